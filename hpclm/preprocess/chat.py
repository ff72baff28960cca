"""Conversations as the text of a model's chat template, and the assistant's characters in it.

If a template marks the assistant's text ({% generation %}), the marks count. Otherwise the assistant's text begins after the generation
prompt (add_generation_prompt) and ends with the turn; white space after the token that ends the turn does not count. A template is refused
if its generation prompt changes the text before it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_text, readable
from hpclm.config.reading import json_object
from hpclm.data.tokenizer_folder import CONFIG, TEMPLATE, is_text, names, template_in
from hpclm.preprocess.lines import UnreadableLineError, read_object, text_of

ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
SHAREGPT = ROLES | {"human": "user", "gpt": "assistant"}
FORMS = {"messages": ("role", "content", ROLES), "conversations": ("from", "value", SHAREGPT)}
"""Maps the key of a conversation's messages to the keys of a message's role and text, and to the names of roles."""
CHANGE_TEXT = ("tools", "documents", "history")
"""Keys of a conversation that templates read, but hpclm does not."""
ALPACA = {"instruction", "output"}
READ = (*FORMS, *CHANGE_TEXT, "system", "instruction", "input", "output")
"""Keys of a conversation that matter."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as in transformers
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of message parts that are text."""
CONVERT = "`hpclm docs finetune` has a line of Python for it"
NAMED = ("special_tokens_map.json", CONFIG)
"""Files with special tokens in a tokenizer's folder."""

Message = dict[str, str]
Span = tuple[int, int]


@dataclass(frozen=True)
class Chat:
    """How to turn conversations into text and samples."""

    template: str
    tokens: tuple[tuple[str, str], ...]
    """Special tokens that the template may name, such as ("bos_token", "<s>")."""
    context: int
    too_long: Literal["cut", "drop"] = "cut"
    """Handling of conversations of more than context + 1 tokens."""


