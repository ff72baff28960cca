"""The verb ``hpclm generate``: continue a prompt with a run's model."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import cli
from hpclm.errors import ConfigError

if TYPE_CHECKING:
    from hpclm.model.stack import Stack


def main(argv: list[str]) -> int:
    """``hpclm generate``."""
    parser = argparse.ArgumentParser(
        prog="hpclm generate", description="Continue a prompt with a run's newest checkpoint."
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that differ from the run's own")
    parser.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top", type=int, default=50, help="draw from this many likeliest tokens (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    args = parser.parse_intermixed_args(argv)  # settings may follow options
    if args.tokens < 1 or args.top < 1 or not 0 <= args.temperature < math.inf:
        parser.error("--tokens and --top must be at least 1, --temperature a finite number of at least 0")
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        prompt.encode()
    except UnicodeError:
        raise ConfigError("the prompt is not UTF-8 text") from None
    drawing = Drawing(args.tokens, args.temperature, args.top, args.seed)
    print(continued(args.run, args.settings, prompt, drawing))
    return 0


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn."""

    tokens: int  # at most
    temperature: float
    top: int  # likeliest tokens to draw from
    seed: int


def continued(run: Path, overrides: list[str], prompt: str, drawing: Drawing) -> str:
    """The prompt and what the model makes of it, until the end of the document or of the tokens."""
    from hpclm.checkpoint import trained
    from hpclm.cluster import hardware
    from hpclm.data import tokenizers

    config = trained.settings(run, overrides)
    tokenizer = tokenizers.of_run(config.data)
    ids = tokenizer.encode(prompt)
    while ids and ids[-1] == tokenizer.eod:  # some tokenizers end every text; a prompt has not ended
        ids.pop()
    ids = ids or ([] if tokenizer.eod is None else [tokenizer.eod])
    if not ids:
        raise ConfigError("the prompt is empty, and the tokenizer has no end-of-document token to start from")
    if max(ids) >= config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer gives id {max(ids)}, but the run's model.vocab_size is {config.model.vocab_size}"
        )
    device = hardware.device(config.engine, 0)
    dtype = hardware.compute_type(config.engine, device)
    hardware.set_matmul(config.engine, device)
    model, _ = trained.model(run, config, tokenizer.identity, device, dtype)
    new: list[int] = []
    for token in islice(sample(model, ids, tokenizer.size, drawing), drawing.tokens):
        if token == tokenizer.eod:
            break
        new.append(token)
    start = tokenizer.decode(ids)
    return prompt + tokenizer.decode(ids + new)[len(start) :]  # together, or the space between the two is lost


def sample(model: "Stack", ids: list[int], vocabulary: int, drawing: Drawing) -> Iterator[int]:
    """Draw token after token, each below ``vocabulary``; the model sees the last model.context of them."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(drawing.seed % 2**63)
    ids = list(ids)
    while True:
        with torch.no_grad():
            head = model(torch.tensor([ids[-model.config.context :]], device=device))
            last = head._replace(hidden=head.hidden[-1:], vocab_size=min(vocabulary, head.vocab_size))
            logits = last.logits()[0, 0].double().cpu()
        best = logits.topk(min(drawing.top, len(logits)))
        likelihood = ((best.values - best.values[0]) / max(drawing.temperature, 1e-6)).softmax(0)
        ids.append(int(best.indices[torch.multinomial(likelihood, 1, generator=generator)]))
        yield ids[-1]


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
