"""Save and find again: a step is written under a name nobody reads, by all processes, then renamed by the first.

What carries a final name is complete; MANIFEST.json's hashes tell whether it still is.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.checkpoint import draft as drafts
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint import shelf
from hpclm.checkpoint.draft import Snapshot, Writing
from hpclm.checkpoint.identity import check_identity
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.checkpoint.progress import Progress
from hpclm.checkpoint.retention import Retention
from hpclm.checkpoint.tensors import Tensors
from hpclm.cluster.lease import Lease
from hpclm.cluster.team import Team, alone
from hpclm.engine import Engine, Shard
from hpclm.errors import ConfigError, HpclmError, NoCheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A checkpoint that is being written."""

    progress: Progress
    scalars: dict[str, Any]
    validation: float | None
    draft: Path
    final: Path
    result: Callable[[], dict[str, Any]]
    """What this process wrote; waits for it."""
    over: Callable[[], bool]
    began: float
    why: str | None


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    The file ``latest`` names the newest, for people and scripts; its being there also says that the run has a history.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        identity: dict[str, Any],
        team: Team | None = None,
        lease: Lease | None = None,
        made: dict[str, Any] | None = None,
    ):
        """``identity``: what a run that goes on from these checkpoints must find unchanged; ``made``: what people may want to
        know of the attempt that saves. ``lease``, which rank 0 has, is looked at before anything gets its final name."""
        self.folder, self.retention, self.identity = folder, retention, identity
        self.team, self.lease, self.made = team or alone(), lease, made or {}
        self.flight: Flight | None = None
        self._snapshot = Snapshot()

    def save(self, engine: Engine, progress: Progress, validation: float | None = None) -> Path:
        """Save the engine's state; after this returns, it is on the disk. HpclmError on every rank when it cannot be."""
        self.begin(engine, progress, validation, beside=False)
        return self.commit()

    def begin(
        self,
        engine: Engine,
        progress: Progress,
        validation: float | None = None,
        beside: bool = True,
        why: str | None = None,
    ) -> None:
        """Take the engine's state, and write it: ``beside`` the training that goes on, or before this returns.

        ``why``: what told the run to leave, where that is the reason; None for a regular save. One save at a time: commit() the
        one before first. HpclmError on every rank where there is no room.
        """
        assert self.flight is None
        final = self.folder / f"step-{progress.step:08d}"
        draft = self.folder / f".tmp-{final.name}-g{self.team.first(lambda: self.generation)}"
        began = time.time()
        held = self._take(engine, beside)
        size = sum(self.team.gather(drafts.size(held)))
        self.team.first(lambda: self._begin(draft, size))

        def work() -> dict[str, Any]:
            return drafts.write_shards(draft, self.team.rank, held)

        if beside:
            writing = Writing(work)
            result, over = writing.result, writing.over
        else:
            found = work()
            result, over = lambda: found, lambda: True
        self.flight = Flight(progress, engine.scalars(), validation, draft, final, result, over, began, why)

    @property
    def generation(self) -> int:
        """Of the attempt that holds the run directory; 0 where nobody must. Rank 0 knows."""
        return self.lease.generation if self.lease else 0

    def written(self) -> bool:
        """Whether this process has nothing left to write."""
        return self.flight is None or self.flight.over()

    def commit(self) -> Path:
        """Wait until every rank has written, and publish; HpclmError on every rank when it cannot be."""
        assert self.flight is not None
        flight, self.flight = self.flight, None
        found = self.team.gather(flight.result(), patient=True)
        self.team.first(lambda: self._publish(flight, found))
        return flight.final

    def resume(self, engine: Engine, policy: str) -> Progress:
        """Load the newest good checkpoint into ``engine``, or start from nothing where ``policy`` allows it.

        All that is loaded is held against its hashes. A bad checkpoint is set aside with its reason, and the one before it
        loaded in its place. NoCheckpointError when the run has a history and nothing good is left of it, ConfigError when the
        run that saved it was another.
        """
        lost: list[str] = []
        for name in reversed(self.team.first(lambda: self._candidates(policy))):
            folder = self.folder / name
            manifest, reason = self._look(folder)
            if manifest is not None and reason is None:
                reason = self._load(folder, manifest, engine)
                if reason is None:
                    if lost:
                        log.warning("going on from %s instead; the steps after it are done again", name)
                    return Progress(**manifest.progress)
            lost.append(f"{name}: {reason}")
        self.team.first(lambda: self._nothing(lost, policy))
        return Progress()

    def _look(self, folder: Path) -> tuple[Manifest | None, str | None]:
        """The manifest of a checkpoint that this run can go on from, and what is wrong with it; a bad one is set aside.

        Each rank looks at the sizes of its share of the files.
        """
        manifest, wrong = None, {}
        try:
            manifest = manifests.read(folder)
            manifests.check_sizes(folder, manifest, sorted(manifest.files)[self.team.rank :: self.team.size])
        except BadCheckpoint as reason:
            wrong = {"bad": str(reason)}
        except OSError as error:
            wrong = {"failed": str(error)}
        except ConfigError as error:
            wrong = {"refused": str(error)}
        return manifest, self._agree(folder, wrong, manifest)

    def _load(self, folder: Path, manifest: Manifest, engine: Engine) -> str | None:
        """Load a checkpoint; what is wrong with it, where the engine now holds nothing that can be used."""
        wrong: dict[str, str] = {}
        with Tensors(folder, manifest, wrong) as saved:
            engine.load(saved, manifest.scalars)
        return self._agree(folder, wrong, manifest)

    def _take(self, engine: Engine, beside: bool) -> list[Shard]:
        return self._snapshot.take(engine.tensors()) if beside else list(engine.tensors())

    def _begin(self, draft: Path, size: int) -> None:
        """Make room for a checkpoint of ``size`` bytes, and a folder that nobody reads."""
        if self.lease:
            self.lease.check()
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            shelf.sweep(self.folder, self.generation)
            free = shutil.disk_usage(self.folder).free
            if free < 1.2 * size:
                raise HpclmError(
                    f"{self.folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes {size / 1e6:,.1f} MB"
                )
            draft.mkdir(mode=0o700)
        except OSError as error:
            raise HpclmError(f"checkpoint {draft} could not be saved: {error.strerror or error}") from error

    def _publish(self, flight: Flight, written: Sequence[dict[str, Any]]) -> None:
        """Give the draft its final name, once what every rank wrote is found good."""
        failed = [f"rank {rank}: {found['error']}" for rank, found in enumerate(written) if "error" in found]
        try:
            if failed:
                raise HpclmError(f"checkpoint {flight.final} could not be saved: {'; '.join(failed[:3])}")
            self._describe(flight, written).write(flight.draft)
            files.sync(flight.draft)
            if self.lease:
                self.lease.check()  # a later attempt that takes over removes drafts, so nothing comes between
            shelf.publish(flight.draft, flight.final)
        except (OSError, HpclmError) as error:
            if isinstance(error, HpclmError) and not failed:
                raise
            shelf.discard([flight.draft])
            if isinstance(error, HpclmError):
                raise
            raise HpclmError(f"checkpoint {flight.final} could not be saved: {error.strerror or error}") from error
        try:  # the checkpoint counts; the rest is tidying up
            files.write_text(self.folder / "latest", flight.final.name + "\n")
            shelf.mark(self.folder)
        except OSError as error:
            log.warning("%s could not be written: %s", error.filename or self.folder / "latest", error.strerror)
        try:
            shelf.discard(self.retention.dispensable(shelf.steps(self.folder)))
        except HpclmError as error:
            log.warning("older checkpoints stay: %s", error)

    def _describe(self, flight: Flight, written: Sequence[dict[str, Any]]) -> Manifest:
        tensors: dict[str, dict[str, Any]] = {}
        for found in written:
            for name, shape, part in found["parts"]:
                tensors.setdefault(name, {"shape": shape, "parts": []})["parts"].append(part)
        made = self.made | {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(time.time() - flight.began, 3),
            "generation": self.generation,
            "why": flight.why,
        }
        listed = {name: facts for found in written for name, facts in found["files"].items()}
        return Manifest(
            asdict(flight.progress), flight.scalars, self.identity, tensors, listed, made, flight.validation
        )

    def _candidates(self, policy: str) -> list[str]:
        shelf.restore(self.folder)
        shelf.sweep(self.folder, self.generation)
        found = shelf.steps(self.folder)
        if policy == "never" and found:
            raise ConfigError(
                f"{self.folder} already holds {found[-1].name}, and checkpoint.resume=never; give another out"
            )
        return [folder.name for folder in found]

    def _agree(self, folder: Path, wrong: dict[str, str], manifest: Manifest | None) -> str | None:
        """What is wrong with a checkpoint, by what every rank has found; a bad one is set aside."""
        found = self.team.gather(wrong, patient=True)
        return self.team.first(lambda: self._judge(folder, found, manifest))

    def _judge(self, folder: Path, found: Sequence[dict[str, str]], manifest: Manifest | None) -> str | None:
        for one in found:
            if "refused" in one:
                raise ConfigError(one["refused"])
            if "failed" in one:
                raise shelf.unreadable(folder, one["failed"])
        reasons = [one["bad"] for one in found if "bad" in one]
        if reasons:
            shelf.set_aside(folder, reasons[0])
            return reasons[0]
        if manifest is not None and manifest.identity:  # an import knows weights only, whose shapes the engine looks at
            check_identity(folder, manifest.identity, self.identity)
        return None

    def _nothing(self, lost: Sequence[str], policy: str) -> None:
        """NoCheckpointError unless a start from nothing is what is wanted."""
        if lost or policy == "require" or shelf.history(self.folder):
            reasons = "; ".join(lost) or "there is none"
            raise NoCheckpointError(
                f"no good checkpoint in {self.folder} ({reasons}); put one back, or start over with another out="
            )
