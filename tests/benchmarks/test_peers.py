"""The pure parts of the comparison with other engines: limits, what runners print, the tables."""

from __future__ import annotations

import argparse
import doctest
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import checkpoints, limits, report
from benchmarks.peers.__main__ import ENGINES, letters_for, some_of
from benchmarks.peers.engines import base
from benchmarks.peers.process import Run, execute
from benchmarks.peers.report import METRICS, Metric, block, markdown
from benchmarks.peers.results import failures, medians, metrics_of, parse_line, workload_of
from benchmarks.peers.workshop import CannotPrepare, Workshop

CEILINGS = {"bf16_gflops": 400.0, "int8_gops": 800.0, "read_gbs": 50.0}
TINY = limits.Shape(layer_weights=1000, head_weights=100, num_layers=2, num_heads=3, head_dim=8)


def counted(requests: list[dict[str, Any]]) -> tuple[int, int, int, int]:
    """Tokens, sampled rows, (query, key) pairs and steps, one by one; each distinct prefix of a prompt is computed once."""
    known, tokens, sampled, pairs = set(), 0, 0, 0
    for request in requests:
        prompt = request["prompt"]
        for end in range(1, len(prompt) + 1):
            if tuple(prompt[:end]) not in known:
                known.add(tuple(prompt[:end]))
                tokens, pairs = tokens + 1, pairs + end
        sampled += 1
        for _ in range(request.get("n", 1)):
            for context in range(len(prompt) + 1, len(prompt) + request["max_tokens"]):
                tokens, sampled, pairs = tokens + 1, sampled + 1, pairs + context
    return tokens, sampled, pairs, max(r["max_tokens"] for r in requests)


@given(shared=st.integers(0, 5), owns=st.lists(st.integers(1, 6), min_size=1, max_size=4), out=st.integers(1, 5), n=st.integers(1, 3))
def test_work_is_what_counting_token_by_token_gives(shared: int, owns: list[int], out: int, n: int) -> None:
    requests = [{"prompt": [0] * shared + [9 + i] * own, "max_tokens": out + i, "n": n} for i, own in enumerate(owns)]
    work = limits.prompt_work(requests) + limits.decode_work(requests)
    assert (work.tokens, work.sampled, work.pairs, work.steps) == counted(requests)


def test_time_is_the_larger_of_arithmetic_and_memory() -> None:
    steps = limits.Work(tokens=1, sampled=1, pairs=0, steps=1)
    rows = limits.Work(tokens=10_000, sampled=0, pairs=100, steps=1)
    assert limits.seconds(steps, TINY, "bf16", CEILINGS) == pytest.approx(2 * 1100 / 50e9)
    attention = 4 * 2 * 3 * 8 * 100 / 400e9
    assert limits.seconds(rows, TINY, "bf16", CEILINGS) == pytest.approx(2 * 1000 * 10_000 / 400e9 + attention)
    assert limits.seconds(rows, TINY, "int8", CEILINGS) == pytest.approx(2 * 1000 * 10_000 / 800e9 + attention)


def test_a_single_stream_reads_the_weights_once_per_token() -> None:
    shape = limits.SHAPES["smollm2"]
    work = limits.decode_work([{"prompt": [1] * 128, "max_tokens": 128}])
    rates = {p: work.steps / limits.seconds(work, shape, p, CEILINGS) for p in limits.BITS}
    assert rates["bf16"] == pytest.approx(50e9 / (2 * 134_479_872))
    assert rates["int8"] == pytest.approx(2 * rates["bf16"])
    assert rates["int4"] == pytest.approx(50e9 / (106_168_320 * 4.5 / 8 + 28_311_552))


def test_first_tokens_wait_for_the_prompts_before_them() -> None:
    requests = [{"prompt": [i] * 1000, "max_tokens": 5} for i in range(4)]
    service = limits.seconds(limits.prompt_work(requests[:1]), TINY, "bf16", CEILINGS)
    rare, at_once = (limits.first_tokens(requests, rate, TINY, "bf16", CEILINGS) for rate in (1e-6, 1e12))
    assert rare == pytest.approx([service] * 4)
    assert at_once == pytest.approx([service, 2 * service, 3 * service, 4 * service])


