"""Bits per byte of validation data: from the bytes that PREFIX.json counts, or nothing where they are unknown."""

import json
import math

import pytest

from hpclm import cli, config
from hpclm.data import sources
from hpclm.data.tokenizer_folder import TokenizerFolder
from hpclm.inference import scoring
from hpclm.preprocess import run_text
from hpclm.reporting import comparison
from hpclm.rundir import runs
from hpclm.rundir.state import state_of
from tests.runs import figures

SHORT, LONG = "ab\n" * 60, "to be or not to be, that is\n" * 40
BYTES = {
    "short": len("ab") / len("ab."),
    "long": len("to be or not to be, that is") / len("to be or not to be, that is."),
}
"""Bytes per token: each line has a token for each byte, and one for its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two datasets of bytes, with lines as documents."""
    folder = tmp_path_factory.mktemp("bytes")
    for name, text in {"short": SHORT, "long": LONG}.items():
        (folder / f"{name}.txt").write_text(text)
        words = ["--format", "lines", "--tokenizer", "bytes", "--append-eod", "--output-prefix", str(folder / name)]
        assert cli.main(["preprocess", "--input", str(folder / f"{name}.txt"), *words]) == 0
    return folder


def words_of(folder, out, *more):
    """A run that trains on the long lines."""
    data = {name: folder / f"{name}_text_document" for name in ("short", "long")}
    mixture = f"data.valid=[3, {data['short']}, 1, {data['long']}]"
    named = [f"data.train=[{data['long']}]", mixture, f"data.validation=[short={data['short']}]"]
    shape = ["model={vocab_size: 257, layers: 1, hidden: 16, context: 8, attention: {heads: 2}}", "engine.device=cpu"]
    sizes = ["batch={global_size: 4, micro_size: 4}", "budget.steps=4", "evaluate={every: 4, batches: 2}"]
    return [*named, *shape, *sizes, f"out={out}", *more]


def test_an_evaluation_has_the_bits_per_byte_of_its_data(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["train", *words_of(folder, out)]) == 0
    per_token = {"valid": 0.75 * BYTES["short"] + 0.25 * BYTES["long"], "valid/short": BYTES["short"]}
    rows = figures(out, "part", "validation_loss", "validation_bits_per_byte")
    assert [part for part, *_ in rows] == [*per_token]
    for part, loss, bits in rows:
        assert bits == pytest.approx(loss / math.log(2) / per_token[part])
    assert f"bits per byte {rows[0][2]:.4f}" in (out / "log.txt").read_text()
    capsys.readouterr()
    assert cli.main(["evaluate", str(out), "--part", "valid", "--samples", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(rows[0][2], rel=1e-5)
    mean = sum(bits for *_, bits in rows) / 2
    [row] = comparison.rows([state_of(runs.read_run(out), None)])
    assert row["bits_per_byte"] == pytest.approx(mean)
    header, line = comparison.table([state_of(runs.read_run(out), None)])
    assert "BITS/BYTE" in header and f"{mean:.4f}" in line


@pytest.mark.parametrize("setting", ["data.eod_mask_loss=true", "data.order=packed"])
def test_nothing_is_said_where_not_every_token_counts(setting, folder, tmp_path):
    run = config.load(None, words_of(folder, tmp_path, setting))
    source = sources.build_source(run.data, run.model, run.seed)
    assert sources.bits_per_byte(source, "valid") is None


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {},
        {"text_bytes": "many"},
        [],
        {"text_bytes": 9, "special": {"<unk>": 1}},
        {"text_bytes": 9, "line_ends": 1},
    ],
)
def test_nothing_is_said_of_a_mixture_with_a_dataset_of_unknown_bytes(counts, folder, tmp_path):
    for path in folder.glob("*_text_document.*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    note = tmp_path / "short_text_document.json"
    content = {name: value for name, value in json.loads(note.read_text()).items() if name != "counts"}
    note.write_text(json.dumps(content if counts is None else {**content, "counts": counts}))
    run = config.load(None, words_of(tmp_path, tmp_path / "run"))
    source = sources.build_source(run.data, run.model, run.seed)
    assert sources.bits_per_byte(source, "valid") is sources.bits_per_byte(source, "valid/short") is None
    assert sources.bits_per_byte(source, "train") == pytest.approx(1 / math.log(2) / BYTES["long"])


def test_bytes_of_a_text_with_unknown_words_are_unknown(tmp_path):
    (tmp_path / "v.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "so": 2}))
    folder = TokenizerFolder("whitespace", (str(tmp_path / "v.json"),))
    text = run_text.of_folder(folder, 3)
    assert [one.bytes for given in ("so so", "so it") for one in scoring.of_text("x", given, False, text)] == [
        5,
        None,
    ]
