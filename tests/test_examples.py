"""The examples of the documentation run as typed, in a folder that has the files and runs that they name."""

import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm.commands import submit
from hpclm.launch import arguments
from tests import twins
from tests.preprocess.chats import PLAIN, said, tokenizer
from tests.runs import ROOT
from tests.test_documentation import PAGES, assert_printed, commands
from tests.trials.test_page import write_examples

zstandard = pytest.importorskip("zstandard")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.whole

ELSEWHERE = {
    r"^(source|eval|export|sudo|tools/|pip |python |/scratch/|sinfo|srun|sbatch|mpirun|until|scontrol)": "set-up, clusters",
    r"hpclm submit (?!.*(--dry-run --ranks|--cluster local --gpus 2 out))|logs -f runs/debug": "needs GPUs or nodes: its twin trains below",
    r"hpclm (cancel|resume|request|top) |hpclm top$": "needs a run in progress: test_cancel.py, test_resume.py",
    r"hpclm train (configs/)?gpt2-124m": "large: its twin trains below",
    r"hpclm train small data=": "minutes: its twin trains below",
    r"hpclm generate runs/small": "needs the run of the line before it: test_generate.py",
    r"hpclm demo": "minutes: test_demo.py",
    r"wandb|hpclm sync|--tasks": "needs a service or data from elsewhere: sinks/, inference/",
    r"/data/megatron|runs/mine/config.yaml": "needs a checkpoint of Megatron: interop/",
    r"saved/wiki": "needs a dataset that Hugging Face's datasets saved: preprocess/test_tables.py",
}
"""What is not run here, and why, with the tests that do."""

SEPARATELY = {"tutorial.md", "try-slurm.md", "fairseq.md", "megatron-deepspeed.md", "your-own-code.md"}
"""Pages that have their own test, in test_documentation.py or trials/test_page.py."""


def examples(page):
    return [line for line in commands(page) if not any(re.search(pattern, line) for pattern in ELSEWHERE)]


RUN = [page for page in PAGES if not page.name.endswith(".zh.md") and page.name not in SEPARATELY and examples(page)]

SMALL = "model.layers=1 model.hidden=16 model.attention.heads=2 model.context=32 batch.global_size=2 batch.micro_size=2 evaluate.every=0"
MADE = f"""
hpclm train-tokenizer --input text.jsonl --output t.json --vocab-size 300
hpclm train-tokenizer --input text.jsonl --output spm.model --vocab-size 300
for name in own web code held_out theirs a b other; do
    hpclm preprocess --input text.jsonl --output-prefix data/$name --tokenizer json --tokenizer-files t.json --append-eod --workers 1
done
hpclm data convert data/a_text_document old/train --layout fairseq
for run in sweep-1 sweep-2 gpt2-124m; do
    hpclm train small name=$run data.prefix=data/own_text_document model.vocab_size=300 {SMALL} budget.steps=1000 checkpoint.every=1000
done
"""


