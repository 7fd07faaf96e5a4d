"""Slices of the shared traces, simulated from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import SchedulerConfig
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import SimConfig
from octavo.planner.report import summarise, unlimited_hit_rate
from octavo.planner.simulate import simulate
from octavo.planner.studies import Study, run_study
from octavo.planner.traces import read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not beside the repository")

KINDS = ("used", "reserved", "internal", "external", "free")


@pytest.mark.parametrize("name", ["azure_llm_2023_conv.csv", "azure_llm_2023_code.csv"])
def test_azure_with_each_kind_of_memory(name: str) -> None:
    requests = read_trace(TRACES / name, 80, speed=8.0)
    study = Study(name, KNOWN_MODELS["llama-3.1-8b"], schemes=("paged", "oracle", "maximum"), kv_memory="4GiB")
    result = run_study(study, requests)
    for run in result.summaries.values():
        assert run["requests"] == {"all": 80, "completed": 80, "given_up": 0, "refused": 0}
        assert sum(run["memory"]["all"][kind] for kind in KINDS) == pytest.approx(1)
        assert run["prefix"]["hit_rate"] <= result.unlimited_hit_rate == 0  # nothing is known of what Azure's prompts share
    batch = {name: run["batch"]["max"] for name, run in result.summaries.items()}
    speed = {name: run["throughput"]["output_tokens_per_second"] for name, run in result.summaries.items()}
    assert batch["paged"] >= batch["oracle"] > batch["maximum"] and speed["paged"] >= speed["maximum"]


def test_mooncake_finds_what_an_unlimited_cache_would_and_less_with_little_memory() -> None:
    requests = read_trace(TRACES / "mooncake_conversation.jsonl", 150)
    bound, latency = unlimited_hit_rate(requests), LinearLatency(per_step=0.01, per_token=1e-5)
    rates = []
    for slots in (250_000, 8_000_000):
        summary = summarise(simulate(requests, SimConfig(slots, "paged", 16, SchedulerConfig(64, 8192), 131_072), latency))
        assert summary["requests"]["completed"] == 150
        rates.append(summary["prefix"]["hit_rate"])
    assert 0 < rates[0] < rates[1] <= bound + 1e-12
    assert rates[1] == pytest.approx(bound, rel=0.02)
