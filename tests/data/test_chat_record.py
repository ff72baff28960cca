"""What conversations were rendered with: what several datasets have in common, and what a run keeps of it."""

import json

import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import chat_record
from hpclm.data.chat_record import ChatRecord

TEMPLATE = "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def dataset(tmp_path):
    """The prefix of a dataset that was rendered like this."""

    def made(name, template=TEMPLATE, tokens=TOKENS, ends=()):
        note = {"content": {}, "chat": ChatRecord(template, tokens, dict(ends)).note()}
        (tmp_path / f"{name}.json").write_text(json.dumps(note))
        return str(tmp_path / name)

    return made


def test_datasets_of_one_template_have_the_ends_and_the_tokens_of_all(dataset, tmp_path):
    first = dataset("a", tokens={"bos_token": "<s>", "pad_token": "<p>"}, ends={"z": 3, "b": 2})
    second = dataset("b", tokens={"bos_token": "<s>", "pad_token": "<q>", "eos_token": "</s>"}, ends={"a": 9})
    shared = chat_record.shared([str(tmp_path / "plain"), first, second])
    assert shared == ChatRecord(TEMPLATE, {"bos_token": "<s>", "pad_token": "<p>", "eos_token": "</s>"}, shared.ends)
    assert list(shared.ends.items()) == [("a", 9), ("b", 2), ("z", 3)]
    assert chat_record.shared([str(tmp_path / "plain")]) is None


@pytest.mark.parametrize(
    "template",
    [TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""), TEMPLATE + "\n", TEMPLATE + "\r\n"],
    ids=["marks", "line end", "line end of Windows"],
)
def test_templates_that_write_the_same_text_are_one(template, dataset):
    assert chat_record.shared([dataset("a"), dataset("b", template)]).template == TEMPLATE


@pytest.mark.parametrize(
    "other, said",
    [
        ({"template": TEMPLATE + "!"}, r"from character \d+ on nothing against '!'"),
        ({"template": TEMPLATE.replace("bos", "eos")}, r"from character 4 on 'bos_token }}.* against 'eos_token }}"),
        ({"tokens": {"bos_token": "[B]"}}, r"bos_token was '<s>' and '\[B\]'"),
        ({"tokens": {}}, "bos_token was '<s>' and nothing"),
    ],
)
def test_datasets_whose_templates_write_different_text_are_refused(other, said, dataset):
    first, second = dataset("a"), dataset("b", **other)
    with pytest.raises(
        ConfigError, match=f"datasets {first} and {second} were made with different chat templates.*: {said}"
    ):
        chat_record.shared([first, second])


def test_only_the_special_tokens_that_a_template_names_count():
    record = ChatRecord("{{ bos_token }} my_eos_token eos_tokens", TOKENS, {})
    assert record.named == {"bos_token": "<s>"}
    assert chat_record.names("{{eos_token}}", "eos_token") and not chat_record.names("{{ eosxtoken }}", "eos.token")


def test_marks_become_comments_that_remove_the_same_white_space():
    assert chat_record.without_marks("a {%- generation %} b {% endgeneration -%} c") == "a {#- #} b {# -#} c"


def test_a_run_keeps_its_record_until_it_has_none(tmp_path):
    record = ChatRecord("é {{ bos_token }}", TOKENS, {"</s>": 2})
    assert chat_record.of_run(tmp_path) is None
    chat_record.keep(tmp_path, record)
    assert chat_record.of_run(tmp_path) == record and "é" in (tmp_path / "chat.json").read_text()
    for _ in range(2):
        chat_record.keep(tmp_path, None)
        assert chat_record.of_run(tmp_path) is None


@pytest.mark.parametrize(
    "change", [{"template": 1}, {"tokens": {"a": 1}}, {"ends": {"a": -1}}, {"ends": {"a": True}}, {"ends": []}]
)
def test_a_record_that_is_none_is_refused_with_a_way_out(change, tmp_path):
    chat_record.keep(tmp_path, ChatRecord("x", {}, {"y": 0}))
    assert chat_record.of_run(tmp_path).ends == {"y": 0}
    note = json.loads((tmp_path / "chat.json").read_text())
    (tmp_path / "chat.json").write_text(json.dumps({**note, **change}))
    with pytest.raises(
        ConfigError,
        match=r"record of the chat template is corrupt.*; restore it, or remove it to use the chat template",
    ):
        chat_record.of_run(tmp_path)


def test_a_checkpoint_is_of_the_run_two_folders_above_it(tmp_path):
    run, step = tmp_path / "run", tmp_path / "run/checkpoints/step-00000001"
    step.mkdir(parents=True)
    assert chat_record.owner(step) == step
    (step / "MANIFEST.json").write_text("{}")
    assert chat_record.owner(step) == run
    (run / "config.yaml").write_text("")
    assert chat_record.owner(run) == run
