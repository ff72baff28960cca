"""``hpclm convert``: a run's weights for Hugging Face transformers, and other projects' weights as a run."""

from pathlib import Path
from typing import Any

from hpclm.base import paths
from hpclm.base.errors import ExitCode
from hpclm.base.terminal import say
from hpclm.interop.convert import SHARD_GB, ConvertOptions, converted
from hpclm.parser import Parser, completed, exit_codes, number
from hpclm.rundir import runs

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


def main(source: Path, target: Path, settings: list[str], runs_folder: Path, **options: Any) -> int:
    """Convert weights, and print the result."""
    say(converted(runs.located(source, runs_folder), target, settings, ConvertOptions(**options)))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm convert``."""
    options = Parser(
        prog="hpclm convert",
        description=DESCRIPTION,
        epilog=exit_codes({ExitCode.INVALID: "cannot be converted (the message says why)"}),
    )
    add = options.add_argument
    completed(add("source", type=paths.option_path, metavar="SOURCE"), "runs")
    add("target", type=paths.option_path, metavar="TARGET")
    settings = "settings that differ from the run's own, such as data.tokenizer_files; in an import, model.… settings that its files lack"
    options.add_settings(settings, default=[])
    options.add_runs_folder()
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of an export's weights (default: fp32)")
    size = number(lambda value: value > 0, "a number above 0")
    add("--shard-gb", type=size, metavar="GB", help=f"start another file beyond this (default: {SHARD_GB:g})")
    add("--allow-nan", action="store_true", help="export weights that are not finite, too")
    options.add_ema("export")
    pickled = "read pytorch_model.bin if safetensors is missing; only tensors are loaded"
    add("--pickle", action="store_true", help=pickled)
    ignore = "import although hpclm does not know or support this option of Megatron's; may be repeated"
    add("--ignore", action="append", default=[], metavar="NAME", help=ignore)
    weights_only = "import a Megatron run at step 0, without its optimizer and settings"
    add("--weights-only", action="store_true", help=weights_only)
    return options
