"""A report as one HTML page: the curves, samples, attempts and provenance of one run, or a ranking of several."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError, unwritten
from hpclm.reporting import comparison, curves, figures, history, plots, provenance, timeline
from hpclm.reporting.curves import Chart, Standing
from hpclm.reporting.experts import LOADS, NO_TOKEN, RANGE, ExpertHistory
from hpclm.reporting.history import RECENT, History
from hpclm.reporting.html import SORT, definitions, document, folded, text
from hpclm.reporting.provenance import Settings
from hpclm.rundir.state import span

PAGE = ".html"
"""How the name of a page ends."""
SPREAD = "Each point is the mean of {} steps; the band reaches from their lowest to their highest value."
DIVERGED = "✕: the run diverged, and is off the chart from there; charts show the healthy range."
CLIPPED = "Values above {:.3g} are off the chart."
OPEN_LAYERS = 8
"""Heat maps that are open; more of them are folded."""
BESIDE = 8
"""Settings that are shown below a run's name on a narrow screen, at most."""
Samples = Mapping[str, Mapping[int, str]]
"""Run -> step of a checkpoint -> what its model wrote."""
Sampler = Callable[[Mapping[str, Path], str], Samples]
"""What gives the samples of runs, by name, that continue a text."""


@dataclass(frozen=True)
class Content:
    """What a report is about."""

    runs: Mapping[str, History]
    settings: Mapping[str, Settings]
    prompt: str = ""
    samples: Samples = field(default_factory=dict)


def page(content: Content) -> str:
    """The page, which needs no other file."""
    runs, several = content.runs, len(content.runs) > 1
    standings = curves.ranked(runs)
    ordered = curves.ordered(runs)
    charts = curves.charts(ordered)
    named = {chart.key: _colours([*ordered] if several else [curve.name for curve in chart.curves]) for chart in charts}
    scripts = (plots.scripts() if charts else []) + ([SORT] if several else [])
    drawn = [plots.drawn(chart, named[chart.key]) for chart in charts]
    title = f"{len(runs)} runs compared" if several else standings[0].name
    body = [f"<h1>{text(title)}</h1>"]
    if several:
        differing = provenance.differing(content.settings)
        columns = {key: row for key, row in differing.items() if not provenance.IDLE.fullmatch(key)}
        body += [_verdict(standings, differing), _ranking(standings, ordered, columns), _samples(content, ordered)]
        body += _curves(charts, named)
        body += ["<h2>Attempts</h2>", timeline.legend([*ordered.values()])]
        body += (f"<h3>{text(name)}</h3>{timeline.bars(history)}" for name, history in ordered.items())
        body.append(folded("Provenance", _origins(ordered, content.settings)))
    else:
        [(name, history)] = runs.items()
        body += [f"<p>{text(timeline.state(history))}</p>"]
        if standings[0].diverged is not None:
            body.append(f'<p class="warn">The run diverged at step {standings[0].diverged}.</p>')
        load = history.experts
        drawn += [plots.drawn_heat_map(load, layer) for layer in range(len(load.blocks))] if load else []
        body += [*_curves(charts, named, _load(load) if load else ""), _samples(content, ordered)]
        body += ["<h2>Numbers</h2>", _numbers(history, standings[0])]
        said = timeline.summary(history)
        body += ["<h2>Attempts</h2>", f"<p>{text(said)}</p>" if said else "", timeline.legend([history])]
        body += [timeline.bars(history), timeline.numbers(history)]
        body.append(folded("Provenance", _origin(history, content.settings[name])))
    now = time.strftime("%Y-%m-%d %H:%M %Z")
    body.append(f"<footer><p>Made by hpclm report, {now}. All times are in this time zone.</p></footer>")
    return document(title, body, drawn, scripts)


def _colours(names: list[str]) -> dict[str, str]:
    return dict(zip(names, curves.COLOURS, strict=False))


