"""The mean of checkpoints is a run like any other."""

import pytest
import torch

from hpclm import cli
from hpclm.checkpoint import CheckpointStore, Progress, Retention, directory
from hpclm.checkpoint.tensors import CheckpointTensors
from tests.interop import made
from tests.networks import NETWORKS

average = cli.function("average")


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 7, 8 and 9, whose weights are 1, 2 and 4 times the drawn ones."""
    weights = made.run(tmp_path / "run", NETWORKS["learned"], source="indexed", tokenizer="bytes")
    drawn = made.Drawn(made.load(tmp_path / "run/config.yaml").model)
    store = CheckpointStore(tmp_path / "run/checkpoints", Retention(), {})
    for step, factor in ((8, 2), (9, 4)):
        drawn.weights = {name: factor * weight for name, weight in weights.items()}
        store.save(drawn, Progress(step=step))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "words, factor", [(["--last", "2"], 3), (["--last", "3"], 7 / 3), (["--steps", "9", "7", "9"], 2.5)]
)
def test_it_is_the_mean_of_their_weights(words, factor, run, tmp_path, capsys):
    assert average([str(run), str(tmp_path / "mean"), *words]) == 0
    assert "the mean of the weights of steps" in capsys.readouterr().out
    tokens = torch.arange(24)[None]
    drawn = made.run(tmp_path / "expected", NETWORKS["learned"])
    with CheckpointTensors(*directory.newest(tmp_path / "mean/checkpoints")) as found:
        for name, weight in drawn.items():
            assert torch.allclose(found.whole(f"model.{name}"), factor * weight, rtol=1e-6, atol=0), name
    assert made.logits(tmp_path / "mean", tokens).isfinite().all()
    assert cli.main(["generate", str(tmp_path / "mean"), "--prompt", "so", "--tokens", "3"]) == 0


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--last", "4"], 64, "run has only 3 checkpoints; its checkpoints: 7, 8, 9"),
        (["--steps", "7", "10"], 64, "run has no checkpoint of step 10; its checkpoints: 7, 8, 9"),
        (["--steps", "7"], 64, "its checkpoints: 7, 8, 9"),
        (["--last", "1"], 2, "--last"),
        ([], 2, "give either --last K or --steps"),
    ],
)
def test_what_cannot_be_averaged_is_refused_with_what_there_is(words, code, said, run, tmp_path, capsys):
    try:
        ended = cli.main(["average", str(run), str(tmp_path / "mean"), *words])
    except SystemExit as error:  # of a command line that cannot be parsed
        ended = error.code
    assert ended == code and said in capsys.readouterr().err and not (tmp_path / "mean").exists()


def test_a_corrupt_checkpoint_is_named_and_nothing_is_written(run, tmp_path, capsys):
    file = next((run / "checkpoints/step-00000008").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert cli.main(["average", str(run), str(tmp_path / "mean"), "--last", "2"]) != 0
    assert "step-00000008" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
