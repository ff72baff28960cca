import contextlib
import json

import pytest
import yaml

from hpclm import cli, config
from hpclm.commands.import_deepspeed import translated
from hpclm.errors import ConfigError

ZERO1 = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
    "steps_per_print": 50,
}
ZERO2 = {
    "train_batch_size": 16,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "initial_scale_power": 12,
        "hysteresis": 4,
        "min_loss_scale": 2,
    },
    "zero_optimization": {
        "stage": 2,
        "cpu_offload": True,
        "contiguous_gradients": True,
        "overlap_comm": False,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.0, "bias_correction": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "wall_clock_breakdown": False,
}
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local/nvme", "buffer_count": 5},
        "offload_param": {"device": "nvme", "nvme_path": "/local/nvme"},
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "gradient_acumulation_steps": 2,
}
PIPELINE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "pipeline": {"stages": 4, "partition": "type:transformer", "activation_checkpoint_interval": 2},
    "steps_per_print": 1000000000,
}


def imported(tmp_path, capsys, tree, *words):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(tree))
    code = cli.main(["import-deepspeed", str(file), *words])
    out, err = capsys.readouterr()
    return code, out, err


TRANSLATIONS = {
    "zero1": (
        ZERO1,
        """
batch: {global_size: 256, micro_size: 4}
engine:
  {name: deepspeed, precision: bf16, zero_stage: 1, gradients: fp32,
   extra: {zero_optimization.reduce_bucket_size: "500000000", zero_optimization.allgather_bucket_size: "500000000"}}
optim:
  {clip: 1.0, lr: 0.0006, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, decayed: all, schedule: cosine,
   schedule_length: 1000, warmup: 100, warmup_start: 0.0, min_lr: 0.00006}
""",
        ["8 with 8 data-parallel replicas", "steps_per_print: engine.extra adds to"],
    ),
    "zero2": (
        ZERO2,
        """
batch: {global_size: 16}
engine:
  {name: deepspeed, precision: fp16, zero_stage: 2, offload: optimizer,
   extra: {zero_optimization.contiguous_gradients: "true", zero_optimization.overlap_comm: "false",
           wall_clock_breakdown: "false"}}
scaler: {window: 500, initial: 4096.0, hysteresis: 4, minimum: 2}
optim:
  {clip: 0.0, name: cpu_adam, lr: 0.0001, weight_decay: 0.0, decayed: all, schedule: linear, schedule_length: 100,
   warmup: 10, min_lr: 0.0}
""",
        ["bias_correction", "warmup_type: hpclm's warm-up is linear"],
    ),
    "hugging-face": (
        HUGGING_FACE,
        """
engine:
  {name: deepspeed, zero_stage: 3, offload: parameters, offload_folder: /local/nvme,
   extra: {zero_optimization.offload_optimizer.buffer_count: "5", zero_optimization.sub_group_size: "1000000000"}}
optim: {name: cpu_adam, decayed: all, schedule: constant, min_lr: 0.0}
""",
        [
            "bf16.enabled, fp16.enabled, gradient_clipping",
            "model_save: it follows from the settings",
            "gradient_acumulation_steps: engine.extra adds to",
        ],
    ),
    "pipeline": (
        PIPELINE,
        """
batch: {global_size: 64, micro_size: 4}
engine: {name: deepspeed, zero_stage: 1, recompute: full, recompute_every: 2}
parallel: {pipeline: 4, partition: blocks}
optim: {clip: 0.0}
""",
        [],
    ),
}


@pytest.mark.parametrize("tree, expected, listed", TRANSLATIONS.values(), ids=TRANSLATIONS.keys())
def test_a_json_is_translated_into_equivalent_settings(tmp_path, capsys, tree, expected, listed):
    code, out, err = imported(tmp_path, capsys, tree)
    assert (code, err) == (0, "")
    assert flat(yaml.safe_load(out)) == pytest.approx(flat(yaml.safe_load(expected)))
    assert all(line in out for line in listed)
    file = tmp_path / "run.yaml"
    file.write_text(out)
    assert config.load(str(file), []).engine.name == "deepspeed"


