"""Figures against counting by hand, and everything that is printed or drawn."""

from __future__ import annotations

import json
import random
import tracemalloc
from array import array

import pytest

from octavo.blocks import BlockManager
from octavo.errors import ConfigError
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import LinearLatency
from octavo.planner.paper import PAPER, paper_study
from octavo.planner.replica import SimConfig
from octavo.planner.report import ENTRY_BYTES, TOKEN_BYTES, summarise, unlimited_hit_rate
from octavo.planner.simulate import simulate
from octavo.planner.studies import Study, StudyResult, run_study
from octavo.planner.workload import WORKLOADS, SimRequest, own_run, shared_run, with_outputs


@pytest.mark.parametrize("seed", [0, 1])
def test_memory_study_of_the_paper_within_five_points(seed: int) -> None:
    study = paper_study(seed=seed)
    for scheme, paper in PAPER.items():
        for kind in paper.keys() - {"batch"}:
            assert study.rows[scheme][kind] == pytest.approx(paper[kind], abs=0.05), (scheme, kind)
    assert 2.2 < study.gains["oracle"] < 2.9 and 4.3 < study.gains["maximum"] < 5.6
    text = study.describe()
    assert all(f"{number}. " in text for number in range(1, len(study.as_dict()["assumptions"]) + 1)) and "(20.4%)" in text


def test_first_fit_wastes_less_than_the_paper_says() -> None:
    """Its baselines' external fragmentation is what a buddy allocator rounds away, for the most part."""
    buddy, first_fit = (paper_study(120, placement=placement).rows for placement in ("buddy", "first_fit"))
    for scheme in ("power_of_two", "oracle"):
        assert first_fit[scheme]["used"] > PAPER[scheme]["used"] + 0.05
        assert first_fit[scheme]["external"] < buddy[scheme]["external"] / 1.5
    assert first_fit["paged"] == buddy["paged"] and first_fit["maximum"] == buddy["maximum"]


