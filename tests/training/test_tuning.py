"""What a run is tuned with stays in its directory."""

import pytest

from hpclm import config
from hpclm.data import chat_record
from hpclm.data.chat_record import ChatRecord
from hpclm.training import tuning

ONE = ChatRecord("{{ messages }}", {}, {"<end>": 5})


def run(out, *words):
    return config.load(None, ["data.source=synthetic", f"out={out}", *words])


def test_an_answer_may_end_as_it_did_before_and_as_it_does_now(tmp_path, caplog):
    with caplog.at_level("INFO"):
        tuning.keep_chat(run(tmp_path), ONE, 0)
        tuning.keep_chat(run(tmp_path), ONE, 3)  # nothing new
        tuning.keep_chat(run(tmp_path), ChatRecord("{{ x }}", {}, {"<stop>": 7}), 3)
    kept = chat_record.of_run(tmp_path)
    assert (kept.template, kept.ends) == ("{{ x }}", {"<end>": 5, "<stop>": 7})
    assert [text for text in caplog.messages if "an answer ends with" in text] == [
        "an answer ends with <end>, where generation stops",
        "an answer ends with <end> or <stop>, where generation stops",
    ]
    tuning.keep_chat(run(tmp_path), None, 3)  # of data without conversations
    assert chat_record.of_run(tmp_path) == kept
    tuning.keep_chat(run(tmp_path), None, 0)
    assert chat_record.of_run(tmp_path) is None


def test_without_a_token_that_ends_an_answer_it_is_said_how_to_stop(tmp_path, caplog):
    tuning.keep_chat(run(tmp_path), ChatRecord("{{ x }}", {}, {}), 0)
    assert caplog.messages[-1].startswith("with this chat template no single token ends an answer")


@pytest.mark.parametrize("step, template", [(0, "{{ messages }}"), (3, None)])
def test_a_new_run_has_the_template_of_the_run_that_it_starts_from(step, template, tmp_path):
    config.dump(run(tmp_path / "base"), tmp_path.joinpath("base").mkdir() or tmp_path / "base/config.yaml")
    tuning.keep_chat(run(tmp_path / "base"), ONE, 0)
    (tmp_path / "new").mkdir()
    tuning.keep_chat(run(tmp_path / "new", f"checkpoint.init_from={tmp_path}/base"), None, step)
    kept = chat_record.of_run(tmp_path / "new")
    assert (kept and kept.template) == template