def flat(tree):
    """Dotted name -> value, numbers in lists apart."""
    values = {f"{section}.{name}": value for section, names in tree.items() for name, value in names.items()}
    values |= values.pop("engine.extra", {})
    return values | dict(zip(("beta1", "beta2"), values.pop("optim.betas", ())))


@pytest.mark.parametrize(
    "change, words, message",
    [
        ({"train_batch_size": 250}, [], "train_batch_size=250 must be a multiple of"),
        ({}, ["--replicas", "4"], "x 4 replicas = 128"),
        ({"train_batch_size": None}, [], "train_batch_size is missing"),
        ({"train_batch_size": 250, "train_micro_batch_size_per_gpu": None}, ["--replicas", "8"], "8 replicas = 64"),
        ({"train_micro_batch_size_per_gpu": "4"}, [], "its factors must be whole numbers"),
        ({"fp16": {"enabled": True}}, [], "both true"),
        ({"bf16": {}, "fp16": {"enabled": True, "loss_scale": 128}}, [], "loss_scale is fixed"),
        ({"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 100000}}, [], "initial_scale_power=100000"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, [], "OneBitAdam"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], "decoupled"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [None, 1]}}},
            [],
            "optim.betas=[None, 1] must be a list of 2",
        ),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, [], "OneCycle"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "a"}}}, [], 'cos_min_ratio="a" must be'),
        ({"zero_optimization": {"stage": 4}}, [], "engine.zero_stage=4 must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}}, [], "does not support engine.zero_stage=2"),
        ({"pipeline": {"pipe_partitioned": True}}, [], "pipe_partitioned"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, [], "devices cpu and none"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, [], "needs nvme_path"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}}, [], "device=disk must be none"),
    ],
)
def test_contradictions_are_named_and_end_with_64(tmp_path, capsys, change, words, message):
    tree = {key: value for key, value in {**ZERO1, **change}.items() if value is not None}
    code, out, err = imported(tmp_path, capsys, tree, *words)
    assert code == 64 and message in err and out == ""


@pytest.mark.parametrize(
    "text, message", [("{", "is not JSON"), ("[]", "must hold an object"), (None, "does not exist")]
)
def test_a_file_that_is_no_json_is_refused(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    assert cli.main(["import-deepspeed", str(tmp_path / "ds.json")]) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1"])
def test_there_is_at_least_one_replica(tmp_path, capsys, count):
    code, _, err = imported(tmp_path, capsys, ZERO1, "--replicas", count)
    assert code == 64 and f"--replicas {count} must be at least 1" in err


STRANGE = [None, True, "x", "auto", -1, 0, 1e400, [], {}, ["a"], 10**400, [{}], {"a": {}}]


def changed(tree):
    """``tree`` with each of its keys, on every level, replaced by each strange value."""
    for key, value in tree.items():
        yield from ({**tree, key: strange} for strange in STRANGE)
        if isinstance(value, dict):
            yield from ({**tree, key: inner} for inner in changed(value))


@pytest.mark.parametrize("tree", [ZERO1, ZERO2, HUGGING_FACE, PIPELINE], ids=["zero1", "zero2", "hf", "pipeline"])
def test_no_value_of_any_key_raises(tree):
    cases = list(changed(tree))
    outcomes = {tuple(translated(case, replicas).options()) for case in cases for replicas in (None, 2)}
    assert len(cases) > 90 and len(outcomes) > 5
    for outcome in sorted(outcomes)[:: max(1, len(outcomes) // 40)]:  # each takes 30 ms
        with contextlib.suppress(ConfigError):
            config.load(None, list(outcome))


def test_keys_that_are_not_translated_for_one_reason_are_named_together(tmp_path, capsys):
    _, printed, _ = imported(tmp_path, capsys, {"steps_per_print": 1, "zero_allow_untested_optimizer": True})
    assert "#   steps_per_print, zero_allow_untested_optimizer: engine.extra adds to" in printed
