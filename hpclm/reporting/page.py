"""A report as one HTML page: the curves, samples, attempts and provenance of one run, or a ranking of several."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError, unwritten
from hpclm.reporting import comparison, history, image_style, images, plots, provenance, timeline
from hpclm.reporting.charts import Chart, charts, colours
from hpclm.reporting.comparison import Entry
from hpclm.reporting.expert_history import LEGEND, HeatMap
from hpclm.reporting.history import RECENT, History
from hpclm.reporting.html import SORT, definitions, document, folded, text
from hpclm.reporting.provenance import Settings
from hpclm.reporting.standings import Standing, have_bits
from hpclm.rundir.state import span

NAME = "report.html"
SPREAD = "Each point is the mean of {} steps; the band reaches from their lowest to their highest value."
DIVERGED = "✕: the run diverged, and is off the chart from there; charts show the healthy range."
CLIPPED = "Values above {:.3g} are off the chart."
OPEN_LAYERS = 8  # if there are more heat maps, they are folded
SETTING = ' class="setting"'  # attribute of a table's cell
BESIDE = 8  # maximum number of settings below a run's name on a narrow screen
Samples = Mapping[str, Mapping[int, str]]
"""Run -> step of a checkpoint -> the text that its model wrote."""
Sampler = Callable[[Mapping[str, Path], str], Samples]
"""Returns continuations of a text by the models of runs, which are given by name."""


@dataclass(frozen=True)
class ReportContent:
    """The data of a report."""

    runs: Mapping[str, History]
    settings: Mapping[str, Settings]
    prompt: str = ""
    samples: Samples = field(default_factory=dict)


def page(content: ReportContent) -> str:
    """The page, which needs no other file."""
    entries = comparison.entries(content.runs, content.settings)
    best = entries[0]
    several = len(entries) > 1
    drawn = list(charts(content.runs))
    heat_maps: Sequence[HeatMap] = []
    if best.history.experts and not several:
        heat_maps = best.history.experts.heat_maps
    title = f"{len(entries)} runs compared" if several else best.name
    body = [f"<h1>{text(title)}</h1>"]
    trunks = comparison.trunks(content.runs)
    if several:
        body += [_verdict([entry.standing for entry in entries], provenance.differing(content.settings))]
        body += [_ranking(entries, trunks), _samples(content, entries), *_curves(drawn, heat_maps), "<h2>Attempts</h2>"]
        body.append(timeline.legend(content.runs.values()))
        body += (f"<h3>{text(entry.name)}</h3>{timeline.bars(entry.history)}" for entry in entries)
    else:
        body.append(f"<p>{text(timeline.state(best.history))}</p>")
        body += (f"<p>{text(trunk)}.</p>" for trunk in trunks.values())
        if best.standing.diverged is not None:
            body.append(f'<p class="warn">The run diverged at step {best.standing.diverged}.</p>')
        body += [*_curves(drawn, heat_maps), _samples(content, entries)]
        body += ["<h2>Numbers</h2>", _numbers(best.history, best.standing), "<h2>Attempts</h2>"]
        if best.history.attempts:
            body.append(f"<p>{text(timeline.summary(best.history))}</p>")
        body += [timeline.legend([best.history]), timeline.bars(best.history), timeline.numbers(best.history)]
    body.append(folded("Provenance", _origins(entries, content.settings)))
    now = time.strftime("%Y-%m-%d %H:%M %Z")
    body.append(f"<footer><p>Made by hpclm report, {now}. All times are in this time zone.</p></footer>")
    scripts = plots.scripts() if drawn else []
    if several:
        scripts.append(SORT)
    data = [*map(plots.embedded, drawn), *map(plots.embedded, heat_maps)]
    return document(title, body, data, scripts)


def _verdict(standings: Sequence[Standing], differing: Mapping[str, object]) -> str:
    best = standings[0]
    kind = "training" if best.best is None else "validation"
    loss = best.training if best.best is None else best.best
    by_bits = have_bits(standings)
    said = []
    if by_bits and best.best is not None and best.diverged is None:
        said.append(
            f"<b>{text(best.name)}</b> has the fewest bits per byte of the validation data, {best.bits_per_byte:.4f}."
        )
    elif loss is not None and best.diverged is None:
        said.append(f"<b>{text(best.name)}</b> has the lowest {kind} loss, {loss:.4f} nats per token.")
    lost = [standing for standing in standings if standing.diverged is not None]
    if lost:
        names = ", ".join(f"<b>{text(standing.name)}</b> at step {standing.diverged}" for standing in lost)
        said.append(f'<span class="warn">{len(lost)} of {len(standings)} diverged</span>: {names}.')
    unlike = [key for key in differing if key in provenance.UNCOMPARABLE]
    if unlike:
        instead = "; bits per byte are, if the text is the same" if by_bits else ""
        said.append(f"They differ in {text(', '.join(unlike))}, so their losses may not be comparable{instead}.")
    return f"<p>{' '.join(said)}</p>"


def _ranking(entries: Sequence[Entry], trunks: Mapping[str, str]) -> str:
    """The runs as rows, the best first, with the settings that differ. A click on a column heading sorts. On a phone, the settings are
    below the run's name instead of in columns, so that no scrolling is needed."""
    swatches = colours(entry.name for entry in entries)
    losses = {
        "validation_loss": "validation loss",
        "bits_per_byte": "bits per byte",
        "training_loss": "mean training loss",
    }
    if all(entry.standing.bits_per_byte is None for entry in entries):
        del losses["bits_per_byte"]
    rows = []
    for entry in entries:
        swatch = _swatch(swatches.get(entry.name), "")
        name = text(entry.name)
        if entry.name in trunks:
            name += f'<br><span class="soft">{text(trunks[entry.name])}</span>'
        cells = [("", entry.name, swatch + name + _beside(entry.settings))]
        cells += [
            (SETTING, provenance.shown(value), text(provenance.shown(value))) for value in entry.settings.values()
        ]
        cells += _results(entry, losses)
        rows.append("".join(f'<td{kind} data-value="{text(key)}">{cell}</td>' for kind, key, cell in cells))
    own = [*entries[0].reported][: comparison.REPORTED]
    heads = [("", "run"), *((SETTING, key) for key in entries[0].settings)]
    heads += [("", head) for head in (*losses.values(), *own, "state", "steps", "tokens/s")]
    head = "".join(f"<th{kind}><button>{text(title)}</button></th>" for kind, title in heads)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody>"
    means = "The training loss and own metrics are means" if own else "The training loss is the mean"
    note = (
        "The best run is first: by bits per byte if known for all, or else by validation loss, or else by training loss. "
        f"{means} of the last {RECENT} steps. Click a column heading to sort."
    )
    return f'<div class="scroll"><table class="ranking">{body}</table></div><p class="soft">{note}</p>'


