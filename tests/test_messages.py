"""Mistakes as people type them, and the words of the answer that put them right."""

import re

import pytest

import hpclm
from hpclm import cli, config
from hpclm.base import shipped
from hpclm.base.errors import ConfigError
from hpclm.config import elsewhere, fields
from tests.rundir.test_runs import make
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
    ("planner", "debug", "--step", "3"): "unrecognized arguments: --step; --step: did you mean budget.steps?\n",
    ("train", "debug", "--steps", "3"): "key=value: budget.steps=3",
    ("train", "small", "--data", "my text.txt"): "as key=value: data='my text.txt'",
    ("submit", "small", "--tokenizer", "t.json"): "as key=value: tokenizer=t.json",
    ("train", "small", "data=x.jsonl", "--json-keys", "content"): "--json-keys: it is an option of hpclm preprocess; data= takes the dataset",
    ("train", "small", "data=x.txt", "--format=jsonl"): "--format: it is an option of hpclm preprocess; data= takes the dataset",
    ("evaluate", "x", "--input", "a.txt"): "did you mean --text a.txt?",
    ("generate", "x", "--input", "a.txt"): "did you mean --prompts a.txt?",
    ("evaluate", "x", "--account", "me"): "unrecognized arguments: --account; --account: it is an option of hpclm submit\n",
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
    ("submit", "--sbatch", "hetjob"): "one job trains a run, on nodes of one kind",
    # verbs
    ("trian", "debug"): "Did you mean 'train'?",
    ("xyzzy",): "unknown command 'xyzzy'; choose one of",
    ("ls",): "hpclm ls does not exist: use hpclm status\n",
    ("preflight",): "hpclm preflight does not exist: every run begins with it; hpclm doctor checks a machine without a run\n",
    ("Eval", "runs/x"): "hpclm Eval does not exist: use hpclm evaluate RUN\n",
    ("small", "optim.lr=1"): "small is not a command; to train with it: hpclm train small\n",
    ("optim.lr=1",): "optim.lr=1 is not a command; to train with it: hpclm train optim.lr=1\n",
    ("--dry-run", "x"): "the command comes first: hpclm VERB --dry-run\n",
    ("--dry-run", "submit", "small"): "the command comes first: hpclm submit --dry-run\n",
    ("data", "verfy", "x"): "invalid choice: 'verfy' (choose from", ("data", "vrify", "x"): ". Did you mean 'verify'?\n",
    ("convert", "a", "b", "--dtype", "bf61"): ". Did you mean 'bf16'?\n",
    # options of other verbs
    ("train", "small", "--nodes", "2"): "--nodes: it is an option of hpclm submit\n",
    ("train", "--config", "small"): "the settings file is given by itself: hpclm train small\n",
    ("train", "--fp16"): "settings are written without dashes, as key=value: engine.precision=fp16; hpclm docs migrating",
    # values that an option cannot have
    ("cancel", "x", "--wait", "nan"): "argument --wait: 'nan' is not a number of seconds from 0\n",
    ("request", "x", "stop", "--wait", "-1"): "argument --wait: '-1' is not a number of seconds from 0\n",
    ("submit", "debug", "--dry-run", "--ranks", "0,x"): "argument --ranks: '0,x' must be ranks such as 0,511 or 0-3\n",
    ("submit", "debug", "--dry-run", "--ranks", "0", "--gpus-kind", "X"): "--gpus-kind 'X' is an unknown kind of GPU; choose one of B200",
    ("submit", "debug", "--nodes", "x"): "job.nodes='x' must be a whole number",
    ("data", "inspect", "x", "--tokenizer-files", "t.json"): "--tokenizer-files goes with --tokenizer\n",
    ("data", "inspect", "x", "--documents", "-1"): "argument --documents: '-1' is not a whole number of at least 0\n",
    ("data", "verify", "x", "--vocab-size", "1e3"): "argument --vocab-size: '1e3' is not a whole number of at least 0\n",
    ("data", "verify", "x", "--vocab-size", "1" * 19): f"argument --vocab-size: '{'1' * 19}' is not a whole number of at least 0\n",
    ("evaluate", "x", "--samples", "0"): "argument --samples: '0' is not a whole number of at least 1\n",
    ("evaluate", "x", "--text", "a", "--tokens", "0"): "argument --tokens: '0' is not a whole number of at least 1\n",
    ("evaluate", "x", "--tasks", "a", "--shots", "-1"): "argument --shots: '-1' is not a whole number of at least 0\n",
    ("evaluate", "x", "--tasks", "a", "--shots", "0"): "x is not a run directory: it does not exist",
    ("evaluate", "x", "--tasks", "a", "--batch", "0"): "argument --batch: '0' is not a whole number of at least 1\n",
    ("evaluate", "x", "--text", "a", "--samples", "3"): "--samples is for --part and --tasks; use --tokens\n",
    ("evaluate", "x", "--data", "a", "--samples", "3"): "--samples is for --part and --tasks; use --tokens\n",
    ("evaluate", "x", "--tokens", "3"): "--tokens is for --text and --data; use --samples\n",
    ("evaluate", "x", "--format", "jsonl"): "--format is for --text\n",
    ("evaluate", "x", "--shots", "1"): "--tasks-path, --shots and --batch are for --tasks\n",
    ("evaluate", "x", "--batch", "1"): "--tasks-path, --shots and --batch are for --tasks\n",
    ("evaluate", "x", "--tasks-path", "."): "--tasks-path, --shots and --batch are for --tasks\n",
    ("evaluate", "x", "--tasks", "a,,b"): "--tasks must be names, separated by commas\n",
    ("evaluate", "x", "--submit"): "--submit is for --follow\n",
    ("evaluate", "x", "--follow"): "--follow is for --tasks, without --json\n",
    ("evaluate", "x", "--follow", "--tasks", "a", "--json"): "--follow is for --tasks, without --json\n",
    ("generate", "x"): "give --prompt TEXT, --prompts FILE, --interactive or --chat\n",
    ("generate", "x", "--prompts", "p", "--prompt", "a"): "--prompts goes with neither --prompt nor --interactive\n",
    ("generate", "x", "--prompts", "p", "--interactive"): "--prompts goes with neither --prompt nor --interactive\n",
    ("generate", "x", "--prompt", "a", "--format", "lines"): "--format is for --prompts\n",
    ("generate", "x", "--prompt", "a", "--batch", "0"): "argument --batch: '0' is not a whole number of at least 1\n",
    ("generate", "x", "--prompt", "a", "--top-k", "-1"): "argument --top-k/--top: '-1' is not a whole number of at least 0\n",
    ("convert", "x", "y", "--shard-gb", "0"): "argument --shard-gb: '0' is not a number above 0\n",
    ("logs", "x", "--lines", "-1"): "argument --lines: '-1' is not a whole number of at least 0\n",
    ("logs", "x", "--rank", "-1"): "argument --rank: '-1' is not a whole number of at least 0\n",
    ("logs", "x", "--grep", "("): "argument --grep: '(' is not a regular expression: ",
    ("planner", "a.yaml", "b.yaml", "--suggest"): "error: give one settings file with --suggest, not 2: a.yaml, b.yaml\n",
    ("preprocess", "--input", "a", "--output-prefix", "b", "--tokenizer", "bytes", "--context", "9"): (
        "--chat-template, --context and --too-long go with --chat\n"
    ),
    ("preprocess", "--input", "a", "--output-prefix", "b", "--tokenizer", "bytes", "--workers", "0"): "argument --workers: '0' is not a whole number of at least 1\n",
    ("preprocess", "--input", "a", "--output-prefix", "b", "--tokenizer", "bytes", "--longest-line", "0"): (
        "argument --longest-line: '0' is not a whole number of at least 1\n"
    ),
    ("submit", "debug", "--ranks", "0"): "--ranks is for --dry-run\n",
    ("submit", "debug", "--pdb"): "--pdb is for --debug\n",
    **{
        ("submit", "debug", "--from", "3", *more): "--from is for a single run that is not running; it excludes --debug, --sweep and --again\n"
        for more in (("--debug",), ("--again",), ("--sweep", "seed=1,2"))
    },
    ("top", "--every", "0.05"): "argument --every: '0.05' is not between 0.1 and 86400 seconds\n",
    ("top", "--every", "86401"): "argument --every: '86401' is not between 0.1 and 86400 seconds\n",
    ("train", "debug", "--from", "3", "--sweep", "seed=1,2"): "--from is for a single run, without --sweep\n",
    ("train", "debug", "--from", "-3"): "argument --from: '-3' is not a whole number of at least 0\n",
    ("train", "debug", "--parallel", "2"): "--parallel is for --sweep\n",
    ("train", "debug", "--sweep", "seed=1,2", "--parallel", "0"): "argument --parallel: '0' is not a whole number of at least 1\n",
    ("train", "debug", "job.nodes=2"): "error: job.nodes would have no effect: hpclm train does not start jobs; use hpclm submit\n",
    ("train", "debug", "--sweep", "job.nodes=1,2"): "error: job.nodes would have no effect: hpclm train does not start jobs",
    ("train-tokenizer", "--input", "a", "--output", "b.json", "--sentences", "0"): "argument --sentences: '0' is not a whole number of at least 1\n",
    ("train-tokenizer", "--input", "a", "--output", "b.json", "--longest-line", "0"): "argument --longest-line: '0' is not a whole number of at least 1\n",
    ("cancel", "x", "--wait", "soon"): "argument --wait: 'soon' is not a number of seconds from 0\n",
    ("cancel", "x", "--wait", "inf"): "argument --wait: 'inf' is not a number of seconds from 0\n",
    # options of other projects
    ("train", "small", "--deepspeed", "ds.json"): "--deepspeed: engine.name=deepspeed, and a setting for each key of the JSON; hpclm docs migrating",
    ("train", "small", "deepspeed_config=ds.json"): "unknown setting deepspeed_config: engine.name=deepspeed, and a setting for each key of "
    "the JSON; hpclm docs migrating lists other projects' options (command line)\n",
    ("submit", "small", "--max-tokens", "4096"): "batch.micro_size, in samples of model.context tokens",
    ("train", "small", "--adam-betas", "(0.9, 0.98)"): "as key=value: optim.betas='[0.9,0.98]'; hpclm docs migrating",
    ("train", "small", "--report_to", "wandb"): "as key=value: log.sinks='[wandb]'; hpclm docs migrating",
    ("train", "small", "--normalization", "LayerNorm"): "as key=value: model.norm=layernorm; hpclm docs migrating",
    ("train", "small", "--expert-model-parallel-size", "2"): "as key=value: parallel.expert=2; hpclm docs migrating",
    ("submit", "small", "--moe-router-topk", "4"): "as key=value: model.experts.per_token=4; hpclm docs migrating",
    ("train", "small", "--moe-grouped-gemm"): "--moe-grouped-gemm: leave it out: hpclm does what is fastest, with the router in fp32",
    ("train", "small", "--moe-expert-capacity-factor", "1.5"): "leave it out: hpclm computes all tokens and drops none",
    ("train", "small", "--mtp-num-layers"): "--mtp-num-layers: hpclm does not have it",
    ("train", "small", "moe_intermediate_size=64"): "moe_intermediate_size: it is model.experts.ffn here",
    ("train", "small", "--load", "x"): "--load: leave it out: a run resumes from its newest good checkpoint by itself; hpclm docs migrating",
    ("train", "small", "--dtype", "torch.float16"): "as key=value: engine.precision=fp16; hpclm docs migrating",
    ("train", "small", "--dtype", "bfloat16"): "as key=value: engine.precision=bf16; hpclm docs migrating",
    ("train", "small", "optimizer.type=Adam"): "optimizer.type: it is optim.name here",
    ("train", "small", "train_micro_batch_size_per_gpu=4"): "train_micro_batch_size_per_gpu: it is batch.micro_size here",
    ("train", "small", "scheduler.params.warmup_num_steps=9"): "warmup_num_steps: it is optim.warmup here",
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


