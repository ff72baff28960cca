"""The end of a hung run: all tell where they are, somebody reports it, and all leave with the same exit code."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpclm.cluster import hang, slurm, stacks
from hpclm.cluster.ending import GuestLine, HostLine
from hpclm.cluster.hang import Sight
from hpclm.cluster.line import Line, end
from hpclm.cluster.rollcall import Present
from hpclm.cluster.stacks import Stand
from hpclm.config import ClusterConfig
from hpclm.errors import REQUEUE, HpclmError

log = logging.getLogger(__name__)

ANSWER, WAKE = 2.0, 5.0  # seconds that ranks have to say where they are, and those that had to be woken


class Hung:
    """This rank's part in such an end; nothing happens before ``finish``, or before another rank asks."""

    def __init__(
        self,
        settings: ClusterConfig,
        me: Present,
        line: Line | None,
        job: str,
        place: Callable[[], str],
        paused: Callable[[], float],
        sights: Callable[[], dict[int, Sight]],
    ):
        """``job``: Slurm's number of the job; ``place``: phase and step of this rank; ``paused``: seconds for which its
        process did not run of late; ``sights``: what it knows of the others."""
        self.me, self.line, self.job, self.place, self.paused, self.sights = me, line, job, place, paused, sights
        self.everyone: Sequence[Present] = line.everyone if line else (me,)
        self.limit = settings.hang_minutes * 60
        self.code = REQUEUE if settings.hang == "requeue" else 1
        self.out: Path | None = None
        self.folder: Path | None = None
        if line:
            line.stand, line.accused = self.answer, self.accused

    def answer(self, code: int, folder: str | None, **_: Any) -> dict[str, Any]:
        """Write this process's stacks, and say where it is."""
        found = stacks.stand()
        if folder:
            with suppress(OSError):  # a disk may be why it hangs
                path = Path(folder) / f"rank-{self.me.rank:05d}.txt"
                stacks.write(path, f"{self.me}, {self.place()}: {found.at}")
        return {**asdict(found), "paused": self.paused()}

    def accused(self, order: dict[str, Any]) -> None:
        """On rank 0, which did not answer: end the run as another demands."""
        seconds = order["seconds"]
        sights = {rank: replace(sight, seconds=seconds, silent=0.0) for rank, sight in self.sights().items()}
        sights[0] = replace(sights[0], silent=seconds)
        self._ask(order, sights, {0: self.answer(**order)})

    def finish(self, sights: dict[int, Sight]) -> None:
        """Have all tell where they are, report it, and end the run."""
        order: dict[str, Any] = {"code": self.code, "folder": str(self.folder) if self.folder else None}
        stands = {self.me.rank: self.answer(**order)}
        if isinstance(self.line, GuestLine):
            self._without(self.line, order, sights, stands)
        self._ask(order, sights, stands)

    def _ask(self, order: dict[str, Any], sights: dict[int, Sight], stands: dict[int, dict[str, Any]]) -> None:
        """On rank 0: ask the others, report, and end all."""
        mute = {0} if 0 in stands and sights[0].silent else set[int]()
        if isinstance(self.line, HostLine):
            silent = {rank for rank, sight in sights.items() if sight.silent > self.limit}
            others, slept = self.line.ask(order["code"], order["folder"], silent, ANSWER, WAKE)
            stands, mute = others | stands, mute | slept
        self._report({rank: self._told(sight, stands.get(rank), rank in mute) for rank, sight in sights.items()}, order)

    def _without(
        self, line: GuestLine, order: dict[str, Any], sights: dict[int, Sight], stands: dict[int, dict[str, Any]]
    ) -> None:
        """On another rank, when rank 0 does not answer: wake it, or report in its place."""
        mine = stands[self.me.rank]
        seconds = sights[self.me.rank].seconds
        line.accuse({**order, "stand": mine, "seconds": seconds}, WAKE)
        if self.folder:
            hang.share(self.folder, self.me.rank, mine)
        if not hang.speaks(self.folder, self.me.rank):
            time.sleep(ANSWER)
            line.end("", order["code"], speaker=False)
        time.sleep(ANSWER / 2)
        stands |= hang.shared(self.folder)
        sights |= {rank: replace(sights[self.me.rank], stand=None) for rank in stands.keys() - sights.keys()}
        sights[0] = replace(sights[0], silent=max(sights[0].silent, seconds))

    def _told(self, sight: Sight, told: dict[str, Any] | None, mute: bool) -> Sight:
        """``sight`` with what the rank has told of itself."""
        known = Stand(told["at"], told["waits"], told["debugged"]) if told else None
        stopped = sight.stopped or bool(mute and told and told["paused"] > self.limit / 2)
        silent = sight.silent if mute or not told else 0.0
        return replace(sight, silent=silent, stopped=stopped, stand=known)

    def _report(self, sights: Mapping[int, Sight], order: dict[str, Any]) -> None:
        then = "the run ends with exit code 1, as cluster.hang=stop says"
        if order["code"] == REQUEUE:
            then = "the run ends with exit code 85: the job, or the same command, goes on from its last checkpoint"
        text = hang.report(sights, self.everyone, self.folder, then)
        if self.out:
            with suppress(OSError):
                hang.write(self.out / "hang.json", text, sights, self.everyone)
        deaf = any(sight.silent and not sight.stand for sight in sights.values())
        if deaf and self.job and order["code"] == REQUEUE:  # Slurm must kill it, and srun then ends with another code
            with suppress(HpclmError):
                slurm.ask(["scontrol", "requeue", self.job], ANSWER)
        if isinstance(self.line, HostLine):
            self.line.finish(text, order["code"])
        end(self.line.tell if self.line else lambda text, _: log.error(text), text, order["code"], True)