def _results(entry: Entry, losses: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The cells of a run after its settings: attribute, the value to sort by, HTML. ``losses``: the first figures."""
    figures = entry.figures
    at = f' <span class="soft">step {figures["validation_step"]}</span>'
    for name in losses:
        value = figures[name]
        beside = at if name == "validation_loss" else ""
        yield ("", "", "") if value is None else ("", f"{value:.4f}", f"{value:.4f}{beside}")
    for value in [*entry.reported.values()][: comparison.REPORTED]:
        yield ("", "", "") if value is None else ("", f"{value:.17g}", f"{value:.4g}")
    yield "", "", _state(entry.history, entry.standing)
    yield "", str(figures["steps"]), f"{figures['steps']:,}"
    rate = figures["tokens_per_second"] or 0.0
    yield "", f"{rate:.0f}", f"{rate:,.0f}"


def _swatch(colour: str | None, title: str, style: str = "") -> str:
    return f'<i style="background:{colour or plots.INK}{style}"></i>{text(title)}'


def _beside(settings: Mapping[str, Any]) -> str:
    """The settings of a run below its name, for a narrow screen."""
    shown = [f"<span>{text(key)}={text(provenance.shown(value))}</span>" for key, value in settings.items()]
    if len(shown) > BESIDE:
        shown[BESIDE:] = [f"<span>and {len(shown) - BESIDE} more</span>"]
    if not shown:
        return ""
    return f'<span class="beside soft">{"".join(shown)}</span>'


def _state(history: History, standing: Standing) -> str:
    """The state of a run in a few words. A tooltip, and the attempts below, show why it ended."""
    ended = history.attempts[-1].ended if history.attempts else "not started"
    said = history.state or ended or "running, according to its files"
    if standing.diverged is not None:
        said = f"diverged at step {standing.diverged}"
    warn = ' class="warn"' if standing.diverged is not None or said == "failed" else ""
    return f'<span{warn} title="{text(ended)}">{text(said)}</span>'


def _curves(drawn: Sequence[Chart], heat_maps: Sequence[HeatMap]) -> Iterator[str]:
    if not drawn:
        return
    group = max(chart.group for chart in drawn)
    said = ["Point at a chart, or tap it, to read its values."]
    if group > 1:
        said.append(SPREAD.format(group))
    if any(curve.left for chart in drawn for curve in chart.curves):
        said.append(DIVERGED)
    yield f'<h2>Curves</h2><p class="soft">{" ".join(said)}</p>'
    for heading in ("Curves", "Experts", "Own metrics"):
        places = [_figure(chart) for chart in drawn if chart.section == heading]
        if places and heading != "Curves":
            yield f"<h2>{heading}</h2>"
        if places:
            yield f'<div class="figures">{"".join(places)}</div>'
        if heading == "Experts" and heat_maps:
            yield _load(heat_maps)


def _figure(chart: Chart) -> str:
    swatches = "".join(f"<span>{_swatch(colour, name)}</span>" for name, colour in chart.legend.items())
    caption = CLIPPED.format(chart.top) if chart.clipped else ""
    return (
        f'<figure><h3>{text(chart.title)}</h3><div class="legend">{swatches}</div>'
        f'<div class="plot" id="{chart.place}"></div><figcaption>{caption}</figcaption></figure>'
    )


def _load(heat_maps: Sequence[HeatMap]) -> str:
    """The places of heat maps, and the meaning of their colours; many heat maps are folded."""
    outline = ";outline:1px solid var(--line)"
    swatches = "".join(f"<span>{_swatch(colour, said, outline)}</span>" for colour, said in LEGEND.items())
    places = "".join(
        f'<figure><h3>{text(heat_map.title)}</h3><div class="plot" id="{heat_map.place}"></div></figure>'
        for heat_map in heat_maps
    )
    content = f'<div class="legend">{swatches}</div><div class="figures">{places}</div>'
    title = "Load of every expert"
    if len(heat_maps) > OPEN_LAYERS:
        return folded(title, content)
    return f"<h2>{title}</h2>{content}"


def _samples(content: ReportContent, entries: Sequence[Entry]) -> str:
    if not content.samples:
        return ""
    cards = []
    for entry in entries:
        for step, sample in content.samples.get(entry.name, {}).items():
            about = f"{entry.name}, step {step:,}" if len(entries) > 1 else f"step {step:,}"
            cards.append(f'<div class="card"><span class="soft">{text(about)}</span>{_sample(sample)}</div>')
    said = f'<p class="soft">Continuing <code>{text(content.prompt)}</code></p>' if content.prompt else ""
    return f'<h2>Samples</h2>{said}<div class="grid">{"".join(cards)}</div>'


def _sample(sample: str) -> str:
    if sample.strip():
        return f"<pre>{text(sample)}</pre>"
    return f'<p class="soft">{"wrote only white space" if sample else "ended at once"}</p>'


def _origins(entries: Sequence[Entry], settings: Mapping[str, Settings]) -> str:
    """The facts that all runs share, then the facts that differ."""
    facts = {entry.name: provenance.facts(entry.history, settings[entry.name]) for entry in entries}
    titles = dict.fromkeys(title for run_facts in facts.values() for title in run_facts)
    rows = {title: {name: text(run_facts.get(title, "–")) for name, run_facts in facts.items()} for title in titles}
    common = {title: next(iter(row.values())) for title, row in rows.items() if len(set(row.values())) == 1}
    unlike = (f"<h3>{text(title)}</h3>{definitions(row)}" for title, row in rows.items() if title not in common)
    differing = provenance.differing(settings)
    used = next(filter(None, settings.values()), {})
    changed = provenance.changed({key: value for key, value in used.items() if key not in differing})
    words = [f"{key}={provenance.shown(value)}" for key, value in changed.items() if not key.startswith("data.")]
    if words:
        common["settings that differ from the defaults"] = " ".join(f"<code>{text(word)}</code>" for word in words)
    return definitions(common) + "".join(unlike)


def _numbers(history: History, standing: Standing) -> str:
    last = next(reversed(history.recent), {})
    cards: dict[str, tuple[Any, str]] = {
        "last step": (last.get("step"), ""),
        f"training loss, mean of the last {standing.over} steps": (standing.training, ".4f"),
        f"best validation loss, step {standing.best_step}": (standing.best, ".4f"),
        f"bits per byte, step {standing.best_step}": (standing.bits_per_byte, ".4f"),
        "tokens/s": (history.mean("tokens_per_second"), ",.0f"),
        "MFU": (history.mean("mfu"), ".1%"),
        "peak memory of rank 0": (f"{history.memory / (1 << 30):.2f} GiB" if history.memory else None, ""),
        "of step time waiting for data": (history.mean("data_fraction"), ".1%"),
        "goodput": (history.goodput, ".1%"),
        "time": (span(history.wall) if history.wall else None, ""),
        "waiting in the queue": (timeline.seconds(history.seconds("queued")), ""),
        "starting": (timeline.seconds(history.seconds("starting")), ""),
        "steps redone": (sum(attempt.lost for attempt in history.attempts), ""),
    }
    shown = (
        f"<div><b>{text(format(value, form))}</b><span class=soft>{text(name)}</span></div>"
        for name, (value, form) in cards.items()
        if value not in (None, "")
    )
    return f'<div class="numbers">{"".join(shown)}</div>'


def write(
    chosen: Sequence[Path],
    output: Path,
    with_images: bool,
    prompt: str | None = None,
    sampler: Sampler | None = None,
) -> list[Path]:
    """Write the report of the runs ``chosen``; returns the paths of its files, the page first.

    ``output``: the page, which ends with .html, or a folder for the page and, ``with_images``, an image of each chart. ``prompt``: a text
    for their models to continue. ``sampler``: generates the continuations.
    """
    is_page = output.suffix == ".html" and not output.is_dir()
    if output.suffix and not is_page and not output.is_dir():
        raise ConfigError(f"output {output} must end with .html, or be a folder")
    if not output.parent.is_dir():
        raise ConfigError(f"output {output}: the folder {output.parent} does not exist")
    page_path = output if is_page else output / NAME
    named = dict(zip(comparison.names(chosen), chosen, strict=True))
    samples: Samples = {}
    if sampler and prompt is not None:
        samples = sampler(named, prompt)
    runs = {name: history.read_history(out) for name, out in named.items()}
    settings = {name: provenance.settings_of_run(out) for name, out in named.items()}
    written = {page_path: page(ReportContent(runs, settings, prompt or "", samples)).encode(errors="replace")}
    if with_images and not is_page:
        for name, figure in images.images(runs).items():
            label = re.sub("[ /_]", "-", name)
            written[output / f"report-{label}.png"] = image_style.encoded(figure)
    for path, data in written.items():
        try:
            path.parent.mkdir(exist_ok=True)
            files.write_bytes(path, data)
        except OSError as error:
            raise unwritten(error, path, "choose another output") from None
    return list(written)