def test_a_prompt_ends_before_its_output_begins_but_many_requests_overlap() -> None:
    one = [{"prompt": [1] * 50_000, "max_tokens": 50}]
    alone, apart = limits.wall(one, TINY, "bf16", CEILINGS), [limits.prompt_work(one), limits.decode_work(one)]
    assert alone == pytest.approx(sum(limits.seconds(work, TINY, "bf16", CEILINGS) for work in apart))
    two = [*one, {"prompt": [2] * 50_000, "max_tokens": 50}]
    work = limits.prompt_work(two) + limits.decode_work(two)
    assert limits.wall(two, TINY, "bf16", CEILINGS) == pytest.approx(limits.seconds(work, TINY, "bf16", CEILINGS))


def test_lines_of_runners() -> None:
    assert parse_line('RESULT {"workload": "a", "walls": [1.0]}\n') == {"workload": "a", "walls": [1.0]}
    assert parse_line('{"wall": 2.5}') == {"wall": 2.5}
    assert parse_line("READY m.gguf args '-np 8 -c 8192' ready_s .398 first_token_s .436") == {"first_token_s": 0.436}
    assert parse_line("READY octavo m args '' ready_s 1.2") is None
    assert parse_line("{broken") is None
    assert parse_line("loading weights") is None


def test_runners_name_the_same_things_differently() -> None:
    offline = {"label": "x", "workload": "k", "walls": [3.0, 1.0, 2.0], "ttft_ms": 87.0, "decode_tps": 64.0, "peak_rss_mib": 900}
    assert workload_of(offline, "abck") == "c"
    assert metrics_of(offline, "c") == {"wall": 2.0, "ttft_ms": 87.0, "decode_tps": 64.0, "peak_rss_mib": 900.0}
    served = {"label": "llama-server", "wall": 38.0, "ttft_p50_ms": 61.0, "ttft_p99_ms": 309.0, "tpot_p50_ms": 7.9, "tpot_p99_ms": 15.0}
    assert workload_of(served, "e") == "e"
    assert metrics_of(served, "e") == {"wall": 38.0, "ttft_ms": 61.0, "ttft_p99_ms": 309.0, "tpot_ms": 7.9, "tpot_p99_ms": 15.0}
    assert workload_of(dict(offline, workload="a"), "q") == "q"
    assert workload_of({"load_to_first_token_s": 1.2}, "abcd") is None


def run(code: str, workloads: str, log: Path) -> list[dict[str, Any]]:
    return execute(Run("X", "bf16", workloads, [sys.executable, "-c", code]), log)


def test_a_process_gives_a_record_for_each_result_and_a_reason_for_each_missing_one(tmp_path: Path) -> None:
    code = """
print('RESULT {"load_to_first_token_s": 0.0}')
print('RESULT {"workload": "a", "walls": [1.5], "peak_rss_mib": 100}')
raise ValueError("no room for c")
"""
    records = run(code, "acc", tmp_path / "log")
    assert [(r["workload"], "why" in r) for r in records] == [("start", False), ("a", False), ("c", True)]
    assert records[0]["metrics"]["first_token_s"] > 0
    assert records[1]["metrics"] == {"wall": 1.5, "peak_rss_mib": 100.0}
    assert records[2]["why"] == "ValueError: no room for c"


def test_the_start_of_a_server_is_not_that_of_the_engine(tmp_path: Path) -> None:
    code = """print("READY m first_token_s 83.0"); print('{"wall": 40.0}')"""
    assert [r["workload"] for r in run(code, "e", tmp_path / "log")] == ["e"]
    assert [r["workload"] for r in run(code, "a", tmp_path / "log")] == ["start", "a"]


def test_failures_for_one_reason_are_one() -> None:
    records = [{"engine": "X", "precision": "bf16", "workload": w, "why": why} for w, why in (("c", "full"), ("a", "full"), ("b", "late"))]
    assert failures(records) == {("X", "bf16", "full"): "AC", ("X", "bf16", "late"): "B"}


def test_turns_leave_out_what_an_engine_cannot_run_and_long_workloads_after_the_first_round(tmp_path: Path) -> None:
    openvino = ENGINES["openvino"](Workshop(tmp_path))
    assert letters_for(openvino, "bf16", "abcdeqs", first_round=True) == "abcdq"
    assert letters_for(openvino, "bf16", "abcdeqs", first_round=False) == "abcd"
    octavo = ENGINES["octavo"](Workshop(tmp_path))
    assert letters_for(octavo, "int8", "aes", first_round=True) == "ae"
    assert letters_for(octavo, "int4", "aes", first_round=True) == "a"


