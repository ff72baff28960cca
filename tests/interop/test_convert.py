"""``hpclm convert`` as a person runs it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.interop.huggingface import shards
from tests.forks import Ranks, hpclm
from tests.interop import made
from tests.runs import PATIENCE, ROOT

convert = cli.function("convert")

LLAMA = [
    "model.positions=rope",
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.bias=false",
    "model.attention.kv_heads=2",
]
LAYOUTS = {
    "tensor": [*LLAMA, "model.tied=false", "model.vocab_size=61", "parallel.tensor=2"],
    "pipeline": ["model.vocab_size=61", "engine.name=pipelining", "parallel.pipeline=2", "batch.micro_size=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_several_processes_trained_is_exported_whole(layout, tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = tiny("run", "model.init_std=0.2", "stop_at=2", *LAYOUTS[layout])
    with Ranks(2, words) as ranks:
        found = ranks.wait()
    assert {code for code, _ in found.values()} == {0}, found
    assert len(list((tmp_path / "run/checkpoints/step-00000002").glob("*.safetensors"))) == 2
    hpclm("convert", tmp_path / "run", tmp_path / "hf", check=0)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = made.TOKENS % 61
    with torch.no_grad():
        made.close(made.logits(tmp_path / "run", tokens), there(tokens).logits)


def test_from_an_import_one_can_evaluate_and_generate(tmp_path):
    made.run(tmp_path / "run", dict(made.LLAMA, vocab_size=257))
    convert([str(tmp_path / "run"), str(tmp_path / "hf")])
    done = hpclm("convert", tmp_path / "hf", tmp_path / "back", check=0)
    assert "a run directory of 2 layers x 48" in done.stdout and "\r" not in done.stderr
    assert f"next: hpclm evaluate {tmp_path}/back --data " in done.stdout  # it has no tokenizer to generate with
    assert "  imported\n" in hpclm("checkpoints", tmp_path / "back", check=0).stdout
    text = hpclm("generate", tmp_path / "back", "data.tokenizer=bytes", "--prompt", "so", "--tokens", 5, check=0).stdout
    assert text.startswith("so")
    words = ["data.source=synthetic", "evaluate.every=5", "engine.device=cpu"]
    found = json.loads(hpclm("evaluate", tmp_path / "back", *words, "--samples", 4, "--json", check=0).stdout)
    assert found["step"] == 0 and 3 < found["loss"] < 30
    assert (tmp_path / "back").stat().st_mode & 0o77 == 0  # as a run that others cannot change


def test_mistakes_end_with_the_documented_codes_and_no_traceback(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    cases = {(tmp_path / "run",): (64, "exists; remove it, or choose another target"), ("/proc/hf",): (64, "/proc/hf")}
    cases[tmp_path / "hf", "--shard-gb", "0"] = (2, "argument --shard-gb: '0' is not a number above 0")
    for words, (code, answer) in cases.items():
        done = hpclm("convert", tmp_path / "run", *words, check=code)
        assert answer in done.stderr and "Traceback" not in done.stderr, words
    for source, words, answer in [
        ("none", [], "none is not a run directory: it does not exist"),
        (".", [], "cannot be converted"),
        ("run", ["--pickle"], "--pickle has no effect"),
        ("run", ["modle.layers=1"], "Did you mean"),
    ]:
        with pytest.raises(ConfigError, match=answer):
            convert([str(tmp_path / source), str(tmp_path / "hf"), *words])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("beside", [["config.json", "model.safetensors"], []], ids=["beside a model", "alone"])
def test_an_adapter_is_not_left_out_without_a_word(beside, tmp_path):
    for name in ["adapter_config.json", *beside]:
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ConfigError,
        match=r"contains an adapter \(PEFT's adapter_config.json\), which hpclm does not apply: merge it first",
    ):
        convert([str(tmp_path), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_the_script_is_the_verb(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    command = [sys.executable, ROOT / "tools/convert_checkpoint.py", tmp_path / "run", tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 0 and "GPT2LMHeadModel, from step 7" in done.stdout, done.stderr
    assert load_file(tmp_path / "hf/model.safetensors")["transformer.wte.weight"].shape == (93, 48)


SLOW = (
    "import sys, time\n"
    "from hpclm.interop.huggingface import shards\n"
    "save = shards.save_file\n"
    "def slow(*words, **more):\n    save(*words, **more)\n    print('one', flush=True)\n    time.sleep(60)\n"
    "shards.save_file = slow\n"
    "from hpclm import cli\n"
    "sys.exit(cli.function('convert')(sys.argv[1:]))\n"
)


def test_an_export_that_is_killed_leaves_no_target_and_the_next_one_no_rest(tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    words = [str(tmp_path / "run"), str(tmp_path / "hf")]
    command = [sys.executable, "-c", SLOW, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"one\n"
        process.kill()
    assert not (tmp_path / "hf").exists() and len(list(tmp_path.iterdir())) == 2
    convert(words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    made.run(tmp_path / "run", made.NETWORKS["gpt2"][1])
    save = shards.save_file

    def interrupted(*words, **more):
        save(*words, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert([str(tmp_path / "run"), str(tmp_path / "hf")])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    (tmp_path / "runs").mkdir()
    made.run(tmp_path / "runs/run", dict(made.SHAPE, vocab_size=257, context=16), tokenizer="bytes")
    [step] = (path.name for path in (tmp_path / "runs/run/checkpoints").glob("step-*"))
    for source in ("runs/run", "run"):
        missing = f"{source}/checkpoints/step-99999999"
        refused = hpclm("convert", missing, tmp_path / "hf", cwd=tmp_path, check=64).stderr
        assert refused == f"error: {missing} does not exist; runs/run/checkpoints has {step}\n"
