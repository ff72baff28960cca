"""What a model learns after a prompt is tokenized as generation tokenizes it: the prompt alone, then the answer."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess.chat import chat_of, rendered
from hpclm.preprocess.tokenizers.huggingface import TokenizerJson
from tests.preprocess.chats import said
from tests.preprocess.texts import preprocess

pytest.importorskip("transformers")
END = "<|eot_id|>"
TURNS = "{% for m in messages %}{{ m['role'] + ':SPACE' + m['content'] + '<|eot_id|>' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'assistant:SPACE' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{{ m['role'] + ':SPACE' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
NO_END = TURNS.replace("'<|eot_id|>'", "'\\n'") + PROMPT
SPACES = {"a space": " ", "two spaces": "  ", "two lines": "\\n\\n", "spaces and a line": "\\n  ", "nothing": ""}
ANSWERS = {
    "a word": "Paris",
    "a space": " Paris",
    "a line": "\nParis",
    "Chinese": "日本",
    "spaces": "  Paris  ",
    "nothing": "",
}
TEXT = ["user: capital of France assistant: Paris  Paris\n\nParis assistant:\n\n  Paris assistant:Paris 日本"] * 4


def trained(model, **parts):
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    alphabet = (
        [*pre_tokenizers.ByteLevel.alphabet()] if isinstance(made.pre_tokenizer, pre_tokenizers.ByteLevel) else []
    )
    options = dict(vocab_size=360, special_tokens=["<unk>", END], initial_alphabet=alphabet, show_progress=False)
    trainer = (
        trainers.UnigramTrainer(unk_token="<unk>", **options)
        if isinstance(model, models.Unigram)
        else trainers.BpeTrainer(**options)
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def byte_level(**options):
    return trained(models.BPE(), pre_tokenizer=pre_tokenizers.ByteLevel(**options), decoder=decoders.ByteLevel())


def metaspace(scheme):
    space = dict(replacement="▁", prepend_scheme=scheme)
    return trained(
        models.BPE(unk_token="<unk>"),
        pre_tokenizer=pre_tokenizers.Metaspace(**space),
        decoder=decoders.Metaspace(**space),
    )


def like_llama_2():
    """Whose normalizer puts a space before whatever it is given."""
    steps = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), normalizer=steps, decoder=strip)


TOKENIZERS = {
    "GPT-2's": lambda: byte_level(add_prefix_space=False),
    "a space is added": lambda: byte_level(add_prefix_space=True),
    "no pattern": lambda: byte_level(add_prefix_space=False, use_regex=False),
    "metaspace": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, never": lambda: metaspace("never"),
    "Llama 2's": like_llama_2,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(TOKENIZERS[request.param]().to_str())
    return path, TokenizerJson([str(path)])


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("template", [TURNS + PROMPT, MARKED, NO_END], ids=["plain", "marked", "no end of turn"])
def test_an_answer_follows_the_tokens_of_the_prompt_alone(template, space, tokenizer):
    path, ours = tokenizer
    chat = _chat(path, template.replace("SPACE", space))
    for name, answer in ANSWERS.items():
        messages = [*said("capital of France", answer), *said("and?", answer)]
        [(text, spans)] = rendered(messages, chat, ours.special)
        whole = ours.model.encode(text, add_special_tokens=False)
        ids, counts, spanning = ours.marked(text, spans)
        assert not spanning and ours.decode(ids.tolist()) == ours.decode(whole.ids), name
        begin, end = spans[0]
        prompt, answered = (ours.model.encode(text[:to], add_special_tokens=False).ids for to in (begin, end))
        assert ids[: len(prompt)].tolist() == prompt and not counts[: len(prompt)].any(), name
        learned = len(prompt) + int(counts[len(prompt) :].argmin())  # up to the next question
        assert ours.decode(ids[:learned].tolist()) == ours.decode(answered), name


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_where_no_token_spans_the_bound_the_text_has_the_tokens_of_the_whole(answer, tokenizer):
    path, ours = tokenizer
    chat = _chat(path, (TURNS + PROMPT).replace(":SPACE", END))
    [(text, spans)] = rendered(said("capital of France", answer, "and?", answer), chat, ours.special)
    assert ours.marked(text, spans).ids.tolist() == ours.model.encode(text, add_special_tokens=False).ids


def _chat(path, template):
    (path.parent / "template.jinja").write_text(template)
    return chat_of(str(path), str(path.parent / "template.jinja"), 100, "cut")


@pytest.mark.parametrize("dated", [True, False])
def test_a_template_that_writes_the_date_is_named(dated, tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_level(add_prefix_space=False).to_str())
    date = "{{ strftime_now('%d %b %Y') }}" if dated else "{# strftime_nowhere #}"
    (tmp_path / "t.jinja").write_text(date + (TURNS + PROMPT).replace("SPACE", END))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said("capital", "Paris")}) + "\n")
    words = ["--chat", "c.jsonl", "--tokenizer", "json", "--tokenizer-files", "tokenizer.json", "--context", 80]
    assert preprocess(*words, "--chat-template", "t.jinja", "--output-prefix", "out") == 0
    assert ("the chat template writes the date" in caplog.text + capsys.readouterr().err) == dated


def test_what_cannot_be_tokenized_apart_is_reported_with_its_count(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    composed = byte_level(add_prefix_space=False)
    composed.normalizer = normalizers.NFC()
    (tmp_path / "tokenizer.json").write_text(composed.to_str())
    (tmp_path / "t.jinja").write_text((TURNS + PROMPT).replace("SPACE", "e"))
    chats = [said("capital", answer) for answer in ("\u0301", "Paris", "\u0301 x")]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    words = ["--chat", "c.jsonl", "--tokenizer", "json", "--tokenizer-files", "tokenizer.json", "--context", 40]
    assert preprocess(*words, "--chat-template", "t.jinja", "--output-prefix", "out") == 0
    assert "in 2 conversations one token spans the end of a prompt" in caplog.text + capsys.readouterr().err
    assert sidecar("out_chat")["counts"]["spanning"] == 2 and len(IndexedDataset("out_chat")) == 3
