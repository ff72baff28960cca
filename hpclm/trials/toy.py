"""The toy model that trains, and the layouts for trials of each kind of code."""

from dataclasses import dataclass

from hpclm.trials.verdict import SETTINGS

STEPS = 4
SAVED = 2  # step of the checkpoint that a killed run resumes from
TOY = (
    *("model.vocab_size=64", "model.vocab_multiple=16", "model.layers=2", "model.hidden=32", "model.attention.heads=4"),
    *("model.context=16", "model.init_std=0.1", "model.bias=false"),
    *("data.source=synthetic", "batch.global_size=8", "batch.micro_size=4", f"budget.steps={STEPS}"),
    *("optim.lr=3e-3", "optim.warmup=1", "optim.clip=0"),
    *("engine.device=cpu", "engine.precision=fp32", "evaluate.every=0", f"checkpoint.every={SAVED}"),
    *("checkpoint.background=false", "log.tensorboard=false", "cluster.self_check=false", "cluster.verify_every=0"),
)
"""Settings of the toy. The user's settings override them. Checks that would end a trial before its comparison are off."""
ADAM = ("optim.eps=1e-5",)
"""Settings for AdamW, which would otherwise turn the rounding error of a zero gradient into a full step."""


@dataclass(frozen=True)
class LayoutTrial:
    """A layout for training the toy."""

    name: str
    processes: int = 1
    settings: tuple[str, ...] = ()
    killed: bool = False
    """Whether the process is killed after the step that follows the checkpoint, and another one resumes."""
    exact: bool = False
    """Whether every bit must equal the reference."""
    other_batches: bool = False
    """Whether its micro-batches, and so its random numbers, differ from those of the reference."""

    @property
    def splits(self) -> bool:
        """Whether tensor-parallel ranks split weights and sequences."""
        return "parallel.tensor=2" in self.settings


REFERENCE = LayoutTrial("one process")
AGAIN = LayoutTrial("one process again", exact=True)
SMALLER = LayoutTrial("smaller micro-batches", settings=("batch.micro_size=2",), other_batches=True)
TENSOR = LayoutTrial("tensor 2", 2, ("parallel.tensor=2",))
PIPELINE = LayoutTrial("pipeline 2", 2, ("parallel.pipeline=2", "engine.name=pipelining"))
DATA = LayoutTrial("data 2", 2)
ZERO = LayoutTrial("ZeRO 1", 2, ("engine.zero_stage=1",))
FSDP = LayoutTrial("fsdp2", 2, ("engine.name=fsdp2",))
KILLED = LayoutTrial("killed and resumed", killed=True, exact=True)
LAYOUTS = {
    "block": (AGAIN, SMALLER, TENSOR, PIPELINE, DATA, ZERO, FSDP, KILLED),
    "optimizer": (AGAIN, TENSOR, PIPELINE, DATA, ZERO, FSDP, KILLED),
    "source": (AGAIN, SMALLER, TENSOR, PIPELINE, DATA, KILLED),
    "schedule": (AGAIN, DATA, PIPELINE, KILLED),
}


def trials(kind: str, name: str) -> tuple[LayoutTrial, tuple[LayoutTrial, ...]]:
    """The reference, and the trials compared with it, for the object ``name`` of this kind."""
    if kind != "engine":
        return REFERENCE, LAYOUTS[kind]
    setting = f"{SETTINGS[kind]}={name}"
    of_engine = (
        LayoutTrial("one process", settings=(setting,)),
        LayoutTrial("tensor 2", 2, (setting, "parallel.tensor=2")),
        LayoutTrial("pipeline 2", 2, (setting, "parallel.pipeline=2")),
        LayoutTrial("data 2", 2, (setting,)),
        LayoutTrial("ZeRO 1", 2, (setting, "engine.zero_stage=1")),
        LayoutTrial("killed and resumed", settings=(setting,), killed=True),
    )
    return LayoutTrial("engine.name=native"), of_engine


def settings_of(kind: str, name: str, trial: LayoutTrial, given: tuple[str, ...]) -> list[str]:
    """The settings of a trial, without its run directory. ``given``: the user's settings."""
    settings = [*TOY]
    if kind != "optimizer":
        settings += ADAM
    if kind != "engine":
        settings.append(f"{SETTINGS[kind]}={name}")
    return [*settings, *given, *trial.settings]
