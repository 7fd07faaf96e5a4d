"""The options of ``octavo simulate``: what each does, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.errors import ConfigError
from octavo.planner import studies
from octavo.planner.latency_model import LinearLatency
from octavo.planner.profile import Profile

FEW = ("--num-requests", "30", "--kv-memory", "2GiB", "--processes", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def runs(*arguments: str) -> dict[str, Any]:
    """The summaries of all runs."""
    result = run(*arguments, "--json")
    assert result.exception is None, result.exception
    found: dict[str, Any] = json.loads(result.output)["runs"]
    return found


def only(*arguments: str) -> dict[str, Any]:
    """The summary of the one run."""
    [summary] = runs(*arguments).values()
    assert isinstance(summary, dict)
    return summary


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--num-requests -3", "at least 1, not -3"),
        ("--paper --num-requests 0", "at least 1, not 0"),
        ("--processes 0", "at least 1, not 0"),
        ("--max-model-len -5", "at least 2, not -5"),
        ("--max-model-len 1", "at least 2, not 1"),
        ("--scheme ,", "paged, maximum, power_of_two"),
        ("--scheme slab", "paged, maximum, power_of_two"),
        ("--block-size ,", "1, 2, 4, 8"),
        ("--placement best_fit", "first_fit or buddy"),
        ("--paper --placement best_fit", "first_fit or buddy"),
        ("--goodput-ttft 0", "positive number of seconds, not 0"),
        ("--goodput-tpot nan", "positive number of seconds, not nan"),
        ("--dtype fp9", "auto, float32"),
        ("--kv-dtype fp9", "auto, float32"),
        ("--quantize int3", "int8, int4"),
        ("--tensor-parallel 3", "8 kv heads"),
        ("--tensor-parallel 0", "8 kv heads"),
        ("--model llama-3.1-70b --gpu H100", "--tensor-parallel 2"),
        ("--rate nan", "positive"),
        ("--arrivals sometimes", "poisson, gamma"),
        ("--arrival-cv 3", "choose gamma"),
        ("--arrivals gamma --arrival-cv inf", "positive number"),
        ("--prompt-len 0", "positive number"),
        ("--output-len inf", "positive number"),
        ("--cancel 1.5", "from 0 to 1"),
        ("--paper --model opt-13b --scheme paged", "--model and --scheme would have no effect"),
        ("--trace t.csv --rate 3", "--rate would have no effect"),
        ("chat --trace t.csv", "the workload would have no effect"),
        ("--speed 3", "--speed would have no effect"),
        ("--n 2 --beam-width 2", "one of the two"),
        ("--n 0", "from 1 to"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "simulate", lambda *_: pytest.fail("the simulation has begun"))
    result = run(*arguments.split(" "))
    assert isinstance(result.exception, ConfigError) and says in str(result.exception)


@pytest.mark.parametrize(("arguments", "says"), [("--replicas 0", "at least 1 replica, not 0"), ("--router psychic", "prefix_aware")])
def test_a_fleet_that_cannot_be_is_refused(arguments: str, says: str) -> None:
    result = run(*arguments.split())
    assert isinstance(result.exception, ConfigError) and says in str(result.exception)


@pytest.mark.parametrize("option", ["--plot", "--html"])
@pytest.mark.parametrize("study", [(), ("--paper",)])
def test_files_that_cannot_be_written_are_refused_before_anything_runs(
    option: str, study: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "simulate", lambda *_: pytest.fail("the simulation has begun"))
    monkeypatch.setattr("octavo.planner.paper.simulate", lambda *_: pytest.fail("the simulation has begun"))
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for path, says in ((tmp_path / "no" / "x.svg", "no folder"), (folder, "is a folder")):
        result = run(*study, option, str(path))
        assert isinstance(result.exception, ConfigError) and says in str(result.exception)
    result = run(*study, "--plot", str(tmp_path / "x.pdf"))
    assert isinstance(result.exception, ConfigError) and ".png or .svg" in str(result.exception)


def test_figures_without_matplotlib_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = run("--plot", str(tmp_path / "x.png"))
    assert isinstance(result.exception, ConfigError) and "octavo[plot]" in str(result.exception)


def test_what_was_not_measured_is_refused_with_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    latency = LinearLatency(per_step=0.01, per_token=1e-5)
    Profile("llama-3.1-8b", "auto", None, "an abacus", 16, latency, {}, {"p50": 0.0, "p90": 0.0, "sum": 0.0}).save(path)
    for arguments in (("--kv-dtype", "int8"), ("--quantize", "int4"), ("--tensor-parallel", "2")):
        result = run("--profile", str(path), *arguments)
        assert isinstance(result.exception, ConfigError) and "was measured with dtype=auto" in str(result.exception)


def test_all_schemes_and_waste_over_time() -> None:
    found = runs("rag", *FEW, "--rate", "20", "--scheme", "all")
    assert list(found) == list(studies.ALL_SCHEMES)
    for summary in found.values():
        columns = summary["timeline"]
        kinds = [columns[kind] for kind in ("used", "reserved", "internal", "external", "free")]
        assert len({len(column) for column in columns.values()}) == 1 and len(columns["seconds"]) > 10
        assert all(sum(shares) == pytest.approx(1, abs=1e-6) for shares in zip(*kinds, strict=True))
        for kind in ("used", "internal", "external", "shared"):  # the last span is shorter than the others
            mean = sum(columns[kind][:-1]) / (len(columns[kind]) - 1)
            assert mean == pytest.approx(summary["memory"]["all"][kind], abs=0.02), kind
    copies = {name: summary["copies"] for name, summary in found.items()}
    assert copies["growing"]["bytes_copied"] == 131_072 * copies["growing"]["slots_copied"] > 0
    assert copies["paged"] == {"slots_copied": 0, "bytes_copied": 0, "stalls": 0}
    assert found["paged"]["memory"]["all"]["shared"] > 0 == found["oracle"]["memory"]["all"]["shared"]


def test_tables_show_copies_stalls_shared_slots_and_limits() -> None:
    output = run("rag", *FEW, "--rate", "20", "--scheme", "growing", "--goodput-ttft", "5", "--goodput-tpot", "0.5").output
    assert "first token within 5 s, then 0.5 s a token" in output
    header = next(line for line in output.splitlines() if "saved by sharing" in line)
    assert header.split("saved by sharing")[0].split()[-1] == "shared" and header.split()[-2:] == ["copied", "stalls"]
    assert "MiB" in next(line for line in output.splitlines() if line.startswith("growing") and "%" in line and "iB" in line)


def test_laxer_limits_count_more_as_goodput() -> None:
    strict, lax = (only("rag", *FEW, "--rate", "20", "--goodput-ttft", limit)["throughput"]["goodput"] for limit in ("0.5", "1e9"))
    assert strict < lax


def test_a_sweep_over_block_sizes() -> None:
    found = runs("chat", *FEW, "--block-size", "sweep", "--no-prefix-caching")
    assert list(found) == [f"paged {2**k}" for k in range(9)]
    assert all(summary["prefix"]["tokens_saved"] == 0 for summary in found.values())


def test_placement_decides_what_is_external() -> None:
    arguments = ("rag", *FEW, "--rate", "20", "--scheme", "oracle", "--placement")
    buddy, first_fit = (only(*arguments, placement)["memory"]["pressed"]["external"] for placement in ("buddy", "first_fit"))
    assert buddy > first_fit + 0.05


def test_samples_and_beams() -> None:
    counts = {how: only("rag", *FEW, *how.split())["memory"]["saved_by_sharing"] for how in ("--n 1", "--n 4", "--beam-width 4")}
    assert counts["--n 1"] + 0.2 < counts["--n 4"] < counts["--beam-width 4"]


@pytest.mark.parametrize("router", ["round_robin", "sticky", "least_loaded", "prefix_aware"])
def test_replicas_behind_each_router(router: str) -> None:
    summary = only("rag", *FEW, "--replicas", "3", "--router", router, "--rate", "20")
    assert summary["num_replicas"] == 3 and summary["requests"]["completed"] == 30


def test_dtypes_of_weights_keys_and_values() -> None:
    def study(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("--num-requests", "5", *arguments, "--json").output)
        return found

    plain, int8 = study(), study("--kv-dtype", "int8", "--quantize", "int8")
    assert plain["kv_bytes_per_token"] == 131_072 and study("--kv-dtype", "fp8")["kv_bytes_per_token"] == 65_536
    assert study("--dtype", "float32")["kv_bytes_per_token"] == 262_144
    assert int8["num_slots"][0] > 2 * plain["num_slots"][0] and int8["weights"] != plain["weights"]
    assert int8["runs"]["paged"]["tpot"]["p50"] < plain["runs"]["paged"]["tpot"]["p50"]


def test_two_devices_hold_what_one_does_not() -> None:
    result = run("--model", "llama-3.1-70b", "--gpu", "H100", "--tensor-parallel", "2", "--num-requests", "5")
    assert result.exit_code == 0 and "published figures of 2 x H100" in result.output


def test_figures_of_a_workload_can_be_replaced() -> None:
    own = only("code", *FEW)
    given_up = only("code", *FEW, "--cancel", "0", "--arrivals", "at_once")
    assert own["requests"]["given_up"] > 0 == given_up["requests"]["given_up"]
    longer = only("code", *FEW, "--cancel", "0", "--output-len", "200", "--prompt-len", "900", "--arrivals", "gamma", "--arrival-cv", "3")
    output, prompt = (kind + "_tokens_per_second" for kind in ("output", "prompt"))
    ratios = [run["throughput"][prompt] / run["throughput"][output] for run in (given_up, longer)]
    assert ratios[1] < ratios[0] / 4


def test_the_study_of_the_paper_with_all_its_options(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "p.svg", tmp_path / "p.html"
    arguments = ("--paper", "--num-requests", "60", "--seed", "3", "--placement", "first_fit", "--plot", str(plot), "--html", str(html))
    data = json.loads(run(*arguments, "--json").output)
    assert (data["num_requests"], data["seed"], data["placement"]) == (60, 3, "first_fit")
    page = html.read_text()
    assert (
        plot.read_text().lstrip().startswith("<?xml") and "<svg" in page and "60 requests, seed 3" in page and "1. Model and memory" in page
    )


def test_figures_and_a_report_of_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, plot, html = tmp_path / "t.csv", tmp_path / "p.png", tmp_path / "p.html"
    rows = [f"2023-11-16 18:00:{i:02d},{100 + i},{5 + i}" for i in range(30)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    result = run("--trace", str(trace), "--speed", "2", "--block-size", "8,32", "--plot", str(plot), "--html", str(html))
    assert result.exit_code == 0 and plot.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "t.csv" in page and "Memory over time" in page and page.count("<svg") == 2
