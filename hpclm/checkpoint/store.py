"""Save and resume: all ranks write a checkpoint to a staging directory, and rank 0 renames it when it is complete.

A checkpoint under its final name was complete when it got the name; the hashes in MANIFEST.json show whether it still is.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.base import files, folders
from hpclm.base.errors import ConfigError, HpclmError, NoCheckpointError
from hpclm.checkpoint import directory, staging
from hpclm.checkpoint.fingerprint import check_fingerprint, of_read
from hpclm.checkpoint.manifest import NAME, BadCheckpoint, Manifest, Progress, many_objects
from hpclm.checkpoint.retention import CompleteCheckpoints, Retention
from hpclm.checkpoint.staging import ShardSnapshot
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.distributed.context import DistributedContext, single
from hpclm.engine import Engine, StateSource
from hpclm.rundir.lease import Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is still being written."""

    progress: Progress
    scalars: dict[str, Any]
    validation: float | None
    staging_dir: Path
    final: Path
    written: "Future[dict[str, Any]]"
    """Description of this process's files once they are on disk, or the error."""
    began: float
    why: str | None


class CheckpointStore:
    """The checkpoints of one run, in one directory.

    The file `latest` names the newest, for people and scripts. The file also shows that the run has saved before.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        fingerprint: dict[str, Any],
        context: DistributedContext | None = None,
        lease: Lease | None = None,
        attempt: dict[str, Any] | None = None,
    ):
        """``fingerprint``: facts that must not change when the run is resumed; ``attempt``: information on the attempt that saves.
        ``lease`` (on rank 0) is checked before a checkpoint gets its final name."""
        self.folder = folder
        self.retention = retention
        self.fingerprint = fingerprint
        self.context = context or single()
        self.lease = lease
        self.attempt = attempt or {}
        self.pending: PendingSave | None = None
        self._snapshot = ShardSnapshot()
        self._complete = CompleteCheckpoints()

    def save(self, state: StateSource, progress: Progress, validation: float | None = None) -> Path:
        """Save ``state``; it is on disk when this returns. HpclmError on every rank if that fails."""
        self.begin(state, progress, validation, background=False)
        return self.commit()

    def begin(
        self,
        state: StateSource,
        progress: Progress,
        validation: float | None = None,
        background: bool = True,
        why: str | None = None,
    ) -> None:
        """Start to save ``state``: in the background if ``background``, otherwise it is written when this returns.

        ``why``: the reason if this is saved because the run has to exit; None for a regular save. Only one save can be pending: commit() the
        previous one first. HpclmError on every rank if there is not enough space.
        """
        assert self.pending is None
        final = self.folder / f"step-{progress.step:08d}"
        staging_dir = self.folder / f".tmp-{final.name}-g{self.context.run_on_main(lambda: self.generation)}"
        began = time.time()
        shards = self._snapshot.take(state.tensors()) if background else list(state.tensors())
        sizes = self.context.all_gather(staging.size(shards))
        self.context.run_on_main(lambda: self._begin(staging_dir, sum(sizes)))

        def work() -> dict[str, Any]:
            return staging.write_shards(staging_dir, self.context.rank, shards)

        if background:
            written = staging.in_background(work)
        else:
            written = Future()
            written.set_result(work())
        self.pending = PendingSave(progress, state.scalars(), validation, staging_dir, final, written, began, why)

    @property
    def generation(self) -> int:
        """Generation of the lease on the run directory, 0 without a lease; known on rank 0."""
        return self.lease.generation if self.lease else 0

    def written(self) -> bool:
        """Whether this process has finished writing."""
        return self.pending is None or self.pending.written.done()

    def commit(self, before_publishing: Callable[[], None] = lambda: None) -> Path:
        """Wait until every rank has written, and publish the checkpoint; HpclmError on every rank if that fails.

        ``before_publishing``: called on rank 0 just before the checkpoint gets its final name; an OSError from it does not fail the
        save.
        """
        assert self.pending is not None
        pending = self.pending
        self.pending = None
        with many_objects():
            written = self.context.gather(pending.written.result(), unlimited=True)
            self.context.run_on_main(lambda: self._publish(pending, written, before_publishing))
        return pending.final

    def resume(self, engine: Engine, policy: str) -> Progress:
        """Load the newest good checkpoint into ``engine``, or start from scratch if ``policy`` allows it.

        Everything that is loaded is verified against its hashes. A bad checkpoint is set aside with the reason, and the previous one is
        loaded instead. NoCheckpointError if the run has saved before and no good checkpoint is left; ConfigError if the checkpoint's
        fingerprint does not match.
        """
        lost: list[str] = []
        for name in reversed(self.context.run_on_main(lambda: self._candidates(policy))):
            progress, reason = self._load(self.folder / name, engine)
            if progress:
                if lost:
                    log.warning("resuming from %s instead; the steps after it will be repeated", name)
                return progress
            lost.append(f"{name}: {reason}")
        self.context.run_on_main(lambda: self._check_fresh_start(lost, policy))
        return Progress()

    def _load(self, folder: Path, engine: Engine) -> tuple[Progress | None, str | None]:
        """Load a checkpoint into ``engine``. Returns its progress, or its fault; a faulty checkpoint is set aside and leaves the
        engine's state unusable. All ranks get the same answer."""
        with many_objects():
            fields, reason = self.context.run_on_main(lambda: self._inspect(folder))
        if reason is not None:
            return None, reason
        manifest = Manifest(**fields)
        wrong = dict[str, str]()
        with CheckpointTensors(folder, manifest, wrong) as saved:
            try:
                engine.load(saved, manifest.scalars)
            except ConfigError as error:
                raise ConfigError(f"{folder / NAME}: {problem}" for problem in error.problems) from None
        every = self.context.gather(wrong, unlimited=True)
        reason = self.context.run_on_main(lambda: self._agreed(folder, every))
        if reason is not None:
            return None, reason
        return Progress.of(manifest.progress), None

    def _inspect(self, folder: Path) -> tuple[dict[str, Any], str | None]:
        """The fields of a checkpoint's manifest, or its fault; a bad checkpoint is set aside."""
        try:
            manifest = directory.checked(folder)
        except BadCheckpoint as reason:
            directory.set_aside(folder, str(reason))
            return {}, str(reason)
        if manifest.fingerprint:  # imported checkpoints have none; the engine checks shapes
            check_fingerprint(folder, manifest.fingerprint, self.fingerprint)
        return manifest.fields, None

    def _agreed(self, folder: Path, every: Sequence[dict[str, str]]) -> str | None:
        """The fault that any rank found in a checkpoint, which is then set aside; None without one."""
        for wrong in every:
            if "failed" in wrong:
                raise directory.unreadable(folder, wrong["failed"])
        reason = next((wrong["bad"] for wrong in every if "bad" in wrong), None)
        if reason is not None:
            directory.set_aside(folder, reason)
        return reason

    def _begin(self, staging_dir: Path, size: int) -> None:
        """Check the free space for a checkpoint of ``size`` bytes, and create its staging directory."""
        if self.lease:
            self.lease.check()
        try:
            folders.make_folder(self.folder, 0o700)
            directory.sweep(self.folder, self.generation)
            # other processes write too, and headers, manifest and block rounding are not counted
            free = shutil.disk_usage(self.folder).free
            needed = 1.2 * size
            if free < needed:
                raise HpclmError(
                    f"{self.folder} has {free / 1e6:,.1f} MB free, but a checkpoint needs {needed / 1e6:,.1f} MB, including "
                    "a margin of 20%; free space or choose another out"
                )
            staging_dir.mkdir(mode=0o700)
        except OSError as error:
            raise HpclmError(f"checkpoint {staging_dir} could not be saved: {error.strerror or error}") from error

    def _publish(
        self,
        pending: PendingSave,
        written: Sequence[dict[str, Any]],
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Rename the staging directory to its final name, if every rank has written its files."""
        failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(written) if "error" in one]
        if failed:
            directory.discard([pending.staging_dir])
            raise HpclmError(f"checkpoint {pending.final} could not be saved: {'; '.join(failed[:3])}")
        try:
            self._describe(pending, written).write(pending.staging_dir)
            files.sync(pending.staging_dir)
            try:
                # a checkpoint must never be newer than the logs and metrics on disk, which a resume continues
                before_publishing()
            except OSError as error:
                log.warning(
                    "%s cannot be synced: %s; a power failure could lose its last lines", error.filename, error.strerror
                )
            if self.lease:
                self.lease.check()  # if another attempt takes over later, it removes the staging directory, so publishing fails
            directory.publish(pending.staging_dir, pending.final)
        except OSError as error:
            directory.discard([pending.staging_dir])
            raise HpclmError(f"checkpoint {pending.final} could not be saved: {error.strerror or error}") from error
        try:  # the checkpoint is published; the rest is cleanup
            files.write_text(self.folder / "latest", pending.final.name + "\n")
            directory.mark(self.folder)
        except OSError as error:
            log.warning("%s could not be written: %s", error.filename or self.folder / "latest", error.strerror)
        try:
            complete = self._complete.among(directory.steps(self.folder))
            directory.discard(self.retention.prunable(complete))
        except HpclmError as error:
            log.warning("older checkpoints are kept: %s", error)

    def _describe(self, pending: PendingSave, written: Sequence[dict[str, Any]]) -> Manifest:
        origin = self.attempt | {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(time.time() - pending.began, 3),
            "generation": self.generation,
            "why": pending.why,
        }
        tensors: dict[str, dict[str, Any]] = {}
        for name, shape, part in (entry for one in written for entry in one["parts"]):
            tensors.setdefault(name, {"shape": shape, "parts": []})["parts"].append(part)
        all_files = {name: info for one in written for name, info in one["files"].items()}
        progress = asdict(pending.progress)
        identity = of_read(self.fingerprint, len(pending.progress.phases))
        return Manifest(progress, pending.scalars, identity, tensors, all_files, origin, pending.validation)

    def _candidates(self, policy: str) -> list[str]:
        directory.restore(self.folder)
        directory.sweep(self.folder, self.generation)
        saved = directory.steps(self.folder)
        if policy == "never" and saved:
            raise directory.not_empty(saved[-1])
        return [folder.name for folder in saved]

    def _check_fresh_start(self, lost: Sequence[str], policy: str) -> None:
        if lost or policy == "require" or directory.has_history(self.folder):
            raise NoCheckpointError(directory.none_left(self.folder, lost or ["the folder has no checkpoint"]))
