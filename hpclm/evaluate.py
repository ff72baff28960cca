"""The verb ``hpclm evaluate``: the loss of a run's model on held-out data."""

import argparse
import json
import math
from pathlib import Path

from hpclm import cli


def main(argv: list[str]) -> int:
    """``hpclm evaluate``."""
    parser = argparse.ArgumentParser(
        prog="hpclm evaluate", description="Measure a run's newest checkpoint on held-out data."
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that differ from the run's own")
    parser.add_argument(
        "--part",
        default="valid",
        metavar="PART",
        help="valid, test, train, or valid/NAME of data.validation (default: valid)",
    )
    parser.add_argument("--samples", type=int, help="read this many samples (default: one pass over the part)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(argv)  # settings may follow options
    if args.samples is not None and args.samples < 1:
        parser.error("--samples must be at least 1")
    result = measure(args.run, args.settings, args.part, args.samples)
    if args.json:
        print(json.dumps(result))
    else:
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
            )
        )
    return 0


def measure(run: Path, overrides: list[str], part: str, wanted: int | None) -> dict[str, float | int | str]:
    """Mean loss per token in nats, perplexity, and what they were measured on."""
    from tqdm import tqdm

    from hpclm.checkpoint import trained
    from hpclm.cluster import hardware
    from hpclm.data import sources
    from hpclm.data.batches import Batch, Batches
    from hpclm.engine.step import mean_loss
    from hpclm.parallel.mesh import ALONE

    config = trained.settings(run, overrides)
    device = hardware.device(config.engine, 0)
    dtype = hardware.compute_type(config.engine, device)
    hardware.set_matmul(config.engine, device)
    source = sources.build(config)
    model, progress = trained.model(run, config, source.identity.get("tokenizer"), device, dtype)
    samples = source.samples(part, wanted)
    count = len(samples) if wanted is None else wanted
    batches = Batches(samples, config, config.plan(), source.eod, device)
    with tqdm(total=count, unit="sample", disable=None) as bar:

        def counted(batch: Batch) -> Batch:
            bar.update(len(batch.tokens))
            return batch

        mean = mean_loss(model, map(counted, batches.take(0, count)), device, ALONE)
    return {
        "loss": mean,
        "perplexity": math.exp(min(20.0, mean)),
        "step": progress.step,
        "part": part,
        "samples": count,
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
