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


def test_a_file_comes_after_the_earlier_ones_whatever_the_clock_says(tmp_path):
    (tmp_path / "events.out.tfevents.9999999998.host").touch()
    (tmp_path / "other").touch()
    for _ in range(2):
        file = EventFile(tmp_path, 0)
        file.flush()
        file.close()
    names = sorted(path.name.split(".")[3] for path in tmp_path.glob("events.*"))
    assert names == ["10000000000", "9999999998", "9999999999"]


def test_a_file_that_was_removed_is_told_once_and_a_new_one_begun(tmp_path):
    file = EventFile(tmp_path / "board", 0)
    file.flush()
    [path] = (tmp_path / "board").iterdir()
    path.unlink()
    file.add("loss", 2.5, 1)
    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        file.flush()
    file.add("loss", 2.25, 2)
    file.flush()
    file.close()
    [(_, lost)] = events(tmp_path / "board")
    assert (lost.step, lost.summary.value[0].simple_value) == (2, 2.25)
