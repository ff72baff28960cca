"""log.style: scripts that read the logs of Megatron-LM and fairseq read those of hpclm."""

import json
import math
import re

import pytest

from hpclm import cli
from hpclm.reporting import history
from hpclm.rundir import logs
from hpclm.training import log_lines

NUMBER = r"([-+.\dE]+)"
MEGATRON = re.compile(
    rf" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): {NUMBER} \| "
    rf"learning rate: {NUMBER} \| global batch size: +(\d+) \| lm loss: {NUMBER} \| loss scale: {NUMBER} \| "
    rf"grad norm: {NUMBER} \| number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|$"
)
MEGATRON_VALID = re.compile(
    rf" validation loss at iteration (\d+) \| lm loss value: {NUMBER} \| lm loss PPL: {NUMBER} \| $"
)
FAIRSEQ = re.compile(r" \| INFO \| train_inner \| epoch (\d{3}): +(\d+) / (\d+) (loss=.*)$")
FAIRSEQ_VALID = re.compile(
    r" \| INFO \| valid \| valid on 'valid' subset \| loss ([\d.]+) \| ppl ([\d.]+) \| num_updates (\d+)$"
)


@pytest.fixture
def log(tiny, tmp_path):
    """The log of a run in a style, its rows of steps and of evaluations."""

    def trained(style):
        words = tiny("run", f"log.style={style}", "log.every=4", "evaluate.every=6", "evaluate.batches=1")
        assert cli.main(["train", *words]) == 0
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        steps = {row["step"]: row for row in rows if "loss" in row}
        evaluations = {row["step"]: row for row in rows if "validation_loss" in row}
        return (tmp_path / "run/log.txt").read_text().splitlines(), steps, evaluations

    return trained


def mean(steps, numbers):
    return sum(steps[number]["loss"] for number in numbers) / len(numbers)


def test_megatrons_lines_hold_the_runs_numbers(log, tmp_path):
    lines, steps, evaluations = log("megatron")
    found = [match.groups() for line in lines if (match := MEGATRON.search(line))]
    assert [int(each[0]) for each in found] == [1, 4, 8, 12] and {each[1] for each in found} == {"12"}
    assert [int(each[2]) for each in found] == [8, 32, 64, 96] and {each[5] for each in found} == {"8"}
    for each, numbers in zip(found, ([1], [2, 3, 4], range(5, 9), range(9, 13))):
        last = steps[int(each[0])]
        assert float(each[6]) == pytest.approx(mean(steps, numbers), rel=1e-5)
        assert float(each[4]) == pytest.approx(last["lr"], rel=1e-5)
        assert float(each[8]) == pytest.approx(last["grad_norm"], abs=1e-3) and each[9:] == ("0", "0")
        assert float(each[3]) == pytest.approx(
            1000 * sum(steps[n]["step_seconds"] for n in numbers) / len(numbers), abs=0.1
        )
    valid = [match.groups() for line in lines if (match := MEGATRON_VALID.search(line))]
    assert [int(each[0]) for each in valid] == [6, 12]
    for step, loss, perplexity in valid:
        assert float(loss) == pytest.approx(evaluations[int(step)]["validation_loss"], rel=1e-5)
        assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_fairseqs_lines_hold_the_runs_numbers_in_bits(log):
    lines, steps, evaluations = log("fairseq")
    found = [match.groups() for line in lines if (match := FAIRSEQ.search(line))]
    stats = [dict(pair.split("=") for pair in each[3].split(", ")) for each in found]
    assert [int(each["num_updates"]) for each in stats] == [1, 4, 8, 12]
    assert all(int(each[1]) <= int(each[2]) and each[0] == "001" for each in found)
    for each, numbers in zip(stats, ([1], [2, 3, 4], range(5, 9), range(9, 13))):
        assert float(each["loss"]) == pytest.approx(mean(steps, numbers) / math.log(2), abs=1e-3)
        assert float(each["ppl"]) == pytest.approx(2 ** float(each["loss"]), rel=1e-2)
        assert float(each["lr"]) == pytest.approx(steps[int(each["num_updates"])]["lr"], rel=1e-4)
        assert {"wps", "ups", "wpb", "bsz", "gnorm", "train_wall"} <= each.keys() and each["wpb"] == "128.0"
    valid = [match.groups() for line in lines if (match := FAIRSEQ_VALID.search(line))]
    assert [int(each[2]) for each in valid] == [6, 12]
    assert float(valid[0][0]) == pytest.approx(evaluations[6]["validation_loss"] / math.log(2), abs=1e-3)


@pytest.mark.parametrize("style", ["hpclm", "megatron", "fairseq"])
def test_what_reads_the_log_knows_a_step_in_every_style(style, log, tmp_path):
    lines, _, _ = log(style)
    assert sum(logs.STEPS.search(line) is not None for line in lines) == 4
    assert [int(match[1]) for line in lines if (match := history.STEP.match(line[26:]))] == [1, 4, 8, 12]
    assert logs.last_words(tmp_path / "run/log.txt")[0] == "done"


def test_another_style_is_refused(tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", "log.style=nemo")]) == 64
    said = capsys.readouterr().err
    assert "log.style" in said and "megatron" in said and "fairseq" in said and not (tmp_path / "run").exists()


def test_the_perplexity_of_a_loss_that_is_not_finite_hides_nothing():
    assert math.isnan(log_lines.perplexity(math.nan))
    assert log_lines.perplexity(math.inf) == log_lines.perplexity(1e9) == math.exp(20)
    assert log_lines.perplexity(2.0) == math.exp(2.0)
