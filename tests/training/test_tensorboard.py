"""TensorBoard's event files."""

import pytest

from hpclm.training.tensorboard import EventFile

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def events(folder):
    """The events of each file, in the order of names."""
    return [[*loader.LegacyEventFileLoader(str(path)).Load()] for path in sorted(folder.iterdir())]


def test_only_the_first_file_of_an_attempt_hides_what_earlier_ones_have_of_steps_after_the_one_it_resumes_from(
    tmp_path,
):
    file = EventFile(tmp_path, 7)
    file.add("loss", 2.5, 8)
    file.flush()
    file.close()
    file.add("loss", 2.25, 9)
    file.flush()
    file.close()
    (version, begins, first), (_, second) = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (begins.session_log.status, begins.step) == (begins.session_log.START, 8)
    assert [(each.step, each.summary.value[0].tag, each.summary.value[0].simple_value) for each in (first, second)] == [
        (8, "loss", 2.5),
        (9, "loss", 2.25),
    ]
