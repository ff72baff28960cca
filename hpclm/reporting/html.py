"""A self-contained HTML page, which opens offline, on a phone and in print, in light and dark.

Its policy forbids the browser to load anything, and to run other scripts than those with the given hashes.
"""

import base64
import hashlib
import html
from collections.abc import Sequence

from hpclm.base import terminal

STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #68717a; --line: #d9dee3; --card: #f5f7f9; --ground: #fff; --warn: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #98a2ac; --line: #323a43; --card: #1b2128; --ground: #12161a; --warn: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; break-after: avoid; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; break-after: avoid; } h1, h3, p, td, dd, pre { overflow-wrap: anywhere; }
.soft, dt, figcaption, footer { color: var(--soft); font-size: .85rem; } .warn { color: var(--warn); font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(7rem, 11rem) 1fr; gap: .35rem 1rem; margin: 0; } dd { margin: 0; font-size: .92rem; }
code { font: .85rem/1.6 ui-monospace, monospace; background: var(--card); border-radius: 4px; padding: .1rem .35rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: .8rem; }
.grid pre { margin: .3rem 0 0; white-space: pre-wrap; font: .82rem/1.45 ui-monospace, monospace; }
.card { background: var(--card); border-radius: 8px; padding: .7rem .9rem; break-inside: avoid; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.2rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem; }
.numbers b { display: block; font-size: 1.15rem; }
figure { margin: 0; min-width: 0; max-width: 43rem; break-inside: avoid; } figure h3 { margin: 0; } .plot { min-height: 300px; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; } .legend span { overflow-wrap: anywhere; }
i { display: inline-block; width: 1.1rem; height: .3rem; margin-right: .4rem; vertical-align: middle; border-radius: 2px; }
.scroll { overflow-x: auto; background: linear-gradient(90deg, transparent, var(--ground) 70%) right / 3rem 100% no-repeat local,
  linear-gradient(90deg, transparent, var(--soft)) right / .8rem 100% no-repeat; } /* a shadow while there are more columns */
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; min-width: 4rem; }
th { vertical-align: bottom; overflow-wrap: normal; } tr { break-inside: avoid; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; } th[aria-sort]::after { content: " ▾"; }
th[aria-sort=descending]::after { content: " ▴"; }
.ranking :is(th, td):first-child { position: sticky; left: 0; background: var(--ground); min-width: 7rem; }
.ranking td { max-width: 16rem; } .ranking td:not(:first-child) { overflow-wrap: break-word; }
.ranking .soft { white-space: nowrap; }
.beside { display: none; }
summary { cursor: pointer; margin: 2rem 0 .6rem; } summary h2 { display: inline; margin: 0; }
.attempt { break-inside: avoid; margin: .5rem 0; } .attempt p { margin: 0; font-size: .85rem; }
.bar { position: relative; height: .9rem; background: var(--card); border-radius: 3px; overflow: hidden; }
.bar i { position: absolute; top: 0; height: 100%; min-width: 1px; margin: 0; border-radius: 0; }
.lost { background: repeating-linear-gradient(135deg, #d64545 0 4px, #f2a7a7 4px 8px) !important; }
.ends { display: flex; justify-content: space-between; }
i, .bar, .lost { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; } .ranking .setting { display: none; }
  .ranking .beside { display: block; white-space: normal; } .beside span { display: block; overflow-wrap: anywhere; }
  .ranking :is(th, td):first-child { min-width: 9rem; max-width: 60vw; } }
@media print { @page { size: A4; margin: 12mm; }
  :root { color-scheme: light; --ink: #000; --soft: #555; --line: #ccc; --card: #f5f7f9; --ground: #fff; --warn: #b3261e; }
  html { font-size: 11px; } body { font-size: 1rem; padding: 0; } .scroll { overflow: visible; }
  .figures { grid-template-columns: 1fr 1fr; zoom: .51; } /* two a row: charts keep their width, at most 43rem */
  .figures :is(h3, figcaption, .legend) { font-size: 1.7rem; } }
"""
SORT = """document.addEventListener("click", event => {
  const head = event.target.closest("th button")?.parentElement;
  if (!head) return;
  const table = head.closest("table"), at = head.cellIndex, down = head.ariaSort == "ascending";
  const value = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const order = (a, b) => a == b ? 0 : a == "" ? 1 : b == "" ? -1
    : (down ? -1 : 1) * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => order(value(a), value(b))));
});"""
"""Sorts a table by a column after a click on its head; empty cells come last."""


def text(value: object) -> str:
    """Any text, escaped. Characters that would reorder or hide text become visible."""
    return html.escape(terminal.plain(str(value)))


def definitions(rows: dict[str, str]) -> str:
    """A list of titles with their meanings, which are HTML."""
    return f"<dl>{''.join(f'<dt>{text(title)}</dt><dd>{meaning}</dd>' for title, meaning in rows.items())}</dl>"


def folded(title: str, content: str) -> str:
    """A part of a page that opens with a click on its title, without a script. In print, it is as the reader left it."""
    return f"<details><summary><h2>{text(title)}</h2></summary>{content}</details>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    if not rows:
        return "<p>None.</p>"
    head, *body = (
        "".join(f"<{tag}>{text(cell)}</{tag}>" for cell in row)
        for tag, row in (("th", heads), *(("td", row) for row in rows))
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def document(title: str, body: Sequence[str], data: Sequence[str], scripts: Sequence[str]) -> str:
    """A page; ``data``: JSON for the ``scripts``."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            *body,
            *(f'<script type="application/json">{content}</script>' for content in data),
            *(f"<script>{content}</script>" for content in scripts),
            "</body>\n</html>\n",
        ]
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
