"""Names of tasks, before lm-evaluation-harness is imported."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.inference import task_names


@pytest.mark.parametrize("name", ["tasks/x", "x.yaml", "tasks/x.yaml"])
def test_a_file_or_a_folder_is_not_the_name_of_a_task(name):
    with pytest.raises(
        ConfigError, match=f"^{name} is not the name of a task; give the folder of a task file as --tasks-path$"
    ):
        task_names.check_task_names(["arc_easy", name], None)
