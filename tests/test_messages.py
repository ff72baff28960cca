"""Mistakes as people type them, and the words of the answer that put them right."""

import re

import pytest

import hpclm
from hpclm import cli, config, parser
from hpclm.config import experts, fields, hints, migrating
from hpclm.errors import ConfigError
from tests.runs import exit_code

MISTAKES = {
    # spaces and values
    ("train", "debug", "optim.lr", "=", "0.001"): "write optim.lr=0.001, without spaces",
    ("train", "debug", "optim.lr", "=0.001"): "write optim.lr=0.001, without spaces",
    ("train", "debug", "optim.lr=", "0.001"): "write optim.lr=0.001, without a space",
    ("submit", "optim.lr", "=", "0.001"): "write optim.lr=0.001, without spaces",
    ("submit", "debug", "--mem", "64", "GB"): "write --mem 64G, in one word",
    ("submit", "--mem", "64", "GB"): "write --mem 64G, in one word",
    ("submit", "debug", "job.mem=64", "gib"): "write job.mem=64G, in one word",
    ("submit", "debug", "job.env.FOO"): "job.env.FOO has no value: job.env.FOO=…",
    ("train", "optim.lr"): "optim.lr has no value: optim.lr=…",
    ("train", "debug", "demo"): "give one settings file, not 2: debug, demo; changes are key=value",
    # options of sbatch and of other programs
    ("submit", "--exclusive", "engine.device=cpu", "out=x"): "unrecognized arguments: --exclusive; --exclusive: it is an option "
    "of sbatch: hpclm submit --sbatch exclusive\n",
    ("submit", "--mem-per-cpu", "4G", "seed=1"): "--mem-per-cpu: it is an option of sbatch: hpclm submit --sbatch mem-per-cpu=4G\n",
    ("submit", "--reservation=me"): "--sbatch reservation=me\n",
    ("train", "debug", "--reservation"): "--sbatch reservation=...\n",
    ("submit", "--gres", "gpu:8"): "use --gpus 8 (GPUs of each node)",
    ("submit", "--gres=gpu:h100:4"): "use --gpus 4 (GPUs of each node)",
    ("submit", "-n", "4"): "-n: processes are job.nodes x job.gpus (--nodes, --gpus)",
    ("submit", "--ntasks=4"): "processes are job.nodes x job.gpus (--nodes, --gpus)",
    ("submit", "--output", "foo.log"): "the log is in logs/ of the run directory, which out= sets",
    ("submit", "--num-gpus", "4"): "did you mean --gpus 4?",
    ("generate", "x", "--prompt", "x", "--max-tokens", "5"): "did you mean --tokens 5?",
    ("evaluate", "x", "--step", "3"): "--step: the newest checkpoint is read",
    ("generate", "x", "--steps=3"): "--steps: the newest checkpoint is read",
    ("convert", "x", "y", "--ckpt-step", "3"): "--ckpt-step: give the folder of the checkpoint instead of the run's",
    ("train", "debug", "--step", "3"): "unrecognized arguments: --step; did you mean --from 3?",
    ("submit", "debug", "--load-step=3"): "did you mean --from 3?",
    ("planner", "debug", "--step", "3"): "unrecognized arguments: --step\n",
    ("train", "debug", "--steps", "3"): "key=value: budget.steps=3",
    ("train", "small", "--data", "my text.txt"): "as key=value: data='my text.txt'",
    ("submit", "small", "--tokenizer", "t.json"): "as key=value: tokenizer=t.json",
    ("train", "small", "data=x.jsonl", "--json-keys", "content"): "--json-keys is an option of hpclm preprocess; data= takes the dataset",
    ("train", "small", "data=x.txt", "--format=jsonl"): "--format is an option of hpclm preprocess; data= takes the dataset",
    ("evaluate", "x", "--input", "a.txt"): "did you mean --text a.txt?",
    ("generate", "x", "--input", "a.txt"): "did you mean --prompts a.txt?",
    ("evaluate", "x", "--account", "me"): "unrecognized arguments: --account\n",
    ("submit", "--input", "a.txt"): "--input: a job reads no input",
    # a run that does not exist
    **{
        (verb, "nosuch", *more): "error: nosuch is not a run directory: it does not exist, and runs has none\n"
        for verb, more in {
            **dict.fromkeys(("status", "logs", "report", "cancel", "checkpoints", "resume", "sync"), ()),
            **dict.fromkeys(("request",), ("stop",)),
            "evaluate": (),
            "generate": ("--prompt", "a"),
            "convert": ("made",),
        }.items()
    },
    ("top", "--once", "--runs", "nosuch"): "error: nosuch does not exist; --runs names the folder that runs are in",
    ("top", "nosuch"): "error: nosuch does not exist; --runs names the folder that runs are in",
    ("status", "--runs", "nosuch"): "error: nosuch does not exist; --runs names the folder that runs are in",
    ("submit", "--sbatch", "hetjob"): "a run is trained by one job; its nodes must be alike",
    # verbs
    ("trian", "debug"): "Did you mean 'train'?",
    ("xyzzy",): "unknown verb 'xyzzy'; choose one of",
    ("ls",): "there is no hpclm ls; use hpclm status\n",
    ("preflight",): "there is no hpclm preflight: every run begins with it; hpclm doctor checks a machine without a run\n",
    ("Eval", "runs/x"): "there is no hpclm Eval; use hpclm evaluate RUN\n",
    ("small", "optim.lr=1"): "small is no verb; to train with it: hpclm train small\n",
    ("optim.lr=1",): "optim.lr=1 is no verb; to train with it: hpclm train optim.lr=1\n",
    ("--dry-run", "submit", "small"): "the verb comes first: hpclm submit --dry-run\n",
    ("data", "verfy", "x"): "invalid choice: 'verfy' (choose from", ("data", "vrify", "x"): ". Did you mean 'verify'?\n",
    ("convert", "a", "b", "--dtype", "bf61"): ". Did you mean 'bf16'?\n",
    # options of other verbs
    ("train", "small", "--nodes", "2"): "--nodes: it is an option of hpclm submit; hpclm train starts no job",
    ("train", "--config", "small"): "the settings file is given by itself: hpclm train small\n",
    ("train", "--fp16"): "settings are written without dashes, as key=value: engine.precision=fp16; hpclm docs migrating",
    # values that an option cannot have
    ("cancel", "x", "--wait", "nan"): "argument --wait: 'nan' is not a number of seconds from 0\n",
    ("request", "x", "stop", "--wait", "-1"): "argument --wait: '-1' is not a number of seconds from 0\n",
    ("submit", "debug", "--dry-run", "--ranks", "0,x"): "argument --ranks: '0,x' must be ranks such as 0,511 or 0-3\n",
    ("submit", "debug", "--dry-run", "--ranks", "0", "--gpus-kind", "X"): "unknown kind of GPU 'X'; choose one of B200",
    ("submit", "debug", "--nodes", "x"): "job.nodes='x' must be a whole number",
    # options of other projects
    ("train", "small", "--deepspeed", "ds.json"): "--deepspeed: engine.name=deepspeed, and a setting for each key of the JSON; hpclm docs migrating",
    ("train", "small", "deepspeed_config=ds.json"): "unknown setting deepspeed_config: engine.name=deepspeed, and a setting for each key of "
    "the JSON; hpclm docs migrating lists other projects' options (command line)\n",
    ("submit", "small", "--max-tokens", "4096"): "batch.micro_size, in samples of model.context tokens",
    ("train", "small", "--adam-betas", "(0.9, 0.98)"): "as key=value: optim.betas=[0.9,0.98]; hpclm docs migrating",
    ("train", "small", "--report_to", "wandb"): "as key=value: log.sinks=[wandb]; hpclm docs migrating",
    ("train", "small", "--normalization", "LayerNorm"): "as key=value: model.norm=...; hpclm docs migrating",
    ("train", "small", "--expert-model-parallel-size", "2"): "as key=value: parallel.expert=2; hpclm docs migrating",
    ("submit", "small", "--moe-router-topk", "4"): "as key=value: model.experts_per_token=4; hpclm docs migrating",
    ("train", "small", "--moe-grouped-gemm"): "--moe-grouped-gemm: leave it out: hpclm does what is fastest, with the router in fp32",
    ("train", "small", "--moe-expert-capacity-factor", "1.5"): "leave it out: hpclm computes all tokens and drops none",
    ("train", "small", "--multi-latent-attention"): "--multi-latent-attention: hpclm does not have it",
    ("train", "small", "moe_intermediate_size=64"): "Did you mean 'model.expert_ffn'?",
    ("train", "small", "--load", "x"): "a run resumes from its newest good checkpoint by itself; hpclm docs migrating",
    ("train", "small", "--dtype", "bfloat16"): "as key=value: engine.precision=bf16; hpclm docs migrating",
    ("train", "small", "optimizer.type=Adam"): "Did you mean 'optim.name'?",
    ("train", "small", "train_micro_batch_size_per_gpu=4"): "Did you mean 'batch.micro_size'?",
    ("train", "small", "scheduler.params.warmup_num_steps=9"): "Did you mean 'optim.warmup'?",
    ("train", "small", "--no-such"): "unrecognized arguments: --no-such; hpclm docs migrating lists other projects' options\n",
    # values
    ("train", "debug", "job.modules=cuda/12.4"): "must be a list of text: 'job.modules=[cuda/12.4]'",
    ("train", "debug", "budget.tokens=1B"): "must be a whole number or null: 1000000000, or 1e9",
    ("train", "debug", "budget.samples=1.5k"): "must be a whole number or null: 1500, or 1.5e3",
    ("train", "debug", "out=runs/o8-${SLURM_ARRAY_TASK_ID}"): "there is neither a setting nor an environment variable SLURM_ARRAY_TASK_ID",
    ("train", "debug", "budget.steps=${STEPS}"): "environment variables are expanded in paths and in job.setup",
    # secrets, which no message repeats
    ("train", "debug", "WANDB_API_KEY=hunter2hunter2"): "WANDB_API_KEY is an environment variable, not a setting: export it where you",
    ("train", "debug", "job.env={WANDB_API_KEY:hunter2hunter2}"): "job.env has no space after the ':' of WANDB_API_KEY, which YAML needs (value not shown)",
    ("train", "debug", "job.env={WANDB_API_KEY: [hunter2hunter2]}"): "job.env.WANDB_API_KEY must be text",
    ("train", "debug", "job.options={comment: [hunter2hunter2]}"): "job.options",
    ("train", "debug", "job.options=hunter2hunter2"): "job.options must be a mapping",
    ("train", "debug", "job.env=WANDB_API_KEY:hunter2hunter2"): "job.env must be a mapping of names to text",
    ("train", "debug", "job.env={WANDB_API_KEY: hunter2hunter2"): "job.env is not a YAML value",
    ("train", "debug", "--wandb-api-key", "hunter2hunter2"): "export WANDB_API_KEY where you start or submit the run",
    ("train", "debug", "--hf-token=hunter2hunter2"): "unrecognized arguments: --hf-token;",
    # text that would steer a terminal
    ("train", "debug", "--a\x1b[31m\u202e"): r"unrecognized arguments: --a\x1b[31m\u202e",
    ("status", "--every\x1b"): r"unrecognized arguments: --every\x1b",
    ("data", "x\nerror: y"): r"invalid choice: 'x\nerror: y'",
    ("train-tokenizer", "--input", "a", "--output", "b", "--vocab-size", "\x1b"): "invalid",
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_answered_with_what_to_write(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = exit_code([*words])
    said = capsys.readouterr()
    assert code == (64 if said.err.startswith("error: ") and words[0] in cli.VERBS else 2)
    assert MISTAKES[words] in said.err and said.out == "", said.err
    assert not re.search("hunter2|[\x1b\u202e]", said.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["train", pytest.param("submit", marks=pytest.mark.whole)])
def test_every_option_of_the_page_on_other_projects_is_answered_with_what_the_page_says(verb, capsys):
    rows = migrating.replacements()
    assert len(rows) > 150
    for name, row in rows.items():
        if row.here == "options of hpclm submit":
            continue
        assert exit_code([verb, "small", f"--{name.replace('_', '-')}", row.example or "7"]) == 2
        said = capsys.readouterr().err
        meant = hints.of_another_project(name)
        assert (meant in said or said.count(f"{meant}=")) and "hpclm docs migrating" in said, name
        for setting in re.findall(
            r"\b(?:model|data|batch|budget|optim|scaler|parallel|engine|evaluate|checkpoint|log|job)\.\w+", row.here
        ):
            assert fields.type_of(setting) is not None, f"{name}: {row.here}"
        if re.fullmatch(r"\w+\.\w+=\S+", row.here):
            needs = ["model.experts=8"] * (row.here.partition("=")[0].removeprefix("model.") in experts.SETTINGS)
            config.load(None, ["model.heads=8", *needs, row.here])


def test_what_hpclm_train_says_of_options_of_submit_is_true():
    usages = {verb: cli.parser(verb).format_help() for verb in ("train", "submit")}
    options = {verb: set(re.findall(r"(?<![\w-])--[\w-]+", usage)) for verb, usage in usages.items()}
    assert set(parser.OF_SUBMIT) <= options["submit"] - options["train"]


@pytest.mark.parametrize("word", cli.ELSEWHERE)
def test_what_stands_for_a_word_that_is_no_verb_exists(word, capsys):
    assert word not in cli.VERBS
    said = cli.ELSEWHERE[word]
    for verb, option in re.findall(r"hpclm ([a-z][a-z-]*)(?: RUN| PRESET| …| FOLDER)* ?(--[a-z-]+)?", said):
        if verb in ("loads", "sends"):
            continue
        assert verb in (*cli.VERBS, "help") and (not option or option in cli.parser(verb).format_help()), said
    for setting in re.findall(r"\b(?:data|log|profile|checkpoint)\.\w+", said):
        assert fields.type_of(setting) is not None, said
    assert cli.main([word]) == 2 and said in capsys.readouterr().err


def test_a_prefix_of_a_dataset_may_be_typed_with_its_ending_and_that_is_what_the_answer_says(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert cli.main(["preprocess", "--input", "a.txt", "--output-prefix", "x", "--tokenizer", "bytes"]) == 0
    assert cli.main(["submit", "--dry-run", "small", "data.prefix=x_text_document.bin", "engine.device=cpu"]) == 64
    assert "x_text_document.bin is one of a dataset's files: leave off .bin" in capsys.readouterr().err


def test_a_run_directory_is_trained_where_it_is(tiny, tmp_path, monkeypatch, capsys):
    assert cli.main(["train", *tiny("run", "budget.steps=2")]) == 0
    (tmp_path / "run").rename(tmp_path / "moved $ {x}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "moved $ {x}", "budget.steps=3"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["moved $ {x}"]
    assert hpclm.open(tmp_path / "moved $ {x}").rows[-1]["step"] == 3


def test_python_takes_the_name_of_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="nothing-like-it does not exist: no settings file, run directory or preset has this name"
    ):
        hpclm.train("nothing-like-it")
    (tmp_path / "mine.yaml").write_text(
        "model: {vocab_size: 64, layers: 1, hidden: 32, heads: 4, context: 16}\nbudget: {steps: 1}\nbatch: {global_size: 2, micro_size: 1}\n"
        "data: {source: synthetic}\nengine: {device: cpu}\noptim: {warmup: 0}\nevaluate: {every: 0}\n"
    )
    assert hpclm.train("mine.yaml").rows[-1]["step"] == 1
