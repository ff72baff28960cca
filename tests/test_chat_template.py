"""What a run was tuned with is part of the run: chat template, special tokens and end of turn, from preprocess to exports."""

import io
import json
import random

import pytest
import torch

from hpclm import cli
from hpclm.api.run import Run
from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data import tokenizer_folder
from hpclm.data.corpus import corpus
from hpclm.data.indexed import IndexedDataset
from hpclm.interop.gguf import vocabulary
from hpclm.preprocess.tokenizers.huggingface import TokenizerJson
from tests.forks import hpclm
from tests.preprocess.chats import MARKED, PLAIN, said, tokenizer

transformers = pytest.importorskip("transformers")
QUESTION = said("what is this?")[:1]
CHATS = [said("what is this?", "hello"), said("hello", "a user", "what is this?", "hello")] * 6
STEPS = [
    *("data.order=packed", "data.reset_attention_mask=true", "data.reset_position_ids=true", "data.split=1"),
    *("engine.device=cpu", "engine.precision=fp32", "batch.micro_size=2", "batch.global_size=4", "evaluate.every=0"),
    *("optim.lr=2e-2", "optim.min_lr=1e-3", "optim.warmup=0", "cluster.preflight=false"),
]
SPEAKERS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
ENDS = {
    **{"chatml": "<|im_end|>", "llama 3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "zephyr": "</s>"},
    "qwen": "<|im_end|>",
}


def write_base(folder, template=None, **named):
    """A folder of transformers with a small Llama, which ends a text with </s>."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer())
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", **named
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(fast), max_position_embeddings=96)
    model = transformers.LlamaForCausalLM(shape)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)


def write_chats(folder):
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """runs/base, which has no chat template, runs/other, which has one, and runs/tuned and runs/retuned from them with Llama 3's."""
    folder = tmp_path_factory.mktemp("template")
    write_chats(folder)
    (folder / "llama.jinja").write_text(PLAIN["llama 3"])
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": "hello there, what is this? " * 9}) + "\n" for _ in range(9))
    )
    for name, tuned, template in (("base", "tuned", None), ("other", "retuned", PLAIN["chatml"])):
        write_base(folder / f"hf-{name}", template)
        convert(folder / f"hf-{name}", folder / "runs" / name)
        preprocess(folder, name, tuned, "llama.jinja")
        train(folder, name, tuned, f"{tuned}_chat", "budget.steps=40")
    return folder


def here(*words):
    """Run a command in this process, which has imported transformers."""
    assert cli.main([str(word) for word in words]) == 0


def convert(source, target):
    here("convert", source, target)


def preprocess(folder, run, output, *template):
    text = (
        ["--input", folder / "text.jsonl", "--append-eod"] if output == "text" else ["--chat", folder / "chats.jsonl"]
    )
    words = [*text, "--tokenizer", folder / "runs" / run, "--output-prefix", folder / "data" / output]
    here("preprocess", *words, *(["--chat-template", folder / template[0]] if template else []))


def train(folder, begin, name, data, *words, status=0):
    settings = [f"runs/{begin}/config.yaml", f"out=runs/{name}", f"checkpoint.init_from=runs/{begin}"]
    return hpclm("train", *settings, f"data.prefix=data/{data}", *STEPS, *words, cwd=folder, check=status)


def generated(run, prompt, *words, cwd):
    words = ["generate", run, *words, "engine.device=cpu", "--temperature", "0", "--tokens", "9", "--json"]
    return json.loads(hpclm(*words, "--prompt", prompt, cwd=cwd, check=0).stdout)


@pytest.mark.parametrize("run", ["tuned", "retuned"])
def test_an_export_has_the_template_of_the_tuning_and_the_model_stops_at_its_end_of_turn(run, made, tmp_path):
    convert(made / "runs" / run, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.chat_template == PLAIN["llama 3"]
    data = IndexedDataset(made / f"data/{run}_chat")
    rendered = [theirs.apply_chat_template(chat)["input_ids"] for chat in CHATS]
    assert rendered == [data.tokens(i).tolist() for i in range(len(data))]
    end = theirs.convert_tokens_to_ids("<|eot_id|>")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [1, end]
    asked = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=9, do_sample=False, pad_token_id=1)[
        0, asked["input_ids"].shape[1] :
    ]
    assert answer[-1] == end and len(answer) < 9
    prompt = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    ours = generated(f"runs/{run}", prompt, cwd=made)
    assert (ours["text"], ours["finish"]) == (theirs.decode(answer[:-1]), "end") == ("hello", "end")
    python = Run(made / "runs" / run).generate(prompt, "engine.device=cpu", tokens=9, temperature=0)
    assert python == "hello" and "apply_chat_template" in (tmp_path / "hf/README.md").read_text()


