"""A demonstration: make a corpus, a tokenizer and a dataset, train a run in two parts, and generate text."""

import json
import random
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hpclm.base import files, folders
from hpclm.base.errors import ConfigError, shell_code
from hpclm.base.terminal import say, sparkline
from hpclm.config import RunConfig
from hpclm.node import preemption, python
from hpclm.rundir import summary

FOLDER = Path("demo")
PROMPT = 'def read(self, size):\n    """'
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}
STOP = 150  # the step after which training is stopped once


def demonstrate(settings: RunConfig, words: Sequence[str]) -> int:
    """Do the steps that are not done yet; returns the exit code.

    ``settings``: the settings of the training run, from ``words`` on top of the preset demo.
    """
    folders.writable_folder(FOLDER, "folder")
    return _prepare() or _train(settings, words)


def _prepare() -> int:
    """Make the corpus, the tokenizer and the dataset, unless they exist; the exit code."""
    corpus = FOLDER / "corpus.jsonl"
    tokenizer = FOLDER / "tokenizer.json"
    data = FOLDER / "data"
    if not corpus.exists():
        say("\n== 1/6 corpus: the source code of Python's standard library, one document for each file")
        say(write_corpus(corpus), flush=True)
    code = 0
    if not tokenizer.exists():
        words = ["train-tokenizer", "--input", str(corpus), "--output", str(tokenizer), "--vocab-size", "4096"]
        code = _step("2/6 tokenizer: byte-level BPE, 4,096 entries", words)
    if not code and not Path(f"{data}_text_document.idx").exists():
        words = ["preprocess", "--input", str(corpus), "--output-prefix", str(data), "--append-eod", "--workers", "2"]
        words += ["--tokenizer", "json", "--tokenizer-files", str(tokenizer)]
        code = _step("3/6 dataset: Megatron's .bin and .idx", words)
    return code


def write_corpus(output: Path, library: Path | None = None) -> str:
    """Write the source code of Python's standard library, one JSONL document for each file. Returns a sentence on the size.

    ``library``: its folder, by default that of the running Python.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    random.Random(0).shuffle(sources)  # files of one folder are similar, and the end of the corpus is for validation
    documents = []
    for path in sources:
        try:
            text = files.read_text(path).strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            documents.append(json.dumps({"text": text, "source": str(path.relative_to(library))}))
    if not documents:
        raise ConfigError(f"no Python sources in {library}; install the standard library's sources")
    folders.writable_folder(output.parent, "output folder")
    files.write_text(output, "\n".join(documents) + "\n")
    return f"{output}: {len(documents):,} documents, {output.stat().st_size / 1e6:.1f} MB, from {library}"


def _train(settings: RunConfig, words: Sequence[str]) -> int:
    """Train in two parts, show the course of the loss, and generate; the exit code."""
    first = f"4/6 training up to step {STOP}; a run that is further along is left alone"
    code = _step(first, ["train", "demo", f"stop_at={STOP}", *words])
    code = code or _step("5/6 training: the same command continues the run", ["train", "demo", *words])
    if code:
        return code
    say(f"loss from the first step to the last: {sparkline(summary.read_summary(settings.out).get('curve', []))}")
    code = _step("6/6 the model writes", ["generate", settings.out, "--prompt", PROMPT, "--tokens", "120"])
    if not code:
        say(f"\n== done. {settings.out} holds the run. Type next:\n")
        say(f"   hpclm generate {shlex.quote(settings.out)} --prompt 'import '")
        say(f"   hpclm report {shlex.quote(settings.out)}")
        say(f"   tensorboard --logdir {shlex.quote(settings.out)}/tensorboard")
        say("   hpclm config demo --changed\n")
    return code


def _step(title: str, words: Sequence[str]) -> int:
    """Show and run an hpclm command; its exit code."""
    say(f"\n== {title}")
    say(f"   $ hpclm {shlex.join(words)}", flush=True)
    child = subprocess.Popen(python.command("hpclm", *words), env=python.safe_env(), start_new_session=True)
    with preemption.handling(lambda number, _: child.send_signal(number)):  # training saves, and ends
        code = child.wait()
    return shell_code(code)
