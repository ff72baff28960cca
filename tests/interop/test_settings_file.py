"""Scripts of Megatron and configurations of nanoGPT become settings files, without being run."""

import pytest

from hpclm import cli, config
from hpclm.config import elsewhere
from hpclm.interop import shell

CORE = """#!/bin/bash
# Runs the "345M" model; don't edit
GPUS=8
CHECKPOINT=$1
DATA="0.3 data/a_text_document 0.7 data/b_text_document"
MODEL_ARGS=(
    --num-layers 24   # deep
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length ${SEQ:-2048}
    --max-position-embeddings 4096
    --swiglu
    --position-embedding-type rope
    --no-position-embedding
    --normalization RMSNorm
    --mtp-num-layers 1
    --attention-backend auto
)
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 64 --rampup-batch-size 16 16 5859375 \\
  --train-samples 500000 --adam-beta2 0.95 --bf16 --lr 6.0e-5 --lr-decay-style cosine --lr-warmup-fraction .001"
TRAINING_ARGS+=" --num-workers $((GPUS * 4))"
if [ -n "$WIDE" ]; then
    TP=4
fi
cat > ds.json <<EOT
{"it's": "not a command --foo 3"}
EOT
touch ran
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS} --tensor-model-parallel-size $TP $MORE \\
    --use-distributed-optimizer --pipeline-model-parallel-size 2 --save $CHECKPOINT --data-path $DATA --split 949,50,1 \\
    --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file='m.txt' --unheard-of 3 2>&1 | tee log.txt
"""
BIGSCIENCE = """
N_GPUS=1; DATA_PATH=data/my_text_document
ARGS=" \\
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 512 --max-position-embeddings 512 \\
    --fp16 --lr 1.0e-4 --train-iters 1_000 --lr-warmup-iters 10 --lr-decay-iters 900 --micro-batch-size 4 --global-batch-size 16 \\
    --clip-grad 1.0 --partition-activations --data-path $DATA_PATH"
export LAUNCHER="python -m torch.distributed.run --nproc_per_node $N_GPUS"
export CMD="`pwd`/pretrain_gpt.py $ARGS"
srun --jobid 1 bash -c '$LAUNCHER $CMD'
"""
NANOGPT = """
# a miniature model
out_dir = 'out-char'
batch_size = 64
gradient_accumulation_steps = 1 * 2
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
max_iters = 5000
lr_decay_iters = max_iters
beta2 = 0.99
wandb_run_name = 'x' + str(open('ran', 'w'))
"""


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """The settings file for a script, and the exit code; nothing of the script has run."""
    monkeypatch.chdir(tmp_path)

    def written(text, name="run.sh"):
        (tmp_path / name).write_bytes(text.encode())
        code = cli.main(["config", "--from-megatron", name])
        assert not (tmp_path / "ran").exists()
        return capsys.readouterr().out, code

    return written


