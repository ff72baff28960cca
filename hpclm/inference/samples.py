"""What the models of runs write at some of their checkpoints, for reports. PyTorch is imported once all that is needed is there."""

import sys
from collections.abc import Mapping
from pathlib import Path

from hpclm.errors import HpclmError
from hpclm.inference import run_settings
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.terminal import say

SAMPLE_TOKENS = 80
SAMPLED_CHECKPOINTS = 4  # of a run


def samples(run: Path, prompt: str, max_checkpoints: int) -> dict[int, str]:
    """Step -> continuation, of at most ``max_checkpoints`` checkpoints from the oldest to the newest; of one only of the newest.

    HpclmError if there is none, or if the run has no tokenizer that reads the prompt.
    """
    kept = run_settings.saved_steps(run)
    last, gaps = len(kept) - 1, min(max_checkpoints, len(kept)) - 1
    chosen = [kept[round(last * number / gaps)] for number in range(gaps + 1)] if gaps else kept[-1:]
    from hpclm.inference.completion import Completer  # imports PyTorch, which takes seconds

    written = {}
    for checkpoint in chosen:
        completer = Completer(run, [], checkpoint)
        [done] = completer.complete([prompt], Limits(SAMPLE_TOKENS), Sampling())
        written[completer.step] = done.text
    return written


def samples_of_runs(named: Mapping[str, Path], prompt: str) -> dict[str, dict[int, str]]:
    """What models of each run write: of one run, several of its checkpoints. A run without a usable model does not keep the others
    from it."""
    if len(named) == 1:
        [(name, out)] = named.items()
        run_settings.saved_steps(out)
        run_settings.check(out, [], reads_text=True)
        return {name: samples(out, prompt, SAMPLED_CHECKPOINTS)}
    written = dict[str, dict[int, str]]()
    for name, out in named.items():
        try:
            written[name] = samples(out, prompt, 1)
        except HpclmError as error:
            say(f"no sample of {name}: {error}", file=sys.stderr)
    return written
