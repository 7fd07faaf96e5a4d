"""Reports of a simulation: one HTML file that needs no other."""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.planner.paper import PaperStudy
from octavo.planner.plots import over_time, overview, paper_figure, swept
from octavo.planner.studies import StudyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_html(result: StudyResult, path: Path) -> None:
    """Figures, the requests' figures by percentile, and all tables."""
    figures = [_svg(overview(result))]
    if swept(result) is not None:
        figures.append("<h2>Memory over time</h2>\n" + _svg(over_time(result)))
    path.write_text(_page(result.study.title, [*figures, _PERCENTILES.format(rows=_rows(result))], result.describe()))


def write_paper_html(study: PaperStudy, path: Path) -> None:
    """The paper's study: figure, table and assumptions."""
    path.write_text(_page("The memory study of the PagedAttention paper", [_svg(paper_figure(study))], study.describe()))


def _svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    svg = StringIO()
    figure.savefig(svg, format="svg")
    drawing = svg.getvalue()
    return drawing[drawing.index("<svg") :]


def _page(title: str, parts: list[str], text: str) -> str:
    return _PAGE.format(title=escape(title), parts="\n".join(parts), text=escape(text))


def _rows(result: StudyResult) -> str:
    rows = []
    for name, s in result.summaries.items():
        cells: list[Any] = [name]
        for figure in ("ttft", "tpot", "latency"):
            cells += [f"{s[figure][p]:.4g}" if p in s[figure] else "–" for p in ("p50", "p90", "p99")]
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


_PERCENTILES = """<h2>Percentiles, in seconds</h2>
<table>
<tr><th></th><th colspan="3">time to first token</th><th colspan="3">time per output token</th><th colspan="3">to the end</th></tr>
<tr><th>run</th><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th><th>p50</th><th>p90</th><th>p99</th></tr>
{rows}
</table>"""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>octavo simulate: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c }}
pre {{ font-size: 12px; overflow-x: auto; background: #f7fafc; padding: 1rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem .8rem; border-bottom: 1px solid #e2e8f0; text-align: right }}
td:first-child {{ text-align: left }} svg {{ width: 100%; height: auto }}
</style>
<h1>{title}</h1>
{parts}
<h2>All figures</h2>
<pre>{text}</pre>
</html>
"""
