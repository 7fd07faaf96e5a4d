"""Loads are sums over plans; a fit finds the coefficients that made the times."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.errors import ConfigError
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import DEVICES, LinearLatency, StepLoad, fit, load_of, named_device, roofline
from octavo.scheduler.step import StepPlan


def plan_of(rows: list[tuple[int, int, int]]) -> StepPlan:
    """rows: (computed before, scheduled, sampled)."""
    computed, scheduled, sampled = (array("i", column) for column in zip(*rows, strict=True))
    zeros, none = array("i", [0] * len(rows)), array("i")
    return StepPlan(
        0,
        (),
        (),
        array("q", range(len(rows))),
        computed,
        scheduled,
        array("i", [1]) * sum(scheduled),
        zeros,
        none,
        sampled,
        none,
        none,
        array("b", zeros),
    )


@pytest.mark.parametrize("rows", [[(5, 1, 1), (9, 1, 1)], [(0, 7, 0), (3, 1, 1), (16, 4, 1)]])
def test_load_counts_each_query_with_each_key(rows: list[tuple[int, int, int]]) -> None:
    load = load_of(plan_of(rows))
    pairs = sum(position + 1 for start, count, _ in rows for position in range(start, start + count))
    keys = sum(start + count for start, count, _ in rows)
    assert load == StepLoad(sum(n for _, n, _ in rows), len(rows), sum(s for _, _, s in rows), keys, pairs, 0)


def random_loads(count: int) -> list[StepLoad]:
    chance = random.Random(0)
    loads = []
    for _ in range(count):
        rows = [(chance.randrange(2000), 1 if chance.random() < 0.8 else chance.randrange(2, 200), 1) for _ in range(chance.randint(1, 60))]
        loads.append(load_of(plan_of(rows)))
    return loads


def test_fit_finds_what_made_the_times() -> None:
    truth = LinearLatency(per_step=5e-3, per_token=3e-4, per_sampled=1e-4, per_context=2e-8, per_pair=5e-9)
    loads = random_loads(150)
    found = fit(loads, [truth.seconds(load) for load in loads])
    for load in random_loads(40):
        assert found.seconds(load) == pytest.approx(truth.seconds(load), rel=0.01)
    assert min(found.coefficients()) >= 0


def test_many_decodes_are_to_the_bit_what_single_steps_are() -> None:
    model = KNOWN_MODELS["llama-3.1-8b"]
    roof = roofline(model.spec, model.weight_bytes("bfloat16"), model.kv_bytes_per_token("bfloat16"), DEVICES["a100-40gb"])
    linear = LinearLatency(5.1e-3, 3.3e-4, 1.7e-4, 2.9e-5, 1.3e-4, 2.1e-8, 5e-9, 1e-9)
    for latency in (roof, linear):
        for rows in (1, 7, 200):
            contexts = range(rows * 100, rows * 100 + 50 * rows, rows)
            assert latency.decodes(rows, contexts) == [latency.seconds(StepLoad(rows, rows, rows, c, c)) for c in contexts]


def test_fit_refuses_nothing_to_fit() -> None:
    with pytest.raises(ConfigError):
        fit([], [])
    with pytest.raises(ConfigError):
        fit(random_loads(1), [0.0])


def test_roofline_is_bound_by_reads_or_by_products() -> None:
    model = KNOWN_MODELS["llama-3.1-8b"]
    weights = model.weight_bytes("bfloat16")
    latency = roofline(model.spec, weights, model.kv_bytes_per_token("bfloat16"), DEVICES["h100"])
    few, many = StepLoad(1, 1, 1, 1, 1), StepLoad(8192, 1, 1, 8192, 8192 * 4096)
    assert latency.seconds(few) == pytest.approx(2e-3 + weights / (0.8 * 3.35e12), rel=0.01)
    flops = 2 * model.spec.num_layer_weights * 8192 + 4 * 32 * 4096 * 8192 * 4096
    assert latency.seconds(many) == pytest.approx(2e-3 + flops / (0.6 * 989.5e12), rel=0.01)


def test_an_unknown_gpu_is_refused_with_the_list() -> None:
    assert named_device("h100").memory == 80 * 2**30
    with pytest.raises(ConfigError, match="A100-40GB"):
        named_device("abacus")
