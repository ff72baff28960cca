"""How far a run is: all that it must remember besides what its engine holds."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    samples: int = 0  # consumed
    seconds: float = 0.0  # of training, over all attempts
    skipped: int = 0  # steps that were not finite
    planned: int | None = None  # samples that the data's order was made for

    def after(self, samples: int, seconds: float, skipped: bool) -> "Progress":
        """One step further."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            seconds=self.seconds + seconds,
            skipped=self.skipped + skipped,
        )