def test_what_is_complete_is_not_made_again_and_the_rest_is(tmp_path: Path) -> None:
    shop, made = Workshop(tmp_path), []

    def make(target: Path) -> None:
        target.mkdir()
        made.append(target)
        if len(made) == 1:
            raise CannotPrepare("interrupted")

    with pytest.raises(CannotPrepare):
        shop.made("x", make)
    assert shop.made("x", make) == shop.made("x", make) == tmp_path / "x"
    assert len(made) == 2


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(CannotPrepare, match=r"failed: ERROR: no matching distribution"):
        Workshop(tmp_path).run("x", [sys.executable, "-c", "print('ERROR: no matching distribution'); print('bye'); raise SystemExit(1)"])


def test_unknown_names_are_refused_with_the_legal_ones() -> None:
    assert some_of(["a", "b"])("b,a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match="'c' is not known; choose some of a,b"):
        some_of(["a", "b"])("a,c")


def record(engine: str, workload: str, precision: str = "bf16", **metrics: float) -> dict[str, Any]:
    return {"engine": engine, "precision": precision, "workload": workload, "metrics": metrics}


def test_medians_are_over_the_rounds() -> None:
    found = medians([record("X", "a", wall=w) for w in (9.0, 1.0, 2.0)])
    assert found == {("a", "wall", "X", "bf16"): 2.0}


def test_a_block_shows_limit_shares_and_the_distance_to_the_best_peer() -> None:
    metric = Metric("a", "wall", "A")
    values = {("Octavo", "bf16"): 10.0, ("P", "bf16"): 12.0, ("Q", "bf16"): 15.0, ("Octavo", "int8"): 6.0}
    found = {("a", "wall", engine, precision): value for (engine, precision), value in values.items()}
    rows = block(metric, found, ["Octavo", "P", "Q", "absent"], [8.0, 4.0], ["bf16", "int8"])
    assert rows == [
        ["A", "limit", "8.00", "4.00"],
        ["", "Octavo", "10.0 (80%)", "6.00 (67%)"],
        ["", "P", "12.0 (67%)", ""],
        ["", "Q", "15.0 (53%)", ""],
        ["", "**Octavo ahead of the best peer**", "**1.20 ×**", ""],
    ]


def test_rates_are_better_when_larger_and_the_best_of_octavos_rows_counts() -> None:
    metric = Metric("b", "decode_tps", "B", more_is_better=True)
    found = {("b", "decode_tps", e, "int8"): v for e, v in {"Octavo": 150.0, "Octavo, int8 KV": 160.0, "P": 200.0, "Q": 100.0}.items()}
    rows = block(metric, found, ["Octavo", "Octavo, int8 KV", "P", "Q"], [None], ["int8"])
    assert rows[0] == ["B", "Octavo", "150"]
    assert rows[-1][-1] == "**0.80 ×**"


def test_the_page_says_what_is_missing_and_why() -> None:
    workloads = {letter: [{"prompt": [1] * 16, "max_tokens": 8}] for letter in "abcd"}
    document = {
        "machine": "two cores", "date": "2026-01-01", "precisions": ["bf16"], "repeats": 1, "limits": [CEILINGS],
        "engines": [{"name": "Octavo", "version": "1", "settings": "s", "installed_mib": 151}, {"name": "P", "settings": "t"}],
        "records": [record("Octavo", "d", wall=2.0), {"engine": "P", "precision": "bf16", "workload": "", "why": "pip failed"}],
    }  # fmt: skip
    page = markdown(document, workloads)
    assert "| D: n = 8, prompt 256, 64 out each, s | limit |" in page
    assert "- P, bf16: pip failed" in page
    assert "- Octavo 1: s. Installed: 151 MiB." in page
    without = markdown(dict(document, limits=[{}]), workloads)
    assert "cannot run limits.cpp" in without and "| limit |" not in without


def test_every_metric_with_a_limit_has_one_at_every_precision() -> None:
    workloads = {letter: [{"prompt": [1] * 16, "max_tokens": 8}] for letter in "abcd"}
    bounds = [metric.limit(workloads, p, CEILINGS) for metric in METRICS if metric.limit for p in limits.BITS]
    assert all(bound > 0 for bound in bounds)


@pytest.mark.parametrize("module", [base, checkpoints, limits, report])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0
