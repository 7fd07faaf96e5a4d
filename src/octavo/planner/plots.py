"""Figures by matplotlib, loaded only here, and a report as one HTML file."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.planner.accounting import KINDS
from octavo.planner.paper import PAPER, PaperStudy
from octavo.planner.report import timeline
from octavo.planner.studies import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"used": "#2b6cb0", "reserved": "#90cdf4", "internal": "#ed8936", "external": "#c53030", "free": "#e2e8f0"}


def write_plot(result: StudyResult, path: Path) -> None:
    """A figure of all runs: memory by kind, memory over time, speed. ``path`` ends in .png or .svg."""
    _save(overview(result), path)


def plot_paper(study: PaperStudy, path: Path) -> None:
    """The paper's figure 2, with its own bars beside ours."""
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    bars = {scheme: row for scheme, row in study.rows.items() if scheme in PAPER}
    names = [label for scheme in bars for label in (_label(scheme), f"{_label(scheme)}\n(paper)")]
    rows = [row for scheme in bars for row in (bars[scheme], PAPER[scheme])]
    _stack(axes, names, rows)
    axes.set_xticks(range(len(names)), names, rotation=0, ha="center")
    axes.set_title("KV memory by kind, beside arXiv 2309.06180, figure 2")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), fontsize=8, frameon=False)
    _save(figure, path)


SWEPT: dict[str, Callable[[dict[str, Any]], float]] = {
    "waste, % of the memory": lambda s: (
        100 * (s["memory"]["all"]["reserved"] + s["memory"]["all"]["internal"] + s["memory"]["all"]["external"])
    ),
    "table entries per request": lambda s: s["metadata"]["table_entries_per_request"],
    "metadata, % of the KV memory": lambda s: 100 * s["metadata"]["share_of_kv_memory"],
    "attention, µs per 1,000 keys (measured)": lambda s: s["attention"]["us_per_1000_keys"],
    "prefix hit rate, %": lambda s: 100 * s["prefix"]["hit_rate"],
    "output tokens per second": lambda s: s["throughput"]["output_tokens_per_second"],
    "goodput, requests per second": lambda s: s["throughput"]["goodput"],
    "preemptions": lambda s: s["preemptions"],
}


def overview(result: StudyResult) -> Figure:
    """One figure of a study: a sweep's lines, or its runs side by side."""
    configs = [run.config for run in result.results.values()]
    sizes, slots = {c.block_size for c in configs if c.scheme == "paged"}, {c.num_slots for c in configs}
    return _swept(result, "block_size" if len(sizes) > 1 else "num_slots") if len(sizes) > 1 or len(slots) > 1 else _side_by_side(result)


