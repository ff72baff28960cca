"""Sample texts from the models of runs at some of their checkpoints, for reports. PyTorch is imported only after checking that checkpoints
and tokenizers exist."""

import sys
from collections.abc import Mapping
from pathlib import Path

from hpclm.base.errors import HpclmError
from hpclm.base.terminal import say
from hpclm.inference import run_settings
from hpclm.inference.generation_settings import Limits, Sampling

SAMPLE_TOKENS = 80
SAMPLED_CHECKPOINTS = 4  # checkpoints sampled of a single run


def samples(run: Path, prompt: str, max_checkpoints: int) -> dict[int, str]:
    """Step -> continuation, for at most ``max_checkpoints`` checkpoints from the oldest to the newest; only the newest if that is 1.

    HpclmError without a checkpoint, or if the run has no tokenizer that reads the prompt.
    """
    kept = run_settings.saved_steps(run)
    last = len(kept) - 1
    gaps = min(max_checkpoints, len(kept)) - 1
    chosen = [kept[round(last * number / gaps)] for number in range(gaps + 1)] if gaps else kept[-1:]
    from hpclm.inference.completion import Completer  # imports PyTorch, which takes seconds

    written = {}
    for checkpoint in chosen:
        completer = Completer.of_run(run, [], checkpoint)
        [done] = completer.complete([prompt], Limits(SAMPLE_TOKENS), Sampling())
        written[completer.step] = done.text
    return written


def samples_of_runs(named: Mapping[str, Path], prompt: str) -> dict[str, dict[int, str]]:
    """Samples of each run; for a single run, at several checkpoints. A run without a usable model does not affect the others."""
    if len(named) == 1:
        [(name, out)] = named.items()
        run_settings.saved_steps(out)
        run_settings.checked_settings(out, [], reads_text=True)
        return {name: samples(out, prompt, SAMPLED_CHECKPOINTS)}
    written = dict[str, dict[int, str]]()
    for name, out in named.items():
        try:
            written[name] = samples(out, prompt, 1)
        except HpclmError as error:
            say(f"no sample of {name}: {error}", file=sys.stderr)
    return written
