"""What the log says of a run as a whole."""

import logging
from types import SimpleNamespace

import pytest
import torch

from hpclm import config
from hpclm.checkpoint import Progress
from hpclm.config.plan import Length, Plan
from hpclm.model.attention.backend import KernelChoice
from hpclm.node.job import OwnJob
from hpclm.training import messages
from tests.checkpoint.state import saved

CPU = torch.device("cpu")


def run(out, *words):
    return config.load(None, ["data.source=synthetic", f"out={out}", *words])


@pytest.mark.parametrize(
    "words, length, leaving, text",
    [
        ([], 5, "", "done at step 5, 1,040 samples; next: hpclm report OUT"),
        ([], 9, "SIGTERM", "stopped at step 5 (SIGTERM); the same command resumes it"),
        ([], 9, "stop", "stopped at step 5 (hpclm request RUN stop); the same command resumes it"),
        (
            ["kill_switch=/k"],
            9,
            "kill_switch",
            "stopped at step 5 (kill_switch); once /k is removed, the same command resumes it",
        ),
        (["stop_at=5"], 9, "", "stopped at step 5 (stop_at)"),
        (["stop_at=5"], 5, "", "done at step 5, 1,040 samples; next: hpclm report OUT"),
        (["stop_at=6"], 9, "exit_interval", "stopped at step 5 (exit_interval); the same command resumes it"),
    ],
)
def test_the_last_words_say_how_a_run_goes_on(words, length, leaving, text, tmp_path):
    said = messages.ending(run(tmp_path, *words), Length(length, None), Progress(5, 1040), leaving)
    assert said == text.replace("OUT", str(tmp_path))


def test_a_model_that_reads_text_is_offered_to_write_some_where_it_was_saved(tmp_path):
    words = ["data={source: indexed, prefix: a, tokenizer: bytes}"]
    told = [
        messages.ending(run(tmp_path, *words, *more), Length(5, None), Progress(5), "")
        for more in ([], ["checkpoint.enabled=false"])
    ]
    assert [f"hpclm generate {tmp_path} --prompt" in text for text in told] == [True, False]


def test_the_way_back_from_a_divergence_is_a_calmer_run_from_what_was_saved(tmp_path):
    out = tmp_path / "run"
    nothing = "Nothing was saved: start again with a new out=, and a lower optim.lr"
    assert messages.way_back(run(out)) == f"{nothing} or optim.clip"
    assert messages.way_back(run(out, "optim.clip=0")) == f"{nothing}, or optim.clip=1"
    saved(out / "checkpoints", (3,))
    assert messages.way_back(run(out)).startswith(
        "Resume from its last checkpoint with a lower optim.lr or optim.clip: hpclm resume "
        f"{out} optim.lr=0.0003; hpclm checkpoints {out} lists"
    )


def test_a_run_of_several_processes_says_how_they_share_a_step(tmp_path, caplog):
    words = ["batch={global_size: 32, micro_size: 2}", "budget.steps=10"]
    for launcher, by in (("local", "locally"), ("srun", "by srun")):
        context = SimpleNamespace(job=OwnJob(), size=4, world=SimpleNamespace(launcher=launcher), hosts=("a", "b"))
        with caplog.at_level(logging.INFO):
            messages.log_start(run(tmp_path, *words), Plan(4, 32, 2), context, Length(10, 320), 1000)
        assert f"4 processes, launched {by}, on a, b; micro-batch size 2, 4 per replica in each step" in caplog.messages


def test_the_budget_that_ends_a_run_before_its_steps_is_named():
    words = ["budget={steps: 20, samples: 100}"]
    limited = run("x", *words).budget
    assert messages._limit(limited, 12) == " (budget.samples=100 ends the run before budget.steps=20)"
    assert messages._limit(limited, 20) == messages._limit(run("x", "budget.samples=100").budget, 12) == ""


def test_kernels_that_a_cpu_does_not_have_are_told(tmp_path, caplog):
    for words in ([], ["model.attention.kernel=flash", "model.kernels=apex"]):
        model = run(tmp_path, *words).model
        messages.attention(model, None)
        messages.kernels(model, CPU)
    assert caplog.messages == [
        "model.attention.kernel=flash is for GPUs; a CPU uses PyTorch's own",
        "model.kernels=apex is for GPUs; using PyTorch's own operations",
    ]


def test_a_kernel_is_told_with_the_reason_why_it_is_not_another(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        messages.attention(run(tmp_path).model, KernelChoice((torch.nn.attention.SDPBackend.MATH,), "too old"))
    assert (
        caplog.messages[0] == "too old" and caplog.messages[1].startswith("attention: ") and len(caplog.messages) == 2
    )


def test_another_number_of_samples_is_told_with_the_one_before(caplog):
    messages.other_budget(Progress(5, planned=80), 160)
    assert caplog.messages[0].startswith("the run's samples changed from 80 to 160. ") and "step 5, " in caplog.text
