"""How far a run is: all that it must remember besides what its engine holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    samples: int = 0  # consumed
    seconds: float = 0.0  # of training, over all attempts
    skipped: int = 0  # steps that were not finite

    def after(self, samples: int, seconds: float, skipped: bool) -> "Progress":
        """One step further."""
        return Progress(self.step + 1, self.samples + samples, self.seconds + seconds, self.skipped + skipped)
