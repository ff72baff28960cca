import re
from contextlib import nullcontext

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import settings
from hpclm.launch.schedulers import slurm_script as template
from hpclm.launch.schedulers.slurm_script import of_nodes, options_of

BIG, SMALL = "128|1031000|gpu:a100:8(S:0-1)\n", "64|515000|gpu:4\n"


@pytest.mark.parametrize(
    "told, words, found",
    [
        (BIG, ["job.gpus=8"], {"cpus-per-task": "16", "mem": "0"}),
        (BIG, ["job.gpus=2"], {"cpus-per-task": "16", "mem": "257750M"}),
        (BIG + SMALL, ["job.gpus=4"], {"cpus-per-task": "16", "mem": "515000M"}),
        (BIG + SMALL, ["job.gpus=8"], {"cpus-per-task": "16", "mem": "0"}),
        (BIG, ["job.gpus=8", "job.mem=64G"], {"cpus-per-task": "16"}),
        (BIG, ["job.gpus=8", "job.cpus_per_task=3"], {"mem": "0"}),
        ("128|1031000|gpu:h100:4,gpu:l4:4,nvme:1\n", ["job.gpus=8"], {"cpus-per-task": "16", "mem": "0"}),
        ("64|256000|gpu:3090:8(S:0-1)\n", ["job.gpus=8"], {"cpus-per-task": "8", "mem": "0"}),
        ("64|256000|gpu:4090:4,gpu:a100:4\n", ["job.gpus=1"], {"cpus-per-task": "8", "mem": "32000M"}),
        ("128|1031000|(null)\n", ["job.gpus=1"], {}),
        (SMALL, ["job.gpus=8"], {}),
        ("", [], {}),
    ],
)
def test_a_job_asks_for_its_gpus_share_of_a_node(told, words, found):
    assert of_nodes(config.load(None, words).job, told) == found


NODE = (
    "NodeName={} CPUTot=64 CPUEfctv={} Gres={} OS=Linux 6.1 #1 SMP x=y RealMemory=256000 MemSpecLimit={} Partitions={} "
)


def test_nodes_are_those_of_the_partitions_without_the_cores_and_the_memory_that_they_keep(tmp_path, monkeypatch):
    nodes = [
        ("n1", 60, "gpu:8", "(null)", "main,gpu"),
        ("n2", 60, "gpu:8", "(null)", "gpu"),
        ("n3", 64, "(null)", 6000, "main"),
    ]
    lines = "\n".join(NODE.format(*node) for node in nodes)
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho '{lines}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    big, small = "60|256000|gpu:8\n", "64|250000|(null)\n"
    for words, kinds in {"gpu": big, "main": big + small, "gpu,none": big, "none": ""}.items():
        assert template.node_kinds(config.load(None, [f"job.partition={words}"]).job) == kinds
    assert template.node_kinds(config.load(None, []).job) == big + small


def test_a_job_has_the_name_of_its_run_directory(tmp_path):
    assert options_of(config.load("debug", ["engine.device=cpu"]), tmp_path / "医疗 2")["job-name"] == "医疗_2"


def test_settings_and_options_of_ones_own_come_before_the_share(monkeypatch, tmp_path):
    monkeypatch.setattr(template, "node_kinds", lambda job: BIG)
    run = config.load(None, ["job.gpus=8"])
    assert options_of(run, tmp_path)["mem"] == "0"
    assert "mem" not in options_of(config.load(None, ["engine.device=cpu"]), tmp_path)
    own = config.load(None, ["job.options.mem-per-gpu=10G", "job.options.exclusive="])
    assert {"mem", "mem-per-gpu"} & options_of(own, tmp_path).keys() == {"mem-per-gpu"}


@pytest.mark.parametrize(
    "nodes, types, refused",
    [
        (["(null)"], "(null)", True),
        (["(null)"], "mps,tmpfs", True),
        (["(null)"], "gpu,mps", False),  # sbatch itself refuses the job
        (["(null)", "gpu:a100:4"], "(null)", False),
        ([], "(null)", False),  # without an answer
    ],
)
def test_a_job_for_gpus_is_refused_where_slurm_would_ignore_that_it_asks_for_some(
    nodes, types, refused, tmp_path, monkeypatch
):
    lines = "\n".join(f"NodeName=n CPUTot=64 RealMemory=256000 Gres={gres} OS=Linux #1 SMP" for gres in nodes)
    answers = f"case $2 in node) echo '{lines}' ;; config) echo 'GresTypes               = {types}' ;; esac\n"
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{answers}")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = config.load("debug", ["job.gpus=2"])
    with pytest.raises(ConfigError, match=r"lists no GPUs .*gres=none") if refused else nullcontext():
        options_of(run, tmp_path)
    for free in ("engine.device=cpu", "job.options.gres=none"):
        assert "gpus-per-node" not in options_of(config.load("debug", [free]), tmp_path)


def test_options_of_sbatch_in_a_site_file_are_written_as_settings_or_the_error_says_how(tmp_path):
    site = tmp_path / "site.yaml"
    assert len(settings.RENAMED) > 50
    for setting, key in settings.RENAMED.items():
        site.write_text(f"{setting}: 007\n")
        assert config.load("debug", [], site).job.options == {key.removeprefix("job.options."): "007"}
    for name, way_out in {
        "mail-type": "set job.options.mail-type=...",
        "output": "the log is in logs/ of the run directory",
        "exclusive": "set job.options.exclusive=''",
        "array": "--sweep submits several runs",
        "core_specs": "Options of sbatch are job.options.NAME",
    }.items():
        site.write_text(f"job: {{{name}: x}}\n")
        with pytest.raises(ConfigError, match=re.escape(way_out)):
            config.load("debug", [], site)
