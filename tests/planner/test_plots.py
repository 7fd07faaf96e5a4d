"""What is drawn, and files that stand alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import LinearLatency
from octavo.planner.paper import PAPER, paper_study
from octavo.planner.profile import AttentionTime, Profile
from octavo.planner.studies import Study, StudyResult, run_study
from octavo.planner.workload import WORKLOADS

pytest.importorskip("matplotlib")

from octavo.planner.html_report import write_html
from octavo.planner.plots import over_time, overview, paper_figure, plot_paper, write_plot

LLAMA = KNOWN_MODELS["llama-3.1-8b"]
MEASURED = Profile(
    "llama-3.1-8b", "auto", None, "an abacus", 16, LinearLatency(per_step=0.01, per_token=1e-5, per_context=1e-7),
    {1: AttentionTime(4e-9, 2e-9), 4: AttentionTime(2e-9, 1e-9), 16: AttentionTime(1e-9, 1e-9)}, {"p50": 0.01, "p90": 0.02, "sum": 0.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def side_by_side() -> StudyResult:
    requests = WORKLOADS["rag"].at_rate(5.0).requests(40)
    return run_study(Study("rag <1>", LLAMA, schemes=("all",), kv_memory="3GiB"), requests)


@pytest.fixture(scope="module")
def memory_sweep() -> StudyResult:
    requests = WORKLOADS["rag"].at_rate(12.0).requests(40)
    return run_study(Study("rag", LLAMA, schemes=("paged", "paged+static", "oracle"), kv_memory="2GiB,4GiB,8GiB"), requests)


def test_runs_side_by_side(side_by_side: StudyResult) -> None:
    figure = overview(side_by_side)
    titles = [axes.get_title() for axes in figure.axes]
    memory = next(axes for axes in figure.axes if axes.get_title().startswith("KV memory"))
    assert {"requests in a batch, mean", "output tokens per second", "paged", "maximum+static"} <= set(titles)
    bars = [sum(bar.get_height() for bar in column) for column in zip(*memory.containers, strict=True)]  # type: ignore[arg-type]
    assert len(bars) == len(side_by_side.results) and bars == pytest.approx([1.0] * len(bars))
    assert "shared, beside used" in memory.get_legend_handles_labels()[1]


def test_memory_over_time_has_a_panel_for_each_run(memory_sweep: StudyResult) -> None:
    titles = [axes.get_title() for axes in over_time(memory_sweep).axes if axes.get_title()]
    assert titles == [name.replace("_", " ") for name in memory_sweep.results]


def test_a_memory_sweep(memory_sweep: StudyResult) -> None:
    panels = {axes.get_title(): axes for axes in overview(memory_sweep).axes}
    goodput = panels["goodput, requests per second"]
    for line, scheme in zip(goodput.lines, ("paged", "paged+static", "oracle"), strict=True):
        drawn = [float(y) for y in line.get_ydata()]  # type: ignore[union-attr]
        assert line.get_label() == scheme
        assert drawn == [memory_sweep.summaries[f"{scheme} {size}"]["throughput"]["goodput"] for size in ("2GiB", "4GiB", "8GiB")]
    assert list(goodput.get_xticks()) == [slots / 1000 for slots in memory_sweep.num_slots]


def test_lines_that_coincide_stay_visible(memory_sweep: StudyResult) -> None:
    """Each line is thinner than those it is drawn over, and dashed in another way."""
    lines = next(axes.lines for axes in overview(memory_sweep).axes if axes.get_title() == "table entries per request")
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == len({line.get_linestyle() for line in lines}) == 3


def test_a_block_size_sweep_with_measured_attention() -> None:
    requests = WORKLOADS["chat"].at_rate(5.0).requests(30)
    result = run_study(Study("chat", LLAMA, MEASURED, block_sizes=("1", "4", "16"), kv_memory="2GiB"), requests)
    panels = {axes.get_title(): axes for axes in overview(result).axes}
    drawn = {title: [float(y) for y in axes.lines[0].get_ydata()] for title, axes in panels.items()}  # type: ignore[union-attr]
    assert drawn["attention, µs per 1,000 keys (measured)"] == pytest.approx([4.0, 2.0, 1.0])
    assert drawn["prompt tokens found in the prefix cache"] == [run["prefix"]["tokens_saved"] for run in result.summaries.values()]
    assert drawn["shared slots, % of the memory"][0] > 0
    assert all(axes.get_xlabel() == "block size" for axes in panels.values())


def test_a_panel_without_measurements_is_left_out(memory_sweep: StudyResult) -> None:
    assert not any("measured" in axes.get_title() for axes in overview(memory_sweep).axes)


def test_the_paper_s_bars_beside_ours(tmp_path: Path) -> None:
    study = paper_study(40)
    [axes] = paper_figure(study).axes
    used = [bar.get_height() for bar in axes.containers[0]]  # type: ignore[union-attr]
    assert used == [share for scheme in PAPER for share in (study.rows[scheme]["used"], PAPER[scheme]["used"])]
    plot_paper(study, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_figures_and_reports_stand_alone(side_by_side: StudyResult, memory_sweep: StudyResult, tmp_path: Path) -> None:
    for name in ("a.png", "a.svg"):
        write_plot(side_by_side, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    for result, num_figures in ((side_by_side, 1), (memory_sweep, 2)):
        write_html(result, tmp_path / "r.html")
        page = (tmp_path / "r.html").read_text()
        assert page.count("<svg") == num_figures and "<script" not in page and 'src="' not in page and 'href="http' not in page
    write_html(side_by_side, tmp_path / "r.html")
    assert "rag &lt;1&gt;" in (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="png"):
        write_plot(side_by_side, tmp_path / "a.pdf")
