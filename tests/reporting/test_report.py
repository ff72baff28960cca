"""The page that ``hpclm report`` writes: self-contained, well formed, and with everything in it."""

import base64
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from hpclm import cli
from hpclm.reporting import page
from tests.reporting import made

pytest.importorskip("matplotlib")
VOID = {"meta", "br", "img", "link", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


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


def drawings(text):
    return [ET.fromstring(base64.b64decode(each)) for each in re.findall(r"image/svg\+xml;base64,([^\"]*)", text)]


def texts(svg):
    return ["".join(each.itertext()).strip() for each in svg.iter(f"{SVG}text")]


def test_the_page_needs_nothing_else_and_is_well_formed(written):
    for name in ("one/report.html", "both.html"):
        text = (written / name).read_text()
        page = Page(text)
        assert page.links and all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
        assert not re.findall(r"https?://", text)
        assert "<script" not in text and "@import" not in text
        assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "@media print" in text
        for svg in drawings(text):
            assert svg.get("viewBox")


def test_nothing_in_the_page_reorders_or_hides_text():
    text = page.page("one\x1b[31m\u202etwo", {}, {"loss": b"<svg></svg>"}, {})
    assert not re.search("[\x1b\u202e]", text) and r"one\x1b[31m\u202etwo" in text


def test_every_curve_and_every_attempt_is_drawn(written):
    svgs = drawings((written / "one/report.html").read_text())
    words = [texts(svg) for svg in svgs]
    assert [any("loss" in each for each in found) for found in words] == [True] + [False] * 6 + [False]
    assert {"training", "validation", "resumed"} <= set(words[0])
    for title in ("Learning rate", "Gradient norm", "Speed", "Model FLOPs utilisation (MFU)", "Time waiting for data"):
        assert sum(title in found for found in words) == 1, title
    assert any("Peak memory of rank 0" in found for found in words)
    timeline = words[-1]
    assert {"queued", "starting", "training", "lost"} <= set(timeline)
    assert "steps 30 to 57: node a2 failed (NODE_FAIL)" in timeline and "steps 60 to 100: finished" in timeline
    hatched = [each for each in svgs[-1].iter(f"{SVG}path") if "url(#" in (each.get("style") or "")]
    assert len(hatched) == 2  # what two attempts lost


def test_the_curves_hold_the_numbers_of_the_run(written):
    loss = drawings((written / "one/report.html").read_text())[0]
    longest = max((each.get("d") for each in loss.iter(f"{SVG}path")), key=len)
    points = [tuple(map(float, each)) for each in re.findall(r"[ML] ([\d.]+) ([\d.]+)", longest)]
    assert len(points) >= 2 and points[0][0] < points[-1][0] and points[0][1] < points[-1][1]  # y grows downwards


def test_a_stranger_finds_what_ended_each_attempt(written):
    text = " ".join(Page((written / "one/report.html").read_text()).words)
    for said in (
        "SIGUSR1: saved at step 30, exiting",
        "node a2 failed (NODE_FAIL)",
        "CUDA out of memory",
        "It was interrupted 3 times",
    ):
        assert said in text
    assert "30 → 57" in text and "21.2%" in text and "3.2500" in text


def test_several_runs_are_compared_by_the_settings_in_which_they_differ(written):
    page = Page((written / "both.html").read_text())
    text = "|".join(page.words)
    assert "|optim.lr|0.001|0.0003|" in text and "|seed|" not in text and "|out|" not in text
    assert "<b>two" in text  # escaped: it is text, not an element
    assert not list(written.glob("both*.png"))


def test_the_images_lie_beside_the_page(written):
    names = {path.name for path in (written / "one").glob("*.png")}
    kinds = ("loss", "lr", "grad-norm", "tokens-per-second", "mfu", "memory", "data-fraction", "attempts")
    assert names == {f"report-{kind}.png" for kind in kinds}
    from PIL import Image

    for name in names:
        with Image.open(written / "one" / name) as image:
            assert image.width > 900 and image.convert("L").getextrema()[1] == 255


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
    assert "must end with .html" in capsys.readouterr().err
    folder = tmp_path / "folder.html"
    folder.mkdir()
    assert cli.main(["report", str(written / "one"), "-o", str(folder)]) == 64
    assert f"{folder}: Is a directory; choose another --output" in capsys.readouterr().err
    folder.rmdir()
    assert cli.main(["report", str(tmp_path)]) == 64
    assert "is not a run directory" in capsys.readouterr().err
    assert cli.main(["report", str(written / "one"), "-o", "/nowhere/at/all.html"]) == 64
    assert "there is no folder /nowhere/at" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_matplotlib_the_way_out_is_named(written, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(written / "one")]) == 64
    assert (
        "hpclm report needs matplotlib, which is not installed: pip install 'hpclm[plots]'" in capsys.readouterr().err
    )


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
)
OVERFLOW = "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join(' of ')</script></body>"


def browse(folder, page, *options):
    """What Chromium prints of a page, with a fresh profile."""
    words = [BROWSER, *QUIET.split(), f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(words, timeout=120, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_the_page_on_a_small_and_a_large_screen_in_light_and_dark(written, width, tmp_path):
    from PIL import Image

    ground = []
    for scheme in (1, 0):  # light, dark
        shot = tmp_path / f"{scheme}.png"
        look = f"--blink-settings=preferredColorScheme={scheme}"
        browse(tmp_path, written / "one/report.html", look, f"--window-size={width},2000", f"--screenshot={shot}")
        with Image.open(shot) as image:
            assert image.width == width and len(image.convert("RGB").getcolors(1 << 24)) > 50
            ground.append(sum(image.convert("RGB").getpixel((2, 2))) // 3)
    assert ground[0] == 255 and ground[1] < 40
    page = tmp_path / "page.html"  # nothing is wider than the screen but what scrolls by itself
    page.write_text((written / "both.html").read_text().replace("</body>", OVERFLOW))
    shown = browse(tmp_path, page, f"--window-size={width},2000", "--dump-dom")
    [(needed, there)] = re.findall(r"<title>(\d+) of (\d+)</title>", shown)
    assert int(needed) <= int(there) == width


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_prints_the_page(written, tmp_path):
    pdf = tmp_path / "page.pdf"
    browse(tmp_path, written / "one/report.html", "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    pages = re.findall(rb"/Type */Pages?\b", pdf.read_bytes())
    assert pdf.read_bytes().startswith(b"%PDF") and 2 <= len(pages) <= 4  # the page tree, and one to three pages