def test_unlimited_cache_against_comparing_all_prompts() -> None:
    chance = random.Random(1)
    requests = []
    for number in range(40):
        runs = [shared_run(chance.randrange(3), 8) for _ in range(chance.randrange(4))] + [own_run(number, chance.randint(1, 5))]
        if chance.random() < 0.3:
            runs.pop()
        requests.append(SimRequest(number, float(number), tuple(runs) or (shared_run(0, 8),), 1))
    prompts = [r.token_ids().tolist() for r in requests]
    found = 0
    for number, prompt in enumerate(prompts):
        best = max((common(prompt, other) // 8 * 8 for other in prompts[:number]), default=0)
        found += min(best, len(prompt) - 1)
    assert unlimited_hit_rate(requests) == pytest.approx(found / sum(len(p) - 1 for p in prompts))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_real_cache_stays_below_the_unlimited_one() -> None:
    requests = WORKLOADS["document"].at_rate(4.0).requests(120)
    rates = []
    for slots in (40_000, 400_000):
        result = simulate(requests, SimConfig(slots, max_model_len=16_384), LinearLatency(per_step=0.01, per_token=1e-5))
        rates.append(summarise(result)["prefix"]["hit_rate"])
        bound = unlimited_hit_rate(requests)
    assert rates[0] < rates[1] <= bound + 0.01


def test_no_cache_finds_more_than_the_unlimited_one() -> None:
    """Conversations, whose answers come back in the next prompt."""
    requests = WORKLOADS["chat"].at_rate(2.0).requests(120)
    result = simulate(requests, SimConfig(2_000_000), LinearLatency(per_step=0.001))
    assert 0.8 < summarise(result)["prefix"]["hit_rate"] <= unlimited_hit_rate(requests)


def test_figures_by_hand() -> None:
    requests = [SimRequest(i, 0.0, (own_run(i, 16),), 4) for i in range(2)]
    s = summarise(simulate(requests, SimConfig(1024, max_model_len=64), LinearLatency(per_step=0.5)), max_ttft=0.4)
    assert s["requests"] == {"all": 2, "completed": 2, "given_up": 0, "refused": 0}
    assert s["seconds"] == 2.0 and s["throughput"]["output_tokens_per_second"] == 4.0 and s["throughput"]["goodput"] == 0.0
    assert (s["ttft"]["p50"], s["tpot"]["p90"], s["latency"]["p99"]) == (0.5, 0.5, 2.0)
    assert s["batch"] == {"mean": 2.0, "mean_pressed": 0.0, "max": 2} and s["steps"] == 4
    # 16 tokens in 1 block for one step, then 17 to 19 in 2.
    assert s["memory"]["all"]["used"] == pytest.approx(2 * (16 + 17 + 18 + 19) / 4 / 1024)
    assert s["metadata"]["table_entries_per_request"] == pytest.approx(7 / 4)


def test_paging_gains_nothing_where_arithmetic_binds() -> None:
    model = KNOWN_MODELS["llama-3.1-8b"]
    requests = WORKLOADS["classify"].at_rate(100.0).requests(150)
    study = Study("classify", model, schemes=("paged", "oracle"), prefix_caching=False)
    runs = run_study(study, requests).summaries
    speeds = [run["throughput"]["requests_per_second"] for run in runs.values()]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.02)


@pytest.fixture(scope="module")
def small_study() -> StudyResult:
    requests = WORKLOADS["rag"].at_rate(5.0).requests(40)
    return run_study(Study("rag <1>", KNOWN_MODELS["llama-3.1-8b"], schemes=("all",), kv_memory="3GiB"), requests)


def test_studies_print_and_dump(small_study: StudyResult) -> None:
    text, data = small_study.describe(), json.loads(json.dumps(small_study.as_dict()))
    assert list(data["runs"]) == ["paged", "maximum", "power_of_two", "oracle", "growing", "paged+static", "maximum+static"]
    assert all(name in text for name in data["runs"])
    for run in data["runs"].values():
        shares = run["memory"]["all"]
        assert sum(shares[k] for k in ("used", "reserved", "internal", "external", "free")) == pytest.approx(1)


def test_memory_against_goodput() -> None:
    requests = WORKLOADS["rag"].at_rate(12.0).requests(60)
    study = Study("rag", KNOWN_MODELS["llama-3.1-8b"], schemes=("paged", "maximum"), kv_memory="2GiB,4GiB,8GiB")
    result = run_study(study, requests)
    goodput = {name: run["throughput"]["goodput"] for name, run in result.summaries.items()}
    assert result.num_slots == [16_384, 32_768, 65_536]
    assert goodput["maximum 2GiB"] <= goodput["maximum 4GiB"] <= goodput["maximum 8GiB"]
    assert all(goodput[f"paged {size}"] > goodput[f"maximum {size}"] for size in ("2GiB", "4GiB"))


def test_a_sweep_over_block_sizes() -> None:
    requests = WORKLOADS["chat"].at_rate(10.0).requests(60)
    study = Study("chat", KNOWN_MODELS["llama-3.1-8b"], block_sizes=("sweep",), kv_memory="2GiB")
    runs = run_study(study, requests).summaries
    waste = [run["memory"]["all"]["reserved"] + run["memory"]["all"]["internal"] for run in runs.values()]
    entries = [run["metadata"]["table_entries_per_request"] for run in runs.values()]
    assert list(runs) == [f"paged {2**k}" for k in range(9)]
    assert waste[0] == pytest.approx(0, abs=1e-12) and waste == sorted(waste) and entries == sorted(entries, reverse=True)


@pytest.mark.parametrize("wrong", [{"block_sizes": ("12",)}, {"block_sizes": ("many",)}, {"placement": "best_fit"}, {"schemes": ("slab",)}])
def test_wrong_settings_of_a_study_are_refused(wrong: dict[str, object]) -> None:
    study = Study("chat", KNOWN_MODELS["llama-3.1-8b"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        run_study(study, WORKLOADS["chat"].requests(1))


def test_a_model_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no memory"):
        run_study(Study("chat", KNOWN_MODELS["llama-3.1-70b"]), WORKLOADS["chat"].requests(1))


def test_bytes_of_the_prefix_index_against_what_python_takes() -> None:
    for size in (4, 64):
        blocks, tokens = BlockManager(4000, size), array("i", range(4000 * size))
        blocks.admit(0, tokens, leaves=True)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        blocks.reserve(0, len(tokens))
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert blocks.num_findable == 4000
        assert taken / 4000 == pytest.approx(ENTRY_BYTES + TOKEN_BYTES * size, rel=0.3)


def test_samples_save_what_they_share() -> None:
    """n samples of a prompt of p full blocks with outputs of one block, once all have begun: n (p + 1) blocks without sharing, p + n with it."""
    requests = with_outputs([SimRequest(0, 0.0, (own_run(0, 160),), 400)], n=4)
    result = simulate(requests, SimConfig(4096, max_model_len=1024, prefix_caching=False), LinearLatency(per_step=1.0))
    s = summarise(result)
    needed = [4 * (10 + blocks) for blocks in range(1, 26) for _ in range(16)]
    used = [10 + 4 * blocks for blocks in range(1, 26) for _ in range(16)]
    assert s["memory"]["saved_by_sharing"] == pytest.approx(1 - sum(used) / sum(needed), abs=0.01)
    assert s["throughput"]["output_tokens_per_second"] * s["seconds"] == 4 * 400
    assert s["tpot"]["p50"] == pytest.approx(1.0)


def test_beams_save_more_than_samples_and_contiguous_regions_cannot_fork() -> None:
    requests = WORKLOADS["rag"].at_rate(1.0).requests(4)
    samples, beams = (
        summarise(simulate(with_outputs(requests, **how), SimConfig(200_000), LinearLatency(per_step=0.01)))["memory"]["saved_by_sharing"]
        for how in ({"n": 4}, {"beam_width": 4})
    )
    assert 0.3 < samples < beams < 0.75
    with pytest.raises(ConfigError, match="beams fork"):
        simulate(with_outputs(requests, beam_width=2), SimConfig(200_000, "oracle"), LinearLatency(per_step=0.01))
    with pytest.raises(ConfigError, match="one of the two"):
        with_outputs(requests, n=2, beam_width=2)
