"""Conversations become tokens and a loss mask, by the model's own chat template."""

import json
from pathlib import Path

import numpy as np
import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data.corpus import corpus
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess.chat import chat_of, rendered
from hpclm.preprocess.tokenizers.huggingface import TokenizerJson
from hpclm.preprocess.writer import Writer
from tests.preprocess.chats import MARKED, PLAIN, said, tokenizer
from tests.preprocess.texts import content, preprocess

transformers = pytest.importorskip("transformers")
SYSTEM = {"role": "system", "content": "be brief"}
CHATS = {
    "one turn": said("hello there", "what is this?"),
    "turns": said("hello", "this is\n\n it ", "日本 <s> there?", "</s>", "a user", "é 😀"),
    "a system message": [SYSTEM, *said("hello", "there")],
    "an open question": said("hello", "there", "what?"),
}


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder without a template."""
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    return tmp_path


@pytest.mark.parametrize("style", MARKED)
def test_what_counts_is_what_the_marked_template_says_with_and_without_marks(style, folder):
    file = folder / "tokenizer.json"
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<s>", eos_token="</s>", chat_template=MARKED[style]
    )
    ours = TokenizerJson([str(file)])
    compared = 0
    for name, messages in CHATS.items():
        if messages[0] == SYSTEM and style in ("gemma", "mistral"):
            continue
        truth = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for template in (MARKED[style], PLAIN[style]):
            (folder / "chat_template.jinja").write_text(template)
            chat = chat_of(str(file), None, 100, "cut")
            [text_and_spans] = rendered(messages, chat, ours.special)
            ids, counts, _ = ours.marked(*text_and_spans)
            assert ids.tolist() == truth["input_ids"], name
            assert counts.tolist() == [bool(mark) for mark in truth["assistant_masks"]], (name, template)
            compared += counts.any() and not counts.all()
    assert compared >= 6


def line(messages, key="messages"):
    if key == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        messages = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in messages]
    return json.dumps({"id": 3, key: messages}) + "\n"


@pytest.fixture
def run(folder, monkeypatch):
    """Preprocess lines with a template to ``out_chat``, in a new folder."""
    monkeypatch.chdir(folder)

    def run(lines, *words, template=PLAIN["chatml"]):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "c.jsonl").write_text("".join(lines))
        files = ["--tokenizer", "json", "--tokenizer-files", "tokenizer.json"]
        return preprocess("--chat", "c.jsonl", "--output-prefix", "out", *files, "--context", 40, *words)

    return run


def test_both_forms_give_a_dataset_and_its_mask_the_same_in_parts(run, capsys):
    names = ("one turn", "a system message", "an open question")
    assert run([line(CHATS[names[0]]), "\n", *(line(CHATS[name]) for name in names[1:])]) == 0
    printed = capsys.readouterr().out
    assert "next: hpclm train RUN/config.yaml" in printed and "data.prefix=out_chat data.order=packed" in printed
    data, mask, ours = IndexedDataset("out_chat"), IndexedDataset("out_chat_loss"), TokenizerJson(["tokenizer.json"])
    assert data.dtype == np.uint16 and mask.dtype == np.uint8 and mask.sizes.tolist() == data.sizes.tolist()
    learned = [ours.decode(data.tokens(i)[mask.tokens(i) == 1].tolist()) for i in range(len(data))]
    assert learned == ["what is this?<|im_end|>", "there<|im_end|>", "there<|im_end|>"]
    alone = [*content("out_chat"), *content("out_chat_loss")]
    for part in ("0/2", "1/2"):
        assert run([line(CHATS[name]) for name in names], "--part", part, "--overwrite") == 0
    assert [*content("out_chat"), *content("out_chat_loss")] == alone
    assert run([line(CHATS[name], "conversations") for name in names], "--overwrite", "--workers", 2) == 0
    assert [*content("out_chat"), *content("out_chat_loss")] == alone
    settings = DataConfig(prefix="out_chat", order="packed", split="1")
    made = corpus(settings, 40, 1, 400)
    assert made.samples("train", None) and "2 random blocks of 2, each of 1 MiB" in made.check_content()[0]
    assert cli.main(["data", "merge", "all", "out_chat", "out_chat"]) == 64
    mask = Path("out_chat_loss.bin").read_bytes()
    with Writer("out_chat_loss", np.uint8) as writer:  # of the same lengths
        for size in data.sizes:
            writer.add_document(np.ones(size, np.uint8))
    assert Path("out_chat_loss.bin").read_bytes() != mask
    with pytest.raises(ConfigError, match="names another mask's hash"):
        corpus(settings, 40, 1, 400)


def test_a_long_conversation_is_cut_or_dropped_and_counted(run, capsys):
    lines = [line(said("hello", "there " * 60)), line(said("hello " * 60, "there")), line(said("hello", "there"))]
    assert run(lines) == 0
    assert "; 2 conversations cut to 41 tokens, 1 conversation dropped: too long" in capsys.readouterr().out
    assert IndexedDataset("out_chat").sizes.tolist()[0] == 41 and len(IndexedDataset("out_chat")) == 2
    assert (sidecar("out_chat")["counts"]["cut"], sidecar("out_chat")["counts"]["dropped"]) == (2, 1)
    assert run(lines, "--overwrite", "--too-long", "drop") == 0
    assert "; 2 conversations dropped: too long" in capsys.readouterr().out
    assert len(IndexedDataset("out_chat")) == 1
    assert run(lines[1:2], "--overwrite") == 64  # nothing is left


GOOD = line(CHATS["turns"])
FORGETS = "{% for message in messages if message['role'] != 'system' %}{{ message['content'] + '</s>' }}{% endfor %}"
LAST_ONLY = (
    "{% for message in messages %}{{ message['role'] + ':' }}{% if loop.last and message['role'] == 'assistant' %}"
    "{{ '<s>' }}{% endif %}{{ message['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SHOUTS = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
OTHER_PROMPT = PLAIN["chatml"].replace("assistant\n' }}{% endif", "model\n' }}{% endif")
BAD = {
    "no JSON": ("{", None, "is not JSON"),
    "a list": ("[]", None, "holds a JSON list, not an object with the key 'messages'"),
    "no messages": ('{"text": "a"}', None, "must have exactly one of the keys"),
    "empty": ('{"messages": []}', None, "is empty: 'messages' must be a list of messages"),
    "no role": ('{"messages": [{"content": "a"}]}', None, "message 1 must be an object with 'role' and 'content'"),
    "an unknown role": (
        line([{"role": "boss", "content": "a"}]),
        None,
        "message 1 has the role 'boss'; known roles are system, user",
    ),
    "no text": (line([{"role": "user", "content": None}]), None, "message 1's 'content' holds null, not text"),
    "half a character": (line([{"role": "user", "content": "\ud800"}]), None, "holds half a character"),
    "tool calls": (line([{"role": "user", "content": "a", "weight": 0}]), None, "has ['weight'], which hpclm does not"),
    "tools": ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', None, "has 'tools'"),
    "no answer": (line(said("a")), None, "has no message of the assistant"),
    "roles that do not alternate": (line(said("a", "b")[::-1]), PLAIN["mistral"], "refuses it: roles must alternate"),
    "no system role": (line([SYSTEM, *said("a", "b")]), PLAIN["gemma"], "refuses it: System role not supported"),
    "a forgotten system message": (
        line([SYSTEM, *said("a", "b")]),
        FORGETS,
        "leaves out or changes the system message",
    ),
    "another prompt": (
        line(said("a", "b")),
        OTHER_PROMPT,
        "when the chat template asks for message 2, it changes earlier text",
    ),
    "changed text": (line(said("a", "b")), SHOUTS, "leaves out or changes message 1, of the user"),
    "no template": (line(said("a", "b")), "{{ nothing.here }}", "refuses it: 'nothing' is undefined"),
    "no marks": (line(said("a", "b")), "{% generation %}{% endgeneration %}", "marks nothing"),
}


@pytest.mark.parametrize("bad, template, message", BAD.values(), ids=BAD)
def test_a_line_that_is_refused_is_named_and_no_dataset_stays(bad, template, message, run, capsys, folder):
    before = {path.name for path in folder.iterdir()} | {"c.jsonl", "chat_template.jinja"}
    lines = [bad] if template else [GOOD, bad]
    assert run(lines, template=template or PLAIN["chatml"]) == 64
    shown = capsys.readouterr().err
    assert f"c.jsonl:{len(lines)}" in shown and message in shown
    assert {path.name for path in folder.iterdir()} == before


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_for_each_answer(run, folder):
    """As those of reasoning models, which leave out earlier thoughts."""
    chat = [SYSTEM, *said("hello", "there", "what is this?", "a user")]
    assert run([line(chat)], "--context", 200, template=LAST_ONLY) == 0
    data, mask = IndexedDataset("out_chat"), IndexedDataset("out_chat_loss")
    ours = TokenizerJson([str(folder / "tokenizer.json")])
    learned = [ours.decode(data.tokens(i)[mask.tokens(i) == 1].tolist()) for i in range(len(data))]
    assert learned == ["<s>there</s>", "<s>a user</s>"]
    whole = [ours.decode(data.tokens(i).tolist()) for i in range(len(data))]
    begun = f"system:{SYSTEM['content']}</s>user:hello</s>assistant:"
    assert whole == [f"{begun}<s>there</s>", f"{begun}there</s>user:what is this?</s>assistant:<s>a user</s>"]
    shout = LAST_ONLY.replace("message['content'] +", "message['content'] | upper +")
    assert run([line(chat)], "--overwrite", template=shout) == 64


def test_rows_of_alpaca_and_a_json_array_are_conversations(run, folder):
    rows = [
        {"instruction": "hello", "input": "", "output": "there", "text": "ignored"},
        {"instruction": "hello", "input": "a user", "output": "there"},
        {"messages": said("hello\n\na user", "there")},
    ]
    assert run([json.dumps(row) + "\n" for row in rows]) == 0
    data = IndexedDataset("out_chat")
    documents = [data.tokens(i).tolist() for i in range(3)]
    assert documents[1] == documents[2] != documents[0]
    (folder / "array.json").write_text(json.dumps(rows, indent=1))
    assert run(["x"], "--overwrite", "--chat", "array.json") == 0
    again = IndexedDataset("out_chat")
    assert [again.tokens(i).tolist() for i in range(3)] == documents
    with_system = [
        {"system": "be nice", **rows[1]},
        {"messages": [{"role": "system", "content": "be nice"}, *rows[2]["messages"]]},
    ]
    assert run([json.dumps(row) + "\n" for row in with_system], "--overwrite", "--context", 200) == 0
    both = IndexedDataset("out_chat")
    assert both.tokens(0).tolist() == both.tokens(1).tolist() != documents[1]
    for wrong in ({**rows[1], "history": [["a", "b"]]}, {**rows[1], "output": ""}):
        assert run([json.dumps(wrong) + "\n"], "--overwrite") == 64
    (folder / "array.json").write_text("[{}, ")
    assert run(["x"], "--overwrite", "--chat", "array.json") == 64


NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
ENDLESS = {
    "the end is outside of the marks": MARKED["chatml"].replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    ),
    "marks, and no end": "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}",
    "no marks, and no end": NO_END + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "an end that is no special token": (
        NO_END + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ).replace("+ '\n'", "+ '###\n'"),
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_template_of_which_no_end_of_turn_is_learned_is_reported_once(template, workers, run, caplog, capsys):
    lines = [line(said("hello", "there", "what is this?", "a user")), line(said("a", "b"))]
    assert run(lines, "--workers", workers, template=template) == 0
    shown = caplog.text + capsys.readouterr().err
    assert shown.count("out_chat: in 2 conversations no end of a turn is learned") == 1
    assert sidecar("out_chat")["counts"]["endless"] == 2


@pytest.mark.parametrize("style", MARKED)
@pytest.mark.parametrize("templates", [MARKED, PLAIN], ids=["marked", "plain"])
def test_templates_of_known_models_teach_the_end_of_a_turn_and_say_nothing(templates, style, run, caplog):
    assert run([line(CHATS["turns"])], template=templates[style]) == 0
    assert "no end of a turn" not in caplog.text and "endless" not in sidecar("out_chat")["counts"]


KEEPS = {
    "the last question": ("{% set messages = messages[-2:] %}", said("one", "two", "three", "four"), "message 1, of the user"),
    "questions with an even number": (
        "{% set messages = messages[:2] + messages[3:] %}", said("a", "b", "a", "d"), "message 3, of the user",
    ),
    "no tools": (
        "{% set messages = messages | rejectattr('role', 'equalto', 'tool') | list %}",
        [*said("a", "b"), {"role": "tool", "content": "b"}, {"role": "assistant", "content": "d"}],
        "message 3, of the tool",
    ),
    "no system": ("{% set messages = messages[1:] %}", [{"role": "system", "content": "a"}, *said("a", "b")], "the system message"),
}  # fmt: skip


@pytest.mark.parametrize("before, messages, says", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("templates", [MARKED, PLAIN], ids=["marked", "plain"])
def test_a_template_that_drops_a_message_is_refused_even_where_its_text_is_elsewhere(
    before, messages, says, templates, run, capsys
):
    assert run([line(messages)], template=before + templates["chatml"]) == 64
    assert f"the chat template leaves out or changes {says}" in capsys.readouterr().err


def test_a_template_may_leave_out_earlier_thoughts(run, caplog):
    thoughts = MARKED["chatml"].replace(
        "{% generation %}{{ message['content'] +", "{% generation %}{{ message['content'].split('</think>')[-1] +"
    )
    assert run([line(said("hello", "<think>what?</think>there", "a", "b"))], template=thoughts) == 0
    assert "no end of a turn" not in caplog.text


def test_unreadable_conversations_can_be_skipped_and_a_marked_template_given(run, folder, capsys):
    (folder / "marked.jinja").write_text(MARKED["chatml"])
    words = ["--on-error", "skip", "--chat-template", "marked.jinja"]
    assert run([GOOD, "{\n", line(said("a"))], *words, template=SHOUTS) == 0
    assert "2 unreadable lines skipped (no answer: 1, not JSON: 1)" in capsys.readouterr().out


ARGUMENTS = {
    "--append-eod": "--chat excludes --append-eod",
    "--split-sentences": "--chat excludes --split-sentences",
    "--json-keys=text": "--chat excludes --json-keys",
    "--empty=keep": "--chat excludes --empty keep",
    "--input=c.jsonl": "--chat excludes --input",
    "--context=0": "argument --context: '0' is not a whole number of at least 1",
}


@pytest.mark.parametrize("word", ARGUMENTS)
def test_arguments_that_do_not_go_with_conversations_are_refused(word, run, capsys):
    with pytest.raises(SystemExit):
        run([GOOD], word)
    assert ARGUMENTS[word] in capsys.readouterr().err


def test_conversations_need_a_template_and_a_tokenizer_that_knows_special_tokens(run, folder, capsys):
    assert run([GOOD]) == 0
    (folder / "latin.jinja").write_bytes(b"\xe9")
    assert run([GOOD], "--overwrite", "--chat-template", "latin.jinja") == 64
    assert "chat template latin.jinja is not UTF-8" in capsys.readouterr().err
    (folder / "chat_template.jinja").unlink()
    words = ["--chat", "c.jsonl", "--output-prefix", "new", "--context", 40]
    assert preprocess(*words, "--tokenizer", "json", "--tokenizer-files", "tokenizer.json") == 64
    assert "has no chat_template.jinja, nor a chat_template in tokenizer_config.json" in capsys.readouterr().err
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": PLAIN["chatml"]}]})
    )
    assert preprocess(*words, "--tokenizer", "json", "--tokenizer-files", "tokenizer.json") == 0
    assert preprocess(*words, "--overwrite", "--tokenizer", folder) == 64
    assert "import this folder first (hpclm convert" in capsys.readouterr().err
    assert preprocess(*words, "--overwrite", "--tokenizer", "bytes", "--tokenizer-files", "tokenizer.json") == 64
