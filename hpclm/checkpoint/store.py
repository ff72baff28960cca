"""Save and resume: all ranks write a checkpoint to a staging directory, and rank 0 renames it when it is complete.

A checkpoint under its final name was complete when it got the name; the hashes in MANIFEST.json show whether it still is.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpclm import files
from hpclm.checkpoint import directory, staging
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.fingerprint import check_fingerprint
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.checkpoint.parts import Plans
from hpclm.checkpoint.retention import Retention
from hpclm.checkpoint.schema import Progress
from hpclm.checkpoint.staging import BackgroundWrite, Snapshot
from hpclm.checkpoint.tensors import Tensors
from hpclm.distributed.context import DistributedContext, single
from hpclm.engine import Engine, Shard
from hpclm.errors import ConfigError, HpclmError, NoCheckpointError
from hpclm.rundir.lease import Lease

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is still being written."""

    progress: Progress
    scalars: dict[str, Any]
    validation: float | None
    staging_dir: Path
    final: Path
    result: Callable[[], dict[str, Any]]
    """Waits for this process's files, and returns their description."""
    done: Callable[[], bool]
    began: float
    why: str | None


class CheckpointStore:
    """The checkpoints of one run, in one directory.

    The file ``latest`` names the newest, for people and scripts; its existence also shows that the run has saved before.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        fingerprint: dict[str, Any],
        context: DistributedContext | None = None,
        lease: Lease | None = None,
        made: dict[str, Any] | None = None,
        before_publishing: Callable[[], None] = lambda: None,
    ):
        """``fingerprint``: what must not change when the run is resumed; ``made``: information on the attempt that saves.
        ``lease`` (on rank 0) is checked before a checkpoint gets its final name; ``before_publishing`` is called just before
        that, and an OSError from it does not fail the save."""
        self.before_publishing = before_publishing
        self.folder, self.retention, self.fingerprint = folder, retention, fingerprint
        self.context, self.lease, self.made = context or single(), lease, made or {}
        self.pending: PendingSave | None = None
        self._snapshot, self._plans = Snapshot(), Plans()

    def save(self, engine: Engine, progress: Progress, validation: float | None = None) -> Path:
        """Save the engine's state; it is on disk when this returns. HpclmError on every rank if that fails."""
        self.begin(engine, progress, validation, background=False)
        return self.commit()

    def begin(
        self,
        engine: Engine,
        progress: Progress,
        validation: float | None = None,
        background: bool = True,
        why: str | None = None,
    ) -> None:
        """Start to save the engine's state: in the background if ``background``, else it is written when this returns.

        ``why``: what makes the run exit, if that is the reason; None for a regular save. Only one save can be pending:
        commit() the previous one first. HpclmError on every rank if there is not enough space.
        """
        assert self.pending is None
        final = self.folder / f"step-{progress.step:08d}"
        staging_dir = self.folder / f".tmp-{final.name}-g{self.context.run_on_main(lambda: self.generation)}"
        began = time.time()
        shards = self._take(engine, background)
        sizes = self.context.all_gather(staging.size(shards))
        self.context.run_on_main(lambda: self._begin(staging_dir, sum(sizes)))

        def work() -> dict[str, Any]:
            return staging.write_shards(staging_dir, self.context.rank, shards)

        if background:
            writing = BackgroundWrite(work)
            result, done = writing.result, writing.done
        else:
            found = work()
            result, done = lambda: found, lambda: True
        self.pending = PendingSave(progress, engine.scalars(), validation, staging_dir, final, result, done, began, why)

    @property
    def generation(self) -> int:
        """Generation of the lease on the run directory, 0 without a lease; known on rank 0."""
        return self.lease.generation if self.lease else 0

    def written(self) -> bool:
        """Whether this process has finished writing."""
        return self.pending is None or self.pending.done()

    def commit(self) -> Path:
        """Wait until every rank has written, and publish the checkpoint; HpclmError on every rank if that fails."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        found = self.context.gather(self._plans.message(pending.result()), unlimited=True)
        self.context.run_on_main(lambda: self._publish(pending, self._plans.complete(found)))
        return pending.final

    def resume(self, engine: Engine, policy: str) -> Progress:
        """Load the newest good checkpoint into ``engine``, or start from scratch if ``policy`` allows it.

        Everything that is loaded is verified against its hashes. A bad checkpoint is set aside with the reason, and the one
        before it is loaded instead. NoCheckpointError if the run has saved before and no good checkpoint is left;
        ConfigError if the checkpoint's fingerprint does not match.
        """
        lost: list[str] = []
        for name in reversed(self.context.run_on_main(lambda: self._candidates(policy))):
            folder = self.folder / name
            manifest, reason = self._inspect(folder)
            if manifest is not None and reason is None:
                reason = self._load(folder, manifest, engine)
                if reason is None:
                    if lost:
                        log.warning("resuming from %s instead; the steps after it will be repeated", name)
                    return Progress.of(manifest.progress)
            lost.append(f"{name}: {reason}")
        self.context.run_on_main(lambda: self._check_fresh_start(lost, policy))
        return Progress()

    def _inspect(self, folder: Path) -> tuple[Manifest | None, str | None]:
        """The manifest of a checkpoint, and what is wrong with it; a bad checkpoint is set aside.

        Rank 0 reads it for all, and the ranks divide the check of file sizes among themselves.
        """
        content, wrong = self.context.run_on_main(lambda: _tried(lambda: manifests.read(folder).fields))
        manifest = Manifest(**content) if content else None
        if manifest:
            mine = sorted(manifest.files)[self.context.rank :: self.context.size]
            _, wrong = _tried(lambda: manifests.check_sizes(folder, manifest, mine))
        return manifest, self._agree(folder, wrong, manifest)

    def _load(self, folder: Path, manifest: Manifest, engine: Engine) -> str | None:
        """Load a checkpoint; what is wrong with it, in which case the engine's state is unusable."""
        wrong: dict[str, str] = {}
        with Tensors(folder, manifest, wrong) as saved:
            engine.load(saved, manifest.scalars)
        return self._agree(folder, wrong, manifest)

    def _take(self, engine: Engine, background: bool) -> list[Shard]:
        return self._snapshot.take(engine.tensors()) if background else list(engine.tensors())

    def _begin(self, staging_dir: Path, size: int) -> None:
        """Check the free space for a checkpoint of ``size`` bytes, and create its staging directory."""
        if self.lease:
            self.lease.check()
        try:
            files.make_folder(self.folder, 0o700)
            directory.sweep(self.folder, self.generation)
            free, needed = shutil.disk_usage(self.folder).free, 1.2 * size
            if free < needed:
                raise HpclmError(
                    f"{self.folder} has {free / 1e6:,.1f} MB free, but a checkpoint needs {needed / 1e6:,.1f} MB, a margin of "
                    "20% included"
                )
            staging_dir.mkdir(mode=0o700)
        except OSError as error:
            raise HpclmError(f"checkpoint {staging_dir} could not be saved: {error.strerror or error}") from error

    def _publish(self, pending: PendingSave, written: Sequence[dict[str, Any]]) -> None:
        """Rename the staging directory to its final name, if every rank has written its files."""
        failed = [f"rank {rank}: {found['error']}" for rank, found in enumerate(written) if "error" in found]
        try:
            if failed:
                raise HpclmError(f"checkpoint {pending.final} could not be saved: {'; '.join(failed[:3])}")
            self._describe(pending, written).write(pending.staging_dir)
            files.sync(pending.staging_dir)
            self._call_before_publishing()
            if self.lease:
                self.lease.check()  # an attempt that takes over later removes staging directories, so it cannot interfere
            directory.publish(pending.staging_dir, pending.final)
        except (OSError, HpclmError) as error:
            if isinstance(error, HpclmError) and not failed:
                raise
            directory.discard([pending.staging_dir])
            if isinstance(error, HpclmError):
                raise
            raise HpclmError(f"checkpoint {pending.final} could not be saved: {error.strerror or error}") from error
        try:  # the checkpoint is published; the rest is cleanup
            files.write_text(self.folder / "latest", pending.final.name + "\n")
            directory.mark(self.folder)
        except OSError as error:
            log.warning("%s could not be written: %s", error.filename or self.folder / "latest", error.strerror)
        try:
            directory.discard(self.retention.dispensable(directory.steps(self.folder)))
        except HpclmError as error:
            log.warning("older checkpoints are kept: %s", error)

    def _call_before_publishing(self) -> None:
        try:
            self.before_publishing()
        except OSError as error:
            log.warning(
                "%s cannot be synced: %s; a power failure could lose its last lines", error.filename, error.strerror
            )

    def _describe(self, pending: PendingSave, written: Sequence[dict[str, Any]]) -> Manifest:
        made = self.made | {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(time.time() - pending.began, 3),
            "generation": self.generation,
            "why": pending.why,
        }
        return Manifest(
            asdict(pending.progress),
            pending.scalars,
            self.fingerprint,
            self._plans.tensors(written),
            {name: facts for found in written for name, facts in found["files"].items()},
            made,
            pending.validation,
        )

    def _candidates(self, policy: str) -> list[str]:
        directory.restore(self.folder)
        directory.sweep(self.folder, self.generation)
        found = directory.steps(self.folder)
        if policy == "never" and found:
            raise ConfigError(
                f"{self.folder} already holds {found[-1].name}, but checkpoint.resume=never; choose another out"
            )
        return [folder.name for folder in found]

    def _agree(self, folder: Path, wrong: dict[str, str], manifest: Manifest | None) -> str | None:
        """What is wrong with a checkpoint according to any rank; a bad one is set aside."""
        found = self.context.all_gather(wrong, unlimited=True)
        return self.context.run_on_main(lambda: self._judge(folder, found, manifest))

    def _judge(self, folder: Path, found: Sequence[dict[str, str]], manifest: Manifest | None) -> str | None:
        for one in found:
            if "refused" in one:
                raise ConfigError(one["refused"])
            if "failed" in one:
                raise directory.unreadable(folder, one["failed"])
        reasons = [one["bad"] for one in found if "bad" in one]
        if reasons:
            directory.set_aside(folder, reasons[0])
            return reasons[0]
        if manifest is not None and manifest.fingerprint:  # imported checkpoints have none; the engine checks shapes
            check_fingerprint(folder, manifest.fingerprint, self.fingerprint)
        return None

    def _check_fresh_start(self, lost: Sequence[str], policy: str) -> None:
        if lost or policy == "require" or directory.has_history(self.folder):
            reasons = "; ".join(lost) or "there is none"
            raise NoCheckpointError(
                f"no good checkpoint in {self.folder} ({reasons}); restore one, or start over with another out="
            )


def _tried(look: Callable[[], T]) -> tuple[T | None, dict[str, str]]:
    """What ``look`` returns, and what is wrong with the checkpoint if it raises."""
    try:
        return look(), {}
    except BadCheckpoint as reason:
        return None, {"bad": str(reason)}
    except OSError as error:
        return None, {"failed": str(error)}
    except ConfigError as error:
        return None, {"refused": str(error)}
