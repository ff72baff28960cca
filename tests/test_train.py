"""Whole runs, as a person starts them."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from hpclm import cli, config
from tests import forks
from tests.events import began
from tests.forks import Hpclm, hpclm
from tests.runs import PATIENCE, ROOT, losses

RAMP = ["batch.rampup=[4,4,20]", "optim.unit=samples", "optim.warmup=30", "budget.steps=16"]
DROPOUT = ["model.dropout=0.2", "model.attention.dropout=0.2"]


def corpus(tmp_path, name="data"):
    """A small dataset, several epochs of which a run reads."""
    words = ["so", "it", "goes", "and", "then", "a", "small", "model", "reads", "text"]
    draw = random.Random(name)
    lines = [" ".join(draw.choices(words, k=draw.randrange(3, 30))) for _ in range(80)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    words = ["--input", f"{tmp_path}/text.txt", "--output-prefix", f"{tmp_path}/{name}", "--tokenizer", "bytes"]
    assert cli.main(["preprocess", *words, "--append-eod"]) == 0
    return f"{tmp_path}/{name}_text_document"


def test_a_run_learns_and_leaves_what_the_readme_says(tiny, tmp_path):
    words = tiny("run", "evaluate.every=6", "log.tensorboard=true", "budget.steps=30", "checkpoint.every=10")
    done = hpclm("train", *words, check=0)
    out = tmp_path / "run"
    assert {p.name for p in out.iterdir()} == {
        "checkpoints", "checkpoints.saved", "config-history", "config.yaml", "events.jsonl", "lock", "log.txt", "metrics.jsonl", "summary.json", "tensorboard",
    }  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if "loss" in row]
    valid = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in train] == list(range(1, 31))
    assert [row["step"] for row in valid] == [6, 12, 18, 24, 30]
    assert train[-1]["loss"] < train[0]["loss"] - 0.3 and valid[-1]["validation_loss"] < valid[0]["validation_loss"]
    assert train[-1]["samples"] == 240 and train[-1]["tokens_per_second"] > 0 and train[-1]["memory"] > 0
    [attempt] = began(out)
    assert "train" in attempt["command"] and attempt["versions"]["torch"] and attempt["from_step"] == 0
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "latest",
        *(f"step-{s:08d}" for s in (10, 20, 30)),
    ]
    assert "done at step 30" in done.stderr and "step 30/30" in (out / "log.txt").read_text()
    assert "\r" not in done.stderr  # quiet where nobody watches


def test_tensorboard_gets_the_scalars_under_bigsciences_names(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = tiny("run", "evaluate.every=6", "log.tensorboard=true", "checkpoint.every=6")
    hpclm("train", *words, "stop_at=6", check=0)
    hpclm("train", *words, check=0)
    assert (
        "settings have changed since the last attempt: stop_at=null (was 6)" in (tmp_path / "run/log.txt").read_text()
    )
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "lm-loss-training/lm loss",
        "learning-rate/learning-rate",
        "batch-size/batch-size",
        "grad-norm/grad-norm",
    } <= tags
    assert {"lm-loss-validation/lm loss validation", "lm-loss-validation/lm loss validation ppl"} <= tags
    assert [e.step for e in events.Scalars("lm-loss-training/lm loss")] == list(range(1, 13))
    events = EventAccumulator(str(tmp_path / "run/tensorboard/samples")).Reload()
    assert [e.step for e in events.Scalars("lm-loss-training/lm loss vs samples")] == [8 * s for s in range(1, 13)]


@pytest.mark.parametrize("stop", [3, 9])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tiny, tmp_path, stop):
    """Dropout on, in the middle of an epoch and of a batch ramp-up."""
    data = ["data.source=indexed", f"data.prefix={corpus(tmp_path)}", "model.vocab_size=257"]
    words = [*RAMP, *DROPOUT, *data, "checkpoint.every=0"]
    hpclm("train", *tiny("whole", *words), check=0)
    hpclm("train", *tiny("parts", *words, f"stop_at={stop}"), check=0)
    assert len(losses(tmp_path / "parts")) == stop
    hpclm("train", *tiny("parts", *words), check=0)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    last = [
        (tmp_path / run / "checkpoints/step-00000016/rank-00000.safetensors").read_bytes() for run in ("whole", "parts")
    ]
    assert last[0] == last[1]


def test_kill_9_at_any_time_costs_only_the_steps_since_the_last_checkpoint(tiny, tmp_path):
    words = tiny("run", *DROPOUT, "budget.steps=40", "checkpoint.every=5")
    hpclm("train", *tiny("whole", *DROPOUT, "budget.steps=40", "checkpoint.every=5"), check=0)
    draw, killed = random.Random(time.time_ns()), 0
    for _ in range(40):
        process = Hpclm("train", *words, before=killed_in_its_seventh_step if killed < 2 else None)
        metrics = tmp_path / "run/metrics.jsonl"
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= before):
            time.sleep(0.01)
        if killed >= 2:
            time.sleep(draw.uniform(0, 0.4))  # the whole run takes little longer
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed += 1
    else:
        hpclm("train", *words, check=0)
    assert killed >= 2
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_does_not_load_the_compiler_which_takes_longer_than_pytorch_itself(tiny):
    code = f"import sys; from hpclm import cli; code = cli.main(['train', *{tiny()!r}])"
    code += "; sys.exit(code or 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def killed_in_its_seventh_step():
    from hpclm.engine.native import NativeEngine

    step, begun = NativeEngine.train_step, []

    def killed(self, *words):
        begun.append(words)
        if len(begun) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *words)

    NativeEngine.train_step = killed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_a_warned_run_saves_and_asks_to_be_started_again(tiny, tmp_path, number):
    words = tiny("run", "budget.steps=100000", "checkpoint.every=0", "optim.schedule=constant")
    with Hpclm("train", *words) as process:
        forks.steps(process, tmp_path / "run", 3)
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85
    step = max(losses(tmp_path / "run"))
    assert f"{signal.Signals(number).name}: saved at step {step}" in told
    again = hpclm("train", *words, f"stop_at={step + 2}", check=0)
    assert f"resumes from step {step}" in again.stderr
    assert max(losses(tmp_path / "run")) == step + 2


def test_a_warned_run_saves_though_nobody_hears_what_it_says(tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "checkpoint.every=0", "optim.schedule=constant")
    listening, told = os.pipe()
    process = subprocess.Popen([sys.executable, "-m", "hpclm", "train", *words], cwd=ROOT, stdout=told, stderr=told)
    try:
        os.close(told)
        forks.steps(process, tmp_path / "run", 3)
        os.close(listening)
        process.terminate()
        assert process.wait() == 85
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / f"run/checkpoints/step-{max(losses(tmp_path / 'run')):08d}").is_dir()


def test_an_order_to_stop_stands_before_a_signal_after_which_the_run_would_start_again(tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "model.block=tests.faults:SlowBlock", "optim.schedule=constant")
    with Hpclm("train", *words, env=os.environ | {"TEST_PAUSE": "0.3"}) as process:  # four times in a step
        forks.steps(process, tmp_path / "run", 1)
        (tmp_path / "run/stop").touch()
        process.terminate()
        assert process.wait() == 0
    assert not (tmp_path / "run/stop").exists()


def test_a_warning_during_start_up_costs_no_step(tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "optim.schedule=constant")
    hpclm("train", *words, "stop_at=3", check=0)
    hpclm("train", *words, before=warned_as_data_is_opened, check=85)
    assert max(losses(tmp_path / "run")) == 3


def warned_as_data_is_opened():
    from hpclm.data import sources

    check = sources.check_content

    def warned(source):
        os.kill(os.getpid(), signal.SIGTERM)
        return check(source)

    sources.check_content = warned


def test_an_evaluation_that_a_warning_prevented_is_made_up_for(tiny, tmp_path):
    words = tiny("run", "evaluate.every=4", "checkpoint.every=0", "log.every=1")
    codes = [hpclm("train", *words, before=warned_in_two_steps).returncode for _ in range(3)]
    # the second evaluation is made at once, unless the machine is so slow that the warning is heard before it is over
    assert codes in ([85, 0, 0], [85, 85, 0])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8, 12]


def warned_in_two_steps():
    from hpclm.engine.native import NativeEngine

    step = NativeEngine.train_step

    def warned(self, batches, lr, number, check_interrupt):
        if number in (3, 11):
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches, lr, number, check_interrupt)

    NativeEngine.train_step = warned


def test_another_budget_is_warned_of_because_the_order_follows_from_it(tiny, tmp_path):
    hpclm("train", *tiny(), check=0)
    assert (
        "the run's samples changed from 96 to 112." in hpclm("train", *tiny("run", "budget.steps=14"), check=0).stderr
    )


def test_the_learning_rate_in_the_metrics_is_the_schedules(tiny, tmp_path):
    hpclm(
        "train", *tiny("run", "optim.warmup=16", "optim.unit=samples", "optim.schedule=linear", "log.every=5"), check=0
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    wanted = [1.5e-3, 3e-3] + [3e-3 - (3e-3 - 1e-4) * (8 * s - 16) / 80 for s in range(2, 12)]
    assert [row["lr"] for row in rows] == pytest.approx(wanted)


def test_a_finished_run_is_done_when_started_again_and_goes_on_with_a_larger_budget(tiny, tmp_path):
    hpclm("train", *tiny(), check=0)
    assert "done at step 12" in hpclm("train", *tiny(), check=0).stderr
    hpclm("train", *tiny("run", "budget.steps=14"), check=0)
    assert max(losses(tmp_path / "run")) == 14


def test_the_run_does_not_go_on_with_other_data_or_another_network(tiny):
    hpclm("train", *tiny(), check=0)
    done = hpclm("train", *tiny("run", "model={layers: 3}", "seed=4"), check=64)
    assert "model.layers was 2 and is now 3" in done.stderr and "seed was 1234 and is now 4" in done.stderr


def test_what_is_not_finite_is_skipped_and_counted_or_stops_the_run(tiny, tmp_path):
    wild = ["optim.lr=1e30", "optim.min_lr=1e30", "optim.clip=0", "optim.schedule=constant"]
    skipping = hpclm("train", *tiny("skip", *wild, "optim.nonfinite_limit=3", "budget.steps=100"), check=93)
    assert "3 steps in a row were not finite (optim.nonfinite_limit)" in skipping.stderr
    assert "skipped, 2 so far" in skipping.stderr
    stopping = hpclm("train", *tiny("stop", *wild, "optim.nonfinite_limit=1"), check=93)
    assert "1 step was not finite (optim.nonfinite_limit)" in stopping.stderr
    assert "1 step was not finite (optim.nonfinite_limit)" in (tmp_path / "stop/log.txt").read_text().splitlines()[-1]
    for line in (tmp_path / "skip/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_budget_of_time_ends_the_run_and_counts_over_attempts(tiny, tmp_path):
    words = tiny("run", "budget.steps=null", "budget.hours=0.0002", "optim.schedule=constant", "checkpoint.every=0")
    hpclm("train", *words, "stop_at=2", check=0)
    hpclm("train", *words, check=0)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    total = sum(row["step_seconds"] for row in rows)
    assert 0.72 <= total < 0.72 + 2 * max(row["step_seconds"] for row in rows)


def test_a_run_that_ends_inside_its_warmup_is_refused_or_warned_of(tiny, tmp_path):
    said = "the run ends after 12 steps, inside its warm-up of 50"
    assert said in hpclm("train", *tiny("run", "optim.warmup=50"), check=64).stderr
    preset = tmp_path / "mine.yaml"
    preset.write_text("optim: {warmup: 50}\nbudget: {steps: 1000}\n")
    assert said in hpclm("train", preset, *tiny("run"), check=0).stderr  # its budget is lowered, to try it
    warned = hpclm("submit", "--cluster", "slurm", "--dry-run", preset, *tiny("run2"), check=0)
    assert f"warning: {said}" in warned.stderr and "#SBATCH" in warned.stdout


@pytest.mark.parametrize(
    "words, answer",
    {
        (
            "data.source=indexed",
            "data.prefix=nowhere/x",
        ): "dataset not found: nowhere/x.bin and nowhere/x.idx do not exist",
        ("modle.layers=3",): "Did you mean 'model.layers'?",
        ("engine.device=cuda",): "PyTorch sees no GPU here",
        ("model.vocab_size=8",): "needs model.vocab_size of at least 16",
        ("optim.schedule=nowhere:f", "optim.warmup=3"): "optim.schedule 'nowhere:f' cannot be loaded",
        ("model.block=nowhere:Block",): "model.block 'nowhere:Block' cannot be loaded",
    }.items(),
)
@pytest.mark.filterwarnings("default")
def test_a_mistake_ends_with_64_one_message_and_nothing_half_written(tiny, tmp_path, words, answer):
    if words == ("engine.device=cuda",):
        pytest.importorskip("torch")
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    done = hpclm("train", *tiny("run", *words), check=64)
    assert answer in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_only_a_job_follows_is_refused_on_the_command_line_and_is_no_fault_of_a_file(tiny, tmp_path, capsys):
    words = [*tiny("run", "budget.steps=1"), "job={snapshot: true, nodes: 2}", "job.warn_seconds=5"]
    assert cli.main(["train", *words]) == 64 and not (tmp_path / "run").exists()
    assert "job.snapshot, job.nodes would have no effect: hpclm train does not start jobs" in capsys.readouterr().err
    config.dump(config.load(None, words), tmp_path / "config.yaml")
    assert cli.main(["train", str(tmp_path / "config.yaml")]) == 0


def test_mistakes_in_the_data_are_answered(tiny, tmp_path):
    prefix = corpus(tmp_path)
    data = ["data.source=indexed", f"data.prefix={prefix}"]
    small = hpclm("train", *tiny("run", *data), check=64)
    assert "model.vocab_size=64 is smaller than the 257 entries of the bytes tokenizer" in small.stderr
    long = hpclm("train", *tiny("run", *data, "model.vocab_size=257", "model.context=100000"), check=64)
    assert "one sample needs model.context + 1 = 100001" in long.stderr
    valid = hpclm(
        "train", *tiny("run", *data, "model.vocab_size=257", "data.split=99999,1,0", "evaluate.every=5"), check=64
    )
    assert "the valid split of" in valid.stderr and "evaluate.every=0" in valid.stderr
    (tmp_path / "empty.txt").write_text("")
    nothing = hpclm(
        "preprocess",
        "--input",
        tmp_path / "empty.txt",
        "--output-prefix",
        tmp_path / "e",
        "--tokenizer",
        "bytes",
        check=64,
    )
    assert "no documents in" in nothing.stderr and not list(tmp_path.glob("e_*"))


def test_a_warning_of_the_data_is_given_once_though_it_is_checked_before_pytorch_is_there(tiny, tmp_path):
    data = ["data.source=indexed", f"data.prefix={corpus(tmp_path)}", "model.vocab_size=4096", "budget.steps=1"]
    assert hpclm("train", *tiny("run", *data), check=0).stderr.count("the model is smaller and faster") == 1
    assert (tmp_path / "run/log.txt").read_text().count("the model is smaller and faster") == 1


def test_an_unwritable_run_directory_is_refused_with_its_reason(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    done = hpclm("train", *tiny("file/run"), check=64)
    assert f"run directory {tmp_path / 'file/run'}: Not a directory (errno 20); choose another out" in done.stderr
    assert "run directory /proc/run cannot be written: " in hpclm("train", *tiny("x", "out=/proc/run"), check=64).stderr
    itself = hpclm("train", *tiny("x", f"out={tmp_path / 'file'}"), check=64).stderr
    assert f"run directory {tmp_path / 'file'} is a file; choose another out" in itself


@pytest.mark.parametrize(
    "words, answer",
    [
        (["engine.device=cuda"], "engine.device=cuda, but PyTorch sees no GPU here"),
        (["engine.offload_activations=true"], "moves activations from the GPU to CPU memory"),
    ],
)
@pytest.mark.parametrize("verb", [["train"], ["submit", "--cluster=local", "--gpus=1"]], ids=["train", "submit"])
def test_what_needs_a_gpu_is_refused_without_one_before_anything_is_written(verb, words, answer, tiny, tmp_path):
    done = hpclm(
        *verb, *tiny("run", "engine.device=auto", *words), check=64, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert answer in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(each, marks=pytest.mark.whole) for each in ("<&-", ">&-", "2>&-"))]
)
def test_closed_streams_keep_nobody_from_training(closed, tiny, tmp_path):
    command = shlex.join([sys.executable, "-m", "hpclm", "train", *tiny()])
    assert subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=ROOT, timeout=PATIENCE).returncode == 0
    assert "done at step 12" in (tmp_path / "run/log.txt").read_text()


def test_evaluate_and_generate_use_the_newest_checkpoint(tiny, tmp_path):
    data = ["data.source=indexed", f"data.prefix={corpus(tmp_path)}", "model.vocab_size=257", "data.split=80,20,0"]
    hpclm("train", *tiny("run", *data, "budget.steps=60", "evaluate.every=60", "evaluate.batches=1000"), check=0)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = json.loads(hpclm("evaluate", tmp_path / "run", "--json", check=0).stdout)
    assert found["step"] == 60 and found["loss"] == pytest.approx(rows[-1]["validation_loss"], rel=1e-5)
    first, again, other = (
        hpclm("generate", tmp_path / "run", "--prompt", "so it", "--tokens", 30, "--seed", seed, check=0).stdout
        for seed in (0, 0, 1)
    )
    assert first == again != other and first.startswith("so it")
    assert "is not a run directory" in hpclm("generate", tmp_path, "--prompt", "x", check=64).stderr


def test_a_model_is_not_used_with_a_tokenizer_it_did_not_learn(tiny, tmp_path):
    data = ["data.source=indexed", f"data.prefix={corpus(tmp_path)}", "model.vocab_size=300", "data.split=80,20,0"]
    hpclm("train", *tiny("run", *data, "budget.steps=2"), check=0)
    (tmp_path / "v.json").write_text('{"<unk>": 0, "<|endoftext|>": 1, "so": 2}')
    other = ["data.tokenizer=whitespace", f"data.tokenizer_files=[{tmp_path / 'v.json'}]"]
    refused = hpclm("generate", tmp_path / "run", *other, "--prompt", "so", check=64).stderr
    assert "data.tokenizer=whitespace has no effect: the run has its own tokenizer" in refused
    words = ["--input", tmp_path / "text.txt", "--output-prefix", tmp_path / "o", "--tokenizer", "whitespace"]
    hpclm("preprocess", *words, "--tokenizer-files", tmp_path / "v.json", check=0)
    prefix = f"data.prefix={tmp_path / 'o_text_document'}"
    for verb in (["evaluate", tmp_path / "run", prefix], ["train", *tiny("run", *data, "budget.steps=4", prefix)]):
        assert "they differ in kind bytes against whitespace" in hpclm(*verb, check=64).stderr


def test_a_run_reads_several_datasets_and_evaluates_each_held_out_one(tiny, tmp_path):
    a, b = corpus(tmp_path), corpus(tmp_path, "more")
    data = ["data.source=indexed", f"data.train=[3, {a}, 1, {b}]", f"data.valid=[{b}]", f"data.validation=[old={a}]"]
    data += ["model.vocab_size=257", "evaluate.every=6", "evaluate.batches=2", "data.workers=2"]
    hpclm("train", *tiny("whole", *data), check=0)
    hpclm("train", *tiny("parts", *data, "stop_at=5"), check=0)
    hpclm("train", *tiny("parts", *data), check=0)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    rows = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    measured = [(row["step"], row["part"]) for row in rows if "validation_loss" in row]
    assert measured == [(5, "valid"), (5, "valid/old"), *((s, p) for s in (6, 12) for p in ("valid", "valid/old"))]
    steps = [row for row in rows if "loss" in row]
    assert all(0 <= row["data_fraction"] == row["data_seconds"] / row["step_seconds"] < 1 for row in steps)
    found = json.loads(
        hpclm("evaluate", tmp_path / "parts", "--part", "valid/old", "--json", check=0, cwd=tmp_path).stdout
    )
    assert found["part"] == "valid/old" and found["step"] == 12
    unknown = hpclm("evaluate", tmp_path / "parts", "--part", "valid/new", check=64).stderr
    assert "define no data for 'valid/new', only for train, valid, valid/old" in unknown


def test_generate_never_leaves_the_tokenizers_vocabulary_and_takes_settings(tiny, tmp_path):
    data = ["data.source=indexed", f"data.prefix={corpus(tmp_path)}", "model.vocab_size=2000"]
    hpclm("train", *tiny("run", *data, "budget.steps=2"), check=0)
    options = ["--prompt", "so", "--temperature", 100, "--top", 5000, "--tokens", 40]
    hpclm("generate", tmp_path / "run", *options, check=0, cwd=tmp_path)  # from anywhere
    for path in tmp_path.glob("data_text_document.*"):  # the run has what it needs
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    hpclm("generate", tmp_path / "run", *options, check=0)
    shutil.rmtree(tmp_path / "run/tokenizer")
    assert "set data.tokenizer" in hpclm("generate", tmp_path / "run", *options, check=64).stderr
    hpclm("generate", tmp_path / "run", "data.tokenizer=bytes", *options, check=0)
    assert "is not UTF-8" in hpclm("generate", tmp_path / "run", "--prompt", "\udcff", check=64).stderr


def test_modules_in_the_current_folder_are_found(tiny, tmp_path):
    (tmp_path / "mine.py").write_text("def f(position, length, optim):\n    return 0.125\n")
    hpclm("train", *tiny("run", "optim.schedule=mine:f"), check=0, cwd=tmp_path)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["lr"] == 0.125


def test_a_closed_or_full_output_is_no_traceback():
    for redirect in ("| head -c 1", ">/dev/full", ">&-"):
        command = f"{sys.executable} -m hpclm config debug {redirect}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
        assert "Traceback" not in done.stderr, redirect