def _swept(result: StudyResult, what: str) -> Figure:
    """Figures against the block size, or the memory; a line for each scheme."""
    figure = _figure(14, 6.5)
    lines = _lines(result, what)
    for axes, (title, value) in zip(figure.subplots(2, 4).flat, SWEPT.items(), strict=True):
        try:
            points = {label: ([x for x, _ in line], [value(result.summaries[name]) for _, name in line]) for label, line in lines.items()}
        except (KeyError, TypeError):  # not measured
            axes.remove()
            continue
        _lines_of(axes, points, "block size" if what == "block_size" else "KV memory, thousands of tokens")
        axes.set_title(title, fontsize=9)
    if len(lines) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _lines(result: StudyResult, what: str) -> dict[str, list[tuple[float, str]]]:
    """(place on the axis, run) of each line, by its label."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for name, run in result.results.items():
        other = f", {run.config.num_slots:,} tokens" if what == "block_size" and len(result.num_slots) > 1 else ""
        label = f"{run.config.scheme}{'+static' if run.config.batching == 'static' else ''}{other}"
        place = run.config.block_size if what == "block_size" else run.config.num_slots / 1000
        lines.setdefault(label, []).append((place, name))
    return lines


def _lines_of(axes: Axes, points: dict[str, tuple[list[float], list[float]]], below: str) -> None:
    for label, (places, values) in points.items():
        axes.plot(places, values, marker="o", markersize=4, label=label)
    places = sorted({place for line, _ in points.values() for place in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places], fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.08 * max(max(values) for _, values in points.values()) or 1)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(below, fontsize=8)
    axes.grid(alpha=0.25)


def _side_by_side(result: StudyResult) -> Figure:
    """Memory and speed of each run, and the memory of each over time."""
    runs = list(result.summaries)
    num_rows = (len(runs) + 2) // 3
    figure = _figure(13, 4.4 + 1.9 * num_rows)
    rows = figure.add_gridspec(2, 1, height_ratios=[4.4, 1.9 * num_rows])
    top, bottom = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    memory, batch, speed = top.subplots(1, 3)
    pressed = any(s["memory"]["pressed_seconds"] for s in result.summaries.values())
    shares = [s["memory"]["pressed" if s["memory"]["pressed_seconds"] else "all"] for s in result.summaries.values()]
    _stack(memory, [_label(run) for run in runs], shares)
    top.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), fontsize=8, frameon=False)
    memory.set_title("KV memory" + (" while requests waited" if pressed else ""), fontsize=10)
    _bars(batch, runs, [s["batch"]["mean"] for s in result.summaries.values()], "requests in a batch, mean")
    _bars(speed, runs, [s["throughput"]["output_tokens_per_second"] for s in result.summaries.values()], "output tokens per second")
    grid = bottom.subplots(num_rows, min(3, len(runs)), squeeze=False, sharey=True, sharex=True)
    for axes, name in zip(grid.flat, runs, strict=False):
        _over_time(axes, name, result)
    for axes in list(grid.flat)[len(runs) :]:
        axes.set_axis_off()
    bottom.supxlabel("seconds", fontsize=8)
    bottom.supylabel("share of the KV memory", fontsize=8)
    return figure


def _label(name: str) -> str:
    return name.replace("_", " ").replace("+", "\n+ ")


def _stack(axes: Axes, names: list[str], rows: list[dict[str, float]]) -> None:
    places = range(len(names))
    below = [0.0] * len(names)
    for kind in KINDS:
        heights = [row.get(kind, 0.0) for row in rows]
        axes.bar(places, heights, bottom=below, color=COLOURS[kind], label=kind)
        for place, start, height in zip(places, below, heights, strict=True):
            if height >= 0.05 and kind != "free":
                dark = kind in ("used", "external")
                axes.text(
                    place, start + height / 2, f"{height:.0%}", ha="center", va="center", fontsize=6, color="white" if dark else "black"
                )
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=7)
    _name(axes, names)


def _bars(axes: Axes, names: list[str], heights: list[float], title: str) -> None:
    bars = axes.bar(range(len(names)), heights, color=COLOURS["used"])
    axes.bar_label(bars, [f"{height:,.0f}" if height >= 100 else f"{height:.3g}" for height in heights], fontsize=7)
    _name(axes, [_label(name) for name in names])
    axes.margins(y=0.12)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(title, fontsize=10)


def _name(axes: Axes, names: list[str]) -> None:
    """Names below bars, slanted where there are many."""
    many = len(names) > 4
    axes.set_xticks(range(len(names)), names, rotation=35 if many else 0, ha="right" if many else "center", fontsize=7)
    if many:
        axes.tick_params(axis="x", pad=0)


def _over_time(axes: Axes, name: str, result: StudyResult) -> None:
    moments = timeline(result.results[name])
    times = [moment.time for moment in moments]
    columns = [[moment.shares[kind] for moment in moments] for kind in KINDS]
    axes.stackplot(times, columns, colors=[COLOURS[kind] for kind in KINDS])
    axes.set_title(name.replace("_", " "), fontsize=8)
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.tick_params(labelsize=7, labelbottom=True)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'octavo[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"a figure is written as .png or .svg, not {path.name}")
    figure.savefig(path, dpi=150)


def write_html(result: StudyResult, path: Path) -> None:
    """Everything in one file that needs no other: figure (SVG), tables, and the requests' figures by percentile."""
    svg = StringIO()
    overview(result).savefig(svg, format="svg")
    drawing = svg.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    path.write_text(_PAGE.format(title=escape(result.study.title), text=escape(result.describe()), svg=drawing, rows=_rows(result)))


def _rows(result: StudyResult) -> str:
    rows = []
    for name, s in result.summaries.items():
        cells: list[Any] = [name]
        for figure in ("ttft", "tpot", "latency"):
            cells += [f"{s[figure][p]:.4g}" if p in s[figure] else "–" for p in ("p50", "p90", "p99")]
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>octavo simulate: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c }}
pre {{ font-size: 12px; overflow-x: auto; background: #f7fafc; padding: 1rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem .8rem; border-bottom: 1px solid #e2e8f0; text-align: right }}
td:first-child {{ text-align: left }} svg {{ width: 100%; height: auto }}
</style>
<h1>{title}</h1>
{svg}
<h2>Percentiles, in seconds</h2>
<table>
<tr><th></th><th colspan="3">time to first token</th><th colspan="3">time per output token</th><th colspan="3">to the end</th></tr>
<tr><th>run</th><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th></tr>
{rows}
</table>
<h2>All figures</h2>
<pre>{text}</pre>
</html>
"""