def shell(folder, script):
    """Run lines in one bash, which stops at the first that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    script = "set -euo pipefail\n" + script
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with what a reader brings along: texts, chats, a model of transformers."""
    folder = tmp_path_factory.mktemp("sources")
    draw = random.Random(1)

    def words():
        return " ".join(draw.choices(["hello", "there", "what", "is", "this", "assistant", "user"], k=40))

    for name in ("configs", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "crawl").mkdir()
    text = "".join(json.dumps({"text": words()}) + "\n" for _ in range(200))
    (folder / "text.jsonl").write_text(text)
    (folder / "text.txt").write_text("\n".join(words() for _ in range(200)))
    (folder / "crawl" / "1.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    for name in ("story.txt", "article.txt", "prompts.txt"):
        (folder / name).write_text("hello there\n")
    (folder / "dump.gz").write_bytes(gzip.compress(words().encode()))
    chats = "".join(json.dumps({"messages": [*said(words(), words())]}) + "\n" for _ in range(20))
    (folder / "chats.jsonl").write_text(chats)
    llama(folder / "hf" / "llama")
    return folder


@pytest.fixture(scope="module")
def made(sources, tmp_path_factory):
    """The same with tokenizers, datasets and runs."""
    folder = tmp_path_factory.mktemp("examples") / "made"
    shutil.copytree(sources, folder, symlinks=True)
    text = (folder / "text.jsonl").read_text()
    shell(folder, MADE)
    bpe = json.loads((folder / "t.json").read_text())["model"]  # under the names of GPT-2's files
    (folder / "data" / "gpt2-vocab.json").write_text(json.dumps(bpe["vocab"]))
    (folder / "data" / "gpt2-merges.txt").write_text("#version\n" + "".join(f"{a} {b}\n" for a, b in bpe["merges"]))
    (folder / "data" / "oscar-en-10k.jsonl").write_text(text)
    return folder


def llama(folder):
    """A model of transformers with a tokenizer and a chat template."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer())
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>"
    )
    fast.chat_template = PLAIN["chatml"]
    fast.save_pretrained(folder)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape = transformers.LlamaConfig(**sizes, vocab_size=len(fast), max_position_embeddings=96)
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)


@pytest.mark.parametrize("page", RUN, ids=[page.relative_to(ROOT).as_posix() for page in RUN])
def test_the_examples_of_a_page_run_as_typed(page, made, tmp_path):
    folder = tmp_path / "home"
    shutil.copytree(made, folder, symlinks=True)
    output = shell(folder, "".join(f"echo '$' {shlex.quote(line)}\n{line}\n" for line in examples(page)))
    assert_printed(page, output)


TRAINS = re.compile(r"(?:hpclm (?:train|submit)|python -m hpclm\.submit) .*")
UNTRAINED = {
    r"--ranks": "trains nothing: above",
    r"--interactive": "needs an allocation of Slurm: launch/test_srun.py",
    r"runs/mine/config.yaml": "needs a checkpoint of Megatron: interop/",
}
"""Runs of the documentation whose twins cannot train here, and why, with the tests that do."""
BASE = ["hpclm convert hf/llama runs/base"]
BEFORE = {
    r"tokenizer=tokenizer.json": ["hpclm train-tokenizer --input text.txt --output tokenizer.json"],
    r"data.prefix=data/mine_chat": [
        *BASE,
        "hpclm preprocess --chat chats.jsonl --tokenizer runs/base --output-prefix data/mine",
    ],
    r"train runs/base ": [
        *BASE,
        "hpclm preprocess --input text.jsonl --tokenizer runs/base --append-eod --output-prefix data/mine",
    ],
}
"""The lines of a page that a run needs before it."""
VARIABLES = {
    "WANDB_MODE": "offline",
    "TEAM_HOOK": "http://127.0.0.1:9/",  # where nobody listens: a failed notification is a warning
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def runs_of(page):
    """The runs that a page shows, without variables before them."""
    return [match[0] for line in commands(page) if (match := TRAINS.search(line))]


RUNS = [page for page in PAGES if page.name not in ("tutorial.md", "try-slurm.md") and not page.name.endswith(".zh.md")]
RUNS = list(dict.fromkeys(line for page in RUNS for line in runs_of(page)))


def twin_of(line, processes):
    """A run of the documentation, made small, as ``hpclm submit`` on this machine; and the datasets that it reads."""
    words = shlex.split(re.sub(r"^(hpclm |python -m hpclm.)(train|submit) ", "", line.replace("$data_bin", "bin")))
    run = arguments.compose(submit.parser().call(submit.request, words), arguments.Variant())
    small = twins.twin(run, processes, weights="runs/base" in line)
    place = ["--cluster", "local", "--nodes", "1", "--gpus", str(processes)]
    if run.job.hostfile:
        place = ["engine.device=cpu"]  # its slots are GPUs
    if run.engine.compile:
        small.append("engine.compile=false")  # which takes a CPU a minute or more: test_presets.py
    return shlex.join(["hpclm", "submit", *words, *place, *small]), run.data.prefixes()


@pytest.mark.parametrize("line", RUNS)
def test_a_run_of_the_documentation_trains_on_two_processes(line, sources, tmp_path, monkeypatch):
    if reason := next((why for pattern, why in UNTRAINED.items() if re.search(pattern, line)), None):
        pytest.skip(reason)
    folder = tmp_path / "home"
    shutil.copytree(sources, folder, symlinks=True)
    monkeypatch.chdir(folder)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    before = next((lines for pattern, lines in BEFORE.items() if re.search(pattern, line)), [])
    if before:
        shell(folder, "\n".join(before))
    if "mine:" in line:
        write_examples(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "hosts").write_text("localhost slots=2\n")
    command, prefixes = twin_of(line, 1 if "--debug" in line else 2)
    for prefix in map(Path, prefixes):
        if not prefix.with_name(f"{prefix.name}.idx").exists():
            twins.dataset(prefix)
    assert "done at step " in shell(folder, command)
