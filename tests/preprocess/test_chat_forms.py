"""The forms of conversations that are read, and the lines of docs/finetune.md that turn others into one."""

import json
import re
import subprocess
import sys

import pytest

from hpclm.preprocess.chat import read_conversation
from hpclm.preprocess.lines import UnreadableLineError
from tests.preprocess.chats import said
from tests.runs import ROOT

PAGE = (ROOT / "docs/finetune.md").read_text().partition("## Other forms")[2]
SCRIPT = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "# the line" in block)
LINES = dict(re.findall(r"^\| ([^|]+) \| `(.*)` \|$", PAGE, re.M))
ASKED, ANSWERED = said("a", "b")
CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
FORMS = {
    "role `developer`": ({"messages": [{"role": "developer", "content": "s"}, ASKED, ANSWERED]}, ["s", "a", "b"]),
    "`name`, `tool_call_id` and other keys of messages": (
        {"messages": [ASKED, {"role": "tool", "content": "3", "tool_call_id": "1"}, {**ANSWERED, "name": "x"}]},
        ["a", "3", "b"],
    ),
    "`tool_calls`, as text like Qwen's": (
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3"},
                ANSWERED,
            ]
        },
        ["a", '<tool_call>\n{"name": "time", "arguments": "{}"}\n</tool_call>', "3", "b"],
    ),
    "`tools`, in a system message": (
        {"messages": [ASKED, ANSWERED], "tools": [{"name": "time"}]},
        ['Tools: [{"name": "time"}]', "a", "b"],
    ),
    "parts that are images or sound, left out": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}]},
                ANSWERED,
            ]
        },
        ["a", "b"],
    ),
    "`weight`: the turns before the first of weight 0 (all answers of a conversation count)": (
        {"messages": [ASKED, {**ANSWERED, "weight": 1}, ASKED, {**ANSWERED, "weight": 0}, ASKED]},
        ["a", "b", "a"],
    ),
    "ShareGPT's other names": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": "f"},
                {"from": "observation", "value": "3"},
                {"from": "chatgpt", "value": "b"},
            ]
        },
        ["a", "f", "3", "b"],
    ),
    "`prompt` and `completion` (or `response`)": ({"prompt": "a", "response": "b"}, ["a", "b"]),
    "`prompt` and `completion` that are lists of messages": ({"prompt": [ASKED], "completion": [ANSWERED]}, ["a", "b"]),
    "a bare list of messages": ([ASKED, ANSWERED], ["a", "b"]),
}


def test_every_line_of_the_page_is_tried():
    assert LINES.keys() == FORMS.keys()


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_refused_is_read_after_its_line(form, tmp_path):
    theirs, texts = FORMS[form]
    with pytest.raises(UnreadableLineError, match=r"hpclm docs finetune|not an object"):
        read_conversation(json.dumps(theirs).encode())
    (tmp_path / "turn.py").write_text(SCRIPT.replace("# the line", LINES[form]))
    done = subprocess.run(
        [sys.executable, "turn.py"], cwd=tmp_path, input=json.dumps(theirs).encode(), capture_output=True, check=True
    )
    assert [message["content"] for message in read_conversation(done.stdout)] == texts


PARTS = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it?"}]


def test_parts_that_are_all_text_are_joined_as_templates_join_them():
    [asked, _] = read_conversation(json.dumps({"messages": [{"role": "user", "content": PARTS}, ANSWERED]}).encode())
    assert asked == {"role": "user", "content": "what is it?"}


@pytest.mark.parametrize(
    "content",
    [
        ["a"],
        [None],
        [{"text": "a"}],
        [{"type": "text"}],
        [{"type": "text", "text": 1}],
        [{"type": ["text"], "text": "a"}],
        {"type": "text", "text": "a"},
    ],
    ids=str,
)
def test_other_parts_are_refused(content):
    with pytest.raises(UnreadableLineError, match="message 1's 'content'"):
        read_conversation(json.dumps({"messages": [{"role": "user", "content": content}, ANSWERED]}).encode())


@pytest.mark.parametrize("role", [["user"], None, {}, 1], ids=str)
def test_a_role_that_is_no_text_is_refused(role):
    with pytest.raises(UnreadableLineError, match="message 1 has the role"):
        read_conversation(json.dumps({"messages": [{"role": role, "content": "a"}, ANSWERED]}).encode())
