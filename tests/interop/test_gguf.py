"""GGUF files: transformers reads them in CI; llama.cpp computes the same where it is installed (mark whole)."""

import json
import os
from dataclasses import replace

import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config import ModelConfig
from hpclm.data import tokenizers
from hpclm.data.tokenizer_folder import TokenizerFolder
from hpclm.interop.gguf import networks, vocabulary
from hpclm.preprocess import run_text
from hpclm.preprocess.tokenizers.huggingface import train_bpe
from hpclm.preprocess.tokenizers.probes import PROBES
from hpclm.preprocess.tokenizers.sentencepieces import train_sentencepiece
from tests.interop import llamacpp, made
from tests.interop.test_tokenizer import ODD, TEXTS, TRAINED, by_its_own_trainer

main = cli.function("convert")

gguf = pytest.importorskip("gguf")
SHAPE = {"vocab_size": 320, "vocab_multiple": 64, "layers": 4, "hidden": 48, "attention.heads": 6, "context": 64}
LLAMA = {**made.LLAMA, **SHAPE, "attention.kv_heads": 2}
YARN = dict(rope_type="yarn", factor="4.0", original_max_position_embeddings="16")
LINEAR = dict(rope_type="linear", factor="8.0")
LLAMA3 = dict(
    rope_type="llama3",
    factor="8.0",
    original_max_position_embeddings="16",
    low_freq_factor="1.0",
    high_freq_factor="4.0",
)
POST = {"norm_order": "post", "attention.qk_norm": True, "attention.qk_norm_span": "projection"}
WINDOWS = {"attention.pattern": ["window", "window", "full"], "attention.window": 5}
GEMMA = {
    **LLAMA,
    "norm_order": "sandwich",
    "activation": "geglu_tanh",
    "embed_scale": True,
    "tied": True,
    "attention.head_dim": 16,
}
GEMMA3 = {**GEMMA, "attention.qk_norm": True, **WINDOWS, "rope.window_base": 500.0}
TABULATED = 5e-3  # llama.cpp looks GELU up in a table of fp16
EXACT = 1e-4
COMPUTED = {
    "gpt2": dict(SHAPE, ffn=112),
    "gpt2, untied": dict(SHAPE, tied=False),
    "bloom": dict(SHAPE, positions="alibi", embed_norm=True),
    "gptneox": {**SHAPE, "positions": "rope", "rope.fraction": 0.5},
    "llama": LLAMA,
    "llama 3": {**LLAMA, "rope.scaling": LLAMA3, "tied": True},
    "llama, biases, wide heads, linear": {**LLAMA, "attention.head_dim": 16, "bias": True, "rope.scaling": LINEAR},
    "qwen 2": {**LLAMA, "attention.qkv_bias": True, "rope.scaling": YARN},
    "qwen 3": {**LLAMA, "attention.head_dim": 16, "attention.qk_norm": True, "rope.scaling": YARN},
    "olmo 2": {**LLAMA, **POST, "tied": True, "rope.scaling": LINEAR},
    "olmo 3": {**LLAMA, **POST, **WINDOWS, "rope.scaling": YARN, "rope.window_scaled": False},
    "smollm 3": {**LLAMA, "attention.pattern": ["full", "full", "full", "nope"], "tied": True, "rope.scaling": YARN},
    "gemma 2": {
        **GEMMA,
        "attention.score_cap": 2.0,
        "logit_cap": 3.0,
        "attention.pattern": ["window", "full"],
        "attention.window": 5,
        "rope.scaling": LINEAR,
    },
    "gemma 3": {**GEMMA3, "rope.scaling": LINEAR, "rope.window_scaled": False},
    "gemma 3, no windows": {**GEMMA, "attention.qk_norm": True, "tied": False, "logit_cap": 3.0},
    "granite": {
        **LLAMA,
        "embed_multiplier": 12.0,
        "logit_multiplier": 0.5,
        "residual_multiplier": 0.22,
        "attention.score_scale": 0.0625,
        "rope.scaling": YARN,
    },
    "arcee": {**LLAMA, "activation": "relu2", "rope.scaling": YARN},
    "glm 4": {**LLAMA, "norm_order": "sandwich", "rope.fraction": 0.5, "attention.qkv_bias": True},
}
REFUSED = {
    "a window": (
        {**LLAMA, "attention.pattern": ["window"], "attention.window": 5},
        r"model\.attention\.window=5, but its layers have full attention",
    ),
    "erf": (dict(SHAPE, activation="gelu"), r"gpt2 would .*\n?model\.activation=gelu, but it needs gelu_tanh"),
    "geglu": (dict(LLAMA, activation="geglu"), r"model\.activation=geglu, but it needs swiglu"),
    "dynamic": (
        {**LLAMA, "rope.scaling": {**LINEAR, "rope_type": "dynamic", "original_max_position_embeddings": "16"}},
        "rope_type=dynamic",
    ),
    "yarn": ({**LLAMA, "rope.scaling": {**YARN, "truncate": "false"}}, "truncate"),
    "llama 3 elsewhere": (
        {**LLAMA, "attention.qk_norm": True, "rope.scaling": LLAMA3},
        "rope_type=llama3, but it needs linear or yarn",
    ),
    "bases": ({**LLAMA, **POST, **WINDOWS, "rope.window_base": 500.0}, "one base for all layers"),
    "scaled windows": (
        {**LLAMA, **POST, **WINDOWS, "rope.scaling": LINEAR},
        "rope.window_scaled=True, but it needs False",
    ),
    "gemma's scale": ({**GEMMA3, "attention.score_scale": 0.3}, r"model\.attention\.score_scale=0\.3"),
    "gemma's caps": (GEMMA, "but it needs all three"),
    "smollm's layers": ({**LLAMA, "attention.pattern": ["full", "nope"]}, "every fourth layer"),
    "qwen's bias": (
        {**LLAMA, "attention.qk_norm": True, "bias": True, "mlp_bias": False},
        "biases in attention's output projection",
    ),
    "windows everywhere": (
        {**LLAMA, **POST, "attention.pattern": ["window"], "attention.window": 5},
        "but some layers have full attention",
    ),
    "apertus": (
        {**LLAMA, "activation": "xielu", "attention.qk_norm": True},
        "ApertusForCausalLM cannot be written as GGUF",
    ),
    "own": (made.OWN["bigscience"], "HpclmForCausalLM cannot be written as GGUF; hpclm writes llama.cpp's gpt2, "),
}
"""Networks, and why llama.cpp does not compute them."""


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 300))
    return dict(source="indexed", tokenizer="json", tokenizer_files=[str(path)])


