"""Save, find again, prune: a step is written under a name nobody reads, then renamed.

What carries a final name is complete; MANIFEST.json's hashes tell whether it still is.
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from hpclm import files
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.checkpoint.progress import Progress
from hpclm.checkpoint.tensors import Tensors
from hpclm.cluster.team import Team, alone
from hpclm.data.tokenizers import mismatch
from hpclm.engine import Engine, Shard
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
        """Save the engine's state; after this returns, it is on the disk. HpclmError on every rank when it cannot be.

        Every rank writes what it holds; rank 0 says where, and publishes the whole once all have written.
        """
        final = self.folder / f"step-{progress.step:08d}"
        draft = self.folder / f".tmp-{final.name}"
        held = list(engine.tensors())
        size = sum(self.team.gather(sum(s.tensor.numel() * s.tensor.element_size() for s in held)))
        self.team.first(lambda: self._begin(draft, size))
        written = self.team.gather(_write(draft, self.team.rank, held))
        self.team.first(lambda: self._publish(draft, final, written, engine.scalars(), progress))
        return final

    def _begin(self, draft: Path, size: int) -> None:
        """Make room for a checkpoint of ``size`` bytes, and a folder that nobody reads."""
        files.writable_folder(self.folder, "checkpoint folder")
        self._sweep()
        try:
            free = shutil.disk_usage(self.folder).free
            if free < 1.2 * size:
                raise HpclmError(
                    f"{self.folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes {size / 1e6:,.1f} MB"
                )
            draft.mkdir()
        except OSError as error:
            raise HpclmError(f"checkpoint {draft} could not be saved: {error.strerror or error}") from error

    def _publish(
        self, draft: Path, final: Path, written: list[dict[str, Any]], scalars: dict[str, Any], progress: Progress
    ) -> None:
        """Give the draft its final name, once what every rank wrote is found good."""
        failed = [f"rank {rank}: {found['error']}" for rank, found in enumerate(written) if "error" in found]
        try:
            if failed:
                raise HpclmError(f"checkpoint {final} could not be saved: {'; '.join(failed[:3])}")
            tensors: dict[str, dict[str, Any]] = {}
            for found in written:
                for name, shape, part in found["parts"]:
                    tensors.setdefault(name, {"shape": shape, "parts": []})["parts"].append(part)
            listed = {found["file"]: found["facts"] for found in written if found["parts"]}
            _sync(Manifest(asdict(progress), scalars, self.identity, tensors, listed).write(draft))
            files.sync_folder(draft)
            draft.rename(final)
            files.sync_folder(self.folder)
            files.write_text(self.folder / "latest", final.name + "\n")
        except (OSError, HpclmError) as error:
            self._sweep()
            if isinstance(error, HpclmError):
                raise
            raise HpclmError(f"checkpoint {final} could not be saved: {error.strerror or error}") from error
        self._prune()

    def resume(self, engine: Engine, policy: str) -> Progress:
        """Load the newest good checkpoint into ``engine``, or start from nothing where ``policy`` allows it.

        A bad one is set aside with its reason. NoCheckpointError when the run has a history and nothing good is left of
        it, ConfigError when the run that saved it was another.
        """
        name = self.team.first(lambda: self._good(policy))
        if name is None:
            return Progress()
        manifest = manifests.read(self.folder / name)
        with Tensors(self.folder / name, manifest) as saved:
            engine.load(saved, manifest.scalars)
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


def _write(draft: Path, rank: int, held: Sequence[Shard]) -> dict[str, Any]:
    """Write what this rank holds into the folder ``draft``: the file and what is in it, or the error."""
    name = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, Any] = {}
    parts = []
    for shard in held:
        part: dict[str, Any] = {"file": name, "start": list(shard.start)}
        key = shard.name
        if key in tensors:  # a second block of the same tensor
            part["key"] = key = f"{key}#{len(tensors)}"
        tensors[key] = shard.tensor.contiguous()
        parts.append((shard.name, list(shard.shape), part))
    if not held:
        return {"file": name, "parts": parts}
    try:
        save_file(tensors, draft / name)
        _sync(draft / name)
        facts = {"size": (draft / name).stat().st_size, "blake2b": manifests.fingerprint(draft / name)}
    except (OSError, SafetensorError) as error:  # safetensors has an exception of its own for a full disk
        return {"error": str(getattr(error, "strerror", None) or error), "parts": []}
    return {"file": name, "parts": parts, "facts": facts}


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
