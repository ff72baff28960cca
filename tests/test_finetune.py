"""From a Hugging Face folder to continued pretraining and to fine-tuning on conversations, and back."""

import json
import random
import shlex

import pytest
import torch

from hpclm.config import DataConfig
from hpclm.data.corpus import corpus
from hpclm.data.indexed import IndexedDataset
from tests.forks import Ranks, hpclm
from tests.preprocess.chats import PLAIN, said, tokenizer
from tests.runs import losses

transformers = pytest.importorskip("transformers")
DRAW = random.Random(1)
SEPARATE = ["data.order=packed", "data.reset_attention_mask=true", "data.reset_position_ids=true", "data.split=1"]
STEP = ["engine.precision=fp32", "batch.micro_size=1", "evaluate.every=0", "optim.lr=1e-3", "cluster.preflight=false"]


def words(most):
    return " ".join(
        DRAW.choices(["hello", "there", "what", "is", "this", "assistant", "user"], k=DRAW.randrange(1, most))
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of transformers, imported as runs/base, and datasets of conversations and of text."""
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "tokenizer.json").write_text(tokenizer())
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>"
    )
    fast.chat_template = PLAIN["chatml"]
    fast.save_pretrained(folder / "hf")
    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(fast), max_position_embeddings=96)
    model = transformers.LlamaForCausalLM(shape)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=[3, 1], do_sample=True, temperature=0.6, top_p=0.9
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    model.save_pretrained(folder / "hf")
    chats = [said(*(words(9) for _ in range(2 * DRAW.randrange(1, 4)))) for _ in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": words(40)}) + "\n" for _ in range(30)))
    hpclm("convert", "hf", "runs/base", cwd=folder, check=0)
    for source in (["--chat", "chats.jsonl"], ["--input", "text.jsonl", "--append-eod"]):
        preprocess = ["preprocess", *source, "--tokenizer", "runs/base", "--output-prefix", "data/x"]
        printed = hpclm(*preprocess, cwd=folder, check=0).stdout
        assert "next: hpclm train runs/base/config.yaml name=tuned out=runs/tuned" in printed
    return folder


def alone(made, prefix, masked):
    """Mean loss of the tokens that count, of each document alone, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "hf", dtype=torch.float64).eval()
    data, total, count = IndexedDataset(made / prefix), 0.0, 0
    mask = IndexedDataset(f"{made / prefix}_loss") if masked else None
    for i in range(len(data)):
        ids = torch.from_numpy(data.tokens(i).astype("i8"))
        counts = torch.ones(len(ids)) if mask is None else torch.from_numpy(mask.tokens(i).astype("f4"))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, count = total + float((each * counts[1:]).sum()), count + int(counts[1:].sum())
    return total / count


def twice_all(made, prefix):
    """Settings of a step that reads every sample of a packed dataset twice, so that any number of replicas can share them."""
    data = DataConfig(prefix=str(made / prefix), order="packed", split="1")
    whole = corpus(data, 96, 1234, 400).per_epoch("train")
    assert whole > 3
    return [f"data.prefix={made / prefix}", *SEPARATE, *STEP, f"batch.global_size={2 * whole}"]


def tuning(made, name):
    base = made / "runs/base"
    return [f"{base}/config.yaml", f"out={made}/runs/{name}", f"checkpoint.init_from={base}", "budget.steps=3"]


@pytest.fixture(scope="module")
def tuned(made):
    """A run of three steps over the conversations."""
    hpclm("train", *tuning(made, "tuned"), *twice_all(made, "data/x_chat"), check=0)
    return made / "runs/tuned"


def test_the_loss_is_that_of_each_conversation_alone(made, tuned):
    first = float.fromhex(losses(tuned)[1])
    assert first == pytest.approx(alone(made, "data/x_chat", masked=True), rel=1e-6)
    assert first != pytest.approx(alone(made, "data/x_chat", masked=False), rel=1e-3)


@pytest.mark.parametrize("prefix, masked", [("data/x_chat", True), ("data/x_text_document", False)])
def test_a_dataset_is_evaluated_by_the_tokens_that_training_counts(prefix, masked, made):
    words = ["engine.precision=fp32", "engine.device=cpu", "--data", prefix, "--json"]
    found = json.loads(hpclm("evaluate", "runs/base", *words, cwd=made, check=0).stdout)
    assert found.get("loss_mask") == (f"{prefix}_loss" if masked else None)
    if masked:  # the tokens of other datasets follow the token that begins a text
        assert found["loss"] == pytest.approx(alone(made, prefix, masked), rel=1e-5)