def written(tmp_path, network, tokenizer, *words):
    """A run, its GGUF file, ids that reach as far as its context, and its logits of them."""
    made.run(tmp_path / "run", network, **tokenizer)
    main([str(tmp_path / "run"), str(tmp_path / "x.gguf"), *words])
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, network["vocab_size"], (1, network["context"]), generator=draw)
    return tmp_path / "x.gguf", ids, made.logits(tmp_path / "run", ids)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_transformers_reads_weights_and_tokenizer_from_the_file(kind, tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    path, ids, ours = written(tmp_path, COMPUTED[kind], tokenizer)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    with torch.no_grad():
        made.close(ours, there(ids).logits)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    own = tokenizers.build_tokenizer("json", tokenizer["tokenizer_files"])
    assert theirs(TEXTS[0])["input_ids"] == own.encode(TEXTS[0])


@pytest.mark.whole
@pytest.mark.parametrize("kind", COMPUTED)
def test_llama_cpp_computes_the_runs_logits(kind, tmp_path, tokenizer):
    path, ids, ours = written(tmp_path, COMPUTED[kind], tokenizer)
    bound = (
        TABULATED if "gelu" in ModelConfig.of(COMPUTED[kind]).activation or "geglu" in str(COMPUTED[kind]) else EXACT
    )
    with llamacpp.loaded(path) as model:
        assert abs(llamacpp.logits(model, ids[0].tolist()) - ours[0].numpy()).max() < bound


@pytest.mark.parametrize("why", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(why):
    network, message = REFUSED[why]
    with pytest.raises(ConfigError, match=message):
        networks.of_network(ModelConfig.of(network))


def test_granites_multipliers_are_named_as_llama_cpp_reads_them_and_it_divides_logits_by_their_scale():
    config = ModelConfig.of(COMPUTED["granite"])  # whose logits are multiplied by 0.5
    keys = networks.of_network(config).keys(config)
    assert {name: keys[name] for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")} == {
        "attention.scale": 0.0625,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 2.0,
    }


KEYS = {
    "llama, biases, wide heads, linear": {
        "attention.key_length": 16,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "feed_forward_length": 80,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": 16,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "glm 4": {"rope.dimension_count": 4, "attention.value_length": 8},
    "qwen 3": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    "bloom": {"attention.layer_norm_epsilon": 1e-5, "context_length": 64, "block_count": 4, "vocab_size": 320},
    "gptneox": {"use_parallel_residual": False},
    "gemma 2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": [True, False, True, False],
        "rope.freq_base_swa": 5000.0,
    },
    "gemma 3": {"attention.sliding_window_pattern": [True, True, False, True], "rope.freq_base_swa": 500.0},
    "gemma 3, no windows": {"final_logit_softcapping": 3.0, "rope.freq_base_swa": 5000.0},
    "olmo 3": {"attention.sliding_window_pattern": [True, True, False, True], "attention.sliding_window": 5},
}
ABSENT = {"bloom": "rope.freq_base", "llama 3": "rope.scaling.type", "gemma 3, no windows": "attention.sliding_window"}


@pytest.mark.parametrize("kind", KEYS)
def test_a_network_is_described_by_the_keys_that_llama_cpp_reads(kind):
    config = ModelConfig.of(COMPUTED[kind])
    found = networks.of_network(config).metadata(config)
    assert {name: found[name] for name in KEYS[kind]} == KEYS[kind]


@pytest.mark.parametrize("kind", ABSENT)
def test_a_network_without_a_feature_has_no_key_for_it(kind):
    config = ModelConfig.of(COMPUTED[kind])
    assert ABSENT[kind] not in networks.of_network(config).metadata(config)


def test_yarns_own_constants_are_named_as_llama_cpp_reads_them():
    config = ModelConfig.of({**LLAMA, "rope.scaling": {**YARN, "beta_fast": "24", "beta_slow": "2"}})
    found = networks.of_network(config).metadata(config)
    assert (found["rope.scaling.yarn_beta_fast"], found["rope.scaling.yarn_beta_slow"]) == (24.0, 2.0)


def test_the_frequencies_of_llama_3_are_divided_by_their_tensor_and_others_have_none():
    scaling = {**LLAMA3, "original_max_position_embeddings": "32"}
    config = ModelConfig.of({**COMPUTED["llama 3"], "attention.head_dim": 16, "rope.scaling": scaling})
    [factors] = networks.of_network(config).extra(config).values()
    assert factors.shape == (8,) and factors[0] == 1.0 and factors[-1] == 8.0 and bool((factors.diff() >= 0).all())
    other = ModelConfig.of(COMPUTED["qwen 2"])
    assert networks.of_network(other).extra(other) == {}


def test_an_embedding_that_is_the_output_projection_is_in_the_file_twice_where_llama_cpp_needs_that():
    def named(kind):
        config = ModelConfig.of(COMPUTED[kind])
        return {rule.ours: rule for rule in networks.of_network(config).rules(config)}["tokens.weight"]

    rows = torch.arange(640.0).view(320, 2)
    twice = named("olmo 2")
    assert twice.theirs == ("token_embd.weight", "output.weight")
    assert all(torch.equal(part, rows) for part in twice.split(rows)) and len(twice.split(rows)) == 2
    assert named("smollm 3").theirs == ("token_embd.weight",)


@pytest.mark.parametrize(
    "network, layers", [({**GEMMA3, "rope.scaling": {}}, 62), (dict(COMPUTED["gemma 2"], layers=4), 46)], ids=["3", "2"]
)
def test_the_largest_gemma_has_another_scale_in_llama_cpp(network, layers):
    networks.of_network(ModelConfig.of(dict(network, layers=layers - 2)))
    with pytest.raises(ConfigError, match=f"in {layers} layers, but it needs 1 / sqrt"):
        networks.of_network(ModelConfig.of(dict(network, layers=layers)))


def test_bytes_are_written_as_gpt_2_writes_them_and_entries_without_text_are_unused():
    keys = vocabulary.keys(run_text.of_folder(TokenizerFolder("bytes", template="{% generation %}x"), 259), None)
    tokens, types = keys["ggml.tokens"], keys["ggml.token_type"]
    assert [tokens[byte] for byte in (0, 10, 32, 33, 65, 126, 127, 160, 161, 173, 174, 255)] == list("ĀĊĠ!A~ġł¡Ń®ÿ")
    assert tokens[256:] == ["<|endoftext|>", "[PAD257]", "[PAD258]"] and types[255:] == [1, 3, 5, 5]
    assert (keys["ggml.bos_token_id"], keys["ggml.eos_token_id"], keys["ggml.add_bos_token"]) == (256, 256, False)
    assert "generation" not in keys["chat_template"].replace("{# ", "") and "ggml.padding_token_id" not in keys


def test_the_end_of_documents_is_named_before_those_of_answers_and_no_more_than_three(caplog):
    folder = TokenizerFolder("bytes", generation={"eos_token_id": [9, 256, 8, 7], "pad_token_id": 5})
    text = replace(run_text.of_folder(folder, 257), before=(4,))
    keys = vocabulary.keys(text, None)
    ends = [keys[f"ggml.{name}"] for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    assert ends == [256, 9, 8] and "up to 3 tokens that end a text; left out: 7" in caplog.text
    assert (keys["ggml.bos_token_id"], keys["ggml.padding_token_id"]) == (4, 5)
    assert keys["ggml.add_bos_token"] is True and keys["ggml.add_eos_token"] is False
    with pytest.raises(ConfigError, match="its template adds several tokens before or after a text"):
        vocabulary.keys(replace(text, before=(4, 5)), None)


@pytest.mark.parametrize("more", [3, 0], ids=["padded", "full"])
def test_without_an_end_of_documents_no_text_ends_at_a_comma_unless_a_warning_says_so(more, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the river, the house, the light\n" * 99)
    words = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t.json"), "--vocab-size", "300"]
    assert cli.main(["train-tokenizer", *words]) == 0
    tokenizer = tokenizers.build_tokenizer("json", [str(tmp_path / "t.json")])
    tokenizer.eod = None
    size = tokenizer.size + more
    keys = vocabulary.keys(run_text.of_folder(TokenizerFolder("json"), size, tokenizer), None)
    if more:
        assert keys["ggml.eos_token_id"] == size - 1 and keys["ggml.tokens"][-1] == f"[PAD{size - 1}]"
    else:
        assert "ggml.eos_token_id" not in keys and "ends a text at its default token" in capsys.readouterr().err


def pre_tokenizer(pattern):
    split = dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
    return dict(type="Sequence", pretokenizers=[split, dict(BYTES, use_regex=False)])


BYTES = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
CHANGED = {
    "llama 3": (pre_tokenizer(vocabulary.WORDS % r"\p{N}{1,3}"), dict(ignore_merges=True)),
    "qwen": (pre_tokenizer(vocabulary.WORDS % r"\p{N}"), {}),
    "digits": (dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), BYTES]), {}),
    "prefix": (dict(BYTES, add_prefix_space=True), {}),
    "own pattern": (pre_tokenizer(r"\w+|\W+"), {}),
    "dropout": (BYTES, dict(dropout=0.1)),
}
"""tokenizer.json: its pre_tokenizer, and keys of its model."""


def made_tokenizer(kind, folder):
    """Our kind and files of a tokenizer."""
    path = folder / "made"
    if kind == "bytes":
        return kind, []
    if kind in CHANGED or kind == "json":
        tree = json.loads(train_bpe(TEXTS, 300))
        splits, more = CHANGED.get(kind, (BYTES, {}))
        tree["added_tokens"].append({**tree["added_tokens"][0], "id": 300, "content": "<x>", "special": False})
        path.write_text(json.dumps({**tree, "pre_tokenizer": splits, "model": {**tree["model"], **more}}))
        return "json", [str(path)]
    if kind == "wordpiece":
        path.write_text("[UNK]\n[SEP]\nso\n")
        return kind, [str(path)]
    own = (
        train_sentencepiece(TEXTS, kind.split()[1], 300)
        if "our" in kind
        else by_its_own_trainer(TEXTS, **TRAINED[kind])
    )
    path.write_bytes(own)
    return "sentencepiece", [str(path)]


SAME = ["json", "llama 3", "qwen", "digits", "dropout", "bytes", "our bpe", "unigram"]
OTHER = {
    "prefix": "does not know the normalizer and pre_tokenizer in its tokenizer.json",
    "own pattern": "does not know the normalizer and pre_tokenizer",
    "wordpiece": "it is a WordPiece",
    "bpe": "neither normalises text nor merges spaces",
    "bpe, own pieces": "with user-defined pieces",
    "word": "it is of kind word",
}


@pytest.mark.whole
@pytest.mark.parametrize("kind", [*SAME, "our unigram"])
def test_llama_cpp_gives_the_same_ids(kind, tmp_path, caplog):
    name, files = made_tokenizer(kind, tmp_path)
    own = tokenizers.build_tokenizer(name, files)
    path, _, _ = written(tmp_path, LLAMA, dict(source="indexed", tokenizer=name, tokenizer_files=files))
    with llamacpp.loaded(path) as model:
        texts = TEXTS if kind == "our unigram" else [*TEXTS, *ODD, *PROBES, "日本中文 한국é\t12a.'"]
        assert [llamacpp.tokens(model, text) for text in texts] == [own.encode(text) for text in texts]
    assert ("as <unk>; hpclm encodes them as bytes" in caplog.text) == (kind == "our unigram")


@pytest.mark.parametrize("kind", OTHER)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused_with_the_reason(kind, tmp_path):
    own = tokenizers.build_tokenizer(*made_tokenizer(kind, tmp_path))
    with pytest.raises(ConfigError, match=OTHER[kind]):
        vocabulary.keys(run_text.of_folder(TokenizerFolder(), 400, own), None)


def test_the_file_says_what_is_in_it_and_has_the_umasks_mode(tmp_path, tokenizer):
    before = os.umask(0o027)
    try:
        path, _, _ = written(tmp_path, COMPUTED["gpt2"], tokenizer, "--dtype", "bf16")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    read = gguf.GGUFReader(path)
    kinds = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist()) for tensor in read.tensors}
    assert kinds["blk.3.attn_qkv.weight"] == ("BF16", [48, 144]) and kinds["output_norm.bias"] == ("F32", [48])
    assert kinds["token_embd.weight"] == ("BF16", [48, 320])  # without the padding
    fields = {name: read.fields[name].contents() for name in ("general.name", "gpt2.feed_forward_length")}
    assert fields == {"general.name": "run", "gpt2.feed_forward_length": 112}
    assert len(read.fields["tokenizer.ggml.tokens"].contents()) == 320


def test_nothing_is_left_of_a_file_that_failed(tmp_path, tokenizer, monkeypatch):
    made.run(tmp_path / "run", LLAMA, **tokenizer)
    there = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(HpclmError, match=r"x\.gguf: No space left on device; nothing was written"):
        main([str(tmp_path / "run"), str(tmp_path / "x.gguf")])
    assert sorted(tmp_path.iterdir()) == there
    made.run(tmp_path / "none", LLAMA)
    with pytest.raises(ConfigError, match="this run names none; give"):
        main([str(tmp_path / "none"), str(tmp_path / "x.gguf")])
