"""The page in a browser: on a phone and a desk, light and dark, in print; values under the pointer; nothing loaded."""

import io
import re

import pytest

from hpclm import cli
from tests.reporting import made
from tools import browser

pytest.importorskip("bokeh")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium here")
DEEP = """((root, wanted) => { const found = [], into = node => { for (const each of node.querySelectorAll("*")) {
  if (each.matches(wanted)) found.push(each); if (each.shadowRoot) into(each.shadowRoot); } }; into(root); return found; })"""
"""Elements below another one by a selector, also those inside charts."""
DRAWN = f"""[...document.querySelectorAll(".plot")].filter(plot => {DEEP}(plot, "canvas").some(each => each.width > 100 &&
  new Set(new Uint32Array(each.getContext("2d").getImageData(0, 0, each.width, each.height).data.buffer)).size > 20)).length"""
FAULTS = ("Runtime.exceptionThrown", "Log.entryAdded")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    falling = [5 - step / 20 for step in range(60)]
    for name, scale in (("good", 1.0), ("better", 0.9), ("a-name-that-is-" + "long-" * 20, 1.1)):
        losses = [scale * loss for loss in falling]
        made.trained(folder / name, losses, {20: losses[19], 60: losses[59]}, lr=scale)
    made.trained(folder / "wild", falling[:30] + [1e9] * 30, {20: 4.0, 60: 1e9}, lr=7.0)
    made.preempted(folder / "one")
    assert cli.main(["report", "--no-png", str(folder / "one"), "-o", str(folder / "one.html")]) == 0
    words = ["--runs", str(folder), "good", "better", "a-name*", "wild", "-o", str(folder / "several.html")]
    assert cli.main(["report", "--no-png", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with browser.page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("width, dark, phone", [(390, True, True), (1280, False, False)], ids=["phone", "desk"])
@pytest.mark.parametrize("name", ["one", "several"])
def test_the_page_fits_the_screen_and_its_charts_are_drawn(name, width, dark, phone, pages, shown):
    shown.open(pages / f"{name}.html", width, dark=dark, phone=phone)
    assert shown.value("document.documentElement.scrollWidth") == shown.value("innerWidth") == width
    assert shown.value(DRAWN) == shown.value("document.querySelectorAll('.plot').length") == 4
    assert (
        shown.value("Math.max(...[...document.querySelectorAll('.plot')].map(e => e.getBoundingClientRect().right))")
        <= width
    )
    ground = Image.open(io.BytesIO(shown.picture())).convert("RGB").getpixel((2, 2))
    assert max(ground) < 40 if dark else min(ground) == 255
    assert not [event for event in shown.events if event["method"] in FAULTS]
    asked = [
        event["params"]["request"]["url"] for event in shown.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [(pages / f"{name}.html").as_uri()]


@pytest.mark.parametrize("width, phone", [(390, True), (1280, False)], ids=["a finger", "the pointer"])
def test_values_are_under(width, phone, pages, shown):
    shown.open(pages / "several.html", width, phone=phone)
    place = "document.getElementById('training_loss')"
    shown.value(f"{place}.scrollIntoView({{block: 'center'}})")
    box = shown.value(f"(({{x, y, width, height}}) => [x, y, width, height])({place}.getBoundingClientRect())")
    (shown.tap if phone else shown.point_at)(box[0] + 0.75 * box[2], box[1] + box[3] / 2)
    said = shown.value(DEEP + "(document, '[class*=tooltip]').map(each => each.textContent).join(' ')")
    assert re.search(r"step: ?4\d", said) and re.search(r"better: ?2\.\d+", said)
    assert re.search(r"wild: ?1e\+09 – off the chart", said)


VISIBLE = """[...document.querySelectorAll('.ranking tbody tr')].map(row => { const box = [...row.cells].filter(cell => cell.checkVisibility()).map(cell => {
  const each = document.createRange(); each.selectNodeContents(cell); return [cell.innerText, each.getBoundingClientRect().right]; });
  return box.filter(([said, right]) => said && right <= innerWidth).map(([said]) => said); })"""
"""What is seen of each row of the comparison without scrolling."""


@pytest.mark.parametrize("width, phone", [(400, True), (1200, False)], ids=["phone", "desk"])
def test_the_settings_that_differ_are_seen_beside_the_name(width, phone, pages, shown):
    shown.open(pages / "several.html", width, phone=phone)
    rows = shown.value(VISIBLE)
    assert rows[0][:1] == ["better\noptim.lr=0.9"] if phone else rows[0][:2] == ["better", "0.9"]
    assert [("optim.lr=7" in " ".join(row), "7" in row) for row in rows if row[0].startswith("wild")] == [
        (phone, not phone)
    ]


@pytest.mark.parametrize("name", ["one", "several"])
def test_provenance_is_folded_and_opens_without_a_script(name, pages, shown):
    shown.open(pages / f"{name}.html", 1200)
    seen = "[...document.querySelectorAll('details dl')].map(each => each.checkVisibility())"
    assert not any(shown.value(seen))
    shown.value("document.querySelector('summary').click()")
    assert all(shown.value(seen))
    assert "on" not in "".join(re.findall(r"<(?:details|summary)([^>]*)>", (pages / f"{name}.html").read_text()))


def test_a_single_run_shows_its_first_curve_without_scrolling(pages, shown):
    for width, height in ((400, 800), (1200, 900)):
        shown.open(pages / "one.html", width, height)
        assert shown.value("document.querySelector('.plot').getBoundingClientRect().bottom") <= height


def test_a_click_on_a_head_sorts(pages, shown):
    shown.open(pages / "several.html", 1280)
    order = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].dataset.value.slice(0, 6))"
    assert shown.value(order) == ["better", "good", "a-name", "wild"]
    head = "[...document.querySelectorAll('th button')].find(each => each.textContent == 'optim.lr')"
    for expected in (["better", "good", "a-name", "wild"], ["wild", "a-name", "good", "better"]):
        shown.value(f"{head}.click()")
        assert shown.value(order) == expected


def test_the_page_is_printed_on_few_sheets(pages, shown):
    shown.open(pages / "several.html", 1280, dark=True)
    printed = shown.pdf()
    assert printed.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type */Pages?\b", printed)) <= 4
