"""The documentation as a site: it builds, loads nothing from elsewhere, and works in a browser on pages opened from a disk."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.runs import PATIENCE, ROOT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-background-networking --allow-file-access-from-files"
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))
PHONE = """<body><script>
function isBroken(word) { // over more than one line
  const range = document.createRange();
  range.setStart(word.node, word.index);
  range.setEnd(word.node, word.index + word[0].length);
  return range.getClientRects().length > 1;
}
function* words(root) {
  for (const code of root.querySelectorAll("td code")) {
    const texts = document.createNodeIterator(code, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode())
      for (const word of node.data.matchAll(/\\S+/g)) yield Object.assign(word, {node});
  }
}
for (const page of PAGES) {
  const frame = document.createElement("iframe");
  frame.style.width = "390px";
  frame.src = page;
  frame.onload = () => setTimeout(() => {
    const root = frame.contentDocument.documentElement;
    const broken = [...words(root)].filter(isBroken).map(String);
    document.body.append(`${page} is ${root.scrollWidth} wide, broken: ${broken.join(" ")};`);
  }, 2000);
  document.body.append(frame);
}
</script></body>"""
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder


def browse(folder, address):
    """The page as Chromium has it once its scripts have run."""
    words = [
        BROWSER,
        *OPTIONS.split(),
        f"--user-data-dir={folder}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(words, timeout=PATIENCE, check=True, capture_output=True, text=True).stdout


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site):
    built = {page.relative_to(site).with_suffix("").as_posix(): page.read_text() for page in site.rglob("*.html")}
    assert set(PAGES) <= set(built)
    for page, text in built.items():
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', text), page


SEARCHES = {
    "preemption": "launch",
    "requeue": "launch",
    "hang_minutes": "launch",
    "job.warn_seconds": "settings",
    "grad_norm": "files",
    "检查点": "tutorial.zh",
}


@pytest.mark.parametrize("query, page", SEARCHES.items())
@pytest.mark.whole
@needs_browser
def test_the_search_finds_a_page_offline(query, page, site, tmp_path):
    shown = browse(tmp_path, f"{(site / 'index.html').as_uri()}?q={query}")
    results = shown[shown.index('class="md-search-result__list"') :]
    assert re.search(rf'href="[^"]*/{re.escape(page)}\.html', results)
    assert "*</del>" not in results  # a part of the word that the search says is missing


@pytest.mark.whole
@needs_browser
def test_chinese_lines_are_joined_without_a_space(site, tmp_path):
    shown = browse(tmp_path, (site / "tutorial.zh.html").as_uri())
    assert '<html lang="zh"' in shown and "root 权限。不需要 GPU" in shown and "然后退出。<strong>" in shown


@pytest.mark.whole
@needs_browser
def test_no_page_overflows_on_a_phone_and_no_name_in_a_table_is_broken(site, tmp_path):
    pages = json.dumps([(site / f"{page}.html").as_uri() for page in PAGES])
    (tmp_path / "phone.html").write_text(PHONE.replace("PAGES", pages))
    shown = browse(tmp_path / "profile", (tmp_path / "phone.html").as_uri())
    measured = re.findall(r"(\S+) is (\d+) wide, broken: (.*?);", shown.split("</script>")[1])
    assert len(measured) == len(PAGES)
    assert [(page, width, broken) for page, width, broken in measured if int(width) > 390 or broken] == []
