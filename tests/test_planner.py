import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from hpclm import cli
from hpclm.model import count
from hpclm.node import environment, failures
from hpclm.planning import forecast, suggest, tables
from tests.forks import hpclm
from tests.runs import ROOT, exit_code

LLAMA = "configs/llama-7b.yaml"


def output(*arguments, capsys):
    """What the verb prints, from inside this process."""
    assert failures.run(cli.function("planner"), [str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_parts_add_up_and_every_figure_is_there(capsys):
    text = output(LLAMA, "engine.recompute=full", "--nodes", 2, "--gpus", 8, "--gpus-kind", "h200", capsys=capsys)
    table = dict(re.findall(r"^  (\w+) +([\d.]+)", text.partition("a step  ")[0], re.M))
    assert list(table) == ["weights", "gradients", "optimizer", "activations", "buffers", "logits", "overhead", "total"]
    total = float(table.pop("total"))
    assert sum(map(float, table.values())) == pytest.approx(total, abs=0.04)
    assert "6,738,415,616 parameters" in text and "16 x h200" in text
    assert re.search(r"[\d,]+ tokens/s, [\d,]+ of each GPU: MFU [\d.]+%, HFU [\d.]+%", text)


def test_the_phase_with_the_longest_samples_is_planned(capsys):
    phases = "data.phases=[{from: 1e9, model.context: 8192}, {from: 2e9, model.context: 2048}]"
    words = [LLAMA, "data.source=indexed", "data.order=per_dataset", "data.train=[a]", "batch.micro_size=1"]
    text = output(*words, phases, capsys=capsys)
    assert text.startswith("phase 1 of data.phases, which has the longest samples:\n")
    assert text.partition("\n")[2] == output(*words, "model.context=8192", capsys=capsys)


def test_json_says_the_same_in_bytes_and_seconds(capsys):
    pipeline = (
        "parallel.pipeline=4",
        "parallel.shard=null",
        "engine.name=deepspeed",
        "batch.micro_size=2",
        "engine.recompute=full",
    )
    found = json.loads(output(LLAMA, "--gpus", 8, "--json", *pipeline, capsys=capsys))
    assert len(found["memory"]) == 4 and found["layout"]["data"] == 2
    for part in found["memory"]:
        assert sum(v for k, v in part.items() if k != "total") == pytest.approx(part["total"])
    assert sum(v for k, v in found["step"].items() if k != "total") == pytest.approx(found["step"]["total"])
    assert found["tokens_per_second"] == pytest.approx(1024 * 4096 / found["step"]["total"])
    assert found["sent"]["pipeline"] > 0 and found["bubble"] == pytest.approx(3 / (256 + 3))
    assert found["hfu"] > found["mfu"] > 0


def test_the_stage_that_is_named_has_the_largest_total(capsys):
    words = ("parallel.pipeline=4", "parallel.shard=null", "engine.name=pipelining", "engine.compile=false")
    text = output(LLAMA, "--gpus", 4, "batch.micro_size=1", *words, capsys=capsys)
    heads = re.findall(r"stage (\d)", re.search("memory of a GPU, GiB(.*)", text)[1])
    totals, named = re.search(r"\n  total +(.*?) of 79, at stage (\d) of 4: does not fit", text).groups()
    sizes = dict(zip(heads, map(float, totals.split()), strict=True))
    assert list(sizes) == ["1", "2", "4"] and sizes[named] == max(sizes.values())


@pytest.mark.parametrize(
    "less, more",
    (
        (["engine.recompute=full"], ["engine.recompute=none"]),
        (["engine.name=fsdp2"], ["engine.name=native"]),
        (["engine.name=deepspeed", "engine.zero_stage=3"], ["engine.name=deepspeed", "engine.zero_stage=1"]),
        (["parallel.tensor=2"], ["parallel.tensor=1"]),
        (["batch.micro_size=1"], ["batch.micro_size=2"]),
        (["engine.loss_chunk=512"], ["engine.loss_chunk=8192", "batch.micro_size=2"]),
    ),
)
def test_what_saves_memory_is_said_to(less, more, capsys):
    def need(words):
        given = (LLAMA, "parallel.shard=null", "batch.micro_size=1", "--gpus", 8, "--json")
        found = json.loads(output(*given, *words, capsys=capsys))
        return max(part["total"] for part in found["memory"])

    assert need(less) < need(more)


def test_over_a_slow_network_weights_are_best_sharded_within_a_node():
    run = environment.settings_with_site([LLAMA, "job.nodes=2", "job.gpus=8", "parallel.shard=null"])
    ranked = suggest.ranked(run, tables.kind_of("H100", network=3))
    best = next(
        one for one in ranked if one.options == ("parallel.shard=8", "batch.micro_size=2", "engine.zero_stage=3")
    )
    assert best.forecast.volume.replicate == pytest.approx(4 * count.parameters(run.model) / 8)
    everywhere = forecast.predict(replace(best.run, parallel=run.parallel), best.forecast.kind)
    assert best.forecast.step.total < 0.5 * everywhere.step.total and everywhere.volume.replicate == 0


def test_suggestions_fit_are_ranked_and_are_what_their_words_give(capsys):
    asked = [LLAMA, "job.nodes=2", "job.gpus=4", "batch.global_size=256", "engine.compile=false"]
    kind = tables.kind_of("A100")
    best = suggest.ranked(environment.settings_with_site(asked), kind)
    assert len(best) > 10
    speeds = [one.forecast.tokens_per_second for one in best]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.forecast.room == "fits" for one in best)
    assert {one.forecast.layout.tensor for one in best} >= {1, 2, 4}
    assert {one.run.engine.name for one in best} >= {"deepspeed", "fairscale", "fsdp2", "pipelining"}
    for one in best[:5]:
        again = json.loads(output(*asked, *one.options, "--gpus-kind", "A100", "--json", capsys=capsys))
        assert again["tokens_per_second"] == pytest.approx(one.forecast.tokens_per_second)
        assert again["verdict"] == "fits"


def test_suggest_stands_before_or_after_a_file(capsys):
    for words in (["--suggest", LLAMA], [LLAMA, "--suggest"]):
        text = output(*words, "--gpus", 8, capsys=capsys)
        assert len(text.splitlines()) == 12 and "layouts fit 8 x H100" in text


def test_suggestions_in_json_are_the_ten_fastest(capsys):
    words = ["debug", "--gpus", 2, "batch.global_size=32"]
    best = suggest.ranked(
        environment.settings_with_site(["debug", "job.gpus=2", "batch.global_size=32"]), tables.kind_of("H100")
    )
    assert len(best) > 10
    found = json.loads(output(*words, "--suggest", "--json", capsys=capsys))
    assert [row["settings"] for row in found] == [[*one.options] for one in best[:10]]
    assert [row["tokens_per_second"] for row in found] == [one.speed for one in best[:10]]


def test_the_network_and_the_memory_of_ones_own_are_those_that_are_reckoned_with(capsys):
    words = ["debug", "-N", 2, "--gpus", 2, "batch={global_size: 32, micro_size: 8}", "--json"]
    run = environment.settings_with_site(
        ["debug", "job.nodes=2", "job.gpus=2", "batch={global_size: 32, micro_size: 8}"]
    )
    found = json.loads(output(*words, "--network", 0.5, "--memory", 3, capsys=capsys))
    wanted = forecast.predict(run, tables.kind_of("H100", 3, 0.5))
    assert found["step"]["total"] == wanted.step.total > forecast.predict(run, tables.kind_of("H100")).step.total
    assert found["available"] == 3 * 2**30


def test_several_files_are_compared_with_the_same_overrides_and_one_that_cannot_be_planned_says_why(tmp_path, capsys):
    for name, heads in (("good", 4), ("bad", 5)):
        (tmp_path / f"{name}.yaml").write_text(
            f"model: {{hidden: 64, attention: {{heads: {heads}}}}}\ndata: {{source: synthetic}}\nbudget: {{steps: 1}}\n"
        )
    good, bad = f"{tmp_path}/good.yaml", f"{tmp_path}/bad.yaml"
    found = json.loads(output(good, bad, "batch.micro_size=2", "--json", capsys=capsys))
    assert found[good]["layout"]["micro_size"] == 2 and found[bad].keys() == {"error"}
    head, first, second = output(good, bad, "batch.micro_size=2", capsys=capsys).splitlines()
    assert head.split() == ["on", "H100", "parameters", "GPUs", "micro", "GiB", "tokens/s", "a", "GPU", "MFU"]
    assert first.split()[:4] == [good, f"{found[good]['parameters']:,}", "1", "2"]
    assert second.split(maxsplit=1) == [bad, found[bad]["error"].splitlines()[0]]


def test_the_idle_part_of_a_pipeline_is_told(capsys):
    words = ["debug", "--gpus", 2, "parallel.pipeline=2", "engine.name=pipelining", "engine.precision=bf16"]
    text = output(*words, "batch={global_size: 32, micro_size: 8}", "engine.compile=false", capsys=capsys)
    assert f"bubble of equal stages {1 / 5:.1%}" in text  # (p - 1) / (m + p - 1)


@pytest.mark.parametrize(
    "name, more",
    [("torch.optim:SGD", "\n"), ("no_such_module:X", ", and to train in any layout, because it cannot be loaded here")],
)
def test_what_is_assumed_of_an_optimizer_of_the_users_is_told(name, more, capsys):
    text = output("debug", f"optim.name={name}", capsys=capsys)
    assert f"optim.name={name} is assumed to keep two tensors of each weight's shape, like AdamW{more}" in text


def test_nothing_fits_a_gpu_that_is_too_small(capsys):
    assert failures.run(cli.function("planner"), [LLAMA, "--suggest", "--memory", "2"]) == 1
    assert "no layout fits 1 x H100" in capsys.readouterr().out
    assert "does not fit" in output(LLAMA, "--memory", 2, capsys=capsys)


@pytest.mark.parametrize(
    "words, message",
    (
        (
            ["--gpus", "3"],
            "batch.global_size=32 must be a multiple of batch.micro_size=4 x 3 data-parallel replicas = 12",
        ),
        (
            ["--suggest", "--gpus", "7", "batch.global_size=5", "batch.micro_size=1", "model.layers=1"],
            "no layout divides batch.global_size=5",
        ),
        (["--suggest", "engine.precision=fp32"], "not predicted in fp32"),
        (["modle.layers=3"], "Did you mean 'model.layers'"),
    ),
)
def test_what_cannot_be_planned_is_told(words, message, capsys):
    assert failures.run(cli.function("planner"), words) == 64
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus-kind", "A1000"], "--gpus-kind 'A1000' is an unknown kind of GPU; choose one of .*A100"),
        *(
            (["--memory", value], f"argument --memory: '{value}' is not a number above 0")
            for value in ("0", "-1", "nan")
        ),
    ],
)
def test_a_value_that_an_option_cannot_have_ends_with_2(words, message, capsys):
    assert exit_code(["planner", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_speed_is_not_predicted_without_a_peak(capsys):
    text = output("--gpus-kind", "V100", capsys=capsys)
    assert "not predicted in fp32" in text and "tokens/s" not in text
    assert "tokens/s" in output("--gpus-kind", "V100", "engine.precision=fp16", capsys=capsys)


def test_a_head_that_tensor_cores_do_not_like_is_told(capsys):
    assert "a head is 150 wide" in output("model.hidden=600", "model.attention.heads=4", capsys=capsys)
    assert "a head is" not in output("model.hidden=96", "model.attention.heads=4", capsys=capsys)


def test_a_whole_forecast_loads_neither_torch_nor_numpy():
    code = (
        "import sys; from hpclm import cli; from hpclm.node import failures; code = failures.run(cli.function('planner')); "
        "print({'torch', 'numpy'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, LLAMA, "--gpus=8"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("set()\n"), done.stderr


def test_the_verb_is_known_and_explains_itself():
    assert "--gpus-kind" in hpclm("planner", "--help", check=0).stdout
    assert "planner" in hpclm("--help", check=0).stdout
