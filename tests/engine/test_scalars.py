"""What an engine refuses of a checkpoint's scalars, by one table."""

import json
import math

import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.checkpoint.manifest import NAME, digest_of
from tests.engine.test_native import GPT2, engine_of, settings, train
from tests.states import Kept, state

MODEL = {**GPT2, "layers": 2, "experts.count": 4, "experts.per_token": 2, "experts.balance_step": 0.1}
WINDOW = [[1.0, None]] * 128
LOAD = [[0.5, 1.5, 2.0, 0.0]] * 2
SCALE = {"value": 8.0, "hysteresis": 1, "good_steps": 5}
ROWS = {
    "optimizer_steps": (3, ["3", 3.0, -1, math.nan, True, None, [3]]),
    "loss_scale": (
        SCALE,
        [
            "8",
            8.0,
            None,
            {"value": 8.0},
            *({**SCALE, "value": value} for value in (math.nan, "8", None)),
            {**SCALE, "good_steps": True},
        ],
    ),
    "guard": (
        {"name": "skip_step", "window": WINDOW},
        [
            "x",
            None,
            {"name": "skip_step"},
            {"name": "other", "window": WINDOW},
            {"name": [], "window": WINDOW},
            *(
                {"name": "skip_step", "window": w}
                for w in (WINDOW[1:], [[1.0]] * 128, [[math.nan, 1.0]] * 128, [["1", 1.0]] * 128, None)
            ),
        ],
    ),
    "expert_load": (
        LOAD,
        [
            "x",
            None,
            1.0,
            [],
            LOAD[:1],
            [row[1:] for row in LOAD],
            *([[*LOAD[0][:3], load], LOAD[1]] for load in (math.nan, math.inf, "1", None, [1.0])),
        ],
    ),
}
GOOD = {name: good for name, (good, _) in ROWS.items()}


def begun(dtype=torch.float16):
    return engine_of(settings(MODEL, optim=dict(guard="skip_step", lr=1e-3)), dtype)


def loads(engine, given):
    engine.load(Kept(state(engine)), given)


@pytest.mark.parametrize("name", ROWS)
def test_a_scalar_that_no_run_saves_is_refused_by_name_before_anything_is_loaded(name):
    engine = begun()
    untrained = {**GOOD, "optimizer_steps": 0}
    loads(engine, untrained)
    assert engine.router_state.load.tolist() == LOAD and engine.scale.value == 8.0
    assert engine.scalars() == untrained
    wrong = [{**untrained, name: bad} for bad in ROWS[name][1]] + [
        {key: untrained[key] for key in untrained if key != name}
    ]
    before = state(engine)
    for given in wrong:
        with pytest.raises(ConfigError, match=rf"^scalars\.{name} is "):
            engine.load(Kept({key: tensor + 1 for key, tensor in before.items()}), given)
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(engine).items())
    assert engine.scalars() == untrained


def test_imported_weights_have_no_other_scalars_than_steps():
    engine = begun()
    loads(engine, {"optimizer_steps": 0})
    assert engine.scalars()["expert_load"] == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["state"].update(step=None),
        lambda entry: entry["group"].update(total=math.nan),
        lambda entry: entry["state"]["decayed"].pop(),
        lambda entry: entry["state"].update(decayed=[1.0, "complex64", True]),
        lambda entry: entry["state"].update(decayed=["1.0", "float32", True]),
        lambda entry: entry.update(state=[1, 2]),
        lambda entry: entry["state"].update(decayed=[1.0, "float32"]),
        lambda entry: entry.pop("group"),
    ],
)
def test_numbers_of_a_users_optimizer_that_no_run_saves_are_refused(change):
    engine, _ = train(settings(GPT2, optim=dict(name="tests.optim.users:Counting", lr=1e-3)), 1)
    given = json.loads(json.dumps(engine.scalars()))
    loads(engine, given)
    change(given["optimizer_numbers"]["tokens.weight"])
    with pytest.raises(ConfigError, match=r"^scalars\.optimizer_numbers is \{"):
        loads(engine, given)


def test_a_run_does_not_resume_from_such_a_manifest_and_names_file_and_key(tiny, tmp_path, capsys):
    words = ["train", *tiny("run", "model.experts.count=4", "model.experts.balance_step=0.1")]
    assert cli.main([*words, "stop_at=4"]) == 0
    path = tmp_path / "run/checkpoints/step-00000004" / NAME
    content = json.loads(path.read_text())
    del content["blake2b"], content["scalars"]["expert_load"]
    path.write_text(json.dumps(content | {"blake2b": digest_of(content)}))
    assert cli.main(words) == 64
    assert f"{path}: scalars.expert_load is missing" in capsys.readouterr().err
