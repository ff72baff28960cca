"""Save, find again, prune: a step is written under a name nobody reads, then renamed.

What carries a final name is complete; MANIFEST.json's hashes tell whether it still is.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpclm import files
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.checkpoint.progress import Progress
from hpclm.cluster.team import Team, alone
from hpclm.data.tokenizers import mismatch
from hpclm.engine import Engine
from hpclm.errors import ConfigError, HpclmError, NoCheckpointError

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, in one folder, newest ``keep`` of them.

    The file ``latest`` names the newest, for people and scripts; its being there also says that the run has a history.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], team: Team | None = None):
        """``identity``: what a run that goes on from these checkpoints must find unchanged.

        Rank 0 of ``team`` writes and judges; the others wait, and read what it found good.
        """
        self.folder, self.keep, self.identity = folder, keep, identity
        self.team = team or alone()

    def steps(self) -> list[Path]:
        """Folders of saved steps, oldest first; whole when they were saved, not verified."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def save(self, engine: Engine, progress: Progress) -> Path:
        """Save the engine's state; after this returns, it is on the disk. HpclmError on every rank when it cannot be."""
        return Path(self.team.first(lambda: str(self._write(engine, progress))))

    def _write(self, engine: Engine, progress: Progress) -> Path:
        files.writable_folder(self.folder, "checkpoint folder")
        final = self.folder / f"step-{progress.step:08d}"
        self._sweep()
        shards = engine.tensors()
        size = sum(s.tensor.numel() * s.tensor.element_size() for s in shards.values())
        try:
            free = shutil.disk_usage(self.folder).free
            if free < 1.2 * size:
                raise HpclmError(
                    f"{self.folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes {size / 1e6:,.1f} MB"
                )
            draft = self.folder / f".tmp-{final.name}"
            draft.mkdir()
            name = "rank-00000.safetensors"
            save_file({k: s.tensor.contiguous() for k, s in shards.items()}, draft / name)
            _sync(draft / name)
            tensors = {
                k: {"shape": list(s.shape), "parts": [{"file": name, "start": list(s.start)}]}
                for k, s in shards.items()
            }
            written = {name: {"size": (draft / name).stat().st_size, "blake2b": manifests.fingerprint(draft / name)}}
            _sync(Manifest(asdict(progress), engine.scalars(), self.identity, tensors, written).write(draft))
            files.sync_folder(draft)
            draft.rename(final)
            files.sync_folder(self.folder)
            files.write_text(self.folder / "latest", final.name + "\n")
        except (OSError, SafetensorError) as error:  # safetensors has an exception of its own for a full disk
            self._sweep()
            raise HpclmError(
                f"checkpoint {final} could not be saved: {getattr(error, 'strerror', None) or error}"
            ) from error
        self._prune()
        return final

    def resume(self, engine: Engine, policy: str) -> Progress:
        """Load the newest good checkpoint into ``engine``, or start from nothing where ``policy`` allows it.

        A bad one is set aside with its reason. NoCheckpointError when the run has a history and nothing good is left of
        it, ConfigError when the run that saved it was another.
        """
        name = self.team.first(lambda: self._good(policy))
        if name is None:
            return Progress()
        manifest = manifests.read(self.folder / name)
        engine.load(read_tensors(self.folder / name, manifest), manifest.scalars)
        return Progress(**manifest.progress)

    def _good(self, policy: str) -> str | None:
        """Name of the newest good checkpoint's folder; None for a start from nothing."""
        self._sweep()
        found = self.steps()
        if policy == "never" and found:
            raise ConfigError(
                f"{self.folder} already holds {found[-1].name}, and checkpoint.resume=never; give another out="
            )
        lost: list[str] = []
        for folder in reversed(found):
            try:
                manifest = self._verified(folder)
            except BadCheckpoint as reason:
                lost.append(f"{folder.name}: {reason}")
                self._set_aside(folder, str(reason))
                continue
            check_identity(folder, manifest.identity, self.identity)
            return folder.name
        if lost or policy == "require" or (self.folder / "latest").exists():
            reasons = "; ".join(lost) or "there is none"
            raise NoCheckpointError(
                f"no good checkpoint in {self.folder} ({reasons}); put one back, or start over with another out="
            )
        return None

    def newest(self) -> tuple[Path, Manifest]:
        """The newest good checkpoint, nothing moved or loaded; NoCheckpointError when there is none."""
        for folder in reversed(self.steps()):
            try:
                return folder, self._verified(folder)
            except BadCheckpoint as reason:
                log.warning("checkpoint %s is bad: %s", folder, reason)
        raise NoCheckpointError(f"no good checkpoint in {self.folder}; train first, with hpclm train")

    def _verified(self, folder: Path) -> Manifest:
        try:
            manifest = manifests.read(folder)
            manifests.verify(folder, manifest)
        except OSError as error:
            raise HpclmError(
                f"checkpoint {folder} cannot be read now: {error}; look at the disk, then start again"
            ) from error
        return manifest

    def _sweep(self) -> None:
        """Remove what an earlier attempt left half done."""
        for old in (*self.folder.glob(".tmp-*"), *self.folder.glob(".trash-*")):
            shutil.rmtree(old, ignore_errors=True)

    def _prune(self) -> None:
        for old in self.steps()[: -self.keep]:
            doomed = old.with_name(f".trash-{old.name}")
            try:
                old.rename(doomed)
            except OSError as error:  # the new checkpoint is saved; an old one too many does no harm
                log.warning("old checkpoint %s could not be removed: %s", old, error)
                return
            shutil.rmtree(doomed, ignore_errors=True)

    def _set_aside(self, folder: Path, reason: str) -> None:
        bad = folder.with_name(f".bad-{folder.name}")
        number = 1
        while bad.exists():
            bad, number = folder.with_name(f".bad-{folder.name}-{number}"), number + 1
        folder.rename(bad)
        (bad / "REASON.txt").write_text(reason + "\n", encoding="utf-8")
        log.error("checkpoint %s is bad: %s. Set aside as %s", folder, reason, bad.name)


def read_tensors(folder: Path, manifest: Manifest) -> Mapping[str, Tensor]:
    """Every tensor of a verified checkpoint that one file holds whole."""
    found: dict[str, Tensor] = {}
    for name in manifest.files:
        with safe_open(folder / name, framework="pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (it is no mapping)
    return found


def check_identity(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ConfigError that lists what differs between the run that saved a checkpoint and the one that would go on from it."""
    wrong = [] if (clash := tokenizer_clash(saved, now.get("data", {}).get("tokenizer"))) is None else [clash]
    before, after = ({k: v for k, v in _leaves(tree).items() if "data.tokenizer" not in k} for tree in (saved, now))
    wrong += [
        f"{key} was {before.get(key)!r} and is now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if wrong:
        raise ConfigError([f"{folder} belongs to another run; set it back, or give another out=:", *wrong])


def tokenizer_clash(saved: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> str | None:
    """How the tokenizer of a checkpoint's identity and another differ, naming both; None where one is not known."""
    known = saved.get("data", {}).get("tokenizer")
    clash = mismatch(known, dict(tokenizer)) if known and tokenizer else None
    return clash and f"the checkpoint's tokenizer is another: {clash}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
