"""Speed of the data path beside bare loops and limits of the same machine, interleaved in one run.

    python tools/bench_data.py                                  # sample order and reading; 10 million documents
    python tools/bench_data.py --documents 100_000_000          # needs 4 GB of memory
    python tools/bench_data.py --text a.jsonl b.txt --gpt2 vocab.json merges.txt --sentencepiece x.model

Ratios are medians over the rounds. Preprocessing counts the processor's time without start-up, on one worker; the text is
repeated, documents shuffled, until it is --megabytes long.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

CONTEXT = 2048
# Largest memory of this process in MB; its ru_maxrss would count the process that started it, from before it was another.
PEAK = "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024"
Figures = dict[str, list[float]]


def main() -> int:
    """Measure what the arguments ask for, and print it."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.text:
            corpus = written(args.text, Path(folder) / "corpus.jsonl", args.megabytes)
            if args.sentencepiece:
                show(
                    "sentencepiece, one worker",
                    "MB per CPU-second",
                    sentencepiece(corpus, args.sentencepiece, args.rounds),
                    "the library alone",
                )
            if args.gpt2:
                show(
                    "GPT-2 BPE, one worker",
                    "MB per CPU-second",
                    gpt2(corpus, args.gpt2, args.rounds),
                    "bare gigatoken loop",
                )
                memory(corpus, args.gpt2)
        index(args.documents, args.rounds)
        show(
            f"random samples of {CONTEXT:,} tokens in batches of 64",
            "µs per sample",
            reading(Path(folder), args.rounds, args.tokens),
            "hpclm",
        )
    return 0


def written(paths: list[str], target: Path, megabytes: int) -> Path:
    """A JSONL file of about ``megabytes``: the texts of ``paths`` (JSONL, or plain text in pieces of 2,000 characters)."""
    texts: list[str] = []
    for path in paths:
        content = Path(path).read_text("utf-8")
        if path.endswith((".jsonl", ".json")):
            texts += [json.loads(line)["text"] for line in content.splitlines()]
        else:
            texts += [content[i : i + 2000] for i in range(0, len(content), 2000)]
    draw, size = random.Random(1), 0
    with target.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            draw.shuffle(texts)
            for text in texts:
                size += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return target


def gpt2(corpus: Path, files: list[str], rounds: int) -> Figures:
    """MB per CPU-second of hpclm preprocess, of a bare loop over gigatoken, and of one over tokenizers, text by text."""
    import numpy as np
    from gigatoken.gigatoken_rs import load_hf_json
    from orjson import loads
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    exact = Tokenizer(models.BPE.from_file(*files))
    exact.pre_tokenizer, exact.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end: int = exact.token_to_id("<|endoftext|>") or 0
    out = corpus.with_name("bare")

    def bare() -> None:
        library = load_hf_json(exact.to_str())  # anew, as every process has it: it remembers words
        library.encode_batch(["x"], parallel=False)
        lengths = []
        began = time.process_time()
        with corpus.open("rb") as lines, out.open("wb") as file:
            while some := lines.readlines(1 << 19):
                layout: Any = library.encode_batch([loads(line)["text"] for line in some], parallel=False).layout
                bounds = np.asarray(layout.offsets.data)
                ids = np.insert(np.asarray(layout.content.data).astype(np.uint16), bounds[1:], end)
                file.write(ids.data)
                lengths.append(np.diff(bounds) + 1)
        np.concatenate(lengths).tofile(out)
        figures["bare gigatoken loop"].append(megabytes / (time.process_time() - began))

    def one_by_one() -> None:
        began, size = time.process_time(), 0
        with corpus.open("rb") as lines, out.open("wb") as file:
            for line in lines:
                ids = exact.encode(json.loads(line)["text"], add_special_tokens=False).ids
                file.write(np.array([*ids, end], np.uint16).tobytes())
                size += len(line)
                if size > 2e6:  # it is slow, and as slow as this all the way
                    break
        figures["tokenizers, text by text"].append(size / 1e6 / (time.process_time() - began))

    def ours() -> None:
        figures["hpclm preprocess"].append(megabytes / preprocessed(corpus, "gpt2", files))

    megabytes = corpus.stat().st_size / 1e6
    figures: Figures = {"hpclm preprocess": [], "bare gigatoken loop": [], "tokenizers, text by text": []}
    for _ in range(rounds):
        for run in (ours, bare, one_by_one):
            run()
    return figures


