"""A run begins from the weights of another only where model and tokenizer are the same, as far as they are known."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.checkpoint.init_from import check_init_from
from hpclm.data.tokenizers import build_tokenizer
from tests.checkpoint.state import State

BYTES = {"data": {"tokenizer": build_tokenizer("bytes", []).fingerprint}}
LARGER = {"data": {"tokenizer": BYTES["data"]["tokenizer"] | {"size": 300}}}
MODEL = {"model": {"layers": 2}}


@pytest.mark.parametrize(
    "now, told",
    [
        (MODEL | BYTES, []),
        (MODEL, []),  # its data are unknown
        (MODEL | LARGER, ["they differ in size 257 against 300"]),
        ({"model": {"layers": 3}} | BYTES, ["model.layers was 2 and is now 3"]),
        ({"model": {"layers": 3}} | LARGER, ["they differ in size 257 against 300", "model.layers was 2 and is now 3"]),
    ],
    ids=["alike", "unknown", "tokenizer", "model", "both"],
)
def test_weights_of_another_model_or_tokenizer_are_refused_by_name(now, told, tmp_path):
    CheckpointStore(tmp_path / "old/checkpoints", Retention(), MODEL | BYTES).save(State(), Progress(1))
    try:
        check_init_from(str(tmp_path / "old"), tmp_path / "new/checkpoints", now)
        problems = []
    except ConfigError as error:
        problems = error.problems[1:]
    assert len(problems) == len(told) and all(
        problem.endswith(end) for problem, end in zip(problems, told, strict=True)
    )


def test_a_run_that_has_checkpoints_of_its_own_needs_no_others(tmp_path):
    with pytest.raises(ConfigError, match="gone is neither a run directory with checkpoints nor a checkpoint"):
        check_init_from(str(tmp_path / "gone"), tmp_path / "new/checkpoints", MODEL)
    CheckpointStore(tmp_path / "new/checkpoints", Retention(), MODEL).save(State(), Progress(1))
    check_init_from(str(tmp_path / "gone"), tmp_path / "new/checkpoints", MODEL)
