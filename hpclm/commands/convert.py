"""The verb ``hpclm convert``: a run's weights for Hugging Face transformers, and other projects' weights as a run."""

import argparse
import re
from pathlib import Path

from hpclm import config, extras, files, paths
from hpclm.checkpoint import manifest
from hpclm.errors import ConfigError
from hpclm.parser import Parser, completed
from hpclm.rundir import runs
from hpclm.terminal import say

DESCRIPTION = """Convert weights. SOURCE sets the direction:

  a run directory, or one checkpoint step-*    -> a folder that transformers and vLLM read, or, if TARGET ends with
                                                  .gguf, a file for llama.cpp
  a folder with config.json and safetensors    -> a run directory
  layer_XX-model_YY-model_states.pt, or
  mp_rank_XX_model_states.pt                   -> a run directory (Megatron-DeepSpeed)
  mp_rank_XX[_YYY]/model_optim_rng.pt          -> a run directory (Megatron-LM)
  .metadata and *.distcp                       -> a run directory, with the optimizer (Megatron-core's torch_dist)

evaluate, generate and fine-tuning can start from such a run directory. TARGET must not exist; it
appears only when it is complete. Nothing is downloaded, and no code that comes with a file is run."""

SHARD_GB = 5.0
IMPORTABLE = re.compile(r"config\.json|latest.*|layer_.*|mp_rank_.*|.*\.distcp")
"""Names of which a folder that can be imported has one; whether it can is seen when PyTorch is imported."""
ADAPTER = "adapter_config.json"
MERGE = (
    "{0} holds an adapter (PEFT's {1}), which hpclm does not apply: merge it first, in Python with "
    "peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...), and convert the result; or remove {1} to "
    "convert the model beside it alone"
)
UNKNOWN = (
    "{} cannot be converted: it is not a run directory or a checkpoint, and has no config.json (Hugging Face), "
    "*_model_states.pt (Megatron-DeepSpeed), mp_rank_*/model_optim_rng.pt or *.distcp (Megatron-LM)"
)


def main(argv: list[str]) -> int:
    """``hpclm convert``."""
    options = parser()
    args = options.parse_intermixed_args(argv)  # settings may follow options
    if args.shard_gb is not None and not args.shard_gb > 0:
        options.error("--shard-gb must be more than 0")
    say(converted(args))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm convert``."""
    options = Parser(
        prog="hpclm convert",
        description=DESCRIPTION,
        epilog="exit codes: 0 done, 2 wrong arguments, 64 cannot be converted (the message says why), 66 no good checkpoint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    completed(add("source", type=paths.option_path, metavar="SOURCE"), "runs")
    add("target", type=paths.option_path, metavar="TARGET")
    settings = "settings that differ from the run's own, such as data.tokenizer_files; in an import, model.… settings that its files lack"
    options.add_settings(settings, default=[])
    options.add_runs_folder()
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of an export's weights (default: fp32)")
    add("--shard-gb", type=float, metavar="GB", help=f"start another file beyond this (default: {SHARD_GB:g})")
    add("--allow-nan", action="store_true", help="export weights that are not finite, too")
    pickled = "read pytorch_model.bin where there is no safetensors: tensors, nothing else"
    add("--pickle", action="store_true", help=pickled)
    ignore = "import although hpclm does not know or support this option of Megatron's, or key of config.json; may be repeated"
    add("--ignore", action="append", default=[], metavar="NAME", help=ignore)
    weights_only = "import a Megatron run at step 0, without its optimizer and settings"
    add("--weights-only", action="store_true", help=weights_only)
    return options


def converted(args: argparse.Namespace) -> str:
    """Convert, and say what was made of what."""
    from hpclm.inference import run_settings  # imports NumPy

    source, target, overrides = runs.located(args.source, args.runs), args.target, args.settings
    if not source.is_dir():
        raise ConfigError(f"{source.absolute()} is not a folder")
    if is_run(source):
        if args.pickle:
            raise ConfigError("--pickle has no effect: an export reads safetensors")
        if args.ignore or args.weights_only:
            raise ConfigError("--ignore and --weights-only are for imports")
        return exported(source, target, overrides, args.dtype or "fp32", args.shard_gb or SHARD_GB, args.allow_nan)
    if files.is_file(source / "config.yaml"):
        run_settings.check_saved(source)
    if files.is_file(source / ADAPTER):  # transformers would apply it, also beside a whole model
        raise ConfigError(MERGE.format(source, ADAPTER))
    if not any(map(IMPORTABLE.fullmatch, (path.name for path in source.iterdir()))):
        raise ConfigError(UNKNOWN.format(source))
    if args.dtype or args.shard_gb or args.allow_nan:
        raise ConfigError("--dtype, --shard-gb and --allow-nan are for exports; a run's weights are fp32 and finite")
    with extras.needed_for("hpclm convert"):
        from hpclm.interop import megatron
        from hpclm.interop.huggingface import folder
    if (source / "config.json").is_file():
        if args.weights_only:
            raise ConfigError("--weights-only has no effect: a folder with config.json contains only weights")
        model = folder.import_folder(source, target, overrides, args.pickle, args.ignore)
    elif (kind := megatron.recognised(source)) is not None:
        model = megatron.convert(kind, target, overrides, args.ignore, args.weights_only)
    else:
        raise ConfigError(UNKNOWN.format(source))
    use = "generate {} --prompt ..." if config.of_run(target, []).data.tokenizer else "evaluate {} --data DATASET"
    return f"{target}: a run directory of {model.layers} layers x {model.hidden}; next: hpclm {use.format(files.typed(target))}"


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory or a checkpoint."""
    return (path / "checkpoints").is_dir() or (path / manifest.NAME).is_file()


def exported(source: Path, target: Path, overrides: list[str], dtype: str, shard_gb: float, allow_nan: bool) -> str:
    """Write the weights of a run or checkpoint for transformers, or for llama.cpp if ``target`` ends with .gguf, and say what was made
    of what; arguments as of the verb."""
    from hpclm.inference import run_settings

    owner = source.absolute().parent.parent if (source / manifest.NAME).is_file() else source
    config.of_run(owner, overrides)
    run_settings.check_saved(source)
    with extras.needed_for("hpclm convert"):
        from hpclm.interop import run
        from hpclm.interop.huggingface import folder

        if target.suffix == ".gguf":
            from hpclm.interop.gguf import file

    checkpoint = run.find_checkpoint(source, overrides)
    if target.suffix != ".gguf":
        name = folder.export_run(checkpoint, target, dtype, shard_gb * 1e9, allow_nan)
    elif shard_gb != SHARD_GB:
        raise ConfigError("the size of shards has no effect: a .gguf file is always one")
    else:
        name = "llama.cpp's " + file.export_run(checkpoint, target, dtype, allow_nan)
    ready = (
        f"next: llama-cli -m {files.typed(target)}"
        if target.suffix == ".gguf"
        else f"{target / 'README.md'} says how to load it"
    )
    return f"{target}: {name}, from step {checkpoint.step} of {checkpoint.run}; {ready}"