ROWS = [(names, row) for table in elsewhere.tables()["projects"].values() for names, row in table.items()]
SECTIONS = r"\b(?:model|data|batch|budget|optim|scaler|parallel|engine|evaluate|checkpoint|log|job|cluster)\.\w+"


def test_every_name_of_another_project_leads_to_settings_that_exist():
    assert len(ROWS) > 300
    texts = [text for _, row in ROWS for text in (row.values() if isinstance(row, dict) else [row])]
    texts += [row for rows in elsewhere.tables()["defaults"].values() for row in rows]
    for text in texts:
        assert all(fields.type_of(setting) is not None for setting in re.findall(SECTIONS, text)), text
    fixed = {word for text in texts if "`" not in text for word in text.split() if re.fullmatch(r"[\w.]+=.+", word)}
    assert len(fixed) > 60
    while fixed:
        several = {word.partition("=")[0]: word for word in sorted(fixed)}.values()
        try:
            config.load(None, [*several])
        except ConfigError as error:  # some need another setting
            assert not [problem for problem in error.problems if re.search("must be (?!false)|unknown", problem)]
        fixed -= {*several}


@pytest.mark.parametrize("verb", ["train", pytest.param("submit", marks=pytest.mark.whole)])
def test_every_option_of_another_project_is_answered_with_what_the_table_says(verb, capsys):
    for name in sorted({name for names, _ in ROWS for name in names.split()}):
        option = f"--{elsewhere.normal(name).replace('_', '-')}"
        if option in ("--hostfile", "--include", "--exclude", "--steps"):
            continue
        assert exit_code([verb, "small", option, "7"]) == 2
        said = capsys.readouterr().err
        found = elsewhere.answers(name, ["7"])
        for answer in found:
            jobs = [setting for setting in answer.settings if setting.startswith("job.")]
            assert jobs or (answer.text in said and elsewhere.SEE in said), name
            assert not jobs or f"--{jobs[0][4:].replace('=', ' ')}" in said, name


