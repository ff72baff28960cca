"""How the models of a run's checkpoints continue a prompt, to see what was learned when."""

from pathlib import Path

from hpclm.inference import run_settings
from hpclm.inference.completion import Completer
from hpclm.inference.generation_settings import Limits, Sampling

TOKENS = 80


def samples(run: Path, prompt: str, most: int) -> dict[int, str]:
    """Step -> continuation, of at most ``most`` checkpoints from the oldest to the newest; of one only of the newest.

    HpclmError if there is none, or if the run has no tokenizer that reads the prompt.
    """
    kept = run_settings.saved_steps(run)
    last, gaps = len(kept) - 1, min(most, len(kept)) - 1
    chosen = [kept[round(last * number / gaps)] for number in range(gaps + 1)] if gaps else kept[-1:]
    written = {}
    for checkpoint in chosen:
        completer = Completer(run, [], checkpoint)
        [done] = completer.complete([prompt], Limits(TOKENS), Sampling())
        written[completer.step] = done.text
    return written