def test_a_gguf_file_has_them_too(made, tmp_path):
    gguf = pytest.importorskip("gguf")
    convert(made / "runs/retuned", tmp_path / "x.gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    values = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    assert values["tokenizer.chat_template"] == PLAIN["llama 3"]
    tokens = values["tokenizer.ggml.tokens"]
    ends = [tokens[values[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "eot")]
    assert ends == ["<s>", "</s>", "<|eot_id|>"]


def test_a_run_that_goes_on_without_conversations_keeps_what_it_was_tuned_with(made):
    preprocess(made, "tuned", "text")
    train(made, "tuned", "continued", "text_text_document", "budget.steps=1")
    continued, tuned = (tokenizer_folder.read(made / "runs" / name / "tokenizer") for name in ("continued", "tuned"))
    assert (continued.rendered_with, continued.ends) == (tuned.rendered_with, tuned.ends)
    preprocess(made, "continued", "again")  # without --chat-template: that of the run, not of the base
    assert folder_of(made / "data/again_chat").template == PLAIN["llama 3"]


def test_another_tuning_takes_the_place_and_stops_at_both_ends(made):
    (made / "chatml.jinja").write_text(MARKED["chatml"])
    preprocess(made, "tuned", "second", "chatml.jinja")
    train(made, "tuned", "second", "second_chat", "budget.steps=1")
    kept = tokenizer_folder.read(made / "runs/second/tokenizer")
    assert kept.template == MARKED["chatml"]
    assert texts_of(kept) == ["</s>", "<|eot_id|>", "<|im_end|>"]


def folder_of(prefix):
    return tokenizer_folder.read(tokenizer_folder.beside(prefix))


def texts_of(folder):
    """The tokens that end a text."""
    return [folder.build().model.id_to_token(id) for id in folder.ends]


def dataset(folder, name, template, bos="<s>"):
    """A dataset of conversations, made here."""
    (folder / name).mkdir()
    write_chats(folder / name)
    (folder / name / "tokenizer.json").write_text(tokenizer())
    (folder / name / "special_tokens_map.json").write_text(json.dumps({"bos_token": bos, "eos_token": "</s>"}))
    (folder / name / "t.jinja").write_bytes(template.encode())
    words = ["--tokenizer-files", folder / name / "tokenizer.json", "--chat-template", folder / name / "t.jinja"]
    words += ["--tokenizer", "json", "--chat", folder / name / "chats.jsonl", "--context", 96]
    assert cli.main(["preprocess", *map(str, words), "--output-prefix", str(folder / name)]) == 0
    return f"{folder / name}_chat"


def parts(how, one, other):
    packed = dict(order="packed")
    return {
        "blend": DataConfig(blend=[one, other], split="1", **packed),
        "train and valid": DataConfig(train=[one], valid=[other], **packed),
        "validation": DataConfig(prefix=one, split="1", validation=[f"more={other}"], **packed),
    }[how]


@pytest.mark.parametrize("how", ["blend", "train and valid", "validation"])
def test_datasets_with_different_templates_in_one_run_are_refused_by_name(how, tmp_path):
    one, other = (dataset(tmp_path, name, PLAIN[name]) for name in ("zephyr", "qwen"))
    with pytest.raises(ConfigError, match="were made with different chat templates") as refused:
        corpus(parts(how, one, other), 96, 1, 400)
    assert one in str(refused.value) and other in str(refused.value)
    assert "hpclm preprocess --chat-template FILE" in str(refused.value)


def test_the_command_line_refuses_them_with_64_and_other_special_tokens_too(tmp_path):
    one, other = (dataset(tmp_path, name, PLAIN["llama 3"], bos) for name, bos in (("one", "<s>"), ("other", "</s>")))
    words = [
        "train",
        "debug",
        f"data.blend=[{one}, {other}]",
        "data.source=indexed",
        "data.order=packed",
        "model.vocab_size=400",
    ]
    refused = hpclm(*words, "model.context=96", f"out={tmp_path}/out", check=64).stderr
    assert "different chat templates or special tokens" in refused and not (tmp_path / "out").exists()


def test_pretraining_data_go_with_conversations(tmp_path):
    chats = dataset(tmp_path, "first", PLAIN["chatml"])
    (tmp_path / "text").write_text("hello there\n" * 40)
    words = [
        "--tokenizer",
        "json",
        "--tokenizer-files",
        tmp_path / "first/tokenizer.json",
        "--input",
        tmp_path / "text",
    ]
    assert cli.main(["preprocess", *map(str, words), "--output-prefix", str(tmp_path / "plain")]) == 0
    both = [f"{tmp_path}/plain_text_document", chats]
    corpus(DataConfig(blend=both, split="1", order="packed"), 96, 1, 400)
    shared = tokenizer_folder.of_datasets(both, None)
    assert shared.template == PLAIN["chatml"] and texts_of(shared) == ["</s>", "<|im_end|>"]


@pytest.mark.parametrize("style", MARKED)
@pytest.mark.parametrize("templates", [MARKED, PLAIN], ids=["marked", "plain"])
def test_the_end_of_a_turn_is_found_from_what_was_rendered(templates, style, tmp_path):
    prefix = dataset(tmp_path, "x", templates[style])
    known = TokenizerJson([str(tmp_path / "x/tokenizer.json")])
    folder = folder_of(prefix)
    assert folder.template == templates[style] and folder.tokens["eos_token"] == "</s>"
    assert folder.ends == list(dict.fromkeys([known.eod, known.model.token_to_id(ENDS[style])]))
    assert not tokenizer_folder.beside(f"{prefix}_loss").exists()


def test_parts_record_what_one_process_records(tmp_path):
    whole = folder_of(dataset(tmp_path, "x", PLAIN["llama 3"]))
    words = [
        "--tokenizer",
        "json",
        "--tokenizer-files",
        tmp_path / "x/tokenizer.json",
        "--chat",
        tmp_path / "x/chats.jsonl",
    ]
    words += ["--chat-template", tmp_path / "x/t.jinja", "--context", 96, "--output-prefix", tmp_path / "y"]
    for part in ("1/2", "0/2"):
        assert cli.main(["preprocess", *map(str, words), "--part", part]) == 0
    there = folder_of(tmp_path / "y_chat")
    assert (there.rendered_with, there.generation) == (whole.rendered_with, whole.generation)


def test_a_template_whose_turns_end_in_plain_text_is_kept_with_a_warning(made, capsys):
    (made / "speakers.jinja").write_text(SPEAKERS)
    preprocess(made, "base", "speakers", "speakers.jinja")
    assert "no end of a turn is learned" in capsys.readouterr().err
    warned = train(made, "base", "speakers", "speakers_chat", "budget.steps=1").stderr
    assert "generation cannot stop there. Use --stop TEXT" in warned
    convert(made / "runs/speakers", made / "hf-speakers")
    assert transformers.AutoTokenizer.from_pretrained(made / "hf-speakers").chat_template == SPEAKERS
    assert transformers.GenerationConfig.from_pretrained(made / "hf-speakers").eos_token_id == 1


def test_a_tokenizer_of_its_own_writes_the_same_ends_in_training_and_in_an_export(tmp_path):
    """Nothing beside it says what begins and ends a text: what an export says counts."""
    write_chats(tmp_path)
    (tmp_path / "text").write_text("hello there, what is this? a user and an assistant\n" * 9)
    words = ["--input", "text", "--output", "t.json", "--vocab-size", "290"]
    hpclm("train-tokenizer", *words, cwd=tmp_path, check=0)
    (tmp_path / "t.jinja").write_text("{{ bos_token }}" + SPEAKERS.replace("+ '\n'", "+ eos_token"))
    words = [
        "--chat",
        "chats.jsonl",
        "--chat-template",
        "t.jinja",
        "--tokenizer",
        "json",
        "--tokenizer-files",
        "t.json",
    ]
    hpclm("preprocess", *words, "--context", "96", "--output-prefix", "x", cwd=tmp_path, check=0)
    folder = folder_of(tmp_path / "x_chat")
    assert folder.ends == [0] and folder.rendered_with[1] == dict.fromkeys(["bos_token", "eos_token"], "<|endoftext|>")
    words = ["data.prefix=x_chat", "data.source=indexed", "model.vocab_size=290", "model.context=96", "budget.steps=1"]
    hpclm("train", "debug", *words, *STEPS, "out=run", cwd=tmp_path, check=0)
    convert(tmp_path / "run", tmp_path / "hf")
    theirs, data = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), IndexedDataset(tmp_path / "x_chat")
    assert theirs.apply_chat_template(CHATS[1], tokenize=False) == theirs.decode(data.tokens(1).tolist())
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 0


def test_special_tokens_that_only_a_template_names_pass_through_a_run(tmp_path):
    """Such as eot_token in tokenizer_config.json, which transformers hands to the template."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + eot_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    write_base(tmp_path / "hf", template, extra_special_tokens={"eot_token": "<|eot_id|>"})
    convert(tmp_path / "hf", tmp_path / "runs/base")
    write_chats(tmp_path)
    preprocess(tmp_path, "base", "x")
    assert texts_of(folder_of(tmp_path / "data/x_chat")) == ["</s>", "<|eot_id|>"]
    train(tmp_path, "base", "tuned", "x_chat", "budget.steps=1")
    convert(tmp_path / "runs/tuned", tmp_path / "back")
    before, back = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "back"))
    ids = [each.apply_chat_template(CHATS[1])["input_ids"] for each in (before, back)]
    assert ids[0] == ids[1]
    data = IndexedDataset(tmp_path / "data/x_chat")
    assert back.apply_chat_template(CHATS[1], tokenize=False) == back.decode(data.tokens(1).tolist())


def test_a_template_without_marks_writes_what_it_wrote_with_them():
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension

    class Marks(Extension):
        tags = frozenset(["generation"])

        def parse(self, parser):
            number = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(number)

        def _body(self, caller):
            return caller()

    options = dict(trim_blocks=True, lstrip_blocks=True)
    draw = random.Random(5)
    for _ in range(200):
        begin, end = (
            f"{{%{draw.choice(['', '-', '+'])} {word} {draw.choice(['', '-'])}%}}"
            for word in ("generation", "endgeneration")
        )
        space = [draw.choice(["", " ", "\n", "\n  ", " \n\n"]) for _ in range(4)]
        marked = f"a{space[0]}{begin}{space[1]}{{{{ x }}}}{space[2]}{end}{space[3]}b"
        written = Environment(extensions=[Marks], **options).from_string(marked).render(x="answer")
        assert (
            Environment(**options).from_string(vocabulary.MARK.sub(r"{#\1 \2#}", marked)).render(x="answer") == written
        ), marked


@pytest.mark.parametrize("extends", [True, False], ids=["with added tokens", "with other tokens"])
def test_a_tokenizer_with_added_tokens_keeps_the_ends_of_the_base(extends, tmp_path):
    """A base with spare entries, and a tokenizer of its own beside which nothing says how the base generates."""
    write_base(tmp_path / "hf")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    model.resize_token_embeddings(384, mean_resizing=False)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "runs/base")
    added = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    added.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|over|>"]})
    added.save_pretrained(tmp_path / "added")
    if not extends:
        whole = (tmp_path / "added/tokenizer.json").read_text()
        (tmp_path / "added/tokenizer.json").write_text(whole.replace("<|im_start|>", "<|unlike|>"))
    write_chats(tmp_path)
    template = PLAIN["llama 3"].replace("<|eot_id|>", "<|over|>").replace("<|start_header_id|>", "<|turn|>")
    (tmp_path / "t.jinja").write_text(template)
    words = ["--tokenizer", "json", "--tokenizer-files", tmp_path / "added/tokenizer.json", "--context", 96]
    words += ["--chat", tmp_path / "chats.jsonl", "--chat-template", tmp_path / "t.jinja"]
    here("preprocess", *words, "--output-prefix", tmp_path / "data/x")
    others = ["data.tokenizer=null", "data.tokenizer_files=[]", "data.eod=null", "budget.steps=1"]
    train(tmp_path, "base", "tuned", "x_chat", *others)
    convert(tmp_path / "runs/tuned", tmp_path / "back")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    data = IndexedDataset(tmp_path / "data/x_chat")
    assert back.apply_chat_template(CHATS[1])["input_ids"] == data.tokens(1).tolist()
    over = added.convert_tokens_to_ids("<|over|>")
    assert back.convert_tokens_to_ids("<|over|>") == over and "<|over|>" in back.get_added_vocab()
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert generation.eos_token_id == ([1, 2, over] if extends else [1, over]) and generation.bos_token_id == 0


def test_a_conversation_at_the_prompt_is_that_of_the_template(made, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("what is this?\n\nhello\n/clear\nwhat is this?\n/exit\nnever read\n"))
    here("generate", made / "runs/tuned", "--chat", "--temperature", "0", "--tokens", "9", "engine.device=cpu")
    shown = capsys.readouterr().out.splitlines()
    theirs = transformers.AutoTokenizer.from_pretrained(made / "runs/tuned/tokenizer")
    talk = QUESTION
    expected = []
    for turn in ("hello", None):
        prompt = theirs.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        answer = generated("runs/tuned", prompt, cwd=made)["text"]
        expected.append(answer)
        talk = [*talk, {"role": "assistant", "content": answer.strip()}, {"role": "user", "content": turn}]
    assert shown == [*expected, expected[0]] and expected[0] == "hello"


def test_a_run_without_a_template_is_no_partner_and_samples_are_several(made):
    refused = hpclm("generate", "runs/base", "--chat", cwd=made, check=64).stderr
    assert "runs/base has no chat template: its model was not tuned on conversations" in refused
    words = ["generate", "runs/base", "--prompt", "so", "--tokens", "9", "--json", "engine.device=cpu"]
    three = hpclm(*words, "--samples", "3", cwd=made, check=0).stdout.splitlines()
    assert len({json.loads(line)["text"] for line in three}) == 3
    assert three[0] == hpclm(*words, cwd=made, check=0).stdout.strip()
    for wrong in (["--chat", "--prompt", "x"], ["--chat", "--samples", "2"], []):
        hpclm("generate", "runs/base", *wrong, cwd=made, check=2)
