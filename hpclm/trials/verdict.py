"""Results of a test of the user's own code, layout by layout, and their text. Needs no PyTorch."""

from collections.abc import Collection
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
"""Note for a layout that draws other random numbers, for example for dropout."""


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
        """Whether the layout agrees or is refused. Nobody can use a refused layout by accident."""
        return self.outcome in ("agrees", "refused")


@dataclass(frozen=True)
class Result:
    """The results for all layouts."""

    name: str
    kind: str
    verdicts: tuple[LayoutVerdict, ...]

    @property
    def agrees(self) -> bool:
        """Whether all layouts agree, except those that are refused."""
        return all(verdict.good for verdict in self.verdicts)

    def __repr__(self) -> str:
        shown = list[str]()
        text = list[str]()
        for verdict in self.verdicts:
            text += lines(verdict, shown)
            shown.append(verdict.cause)
        return "\n".join([*text, conclusion(self)])


def lines(verdict: LayoutVerdict, shown: Collection[str] = ()) -> list[str]:
    """A verdict as lines of text. ``shown``: causes that were printed already."""
    details = [*verdict.details]
    head: str = verdict.outcome
    if not verdict.good:
        head = head.upper()
    if details and verdict.outcome != "differs":
        head += f": {details.pop(0)}"
    text = [f"  {verdict.layout:<24}{head}", *(f"{INDENT}{line}" for detail in details for line in detail.splitlines())]
    if verdict.cause:
        cause = "as above" if verdict.cause in shown else verdict.cause
        text.append(f"{INDENT}usual cause: {cause}")
    return text


def conclusion(result: Result) -> str:
    """The last line of a result's text."""
    bad = ", ".join(verdict.layout for verdict in result.verdicts if not verdict.good)
    refused = [verdict.layout for verdict in result.verdicts if verdict.outcome == "refused"]
    uncompared = ", ".join(verdict.layout for verdict in result.verdicts if UNCOMPARED in verdict.details)
    text = f"{result.name} ({SETTINGS[result.kind]}) "
    if bad:
        text += f"does not agree with one process: {bad}"
    else:
        text += "agrees with one process"
    if refused:
        if not bad:
            text += " everywhere else"
        are = "is" if len(refused) == 1 else "are"
        text += f"; {', '.join(refused)} {are} refused"
    if uncompared:
        text += f"; gradients were not compared in {uncompared}: test it without its random numbers too"
    return text