def load(text, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    return config.load(tmp_path / "mine.yaml")


def test_a_script_becomes_settings_with_the_option_beside_each_and_unknown_ones_first(written, tmp_path):
    text, code = written(CORE)
    assert code == 64
    head, _, rest = text.partition("\nmodel:\n")
    for line in (
        "--tensor-model-parallel-size $TP: the value of parallel.tensor is not known before the script runs",
        "$MORE: its value is not known before the script runs",
        "--num-workers $((GPUS * 4)): the value of data.workers is not known before the script runs",
        "--save $1: the value of out is not known before the script runs",
        "--unheard-of 3: hpclm does not know this option",
        "--mtp-num-layers 1: hpclm does not have it",
        "--tokenizer gpt2 --tokenizer-files v.json m.txt",
    ):
        assert line in head, line
    for line in (
        "  layers: 24  # --num-layers 24\n",
        "  context: 2048  # --seq-length 2048\n",
        "  ffn: 2688  # Megatron's width of a gated MLP\n",
        "  dropout: 0.1  # Megatron's default\n",
        "  betas: [0.9,0.95]  # --adam-beta2 0.95\n",
        "#   --max-position-embeddings 4096: model.context is set by --seq-length 2048\n",
        "#   --attention-backend auto: changes no results\n",
    ):
        assert line in rest, line
    assert "--foo" not in text and "nproc" not in text
    run = load(text, tmp_path)
    assert (run.model.positions, run.model.norm, run.model.activation) == ("rope", "rmsnorm", "swiglu")
    assert run.data.blend == ["0.3", "data/a_text_document", "0.7", "data/b_text_document"]
    assert (run.batch.rampup, run.budget.samples, run.engine.precision) == ((16, 16, 5859375), 500000, "bf16")
    assert (run.optim.min_lr, run.optim.weight_decay, run.optim.warmup_start) == (0.0, 0.01, 0.0)
    assert (run.parallel.pipeline, run.engine.name, run.engine.zero_stage) == (2, "deepspeed", 1)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_command_inside_variables_and_quotes_is_found_and_complete(written, tmp_path, end):
    text, code = written(BIGSCIENCE.replace("\n", end))
    assert code == 0 and "Not translated" not in text
    run = load(text, tmp_path)
    assert (run.model.hidden, run.budget.steps, run.optim.warmup, run.optim.schedule_length) == (64, 1000, 10, 900)
    assert (run.optim.schedule, run.engine.precision, run.scaler.initial) == ("linear", "fp16", 2.0**32)
    assert run.data.prefix == "data/my_text_document"


def test_a_configuration_of_nanogpt_becomes_settings(written, tmp_path):
    text, code = written(NANOGPT, "train_char.py")
    assert code == 0 and "global_size: 128  # batch_size 64 x gradient_accumulation_steps 2\n" in text
    run = load(text, tmp_path)
    assert (run.model.dropout, run.model.attention.dropout, run.model.bias, run.model.activation) == (
        0.2,
        0.2,
        False,
        "gelu",
    )
    assert (run.optim.betas, run.optim.schedule_length, run.budget.steps) == ((0.9, 0.99), 5000, 5000)


def test_options_may_be_given_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "--from-megatron", "--num-layers", "3", "--lr", "1e-4", "--lr", "2e-4"]) == 0
    said = capsys.readouterr().out
    assert "layers: 3  # --num-layers 3\n" in said and "lr: 2e-4  # --lr 2e-4\n" in said
    assert cli.main(["config", "--from-megatron", "--no-such-thing --num-layers 3"]) == 64
    assert "--no-such-thing: hpclm does not know this option\n" in capsys.readouterr().out
    for words, says in {
        ("nosuch.sh",): "nosuch.sh is neither a script nor options of Megatron",
        ("empty.sh",): "empty.sh has no options of Megatron",
        ("wrong.py",): "wrong.py is not Python",
    }.items():
        (tmp_path / "empty.sh").write_text("echo 'a\n")
        (tmp_path / "wrong.py").write_text("a = (\n")
        assert cli.main(["config", "--from-megatron", *words]) == 64
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("experts, engine", [("", "deepspeed"), (" --expert-model-parallel-size 4", "pipelining")])
def test_the_engine_supports_the_pipeline_the_sharded_optimizer_and_divided_experts(
    experts, engine, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    layout = "--num-layers 8 --num-experts 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"
    cli.main(["config", "--from-megatron", layout + experts])
    assert f"name: {engine}  # has parallel.pipeline with engine.zero_stage=1\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--rotary-base 5000", "--moe-router-topk 1"])
def test_an_option_without_effect_does_not_become_a_setting_that_the_run_refuses(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "--from-megatron", f"--num-layers 3 {option}"]) == 0
    said = capsys.readouterr().out
    assert f"#   {option}: model." in said and "has no effect with model." in said
    assert load(said, tmp_path).model.layers == 3


@pytest.mark.parametrize(
    "script, words",
    {
        "A=1\nx.py --a $A ${A} \"$A 2\" 'b c'": ["1", "1", "1 2", "b c"],
        "A='1 2'\nx.py --a $A \"$A\"": ["1", "2", "1 2"],
        'A=(1 "2 3")\nA+=(4)\nx.py --a ${A[@]}': ["1", "2", "3", "4"],
        'A=(1 "2 3")\nx.py --a "${A[@]}"': ["1", "2 3"],
        "for A in 1 2; do\nB=$A\ndone\nx.py --a $B": ["$B"],
        "A=`date`\nx.py --a $A": ["`date`"],
        "A=1; A=2; x.py --a=$A # --b": ["2"],
        "export A=1 B=2\nx.py --a $A$B || exit": ["12"],
        "A=1 B=2 x.py --a 3": ["3"],
        'A=${A:-"${PWD}/b-$(date)"}\nx.py --a 4': ["4"],
        "A=($(ls 'b c') 1)\nx.py --a ${A[1]} # it's": ["${A[1]}"],
        'A=\'it"s\'\nx.py --a "$A 1" $A': ['it"s 1', 'it"s'],
    }.items(),
)
def test_literal_assignments_are_substituted(script, words):
    (flag,) = shell.flags(script)
    assert flag.name == "--a" and list(flag.values) == words


@pytest.mark.parametrize("project", elsewhere.tables()["defaults"])
def test_the_defaults_of_other_projects_are_settings_that_differ(project):
    for row in elsewhere.tables()["defaults"][project]:
        key, _, value = row.partition("=")
        ours = dict(config.fields.flattened(config.compose.tree(config.RunConfig())))[key]
        assert project == elsewhere.NANOGPT or config.fields.as_yaml(ours).replace(" ", "") != value, row
