"""Export a run's weights for Hugging Face transformers or llama.cpp, and import other projects' weights as a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm import config
from hpclm.base import extras, files
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import manifest

SHARD_GB = 5.0
IMPORTABLE = re.compile(r"config\.json|latest.*|layer_.*|mp_rank_.*|.*\.distcp")
"""Names that mark an importable folder; whether its contents can be read is checked after PyTorch is imported."""
ADAPTER = "adapter_config.json"
MERGE = (
    "{0} contains an adapter (PEFT's {1}), which hpclm does not apply: merge it first, in Python with "
    "peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...), and convert the result; or remove {1} to "
    "convert the base model without the adapter"
)
UNKNOWN = (
    "{} cannot be converted: it is not a run directory or a checkpoint, and has no config.json (Hugging Face), "
    "*_model_states.pt (Megatron-DeepSpeed), mp_rank_*/model_optim_rng.pt or *.distcp (Megatron-LM)"
)


@dataclass(frozen=True)
class ConvertOptions:
    """Options of hpclm convert; each applies either to exports or to imports."""

    dtype: str | None = None
    shard_gb: float | None = None
    allow_nan: bool = False
    ema: bool = False
    pickle: bool = False
    ignore: Sequence[str] = ()
    weights_only: bool = False


def converted(source: Path, target: Path, overrides: list[str], options: ConvertOptions) -> str:
    """Convert ``source`` to ``target``; returns a message that describes the result."""
    from hpclm.inference import run_settings  # imports NumPy

    if not source.is_dir():
        raise ConfigError(f"{source.absolute()} is not a folder{_file_hint(source)}")
    if is_run(source):
        if options.pickle:
            raise ConfigError("--pickle has no effect: an export reads safetensors")
        if options.ignore or options.weights_only:
            raise ConfigError("--ignore and --weights-only are for imports")
        shard_gb = options.shard_gb or SHARD_GB
        return exported(source, target, overrides, options.dtype or "fp32", shard_gb, options.allow_nan, options.ema)
    if files.is_file(source / "config.yaml"):
        run_settings.check_saved(source)
    if files.is_file(source / ADAPTER):  # transformers would apply the adapter, even next to a whole model
        raise ConfigError(MERGE.format(source, ADAPTER))
    if not any(map(IMPORTABLE.fullmatch, (path.name for path in source.iterdir()))):
        raise ConfigError(UNKNOWN.format(source))
    if options.dtype or options.shard_gb or options.allow_nan:
        raise ConfigError("--dtype, --shard-gb and --allow-nan are for exports; a run's weights are fp32 and finite")
    if options.ema:
        raise ConfigError("--ema is for exports: only a run's checkpoints have an average of the weights")
    with extras.needed_for("hpclm convert"):
        from hpclm.interop import megatron
        from hpclm.interop.huggingface import folder
    other = [word for word in overrides if not word.startswith("model.")]
    if other:
        raise ConfigError(f"{other[0]}: an import accepts only model.… settings; give the others to hpclm train")
    if (source / "config.json").is_file():
        if options.weights_only:
            raise ConfigError("--weights-only has no effect: a folder with config.json contains only weights")
        if options.ignore:
            raise ConfigError(
                "--ignore is for options of Megatron's; remove a key that hpclm should not read from a copy of config.json"
            )
        model = folder.import_folder(source, target, overrides, options.pickle)
    else:
        checkpoint = megatron.recognised(source)
        if checkpoint is None:
            raise ConfigError(UNKNOWN.format(source))
        model = megatron.convert(checkpoint, target, overrides, list(options.ignore), options.weights_only)
    typed = files.typed(target)
    command = f"evaluate {typed} --data DATASET"
    if config.of_run(target, []).data.tokenizer:
        command = f"generate {typed} --prompt ..."
    return f"{target}: a run directory of {model.layers} layers x {model.hidden}; next: hpclm {command}"


def _file_hint(source: Path) -> str:
    """A hint for a user who named a file instead of its folder."""
    if source.suffix == ".gguf":
        return ": hpclm writes .gguf files but does not read them; convert the safetensors model that it was made from"
    if source.suffix in (".safetensors", ".bin", ".pt", ".pth", ".json", ".distcp"):
        return f"; give its folder: hpclm convert {files.typed(source.absolute().parent)} TARGET"
    return ""


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory or a checkpoint."""
    return (path / "checkpoints").is_dir() or (path / manifest.NAME).is_file()


def exported(
    source: Path,
    target: Path,
    overrides: list[str],
    dtype: str,
    shard_gb: float,
    allow_nan: bool,
    ema: bool = False,
) -> str:
    """Export the weights of a run or checkpoint for transformers, or for llama.cpp if ``target`` ends with .gguf; returns a message that
    describes the result. Arguments: see hpclm convert."""
    from hpclm.inference import run_settings

    owner = source.absolute().parent.parent if (source / manifest.NAME).is_file() else source
    config.of_run(owner, overrides)
    run_settings.check_saved(source)
    with extras.needed_for("hpclm convert"):
        from hpclm.interop import run
        from hpclm.interop.huggingface import folder

        if target.suffix == ".gguf":
            from hpclm.interop.gguf import file

    checkpoint = run.find_checkpoint(source, overrides, ema)
    if target.suffix == ".gguf":
        if shard_gb != SHARD_GB:
            raise ConfigError("the size of shards has no effect: a .gguf export is a single file")
        name = "llama.cpp's " + file.export_run(checkpoint, target, dtype, allow_nan)
        ready = f"next: llama-cli -m {files.typed(target)}"
    else:
        name = folder.export_run(checkpoint, target, dtype, shard_gb * 1e9, allow_nan)
        ready = f"{target / 'README.md'} says how to load it"
    weights = "the average of the weights at" if ema else "from"
    return f"{target}: {name}, {weights} step {checkpoint.step} of {checkpoint.run}; {ready}"