def chat_of(tokenizer_file: str, template: str | None, context: int, too_long: Literal["cut", "drop"]) -> Chat:
    """The chat settings of a tokenizer.json. The template comes from the file ``template``, else from the tokenizer's folder; ConfigError
    without one."""
    folder = Path(tokenizer_file).parent
    text: str | None
    if template is not None:
        try:
            text = read_text(readable(template, "chat template"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"chat template {template} is not UTF-8: {error}") from None
    else:
        text = template_in(folder)
    if text is None:
        raise ConfigError(f"{folder} has no {TEMPLATE}, nor a chat_template in {CONFIG}; give --chat-template FILE")
    tokens: dict[str, str] = {}
    for path in (folder / name for name in NAMED if (folder / name).is_file()):
        for name, token in json_object(path).items():
            if isinstance(token, dict):  # an AddedToken with its options
                token = token.get("content")
            if is_text(name) and isinstance(token, str):
                tokens[name] = token
    return Chat(text, tuple(sorted(tokens.items())), context, too_long)


def with_end(chat: Chat, end: Callable[[], str | None]) -> Chat:
    """``chat`` with ``end`` as bos_token and eos_token, as in an export, if the template names one of them and no file does."""
    if chat.tokens or not any(names(chat.template, name) for name in ("bos_token", "eos_token")):
        return chat
    text = end()
    return chat if text is None else replace(chat, tokens=(("bos_token", text), ("eos_token", text)))


def read_conversation(line: bytes) -> list[Message]:
    """The messages of a line of JSON; none for a blank line. UnreadableLineError for an invalid line."""
    record = read_object(line, "with the key 'messages' or 'conversations'")
    if record is None:
        return []
    if record.keys() >= ALPACA:
        record |= _of_alpaca(record)
    forms = [key for key in FORMS if key in record]
    if len(forms) != 1:
        raise UnreadableLineError(
            "no messages", f" must have exactly one of the keys {[*FORMS]}; it has {sorted(record)}; {CONVERT}"
        )
    for key in CHANGE_TEXT:
        if record.get(key):
            raise UnreadableLineError("tools", f" has {key!r}, which hpclm does not render; {CONVERT}")
    key = forms[0]
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        raise UnreadableLineError("empty", f" is empty: {key!r} must be a list of messages")
    conversation = [_message(message, f"message {n}", *FORMS[key]) for n, message in enumerate(messages, 1)]
    if record.get("system"):
        conversation = [{"role": "system", "content": text_of(record["system"], "'system'")}, *conversation]
    if all(message["role"] != "assistant" for message in conversation):
        raise UnreadableLineError("no answer", " has no message of the assistant, so there is nothing to learn")
    return conversation


def _of_alpaca(record: dict[str, Any]) -> dict[str, Any]:
    """A row with an instruction, an input that may be empty, and an output, as a conversation. UnreadableLineError without an output."""
    if not record["output"]:
        raise UnreadableLineError("no answer", " has an empty 'output', so there is nothing to learn")
    asked = [text_of(record["instruction"], "'instruction'"), text_of(record.get("input") or "", "'input'")]
    question = {"role": "user", "content": "\n\n".join(filter(None, asked))}
    return {"messages": [question, {"role": "assistant", "content": text_of(record["output"], "'output'")}]}


def _message(message: Any, name: str, role: str, content: str, roles: dict[str, str]) -> Message:
    if not isinstance(message, dict) or not {role, content} <= message.keys():
        raise UnreadableLineError("not a message", f": {name} must be an object with {role!r} and {content!r}")
    unknown = [key for key, value in message.items() if key not in (role, content) and value is not None]
    if unknown:
        raise UnreadableLineError("unknown key", f": {name} has {unknown}, which hpclm does not read; {CONVERT}")
    if not isinstance(message[role], str) or message[role] not in roles:
        raise UnreadableLineError(
            "unknown role", f": {name} has the role {message[role]!r}; known roles are {', '.join(roles)}; {CONVERT}"
        )
    return {"role": roles[message[role]], "content": _content(message[content], f"{name}'s {content!r}")}


def _content(content: Any, name: str) -> str:
    """The text of a message's content; text parts are joined, as templates that read parts do."""
    if not isinstance(content, list):
        return text_of(content, name)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise UnreadableLineError("not text", f": {name} holds a part of type {kind!r}, not text; {CONVERT}")
    return "".join(text_of(part.get("text"), f"{name}, in a part,") for part in content)


def rendered(messages: list[Message], chat: Chat, ends: tuple[str, ...]) -> list[tuple[str, list[Span]]]:
    """The text of a conversation, and the spans of its characters that count. UnreadableLineError for a conversation or template that
    cannot be used.

    If the template rewrites earlier turns, as those of reasoning models do, there is a text for each answer, as the model would see it.
    ``ends``: the tokenizer's special tokens; any of them may end a turn.
    """
    if MARKED.search(chat.template):
        text, spans = _render(messages, chat, mask=True)
        _check_complete([message for message in messages if message["role"] == "system"], text)
        if all(begin == end for begin, end in spans):
            raise UnreadableLineError("nothing marked", ": the chat template marks nothing as the assistant's")
        _check_roles(messages, chat)
        return [(text, spans)]
    text = _render(messages, chat)[0]
    _check_roles(messages, chat)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [_answer(messages[: number + 1], chat, ends) for number in numbers]
    if all(text.startswith(answered) for answered, _ in answers):
        _check_complete(messages, text)
        return [(text, [span for _, span in answers])]
    for number, (answered, _) in zip(numbers, answers, strict=True):
        _check_complete([one for one in messages[:number] if one["role"] != "assistant"] + [messages[number]], answered)
    return [(answered, [span]) for answered, span in answers]


def _answer(messages: list[Message], chat: Chat, ends: tuple[str, ...]) -> tuple[str, Span]:
    """The text of a conversation up to its last message, an answer, and the span of that answer."""
    asked = _render(messages[:-1], chat, prompt=True)[0]
    answered = _render(messages, chat)[0]
    if not answered.startswith(asked):
        raise UnreadableLineError(
            "inconsistent template",
            f": when the chat template asks for message {len(messages)}, it changes earlier text, so the assistant's text cannot be "
            "located; give --chat-template FILE, a version with {% generation %} marks",
        )
    bare = answered.rstrip()
    end = max(len(asked), len(bare)) if bare.endswith(ends) else len(answered)
    return answered, (len(asked), end)


def prompt_for(messages: list[Message], template: str, tokens: Mapping[str, str]) -> str:
    """The text of ``messages`` that asks for the assistant's next one; ConfigError if the template refuses them."""
    try:
        return _render(messages, Chat(template, tuple(tokens.items()), 0), prompt=True)[0]
    except UnreadableLineError as error:
        raise ConfigError(f"the conversation cannot be rendered{error}") from None


def _check_complete(messages: list[Message], text: str) -> None:
    """UnreadableLineError unless ``text`` has the content of all messages in order."""
    end = 0
    for number, message in enumerate(messages, 1):
        content = message["content"].strip()
        begin = text.find(content, end)
        if begin < 0:
            raise _incomplete(message["role"], number)
        end = begin + len(content)


def _check_roles(messages: list[Message], chat: Chat) -> None:
    """UnreadableLineError if the template omits a message because of its position and role."""
    number = _left_out(tuple(message["role"] for message in messages), chat)
    if number is not None:
        raise _incomplete(messages[number]["role"], number + 1)


@lru_cache(maxsize=1024)
def _left_out(roles: tuple[str, ...], chat: Chat) -> int | None:
    """Index of the first message that the template omits from a conversation of these roles, whatever its text; None if it omits none.

    The assistant's text may change: templates of reasoning models omit earlier thoughts.
    """
    messages = [{"role": role, "content": f"message-{number}-of-a-chat"} for number, role in enumerate(roles)]
    try:
        text = _render(messages, chat)[0]
        end = 0
    except (
        UnreadableLineError
    ):  # the template may refuse only these made-up texts; rendering the real conversation will tell
        return None
    for number, message in enumerate(messages):
        begin = text.find(message["content"], end)
        if begin < 0 and message["role"] != "assistant":
            return number
        end = max(end, begin)
    return None


def _incomplete(role: str, number: int) -> UnreadableLineError:
    what = "the system message" if role == "system" else f"message {number}, of the {role}"
    return UnreadableLineError("left out", f": the chat template leaves out or changes {what}")


def learned_ends(text: str, spans: list[Span], added: tuple[str, ...]) -> frozenset[str]:
    """The ``added`` tokens that end one of the counted ``spans``; a model learns them as the end of an answer."""
    counted = [text[begin:end].rstrip() for begin, end in spans]
    candidates = ([token for token in added if token and answer.endswith(token)] for answer in counted)
    return frozenset(max(tokens, key=len) for tokens in candidates if tokens)


def _render(messages: list[Message], chat: Chat, prompt: bool = False, mask: bool = False) -> tuple[str, list[Span]]:
    """The text of messages, and with ``mask`` the spans that the template marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    settings: Any = dict(chat_template=chat.template, add_generation_prompt=prompt, return_assistant_tokens_mask=mask)
    try:
        rendered: Any = render_jinja_template([messages], **settings | dict(chat.tokens))
    except Exception as error:  # a template may raise anything
        raise UnreadableLineError("template", f": the chat template refuses it: {error}") from None
    texts, spans = rendered
    return texts[0], spans[0] if mask else []
