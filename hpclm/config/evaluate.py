"""Settings of what is measured while a run trains, besides its own loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpclm import extras
from hpclm.config.checks import Checked, at_least


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Loss on held-out data, and scores at tasks, while training."""

    every: int = 1000
    """Steps between evaluations; 0: never. The last step is always evaluated."""
    batches: int = 10
    """Global batches per evaluation, always the same ones."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness to measure as well, such as [hellaswag, lambada_openai]; needs pip install 'hpclm[lm-eval]'.
    Rank 0 loads the whole model for it, beside the run's own, and the other ranks wait."""
    tasks_every: int = 0
    """Steps between measurements of the tasks; 0: at every evaluation."""
    tasks_path: str | None = None
    """Folder of task files of your own, which are found before the library's."""
    tasks_samples: int | None = None
    """Documents of each task, always its first ones; null: all."""
    tasks_shots: int | None = None
    """Examples before each question; null: what the task says."""

    def problems(self) -> Iterator[str]:
        """Invalid evaluation settings."""
        yield from at_least(0, "evaluate", every=self.every, tasks_every=self.tasks_every, tasks_shots=self.tasks_shots)
        yield from at_least(1, "evaluate", batches=self.batches, tasks_samples=self.tasks_samples)
        if not all(name.strip() for name in self.tasks):
            yield f"evaluate.tasks={self.tasks} must be names of tasks"
        if self.tasks and not (self.every or self.tasks_every):
            yield "evaluate.tasks has no effect with evaluate.every=0; set evaluate.tasks_every"
        for name in ("tasks_every", "tasks_path", "tasks_samples", "tasks_shots"):
            if getattr(self, name) and not self.tasks:
                yield f"evaluate.{name}={getattr(self, name)} has no effect without evaluate.tasks"

    def tasks_interval(self) -> int:
        """Steps between measurements of the tasks; 0: never."""
        return (self.tasks_every or self.every) if self.tasks else 0

    def missing_libraries(self) -> list[str]:
        """Libraries that it needs and that are not installed here."""
        wrong = extras.missing("evaluate.tasks", "lm_eval") if self.tasks else None
        return [wrong] if wrong else []
