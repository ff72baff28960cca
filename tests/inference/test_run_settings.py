"""What must be there before a run's model is loaded."""

import pytest

from hpclm import config as configs
from hpclm.base.errors import ConfigError, NoCheckpointError
from hpclm.inference import run_settings, task_names
from tests.interop import made


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoints; train first, with hpclm train"):
        run_settings.check_saved(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(NoCheckpointError, match=f"no good checkpoint in {tmp_path}/checkpoints; train first"):
        run_settings.check_saved(tmp_path)
    with pytest.raises(NoCheckpointError, match=f"no checkpoint in {tmp_path}/checkpoints; train first"):
        run_settings.saved_steps(tmp_path)


def test_a_run_and_each_of_its_checkpoints_can_be_loaded(tmp_path):
    made.run(tmp_path / "run", made.SHAPE)
    [step] = run_settings.saved_steps(tmp_path / "run")
    assert step.name == "step-00000007"
    for there in (tmp_path / "run", step):
        run_settings.check_saved(there)


def test_a_model_alone_keeps_only_the_settings_of_the_engine_that_its_figures_depend_on(tiny):
    words = [
        "engine.precision=bf16",
        "engine.loss_chunk=64",
        "engine.zero_stage=1",
        "parallel.tensor=2",
        "optim.name=muon",
    ]
    alone = run_settings.for_inference(configs.load(None, tiny("run", *words)))
    assert (alone.engine.precision, alone.engine.loss_chunk, alone.engine.device) == ("bf16", 64, "cpu")
    assert (alone.engine.zero_stage, alone.parallel.tensor, alone.optim.name) == (None, 1, "muon")


def test_without_a_micro_size_of_the_run_texts_are_read_one_by_one(tmp_path):
    made.run(tmp_path / "run", made.SHAPE)
    assert run_settings.inference_settings(tmp_path / "run", ["batch.micro_size=auto"]).batch.micro_size == 1
    assert run_settings.inference_settings(tmp_path / "run", ["batch.micro_size=4"]).batch.micro_size == 4


@pytest.mark.parametrize("name", ["folder/task", "task.yaml"])
def test_the_file_of_a_task_is_not_its_name(name, tmp_path):
    with pytest.raises(
        ConfigError, match=f"{name} is not the name of a task; give the folder of a task file as --tasks-path"
    ):
        task_names.check_task_names([name], str(tmp_path))


def test_tasks_of_ones_own_are_looked_for_in_their_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.yaml").write_text("task: my_own\ntag: [theirs]\n")
    task_names.check_task_names(["my_own", "theirs"], str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}/none is not a folder of task files"):
        task_names.check_task_names(["my_own"], f"{tmp_path}/none")
    said = task_names.no_task("my_onw", ["my_own"])
    assert said == (
        "lm-evaluation-harness has no task 'my_onw'; your own tasks need --tasks-path. Did you mean 'my_own'?"
    )