@pytest.mark.parametrize("option, name, text", [
    ("--input", "small.txt", "hello there what is this\n" * 30),
    ("--input", "long.txt", "hello there what is this\n" * 3000),
    ("--chat", "few.jsonl", "".join(json.dumps({"messages": said("hello", "there")}) + "\n" for _ in range(3))),
], ids=lambda value: value if value.endswith((".txt", ".jsonl")) else "")  # fmt: skip
def test_the_command_that_preprocess_prints_trains_on_data_of_any_size(option, name, text, made):
    (made / name).write_text(text)
    end = ["--append-eod"] if option == "--input" else []
    words = ["preprocess", option, name, *end, "--tokenizer", "runs/base", "--output-prefix", f"data/{name}"]
    command = shlex.split(hpclm(*words, cwd=made, check=0).stdout.partition("next: hpclm ")[2])
    hpclm(*command, f"out=runs/{name}", "engine.device=cpu", cwd=made, check=0)
    assert losses(made / "runs" / name)


def test_a_text_beside_an_imported_run_has_its_tokenizer(made):
    (made / "beside.txt").write_text("hello there what is this\n" * 300)
    words = ["data=beside.txt", "engine.device=cpu", "budget.steps=2", "evaluate.every=0"]
    hpclm("train", *tuning(made, "beside"), *words, cwd=made, check=0)
    [note] = [json.loads(path.read_text()) for path in (made / "runs/datasets").glob("beside-*/*.json")]
    assert note["tokenizer"]["kind"] == "json" and note["tokenizer"]["options"] == {"eod": "<|im_end|>"}


def test_a_run_that_was_stopped_resumes_with_the_same_samples(made, tuned):
    stopped = [*tuning(made, "stopped"), *twice_all(made, "data/x_chat")]
    hpclm("train", *stopped, "stop_at=2", check=0)
    hpclm("train", *stopped, check=0)
    assert losses(made / "runs/stopped") == losses(tuned)
    refused = hpclm("train", *stopped, "data.loss_mask=ignore", check=64)
    assert "another loss mask (data.loss_mask)" in refused.stderr


@pytest.mark.parametrize("layout", [1, pytest.param(2, marks=pytest.mark.whole)], ids=["replicas", "tensor parallel"])
def test_replicas_with_different_numbers_of_tokens_that_count_give_the_same_loss(layout, made, tuned):
    name = f"tensor-{layout}"
    with Ranks(2, [*tuning(made, name), *twice_all(made, "data/x_chat"), f"parallel.tensor={layout}"]) as ranks:
        ended = ranks.wait()
    assert [code for code, _ in ended.values()] == [0, 0], ended
    here, there = ([float.fromhex(loss) for loss in losses(out).values()] for out in (made / "runs" / name, tuned))
    assert here == pytest.approx(there, rel=1e-6)


def test_an_export_keeps_the_chat_template_and_the_settings_of_generation(made, tuned):
    hpclm("convert", "runs/tuned", "back", cwd=made, check=0)
    back, before = (transformers.AutoTokenizer.from_pretrained(made / name) for name in ("back", "hf"))
    assert back.chat_template == before.chat_template == PLAIN["chatml"]
    assert (back.bos_token, back.eos_token, back.pad_token) == ("<s>", "<|im_end|>", "</s>")
    chat = said("hello", "there")
    assert back.apply_chat_template(chat)["input_ids"] == before.apply_chat_template(chat)["input_ids"]
    generation = transformers.GenerationConfig.from_pretrained(made / "back")
    assert (generation.eos_token_id, generation.temperature, generation.do_sample) == ([3, 1], 0.6, True)
    assert transformers.AutoModelForCausalLM.from_pretrained(made / "back").config.eos_token_id == [3, 1]


def test_two_commands_continue_the_pretraining_of_a_folder(made):
    """The other command is in ``made``; last, because it continues the imported run itself."""
    text = twice_all(made, "data/x_text_document")
    done = hpclm("train", made / "runs/base", *text, "budget.steps=1", check=0)
    assert "starts from imported weights" in done.stdout + done.stderr
    expected = alone(made, "data/x_text_document", masked=False)
    assert float.fromhex(losses(made / "runs/base")[1]) == pytest.approx(expected, rel=1e-6)
