"""The options of ``hpclm submit`` are settings of the job."""

import pytest

from hpclm.commands import submit


def request(words):
    return submit.parser().call(submit.request, words)


SETTINGS = {
    ("--nodes", "-N"): "job.nodes",
    ("--gpus",): "job.gpus",
    ("--time", "-t"): "job.time",
    ("--partition", "-p"): "job.partition",
    ("--account", "-A"): "job.options.account",
    ("--qos", "-q"): "job.options.qos",
    ("--constraint", "-C"): "job.options.constraint",
    ("--exclude", "-x"): "job.exclude",
    ("--nodelist", "-w", "--include", "-i"): "job.nodelist",
    ("--mem",): "job.mem",
    ("--cpus-per-task", "-c"): "job.cpus_per_task",
    ("--job-name", "-J"): "job.options.job-name",
    ("--dependency", "-d"): "job.options.dependency",
    ("--template",): "job.template",
    ("--cluster",): "job.cluster",
    ("--hostfile", "-H"): "job.hostfile",
}


@pytest.mark.parametrize(
    "option, setting", [(option, setting) for options, setting in SETTINGS.items() for option in options]
)
def test_an_option_of_sbatch_is_the_setting_of_that_meaning(option, setting):
    assert request(["debug", option, "x"]).options == [f"{setting}=x"]


def test_other_options_of_sbatch_are_passed_on_by_name_and_the_settings_file_may_be_an_option():
    asked = request(["--config", "a b.yaml", "seed=1", "--sbatch", "reservation=c=d", "--sbatch=--exclusive"])
    assert asked.options == ["job.options.reservation=c=d", "job.options.exclusive="]
    assert asked.settings == ["a b.yaml", "seed=1"]


def test_what_else_is_asked_for_is_handed_on():
    asked = request(
        ["debug", "--dry-run", "--ranks", "0,3", "--gpus-kind", "A100", "--exclude-bad", "x", "--sweep", "seed=1,2"]
    )
    assert (asked.dry_run, asked.ranks, asked.gpus_kind, asked.exclude_bad, asked.sweep) == (
        True,
        "0,3",
        "A100",
        ["x"],
        ["seed=1,2"],
    )
    assert request(["debug", "--from", "7"]).resume_step == 7 and request(["debug", "--again"]).again
    asked = request(["debug", "--debug", "--pdb"])
    assert (asked.debug, asked.pdb, asked.interactive, asked.parallel) == (True, True, False, None)