def test_the_page_on_other_projects_has_the_tables():
    page = shipped.pages()["migrating"].read_text()
    assert elsewhere.page(page) == page, "python tools/migrating.py writes it"
    assert all(f"## {project}\n" in page for project in elsewhere.tables()["projects"])


def test_the_options_that_commands_lack_are_answered_with_options_that_exist():
    rows = [(names, *row) for names, table in elsewhere.tables()["options"].items() for row in table.items()]
    for names, options, answer in rows:
        for verb in names.split():
            having = cli.parser(verb).options()
            assert not {*options.split()} & {*having}, (verb, options)
            assert not answer.startswith("--") or answer in having or verb == "resume", (verb, answer)


WORDS = [word for words in elsewhere.tables()["commands"] for word in words.split()]


@pytest.mark.parametrize("word", WORDS)
def test_what_stands_for_a_word_that_is_no_verb_exists(word, capsys):
    assert word not in cli.VERBS
    said = elsewhere.command_meant(word)
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


@pytest.mark.parametrize("name", ["mine", "runs/mine"])
def test_the_name_of_a_run_is_no_verb_and_the_answer_has_those_that_take_it(name, tmp_path, monkeypatch, capsys):
    make(tmp_path / "runs/mine")
    monkeypatch.chdir(tmp_path)
    assert cli.main([name]) == 2
    verbs = f"hpclm status {name} shows it, hpclm train {name} continues it"
    assert capsys.readouterr().err == f"error: {name} is a run, not a command: {verbs}\n"


