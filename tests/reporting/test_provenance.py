"""Where a run came from, in words."""

from hpclm.reporting import history, provenance
from hpclm.rundir import events
from tests.events import rewrite
from tests.reporting import made


def test_the_facts_of_a_run_are_its_size_its_data_its_code_and_its_hardware(tmp_path):
    out = made.trained(tmp_path / "a", [3.0, 2.0])
    row = dict(
        hosts=[f"n{number}" for number in range(6)], size=12, python="3.11.7", versions={"torch": "2.9", "none": None}
    )
    row |= dict(command="hpclm train a", folder="/home/me", hpclm="1.0", git="abc-dirty", digest="123")
    rewrite(out, lambda event: event | row)
    ranks = [{"device_name": "H100", "driver": "550", "cuda": "12.8", "nccl": "2.27"}] * 3 + [
        {"device_name": "A100"},
        "odd",
    ]
    events.append(out, "preflight", ranks=ranks, links=["x" * 5000])
    facts = provenance.facts(history.read_history(out), provenance.settings_of_run(out))
    assert facts["hardware"] == (
        "3 × H100; 1 × A100; 12 processes on n0, n1, n2, n3 and 2 more; driver 550; CUDA 12.8; NCCL 2.27"
    )
    assert facts["code"] == "hpclm 1.0, git abc-dirty, digest of the files 123" and facts["command"] == "hpclm train a"
    assert facts["versions"] == "Python 3.11.7, torch 2.9" and facts["data"] == "source=synthetic"
    context = provenance.compose.of_run(out, []).model.context
    assert facts["tokens"] == f"{16 * context:,} seen, in 16 samples" and f"context {context:,}" in facts["model"]
    rewrite(out, lambda event: event | dict(hosts=["n0"], size=1) if event["kind"] == "began" else None)
    facts = provenance.facts(history.read_history(out), provenance.settings_of_run(out))
    assert facts["hardware"] == "1 process on n0"


def test_the_settings_of_a_run_are_those_of_its_last_attempt_without_its_place_and_none_where_they_are_damaged(
    tmp_path,
):
    out = made.trained(tmp_path / "a", [3.0], lr=0.25)
    used = provenance.settings_of_run(out)
    assert used["optim.lr"] == 0.25 and not {
        key for key in used if key.split(".")[0] in ("out", "name", "job", "cluster")
    }
    assert provenance.changed(used)["optim.lr"] == 0.25 and "model.layers" not in provenance.changed(used)
    (out / "config.yaml").write_text("{")
    assert provenance.settings_of_run(out) == {}
    assert [provenance.shown(value) for value in (0.123456789, None, "x", 3)] == ["0.123457", "–", "x", "3"]