def _verdict(standings: list[Standing], differing: Mapping[str, object]) -> str:
    """The comparison in a sentence or two."""
    best, lost = standings[0], [standing for standing in standings if standing.diverged is not None]
    loss, kind = (best.training, "training") if best.best is None else (best.best, "validation")
    said = []
    if loss is not None and best.diverged is None:
        said.append(f"<b>{text(best.name)}</b> has the lowest {kind} loss, {loss:.4f} nats per token.")
    if lost:
        names = ", ".join(f"<b>{text(standing.name)}</b> at step {standing.diverged}" for standing in lost)
        said.append(f'<span class="warn">{len(lost)} of {len(standings)} diverged</span>: {names}.')
    if unlike := [key for key in differing if key in provenance.UNCOMPARABLE]:
        said.append(f"They differ in {text(', '.join(unlike))}, so their losses may not measure the same.")
    return f"<p>{' '.join(said)}</p>"


def _ranking(
    standings: list[Standing], runs: Mapping[str, History], differing: Mapping[str, Mapping[str, object]]
) -> str:
    """The runs as rows, the best first, with the settings ``differing`` beside their names; clicking a column heading sorts.

    On a phone, the settings have no columns but are below the name, so that they are seen without scrolling."""
    colours = _colours([*runs])
    names = list(dict.fromkeys(name for history in runs.values() for name in history.steps.reported))
    names = names[: comparison.REPORTED]
    heads = ["run", *differing, "validation loss", "training loss", *names, "state", "steps", "tokens/s"]
    lines = []
    for standing in standings:
        history = runs[standing.name]
        best = "" if standing.best is None else f"{standing.best:.4f}"
        at = f' <span class="soft">step {standing.best_step}</span>' if best else ""
        swatch = f'<i style="background:{colours.get(standing.name, plots.INK)}"></i>'
        rate = _mean(history, "tokens_per_second")
        reported = (history.reported.get(name) for name in names)
        training = "" if standing.training is None else f"{standing.training:.4f}"
        last = int(history.steps["step"][-1]) if len(history.steps) else 0
        values = {key: provenance.shown(row.get(standing.name)) for key, row in differing.items()}
        cells = [
            (standing.name, f"{swatch}{text(standing.name)}{_beside(values)}"),
            *((value, text(value)) for value in values.values()),
            (best, best + at),
            (training, training),
            *(("", "") if value is None else (f"{value:.17g}", f"{value:.4g}") for value in reported),
            ("", _state(history, standing)),
            (str(last), f"{last:,}"),
            (f"{rate:.0f}", f"{rate:,.0f}"),
        ]
        kinds = [' class="setting"' * (0 < number <= len(values)) for number in range(len(cells))]
        row = (
            f'<td{kind} data-value="{text(key)}">{cell}</td>' for kind, (key, cell) in zip(kinds, cells, strict=True)
        )
        lines.append(f"<tr>{''.join(row)}</tr>")
    kinds = [' class="setting"' * (heading in differing) for heading in heads]
    head = "".join(
        f"<th{kind}><button>{text(heading)}</button></th>" for kind, heading in zip(kinds, heads, strict=True)
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    note = (
        "The best run is first: by validation loss where it was measured, else by training loss, "
        f"the mean of the last {RECENT} steps{', as own metrics are' if names else ''}. Click a column heading to sort."
    )
    return f'<div class="scroll"><table class="ranking">{body}</table></div><p class="soft">{note}</p>'


def _beside(values: Mapping[str, str]) -> str:
    """The settings of a run below its name, for a narrow screen."""
    shown = [f"<span>{text(key)}={text(value)}</span>" for key, value in [*values.items()][:BESIDE]]
    shown += [f"<span>and {len(values) - BESIDE} more</span>"] * (len(values) > BESIDE)
    return f'<span class="beside soft">{"".join(shown)}</span>' if shown else ""


def _state(history: History, standing: Standing) -> str:
    """How a run stands, in a few words; why it ended is under the pointer, and below with its attempts."""
    ended = history.attempts[-1].ended if history.attempts else "not started"
    said = history.state or ended or "running, as far as its files say"
    if standing.diverged is not None:
        said = f"diverged at step {standing.diverged}"
    warn = ' class="warn"' * (standing.diverged is not None or said == "failed")
    return f'<span{warn} title="{text(ended)}">{text(said)}</span>'


def _curves(charts: list[Chart], named: Mapping[str, Mapping[str, str]], load: str = "") -> Iterator[str]:
    """The charts; ``load``: the heat maps of experts."""
    if not charts:
        return
    group = max(chart.group for chart in charts)
    said = ["Point at a chart, or tap it, to read its values."] + [SPREAD.format(group)] * (group > 1)
    said += [DIVERGED] * any(curve.left for chart in charts for curve in chart.curves)
    sections = {"Curves": "", "Experts": "", "Own metrics": ""}
    for chart in charts:
        sections[chart.section] += _figure(chart, named[chart.key])
    yield f'<h2>Curves</h2><p class="soft">{" ".join(said)}</p><div class="figures">{sections.pop("Curves")}</div>'
    for heading, content in sections.items():
        if content:
            yield f'<h2>{heading}</h2><div class="figures">{content}</div>{load if heading == "Experts" else ""}'


def _load(load: ExpertHistory) -> str:
    """The places of heat maps, and what their colours mean; folded if there are many."""
    marks = {NO_TOKEN: "no token", LOADS[0]: f"1/{RANGE:.0f} of the mean or less"}
    marks |= {LOADS[len(LOADS) // 2]: "the mean", LOADS[-1]: f"{RANGE:.0f} times the mean or more"}
    swatches = "".join(
        f'<span><i style="background:{colour};outline:1px solid var(--line)"></i>{text(said)}</span>'
        for colour, said in marks.items()
    )
    places = "".join(
        f'<figure><h3>{text(block)}</h3><div class="plot" id="{plots.heat_map_place(layer)}"></div></figure>'
        for layer, block in enumerate(load.blocks)
    )
    content = f'<div class="legend">{swatches}</div><div class="figures">{places}</div>'
    title = "Load of every expert"
    return folded(title, content) if len(load.blocks) > OPEN_LAYERS else f"<h2>{title}</h2>{content}"


def _figure(chart: Chart, colours: Mapping[str, str]) -> str:
    """The place of a chart, with its title, names and caption."""
    names = [curve.name for curve in chart.curves if curve.name in colours]
    swatches = "".join(f'<span><i style="background:{colours[name]}"></i>{text(name)}</span>' for name in names)
    others = len(chart.curves) - len(names)
    swatches += f'<span><i style="background:{plots.INK}"></i>{others} more</span>' if others else ""
    clipped = any((curve.mean[: curve.kept] > chart.top).any() for curve in chart.curves)
    said = CLIPPED.format(chart.top) if clipped else ""
    return (
        f'<figure><h3>{text(chart.title)}</h3><div class="legend">{swatches if len(chart.curves) > 1 else ""}</div>'
        f'<div class="plot" id="{chart.place}"></div><figcaption>{said}</figcaption></figure>'
    )


def _samples(content: Content, order: Iterable[str]) -> str:
    """What the models write, side by side."""
    if not content.samples:
        return ""
    cards = []
    for name in order:
        for step, sample in content.samples.get(name, {}).items():
            about = f"{name}, step {step:,}" if len(content.runs) > 1 else f"step {step:,}"
            cards.append(f'<div class="card"><span class="soft">{text(about)}</span>{_sample(sample)}</div>')
    said = f'<p class="soft">Continuing <code>{text(content.prompt)}</code></p>' if content.prompt else ""
    return f'<h2>Samples</h2>{said}<div class="grid">{"".join(cards)}</div>'


def _sample(sample: str) -> str:
    """What a model wrote, or in words that it is nothing to be seen."""
    if sample.strip():
        return f"<pre>{text(sample)}</pre>"
    return f'<p class="soft">{"wrote only white space" if sample else "ended at once"}</p>'


def _origin(history: History, settings: Settings) -> str:
    facts = {title: text(fact) for title, fact in provenance.facts(history, settings).items()}
    return definitions({**facts, **_changed(settings)})


def _origins(runs: Mapping[str, History], settings: Mapping[str, Settings]) -> str:
    """What the runs have in common, and what is of each."""
    facts = {name: provenance.facts(history, settings[name]) for name, history in runs.items()}
    titles = dict.fromkeys(title for run_facts in facts.values() for title in run_facts)
    rows = {title: {name: text(run_facts.get(title, "–")) for name, run_facts in facts.items()} for title in titles}
    alike = {title: next(iter(row.values())) for title, row in rows.items() if len(set(row.values())) == 1}
    differing, first_settings = provenance.differing(settings), next(filter(None, settings.values()), {})
    common = {key: value for key, value in first_settings.items() if key not in differing}
    unlike = (f"<h3>{text(title)}</h3>{definitions(row)}" for title, row in rows.items() if title not in alike)
    return definitions({**alike, **_changed(common)}) + "".join(unlike)


def _changed(settings: Settings) -> dict[str, str]:
    changed = {key: value for key, value in provenance.changed(settings).items() if not key.startswith("data.")}
    words = " ".join(f"<code>{text(f'{key}={provenance.shown(value)}')}</code>" for key, value in changed.items())
    return {"settings that differ from the defaults": words} if words else {}


def _mean(history: History, name: str) -> float:
    values = [row[name] for row in history.recent if row.get(name)]
    return sum(values) / len(values) if values else 0.0


def _numbers(history: History, standing: Standing) -> str:
    """The figures of a run; those that are unknown are left out."""
    last = history.recent[-1] if history.recent else {}
    speed, mfu, waiting = (_mean(history, name) for name in ("tokens_per_second", "mfu", "data_fraction"))
    cards = {
        "last step": str(last.get("step", "")),
        f"training loss, mean of the last {standing.over} steps": ""
        if standing.training is None
        else f"{standing.training:.4f}",
        f"best validation loss, step {standing.best_step}": "" if standing.best is None else f"{standing.best:.4f}",
        "tokens/s": f"{speed:,.0f}" if speed else "",
        "MFU": f"{mfu:.1%}" if mfu else "",
        "peak memory of rank 0": f"{history.memory / (1 << 30):.2f} GiB" if history.memory else "",
        "of step time waiting for data": f"{waiting:.1%}" if waiting else "",
        "goodput": f"{history.goodput:.1%}" if history.goodput is not None else "",
        "time": span(history.wall) if history.wall else "",
        "waiting in the queue": timeline.seconds(history.seconds("queued")),
        "starting": timeline.seconds(history.seconds("starting")),
        "steps redone": str(sum(attempt.lost for attempt in history.attempts)),
    }
    shown = (
        f"<div><b>{text(value)}</b><span class=soft>{text(name)}</span></div>" for name, value in cards.items() if value
    )
    return f'<div class="numbers">{"".join(shown)}</div>'


def write(
    chosen: Sequence[Path],
    output: Path,
    images: bool,
    prompt: str | None = None,
    sampler: Sampler | None = None,
) -> list[Path]:
    """Write the report of the runs ``chosen``; the files it consists of.

    ``prompt``: a text that their models continue, by ``sampler``, which takes the runs and the prompt.
    """
    if output.suffix != PAGE:
        raise ConfigError(f"output {output} must end with {PAGE}")
    if not output.parent.is_dir():
        raise ConfigError(f"output {output}: there is no folder {output.parent}")
    named = dict(zip(comparison.names(chosen), chosen, strict=True))
    samples: Samples = sampler(named, prompt) if sampler and prompt is not None else {}
    runs = {name: history.read(out) for name, out in named.items()}
    settings = {name: provenance.settings(out) for name, out in named.items()}
    written = {output: page(Content(runs, settings, prompt or "", samples)).encode(errors="replace")}
    if images:
        for name, figure in figures.figures(runs).items():
            label = re.sub("[ /_]", "-", name)
            written[output.with_name(f"{output.stem}-{label}.png")] = figures.png(figure)
    for path, data in written.items():
        try:
            files.write_bytes(path, data)
        except OSError as error:
            raise unwritten(error, path, "choose another output") from None
    return list(written)