def test_a_request_or_an_end_is_waited_for_as_long_as_the_help_says():
    for verb, words in (("cancel", ["a"]), ("request", ["a", "stop"])):
        assert cli.parser(verb).parse_args(words).wait == 300
        assert cli.parser(verb).parse_args([*words, "--wait", "0"]).wait == 0


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_is_told(option, capsys):
    assert cli.main([option]) == 0 and capsys.readouterr().out == f"hpclm {hpclm.__version__}\n"


def test_help_lists_the_verbs_or_the_options_of_one(capsys):
    assert cli.main(["help"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^.{{8}}{verb} +\S", listed, re.M) for verb in cli.VERBS)
    for words in (["help", "top"], ["top", "--help"]):
        assert exit_code(words) == 0 and capsys.readouterr().out.startswith("usage: hpclm top ")


def test_several_runs_cannot_go_back_to_one_step(tmp_path, monkeypatch, capsys):
    for name in "ab":
        make(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    assert exit_code(["resume", "a", "b", "--from", "3"]) == 2
    assert "--from takes one run: several runs have different steps" in capsys.readouterr().err


def test_python_takes_the_name_of_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="nothing-like-it does not exist: no settings file, run directory or preset has this name"
    ):
        hpclm.train("nothing-like-it")
    (tmp_path / "mine.yaml").write_text(
        "model: {vocab_size: 64, layers: 1, hidden: 32, context: 16, attention: {heads: 4}}\nbudget: {steps: 1}\nbatch: {global_size: 2, micro_size: 1}\n"
        "data: {source: synthetic}\nengine: {device: cpu}\noptim: {warmup: 0}\nevaluate: {every: 0}\n"
    )
    assert hpclm.train("mine.yaml").rows[-1]["step"] == 1
