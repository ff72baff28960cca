"""The page that ``hpclm report`` writes: self-contained, well formed, and with everything in it."""

import base64
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.reporting import charts, history, image_style, images, provenance
from hpclm.reporting.page import ReportContent
from hpclm.reporting.page import page as page_of
from hpclm.rundir import config_history
from hpclm.rundir.summary import RunSummary
from tests.events import note, rewrite
from tests.reporting import made

pytest.importorskip("bokeh")
pytest.importorskip("matplotlib")
VOID = {"meta", "br", "img", "link", "hr"}
HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e$$x$$\" onclick=\"alert(1)' onclick='alert(1)"


class Page(HTMLParser):
    """An HTML page: that its elements are nested properly, its ids, its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.links, self.count = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made.preempted(folder / "one")
    made.preempted(folder / "<b>two", lr=3e-4)
    assert cli.main(["report", str(folder / "one")]) == 0
    words = ["--runs", str(folder), "one", "<b>two", "-o", str(folder / "both.html"), "--no-png"]
    assert cli.main(["report", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run that was trained on text."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "text.jsonl").write_text(json.dumps({"text": "to be or not to be, that is the question. " * 9}) + "\n")
    words = [
        "--input",
        folder / "text.jsonl",
        "--output-prefix",
        folder / "data",
        "--tokenizer",
        "bytes",
        "--append-eod",
    ]
    assert cli.main(["preprocess", *map(str, words), "--workers", "1"]) == 0
    shape = [
        "model={vocab_size: 257, layers: 1, hidden: 16, context: 16, attention: {heads: 2}}",
        "batch={global_size: 4, micro_size: 4}",
    ]
    rest = ["budget.steps=6", "checkpoint.every=2", "optim.warmup=1", "evaluate.every=0", "log.tensorboard=false"]
    place = [f"out={folder / 'run'}", f"data.prefix={folder / 'data_text_document'}", "engine.device=cpu"]
    assert cli.main(["train", *shape, *rest, *place, "optim.lr=0.01", "engine.precision=fp32"]) == 0
    return folder / "run"


def data(text):
    """The charts of a page, as JSON."""
    return [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)]


def test_the_page_needs_nothing_else_and_is_well_formed(written):
    for name in ("one/report.html", "both.html"):
        text = (written / name).read_text()
        page = Page(text)
        assert not page.links and len(page.ids) == len(set(page.ids)) >= 4
        assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "@media print" in text
        policy = re.search('Content-Security-Policy" content="(.*?)"', text)[1]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
        for script in re.findall("<script>(.*?)</script>", text, re.S):
            assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_text_of_others_is_neither_markup_nor_script_nor_hides_anything(tmp_path):
    out = made.preempted(tmp_path / "run")
    hostile = {"command": HOSTILE, "git": HOSTILE, "versions": {HOSTILE: HOSTILE}, "hosts": [HOSTILE]}
    rewrite(out, lambda event: event | hostile)
    note(out, "preflight", ranks=[3, {"device_name": HOSTILE, "driver": [1]}])
    clean = page_of(
        ReportContent({"a": history.read_history(tmp_path), "b": history.read_history(tmp_path)}, {"a": {}, "b": {}})
    )
    runs = {HOSTILE: history.read_history(out), "b": history.read_history(out)}
    settings = {HOSTILE: {"optim.lr": HOSTILE}, "b": {"optim.lr": 1}}
    for shown in (runs, {HOSTILE: runs[HOSTILE]}):
        text = page_of(ReportContent(shown, settings, HOSTILE, {HOSTILE: {1: HOSTILE}}))
        assert not re.search("[\x1b\u202e]", text) and "<script>alert" not in text and r"\x1b[31m\u202e" in text
        assert Page(text).count["script"] == text.count('<script type="application/json">') + 2 + (len(shown) > 1)
    assert Page(clean).count["script"] == 1  # without charts there is only the sorting


def test_a_run_opens_with_its_curves_and_its_provenance_is_folded(real):
    assert cli.main(["report", "--no-png", str(real), "--samples", "to be"]) == 0
    page = Page((real / "report.html").read_text())
    text = "|".join(page.words)
    for said in (
        "|model|9,712 parameters: 1 layers, hidden size 16, 2 heads, context 16, vocabulary 257|",
        "|tokens|384 seen, in 24 samples|",
        "|optim.lr=0.01|",
        "|budget.steps=6|",
        f"prefix={real.parent / 'data_text_document'}|",
        "|hardware|1 × CPU; 1 process on ",
        "Python 3.",
        ", torch 2.",
        "|code|hpclm 0.",
    ):
        assert said in text, said
    assert "|seed=" not in text
    heads = re.findall(r"<h[12]>(.*?)</h[12]>", (real / "report.html").read_text())
    assert heads == ["run", "Curves", "Samples", "Numbers", "Attempts", "Provenance"]
    before = (real / "report.html").read_text().partition("<h1>run</h1>")[2].partition("<h2>Curves</h2>")[0]
    assert re.fullmatch(r"\s*<p>6 of 6 steps in [^<]*: done at step 6, 24 samples\.</p>\s*", before)
    [folded] = re.findall("<details>(.*?)</details>", (real / "report.html").read_text(), re.DOTALL)
    assert folded.startswith("<summary><h2>Provenance</h2></summary>") and "<dt>command</dt>" in folded


def test_what_models_write_stands_side_by_side(real, capsys):
    assert cli.main(["generate", str(real), "--prompt", "to be", "--tokens", "80", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["text"]
    assert cli.main(["report", "--no-png", str(real), "--samples", "to be"]) == 0
    samples = re.findall(r"step (\d+)</span><pre>(.*?)</pre>", (real / "report.html").read_text(), re.S)
    assert [step for step, _ in samples] == ["2", "4", "6"]
    from hpclm.reporting.html import text

    assert samples[-1][1] == text(newest) and len({sample for _, sample in samples}) == 3


def test_a_sample_that_is_nothing_to_be_seen_is_said_to_be_that(written):
    runs, settings = {"one": history.read_history(written / "one")}, {"one": {}}
    text = page_of(ReportContent(runs, settings, "to be", {"one": {20: "", 40: " \n", 60: " or\n"}}))
    said = re.findall(r"step (\d+)</span><(?:p|pre)[^>]*>(.*?)</p", text, re.DOTALL)
    assert said == [("20", "ended at once"), ("40", "wrote only white space"), ("60", " or\n")]


def test_settings_that_differ_are_also_below_the_name_up_to_eight(written):
    runs = {name: history.read_history(written / "one") for name in "ab"}
    settings = {name: {f"optim.s{number}": f"{name}{number}" for number in range(10)} for name in "ab"}
    below = re.findall('<span class="beside soft">(.*?)</span></td>', page_of(ReportContent(runs, settings)))
    assert len(below) == 2 and "<span>optim.s0=a0</span>" in below[0] and below[0].endswith("<span>and 2 more</span>")
    assert "optim.s7=a7" in below[0] and "optim.s8" not in below[0]


def test_a_run_that_cannot_write_is_named_and_the_page_is_written(real, written, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["report", "--no-png", str(real), str(written / "one"), "-o", str(page), "--samples", "to be"]
    assert cli.main(words) == 0
    assert "no sample of one: no checkpoint in" in capsys.readouterr().err
    assert re.findall(r">([^<>]{1,99}), step \d+</span><pre>", page.read_text()) == ["run"]
    assert cli.main(["report", "--no-png", str(written / "one"), "-o", str(page), "--samples", "to be"]) == 66


def test_charts_hold_the_numbers_of_the_run_for_the_pointer(written):
    charts = data((written / "one/report.html").read_text())
    assert [chart["target_id"] for chart in charts] == ["loss", "grad_norm", "lr", "tokens_per_second"]
    text = json.dumps(charts[0])
    assert '"HoverTool"' in text and '"training"' in text and '"validation"' in text
    assert '"3.25"' in text and '"2.02"' in text  # the validation loss of step 50, the loss of step 99


@pytest.mark.parametrize(
    "bottom, top, ticks",
    [(0.4, 34.4, [0.5, 1, 2, 5, 10, 20]), (0.02, 90, [0.1, 1, 10]), (1.1, 1.9, []), (1, 10, [1, 2, 5, 10])],
)
def test_a_log_scale_has_marks_in_every_decade(bottom, top, ticks):
    chart = charts.Chart("grad_norm", (), 0.0, 1.0, bottom, top, 1)
    assert chart.log_ticks == pytest.approx(ticks)


def test_images_have_the_colours_of_the_page(tmp_path):
    losses = {"a": 3.0, "b": 2.0, "c": 1.0}
    runs = {name: history.read_history(made.trained(tmp_path / name, [5.0, last])) for name, last in losses.items()}
    lines = images.images(runs)["training_loss"].axes[0].lines
    assert [line.get_label() for line in lines if line.get_color() == charts.COLOURS[0]] == ["c"]  # the best is first


@pytest.mark.parametrize("losses, drawn", [([3.0, None], True), ([None, None], False)])
def test_a_notebook_has_the_losses_if_one_is_finite(losses, drawn, tmp_path):
    content = images.loss_png(history.read_history(made.trained(tmp_path / "one", losses)), "$x$")
    assert (content or b"").startswith(b"\x89PNG") == drawn


def test_a_stranger_finds_what_ended_each_attempt(written):
    text = " ".join(Page((written / "one/report.html").read_text()).words)
    for said in (
        "steps 0 to 30: SIGUSR1: saved at step 30, exiting",
        "steps 30 to 57: node a2 failed (NODE_FAIL)",
        "CUDA out of memory",
        "It was interrupted 3 times",
        "lost",
    ):
        assert said in text
    assert "30 → 57" in text and "21.2%" in text and "3.2500" in text


def test_the_bars_of_the_image_are_as_long_as_the_run_in_the_unit_of_their_axis(tmp_path):
    [axes] = images.images({"one": history.read_history(made.preempted(tmp_path / "one"))})["attempts"].axes
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert axes.get_xlabel().startswith("minutes ") and min(ends)[0] == 0
    assert max(end for _, end in ends) == pytest.approx(471 / 60)


def test_attempts_are_bars_on_one_axis_of_time(written):
    text = (written / "one/report.html").read_text()
    pieces = re.findall(r'<i class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%', text)
    assert [kind for kind, *_ in pieces[:3]] == ["queued", "starting", "training"]
    assert [kind for kind, *_ in pieces].count("lost") == 2
    assert max(float(left) + float(width) for _, left, width in pieces) == pytest.approx(100, abs=0.02)
    assert float(pieces[2][2]) == pytest.approx(100 * 32 / 471, abs=0.02)


def test_several_runs_are_one_table_with_the_best_first(tmp_path):
    falling = [5 - step / 20 for step in range(40)]
    made.trained(tmp_path / "good", falling, {20: 4.25, 40: 3.5}, lr=1e-3)
    made.trained(tmp_path / "better", falling, {20: 4.0, 40: 3.25}, lr=2e-3)
    made.trained(tmp_path / "unmeasured", falling, lr=3e-3)
    made.trained(tmp_path / "wild", falling[:20] + [9e9] * 20, {20: 3.0, 40: 9e9}, lr=1.0)
    made.trained(tmp_path / "nan", falling[:20] + [None] * 20, {20: 3.9, 40: None}, lr=2.0)
    why = f"rank 3 on a1: {'a long story, ' * 9}at last"
    RunSummary(tmp_path / "good").failed(why)
    page = tmp_path / "page.html"
    assert cli.main(["report", "--no-png", "--runs", str(tmp_path), "*", "-o", str(page)]) == 0
    text = page.read_text()
    assert f'<span class="warn" title="{why}">failed</span>' in text and text.count(why) == 2  # also with its attempts
    heads = re.findall("<th[^>]*><button>(.*?)</button>", text)
    assert heads == ["run", "optim.lr", "validation loss", "mean training loss", "state", "steps", "tokens/s"]
    rows = re.findall('<tr><td data-value="(.*?)">', text)
    assert rows == ["better", "good", "unmeasured", "wild", "nan"]
    words = " ".join(Page(text).words)
    assert "better  has the lowest validation loss, 3.2500 nats per token." in words
    assert "2 of 5 diverged :  wild  at step 21,  nan  at step 21." in words


def test_the_settings_are_those_that_trained_and_not_those_of_a_job_that_did_not(tmp_path):
    out = made.trained(tmp_path / "run", [3.0, 2.0], lr=1e-3)
    _, used = config_history.replace(out, (out / "config.yaml").read_text())
    note(out, "began", time=made.stamp(0), config=used)
    config.dump(config.load(str(out), ["optim.lr=9"]), out / "config.yaml")
    assert provenance.settings_of_run(out)["optim.lr"] == 1e-3
    (out / used).unlink()
    assert provenance.settings_of_run(out)["optim.lr"] == 9


def test_losses_that_do_not_measure_the_same_are_said_not_to(tmp_path):
    runs = {name: history.read_history(tmp_path / name) for name in "ab"}
    mine, other = {"data.prefix": "x", "log.every": 1}, {"data.prefix": "y", "log.every": 2}
    text = page_of(ReportContent(runs, {"a": mine, "b": other}))
    assert "log.every" not in text  # it changes no result
    assert "They differ in data.prefix, so their losses may not be comparable." in text


def test_several_runs_are_compared_by_the_settings_in_which_they_differ(written):
    page = Page((written / "both.html").read_text())
    text = "|".join(page.words)
    assert "|run|optim.lr|validation loss|" in text and "|seed|" not in text and "|out|" not in text
    assert "<b>two" in text  # escaped: it is text, not an element
    assert not list(written.glob("both*.png"))


@pytest.mark.parametrize("fonts", [("DejaVu Sans Mono",), ()])
def test_chinese_names_are_written_in_a_chinese_font_or_a_warning_says_that_there_is_none(
    fonts, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(image_style, "CHINESE", fonts)
    runs = {name: history.read_history(made.trained(tmp_path / name, [3.0, 2.0])) for name in ("医疗", "b")}
    figure = images.images(runs)["training_loss"]
    [name, _] = sorted(figure.axes[0].get_legend().get_texts(), key=lambda text: text.get_text().isascii())
    assert name.get_fontfamily() == ["sans-serif", *fonts]
    assert ("no Chinese font" in caplog.text) == (not fonts)
    assert image_style.encoded(figure).startswith(b"\x89PNG")


def test_the_images_lie_beside_the_page(written):
    names = {path.name for path in (written / "one").glob("*.png")}
    kinds = ("loss", "lr", "grad-norm", "tokens-per-second", "attempts")
    assert names == {f"report-{kind}.png" for kind in kinds}
    from PIL import Image

    for name in names:
        with Image.open(written / "one" / name) as image:
            assert image.width > 900 and image.convert("L").getextrema()[1] == 255


def test_several_runs_leave_one_file_or_one_folder(tmp_path, monkeypatch, capsys):
    for name in ("one", "two"):
        made.trained(tmp_path / "runs" / name, [3.0, 2.0])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["report", "--runs", str(tmp_path / "runs"), "*"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert cli.main(["report", "--runs", str(tmp_path / "runs"), "*", "-o", "both.html"]) == 0
    assert capsys.readouterr().out == "both.html\n"
    assert cli.main(["report", "--runs", str(tmp_path / "runs"), "*", "-o", "both"]) == 0
    named = capsys.readouterr().out.splitlines()
    assert named[0] == "both/report.html" and "both/report-training-loss.png" in named
    assert sorted(path.name for path in Path("both").iterdir()) == sorted(name.removeprefix("both/") for name in named)
    assert sorted(path.name for path in Path().iterdir()) == ["both", "both.html", "report.html"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_nothing_is_written_to_another_user_s_run(tmp_path, monkeypatch, capsys):
    made.preempted(tmp_path / "one")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    os.chown(tmp_path / "one", 12345, 12345)
    before = sorted((tmp_path / "one").rglob("*"))
    assert cli.main(["report", "--no-png", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == "report.html\n" and (tmp_path / "here/report.html").exists()
    assert cli.main(["sync", str(tmp_path / "one"), "--sink", "wandb"]) == 64
    assert "belongs to user number 12345, and only user number 12345 can send its metrics" in capsys.readouterr().err
    assert sorted((tmp_path / "one").rglob("*")) == before


def test_wrong_words_are_refused_and_nothing_is_written(written, tmp_path, capsys):
    assert cli.main(["report", str(written / "one"), "-o", str(tmp_path / "page.pdf")]) == 64
    assert "must end with .html, or be a folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["report", "--no-png", str(written / "one"), "-o", str(tmp_path / "file")]) == 64
    assert f"{tmp_path / 'file'}: File exists; choose another output" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    assert cli.main(["report", str(tmp_path)]) == 64
    assert "is not a run directory" in capsys.readouterr().err
    assert cli.main(["report", str(written / "one"), "-o", "/nowhere/at/all.html"]) == 64
    assert "the folder /nowhere/at does not exist" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("library, words", [("bokeh", ["--no-png"]), ("matplotlib", [])])
def test_without_a_library_the_way_out_is_named(library, words, written, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.main(["report", *words, str(written / "one")]) == 64
    assert f"needs {library}, which is not installed: pip install 'hpclm[plots]'" in capsys.readouterr().err