def sentencepiece(corpus: Path, model: str, rounds: int) -> Figures:
    """MB per CPU-second of hpclm preprocess and of the library's encode on texts held in memory."""
    from sentencepiece import SentencePieceProcessor

    few = corpus.with_name("few.jsonl")
    lines = corpus.read_bytes().splitlines(keepends=True)
    few.write_bytes(b"".join(lines[: len(lines) // 4]))
    texts = [json.loads(line)["text"] for line in few.read_bytes().splitlines()]
    library = SentencePieceProcessor(model_file=model)
    figures: Figures = {"hpclm preprocess": [], "the library alone": []}
    megabytes = few.stat().st_size / 1e6
    for _ in range(rounds):
        figures["hpclm preprocess"].append(megabytes / preprocessed(few, "sentencepiece", [model]))
        began = time.process_time()
        for first in range(0, len(texts), 256):
            library.encode(texts[first : first + 256], num_threads=1)
        figures["the library alone"].append(megabytes / (time.process_time() - began))
    return figures


def preprocessed(corpus: Path, kind: str, files: list[str]) -> float:
    """CPU-seconds of ``hpclm preprocess`` in this process, less those of a single line."""
    from hpclm import cli

    tiny = corpus.with_name("tiny.jsonl")
    tiny.write_text('{"text": "x"}\n')
    seconds = []
    for path in (tiny, corpus):
        words = ["--input", str(path), "--output-prefix", str(corpus.with_name("ours")), "--tokenizer", kind]
        began = time.process_time()
        with redirect_stdout(StringIO()):
            cli.function("preprocess")([*words, "--tokenizer-files", *files, "--append-eod", "--overwrite"])
        seconds.append(time.process_time() - began)
    return seconds[1] - seconds[0]


def memory(corpus: Path, files: list[str]) -> None:
    """Print the largest process of ``hpclm preprocess``, with one worker and with two."""
    for workers in (1, 2):
        words = ["--input", str(corpus), "--output-prefix", str(corpus.with_name("ours")), "--tokenizer", "gpt2"]
        code = (
            f"import resource, sys; from hpclm import cli; cli.function('preprocess')(sys.argv[1:]); {PEAK}\n"
            "print(max(peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024))"
        )
        command = [
            *(sys.executable, "-P", "-c", code),
            *words,
            "--tokenizer-files",
            *files,
            "--overwrite",
            "--workers",
            str(workers),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"largest process, {workers} worker(s): {float(done.stdout.split()[-1]):,.0f} MB")


def index(documents: int, rounds: int) -> None:
    """Print how long the order of ``documents`` documents takes, beside what no order can do without."""
    import numpy as np

    from hpclm.data.order import Order, build_index

    sizes = np.random.default_rng(1).integers(1, 1000, documents, np.int32)
    build_index(sizes[:1000], range(1000), Order(CONTEXT, 1))
    walked = walker()
    total = (int(sizes.sum(dtype=np.int64)) - 1) // CONTEXT
    shuffled, walk, built, times = [], [], [], []
    for _ in range(rounds):
        ids = np.arange(documents, dtype=np.int32)
        shuffled.append(timed(np.random.RandomState(1).shuffle, ids))
        walk.append(timed(walked, sizes, ids, CONTEXT))
        del ids
        built.append(timed(build_index, sizes, range(documents), Order(CONTEXT, 1)))
        times.append(built[-1] / (shuffled[-1] + walk[-1]))
    print(f"\nsample order of {documents:,} documents, {total:,} samples (seconds)")
    for name, values in {
        "RandomState shuffle of the documents": shuffled,
        "sample starts, Megatron-core's C++": walk,
        "hpclm, everything": built,
    }.items():
        print(f"  {name:<38} {statistics.median(values):8.2f}")
    print(f"  hpclm beside the first two: {spread(times)}")
    child = (
        f"import numpy as np; from hpclm.data.order import Order, build_index; {PEAK}\n"
        f"sizes = np.random.default_rng(1).integers(1, 1000, {documents}, np.int32)\n"
        f"before = peak(); build_index(sizes, range({documents}), Order({CONTEXT}, 1)); print(peak() - before)"
    )
    extra = subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, text=True, check=True).stdout
    print(f"  memory it takes, its result included: {float(extra):,.0f} MB")


def walker() -> Callable[..., Any]:
    """Megatron-core's way to the sample starts: one document after the other, in C++."""
    from megatron.core.datasets.helpers_cpp import build_sample_idx_int32

    def walk(sizes: Any, documents: Any, context: int) -> Any:
        return build_sample_idx_int32(sizes, documents, context, 1, int(sizes.sum()), True, 1)

    return walk


def reading(folder: Path, rounds: int, tokens: int) -> Figures:
    """µs per sample: one dataset, a hundred in a blend, and the same number of plain slices."""
    import numpy as np

    from hpclm.config import DataConfig
    from hpclm.data.corpus import corpus
    from hpclm.preprocess.writer import Writer

    draw = np.random.default_rng(1)
    prefixes = [folder / "one", *(folder / f"part{i}" for i in range(100))]
    for prefix in prefixes:
        sizes = draw.integers(1, 2 * tokens, max(1, 100_000_000 // tokens // (1 if prefix.name == "one" else 100)))
        with Writer(prefix, np.uint16) as writer:
            for part in np.array_split(sizes, -(-len(sizes) // 10_000)):
                writer.extend(draw.integers(0, 50_000, int(part.sum()), np.uint16), part, np.ones(len(part), np.int64))
    one = corpus(DataConfig(prefix=str(prefixes[0]), split="1"), CONTEXT, 1, 50_257).samples("train", None)
    weighted = [word for prefix in prefixes[1:] for word in (str(draw.integers(1, 9)), str(prefix))]
    blended = corpus(DataConfig(blend=weighted, split="1"), CONTEXT, 1, 50_257).samples("train", len(one))
    import torch

    from hpclm.config import BatchConfig, BudgetConfig, ModelConfig, RunConfig
    from hpclm.data.batches import Batches
    from hpclm.parallel.mesh import Compute

    config = RunConfig(
        model=ModelConfig(context=CONTEXT),
        data=DataConfig(prefix=str(prefixes[0]), workers=0),
        batch=BatchConfig(global_size=64, micro_size=64),
        budget=BudgetConfig(steps=1),
    )
    checked = Batches(one, config.plan(), config.data, config.model, None, Compute(torch.device("cpu"), torch.float32))

    def batched() -> float:
        began = time.perf_counter()
        for start in range(0, 300 * 64, 64):
            list(checked.take(start, 64))
        return (time.perf_counter() - began) / 300 / 64 * 1e6

    rows = np.empty((64, CONTEXT + 1), one.dtype)
    flat = np.fromfile(folder / "one.bin", np.uint16)
    begins = draw.integers(0, len(flat) - CONTEXT - 1, (300, len(rows))).tolist()

    def read(samples: Any) -> float:
        began = time.perf_counter()
        for start in range(0, 300 * len(rows), len(rows)):  # the order itself is a random one
            for i, row in enumerate(rows, start):
                samples.read(i, row)
            rows.astype(np.int64)
        return (time.perf_counter() - began) / 300 / len(rows) * 1e6

    def slices() -> float:
        began = time.perf_counter()
        for batch in begins:
            for row, begin in zip(rows, batch, strict=True):
                row[:] = flat[begin : begin + CONTEXT + 1]
            rows.astype(np.int64)
        return (time.perf_counter() - began) / 300 / len(rows) * 1e6

    figures: Figures = {"hpclm": [], "hpclm, a blend of 100": [], "hpclm, checked tensors": [], "plain slices": []}
    for _ in range(2 * rounds + 1):
        figures["hpclm"].append(read(one))
        figures["hpclm, a blend of 100"].append(read(blended))
        figures["hpclm, checked tensors"].append(batched())
        figures["plain slices"].append(slices())
    print(f"\ndocuments of {tokens:,} tokens on average")
    return figures


def timed(run: Callable[..., object], *given: object) -> float:
    """Seconds that ``run`` takes."""
    began = time.perf_counter()
    run(*given)
    return time.perf_counter() - began


def show(title: str, unit: str, figures: Figures, beside: str) -> None:
    """Print the medians, and each row's ratio to the row ``beside``, round by round."""
    print(f"\n{title} ({unit})")
    for name, values in figures.items():
        ratios = [value / other for value, other in zip(values, figures[beside], strict=True)]
        print(f"  {name:<28} {statistics.median(values):8.2f}   beside {beside}: {spread(ratios)}")


def spread(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", metavar="FILE", help="JSONL with the key text, or plain text")
    parser.add_argument("--megabytes", type=int, default=50, help="of text to preprocess (default: 50)")
    parser.add_argument("--gpt2", nargs=2, metavar=("VOCAB", "MERGES"), help="GPT-2's vocab.json and merges.txt")
    parser.add_argument("--sentencepiece", metavar="MODEL", help="a sentencepiece .model")
    parser.add_argument("--documents", type=int, default=10_000_000, help="in the sample order (default: 10 million)")
    parser.add_argument("--tokens", type=int, default=1000, help="mean of a document's tokens (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--folder", help="where its files go for the while (default: the system's)")
    args = parser.parse_args()
    if bool(args.gpt2 or args.sentencepiece) != bool(args.text):
        parser.error("--text goes with --gpt2 or --sentencepiece, and they with it")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
