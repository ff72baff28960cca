"""Text of imported runs is encoded, begun and ended as transformers does it, for tokenizers and folders drawn at random.

HPCLM_SEED draws others.
"""

import io
import json
import os
import random

import pytest
import torch

from hpclm import cli
from hpclm.inference.completion import Completer
from hpclm.inference.generation_settings import Limits, Sampling
from tests.preprocess import chats

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
SEED = int(os.environ.get("HPCLM_SEED", 0))
WORDS = [
    *(
        "so",
        "it",
        "goes",
        "and",
        "then",
        "a",
        "small",
        "model",
        "reads",
        "text",
        "12",
        "345",
        "éà",
        "don't",
        "foo()",
        "[1,",
        "2]",
    ),
    *("Paris", "日本"),
]
MARKS = ["<|im_start|>", "<|im_end|>", "<|user|>", "[MARK]", "<extra 1>"]
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
KINDS = ["bytes", "gpt2", "sentencepiece", "metaspace", "unigram", "wordpiece", "words", "sentencepiece class"]
FORMS = ["none", "added_tokens.json", "added_tokens_decoder", "additional_special_tokens", "both"]
TEXTS = ["", " ", "so it goes", " lead", "two  spaces\n\nand a line", "éà 日本 🙂", "trail "]


class Folder:
    """A Hugging Face folder: a tokenizer of one of KINDS, with added tokens in one of FORMS, and a model with random weights."""

    def __init__(self, path, number):
        self.path, self.draw = path, random.Random(1000 * SEED + number)
        path.mkdir()
        draw = self.draw
        self.kind, self.form = (
            KINDS[number % len(KINDS)],
            draw.choice(FORMS) if number % 5 else FORMS[number // 5 % 4 + 1],
        )
        self.lines = [" ".join(draw.choices(WORDS, k=20)) for _ in range(300)]
        self.named = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
        self.config = {"clean_up_tokenization_spaces": False, "model_max_length": 64, **self.named}
        size = self.write()
        self.marks = self.add(size)
        self.chat = draw.choice(sorted(chats.PLAIN)) if number % 6 == 0 else None
        if self.chat:
            self.config["chat_template"] = chats.PLAIN[self.chat]
        (path / "tokenizer_config.json").write_text(json.dumps(self.config))
        self.model(size + len(self.marks))

    def write(self):
        """The files of the vocabulary; its size."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        draw, special = self.draw, [UNKNOWN, BOS, EOS]
        if self.kind.startswith("sentencepiece"):
            return self.sentencepiece()
        made = {
            "unigram": lambda: Tokenizer(models.Unigram()),
            "wordpiece": lambda: Tokenizer(models.WordPiece(unk_token=UNKNOWN)),
            "words": lambda: Tokenizer(models.WordLevel(unk_token=UNKNOWN)),
        }.get(self.kind, lambda: Tokenizer(models.BPE(unk_token=UNKNOWN if self.kind == "metaspace" else None)))()
        options = dict(vocab_size=420, special_tokens=special, show_progress=False)
        if self.kind in ("bytes", "gpt2"):
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        elif self.kind in ("metaspace", "unigram"):
            scheme = draw.choice(["always", "first", "never"])
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
            made.decoder = decoders.Metaspace(prepend_scheme=scheme)
            trainer = (
                trainers.BpeTrainer(**options)
                if self.kind == "metaspace"
                else trainers.UnigramTrainer(**options, unk_token=UNKNOWN)
            )
        else:
            made.normalizer = draw.choice([normalizers.Lowercase(), normalizers.NFC()])
            made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            made.decoder = decoders.WordPiece()
            trainer = (trainers.WordPieceTrainer if self.kind == "wordpiece" else trainers.WordLevelTrainer)(**options)
        made.train_from_iterator(self.lines, trainer)
        if self.kind == "gpt2":
            tree = json.loads(made.to_str())["model"]
            (self.path / "vocab.json").write_text(json.dumps(tree["vocab"]))
            pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in tree["merges"])
            (self.path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{pair}\n" for pair in pairs))
            self.config["tokenizer_class"] = "GPT2Tokenizer"
            return made.get_vocab_size()
        self.template(made)
        made.save(str(self.path / "tokenizer.json"))
        self.config["tokenizer_class"] = "PreTrainedTokenizerFast"
        return made.get_vocab_size()

    def template(self, made):
        from tokenizers import processors

        ids = [(text, made.token_to_id(text)) for text in (BOS, EOS)]
        single = self.draw.choice([None, f"{BOS} $A", f"{BOS} $A", f"{BOS} $A {EOS}", f"$A {EOS}"])
        if single:
            made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        if self.draw.random() < 0.3:
            self.config |= {"add_bos_token": self.draw.random() < 0.5, "add_eos_token": False}

    def sentencepiece(self):
        from sentencepiece import SentencePieceTrainer

        made, ours = io.BytesIO(), self.kind == "sentencepiece class"
        SentencePieceTrainer.train(
            sentence_iterator=iter(self.lines), model_writer=made, model_type="unigram" if ours else "bpe", vocab_size=330, byte_fallback=True,
            hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
        (self.path / ("spiece.model" if ours else "tokenizer.model")).write_bytes(made.getvalue())
        if ours:
            self.form = "none"  # of which hpclm warns that it lacks added tokens
            self.config |= {"tokenizer_class": "BertGenerationTokenizer", "pad_token": None, "sep_token": None}
        else:
            self.config |= {"tokenizer_class": "LlamaTokenizer", "legacy": self.draw.random() < 0.5}
            self.config |= {"add_bos_token": self.draw.random() < 0.7, "add_eos_token": False}
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=made.getvalue()).get_piece_size()

    def add(self, size):
        """The added tokens, written into the folder in its form."""
        if self.form == "none":
            return []
        marks = self.draw.sample(MARKS, 3)
        options = dict(lstrip=False, rstrip=self.draw.random() < 0.2, single_word=False, normalized=False)
        decoder = {
            str(size + n): dict(content=mark, special=self.draw.random() < 0.7, **options)
            for n, mark in enumerate(marks)
        }
        if self.form in ("added_tokens.json", "both"):
            (self.path / "added_tokens.json").write_text(json.dumps({mark: size + n for n, mark in enumerate(marks)}))
        if self.form in ("added_tokens_decoder", "both"):
            self.config["added_tokens_decoder"] = decoder
        if self.form == "additional_special_tokens":
            self.config[self.form] = marks
        return marks

    def model(self, size):
        """A network, with other ends than the tokenizer alone names."""
        draw = self.draw
        shape = dict(
            vocab_size=size + draw.choice([0, 0, 5]), hidden_size=32, intermediate_size=48, num_hidden_layers=2
        )
        heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
        torch.manual_seed(draw.randrange(1 << 20))
        ends = draw.choice([2, [2, *draw.sample(range(3, size), 12)]])
        ids = dict(bos_token_id=1, eos_token_id=ends, pad_token_id=None)
        config = transformers.LlamaConfig(**shape, **heads, **ids, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
        for weight in model.parameters():
            weight.data.normal_(0, 0.3)
        model.generation_config = transformers.GenerationConfig(**ids)
        model.save_pretrained(self.path)


def check_gguf(path, folder, text):
    """Whether a GGUF file of the run has its tokens, and begins and ends texts as it does."""
    gguf = pytest.importorskip("gguf")
    fields = {
        name.removeprefix("tokenizer.ggml."): field.contents() for name, field in gguf.GGUFReader(path).fields.items()
    }
    ids = [text.tokenizer.model.token_to_id(mark) for mark in folder.marks]
    assert [fields["tokens"][id] for id in ids] == folder.marks
    assert all(fields["token_type"][id] in (3, 4) for id in ids)  # control, or defined by the user
    assert (fields["add_bos_token"], fields["add_eos_token"]) == (bool(text.before), bool(text.after))
    assert fields["bos_token_id"] == text.begin and fields["eos_token_id"] in text.ends
    assert len(fields["tokens"]) == text.vocabulary


NUMBERS = [*range(4), *(pytest.param(number, marks=pytest.mark.whole) for number in range(4, 30))]


@pytest.mark.parametrize("number", NUMBERS)
def test_ids_and_greedy_text_of_an_import_and_its_export_are_those_of_transformers(number, tmp_path, caplog):
    folder = Folder(tmp_path / "hf", number)
    assert cli.main(["convert", str(folder.path), str(tmp_path / "run")]) == 0
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    settings = ["engine.device=cpu", "engine.precision=fp32"]
    completer = Completer.of_run(tmp_path / "run", settings)
    original, export = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "export"))
    marked = [f"{''.join(folder.marks)} so{mark}it {mark} goes" for mark in folder.marks]
    messages = chats.said("so it", "goes", "and then")
    chat = [original.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)] if folder.chat else []
    texts = [*TEXTS, *marked, *chat, *folder.lines[:20]]
    about = (folder.kind, folder.form, folder.config)
    for text in texts:
        ours = completer.text.encode(text, template=True)
        assert ours == original(text).input_ids == export(text).input_ids, (about, text)
    if chat:
        assert export.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat[0]
    assert "other ids" not in caplog.text and "ordinary text" not in caplog.text
    if folder.kind in ("bytes", "gpt2", "sentencepiece"):
        assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "x.gguf")]) == 0
        check_gguf(tmp_path / "x.gguf", folder, completer.text)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for text in [text for text in texts if 0 < len(original(text).input_ids) < 50][:16]:
        ids = torch.tensor([export(text).input_ids])
        if completer.text.start(text) != ids[0].tolist():  # the text begins with the token that the template would add
            ids = ids[:, 1:]
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
        )[0].tolist()
        new = whole[ids.shape[1] :]
        (done,) = completer.complete([text], Limits(8), Sampling(temperature=0.0))
        ended = new[-1] in completer.text.ends
        assert (done.tokens, done.finish) == (len(new), "end" if ended else "length"), (about, text, new)
        expected = completer.text.decode(whole[:-1] if ended else whole)[len(completer.text.decode(ids[0].tolist())) :]
        assert done.text == expected, (about, text)
