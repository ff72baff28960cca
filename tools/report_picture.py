#!/usr/bin/env python3
"""The picture of a report in the documentation: train five tiny models, of which one diverges, and photograph their comparison.

A minute or two on two CPU cores; needs Chromium. From the root of the clone: tools/report_picture.py --folder /tmp/five
"""

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
from PIL import Image

from hpclm.inference.samples import samples_of_runs
from hpclm.launch import demo
from hpclm.reporting import page as report

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "report.png"
RUNS = {
    "lr-3e-4": ["optim.lr=3e-4"],
    "lr-1e-3": ["optim.lr=1e-3"],
    "lr-3e-3": ["optim.lr=3e-3"],
    "lr-1e-2": ["optim.lr=1e-2"],
    "lr-2": ["optim.lr=2", "optim.warmup=300", "optim.schedule=constant"],  # diverges half-way
}
SETTINGS = [
    "model={vocab_size: 257, layers: 2, hidden: 64, context: 64, attention: {heads: 4}}",
    "batch={global_size: 16, micro_size: 16}",
    *(
        "budget.steps=400",
        "optim.min_lr=1e-4",
        "optim.warmup=20",
        "evaluate.every=50",
        "evaluate.batches=4",
        "checkpoint.every=100",
    ),
    *("engine.device=cpu", "engine.precision=fp32", "log.tensorboard=false", "optim.nonfinite_limit=5"),
]
WIDTH, HEIGHT = 1080, 1232  # CSS pixels


def main() -> None:
    """Make docs/images/report.png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="keep the runs here, and reuse those that are there")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    train(folder)
    page = folder / "report.html"
    report.write([folder / name for name in RUNS], page, False, "def read(self, ", samples_of_runs)
    IMAGE.parent.mkdir(exist_ok=True)
    with browser.page(folder / "profile") as shown:
        shown.open(page, WIDTH, HEIGHT)
        picture = Image.open(io.BytesIO(shown.picture()))
    picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(IMAGE, optimize=True)
    print(IMAGE, IMAGE.stat().st_size)


def train(folder: Path) -> None:
    """The runs that are not there yet; one of them is interrupted once."""
    if not (folder / "text.jsonl").exists():
        demo.write_corpus(folder / "text.jsonl", Path(io.__file__).parent / "asyncio")
        words = ["--input", "text.jsonl", "--output-prefix", "data", "--tokenizer", "bytes", "--append-eod"]
        hpclm(folder, "preprocess", *words, "--workers", "1")
    for name, overrides in RUNS.items():
        words = [*SETTINGS, "data.prefix=data_text_document", "data.split=9,1,0", f"out={name}", *overrides]
        if not (folder / name).exists():
            if name == "lr-1e-3":
                hpclm(folder, "train", *words, "stop_at=150")
            hpclm(folder, "train", *words)


def hpclm(folder: Path, *words: str) -> None:
    """Run a verb; a run that diverges exits with 93."""
    code = subprocess.run([sys.executable, "-m", "hpclm", *words], cwd=folder).returncode
    if code not in (0, 93):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
