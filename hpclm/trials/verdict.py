"""Results of a test of the user's own code, layout by layout, as text. Needs no PyTorch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["agrees", "differs", "refused", "failed"]
SETTINGS = {
    "block": "model.block",
    "optimizer": "optim.name",
    "source": "data.source",
    "schedule": "optim.schedule",
    "engine": "engine.name",
    "tokenizer": "data.tokenizer",
    "sink": "log.sinks",
}
"""Maps kinds of code to the settings that name them."""
INDENT = " " * 26
UNCOMPARED = "in evaluation only: in training it draws different random numbers, so gradients could not be compared"
"""Note for a layout that draws other random numbers, for dropout for example."""


@dataclass(frozen=True)
class LayoutVerdict:
    """The result for one layout."""

    layout: str
    outcome: Outcome
    details: tuple[str, ...] = ()
    """The differences, or the reason why it was refused or failed."""
    cause: str = ""
    """The usual cause of the differences."""

    @property
    def good(self) -> bool:
        """Whether the result is fine. A refused layout is: it cannot be used by accident."""
        return self.outcome in ("agrees", "refused")


@dataclass(frozen=True)
class Result:
    """The results for all layouts."""

    name: str
    kind: str
    verdicts: tuple[LayoutVerdict, ...]

    @property
    def agrees(self) -> bool:
        """Whether every layout that is not refused agrees."""
        return all(verdict.good for verdict in self.verdicts)

    def __repr__(self) -> str:
        shown = list[str]()
        text = list[str]()
        for verdict in self.verdicts:
            text += lines(verdict, shown)
            shown.append(verdict.cause)
        return "\n".join([*text, conclusion(self)])


def lines(verdict: LayoutVerdict, shown: Collection[str] = ()) -> list[str]:
    """A verdict as lines of text; ``shown``: causes that were already printed."""
    first, *more = verdict.details or ("",)
    head = verdict.outcome.upper() if verdict.outcome in ("differs", "failed") else verdict.outcome
    if verdict.outcome == "differs":
        more = [first, *more]
    elif first:
        head = f"{head}: {first}"
    text = [f"  {verdict.layout:<24}{head}", *(f"{INDENT}{line}" for detail in more for line in detail.splitlines())]
    if not verdict.cause:
        return text
    return [*text, f"{INDENT}usual cause: {'as above' if verdict.cause in shown else verdict.cause}"]


def conclusion(result: Result) -> str:
    """The last line."""
    who = f"{result.name} ({SETTINGS[result.kind]})"
    bad = [verdict.layout for verdict in result.verdicts if not verdict.good]
    refused = [verdict.layout for verdict in result.verdicts if verdict.outcome == "refused"]
    beside = f"; {_listed(refused)} {'is' if len(refused) == 1 else 'are'} refused" if refused else ""
    uncompared = [verdict.layout for verdict in result.verdicts if UNCOMPARED in verdict.details]
    if uncompared:
        beside += f"; gradients were not compared in {_listed(uncompared)}: test it without its random numbers too"
    if bad:
        return f"{who} does not agree with one process: {_listed(bad)}{beside}"
    elsewhere = " everywhere else" if refused else ""
    return f"{who} agrees with one process{elsewhere}{beside}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
