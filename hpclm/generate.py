"""The verb ``hpclm generate``: continue a prompt with a run's model."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import cli
from hpclm.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hpclm.model.gpt import Stack


def main(argv: list[str]) -> int:
    """``hpclm generate``."""
    parser = argparse.ArgumentParser(
        prog="hpclm generate", description="Continue a prompt with a run's newest checkpoint."
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top", type=int, default=50, help="draw from this many likeliest tokens (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    args = parser.parse_args(argv)
    if args.tokens < 1 or args.top < 1 or args.temperature < 0:
        parser.error("--tokens and --top must be at least 1, --temperature at least 0")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    print(continued(args.run, prompt, args.tokens, args.temperature, args.top, args.seed))
    return 0


def continued(run: Path, prompt: str, tokens: int, temperature: float, top: int, seed: int) -> str:
    """The prompt and what the model makes of it, until ``tokens`` or the end of the document."""
    import torch

    from hpclm.checkpoint import trained
    from hpclm.cluster import hardware
    from hpclm.data import tokenizers

    config = trained.settings(run)
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
    model, _ = trained.model(run, config, device, dtype)
    draw = torch.Generator().manual_seed(seed)
    new: list[int] = []
    for token in sample(model, ids, config.model.context, temperature, top, draw):
        if token == tokenizer.eod or len(new) == tokens:
            break
        new.append(token)
    start = tokenizer.decode(ids)
    return prompt + tokenizer.decode(ids + new)[len(start) :]  # together, or the space between the two is lost


def sample(
    model: "Stack", ids: list[int], context: int, temperature: float, top: int, draw: "torch.Generator"
) -> Iterator[int]:
    """Draw token after token; the model sees the last ``context`` of them."""
    import torch

    device = next(model.parameters()).device
    ids = list(ids)
    while True:
        with torch.no_grad():
            seen = torch.tensor([ids[-context:]], device=device)
            head = model(seen)
            logits = head._replace(hidden=head.hidden[-1:]).logits()[0, 0].float().cpu()
        best = logits.topk(min(top, len(logits)))
        choice = (
            0 if temperature == 0 else int(torch.multinomial((best.values / temperature).softmax(0), 1, generator=draw))
        )
        ids.append(int(best.indices[choice]))
        yield ids[-1]


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
