"""Replicas and devices for a load: no more is promised than the simulator reaches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.errors import ConfigError
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.latency_model import LinearLatency, StepLoad, named_device, roofline
from octavo.planner.lengths import Lengths
from octavo.planner.load_plan import UTILISATION, LoadPlan, completed, degrees_for, most_completed, plan_load
from octavo.planner.memory_model import MemoryPlan, plan_memory
from octavo.planner.profile import Profile
from octavo.planner.replica import SimConfig
from octavo.planner.simulate import simulate
from octavo.planner.workload import SimRequest, own_run

GIB = 2**30
LLAMA = KNOWN_MODELS["llama-3.1-8b"]
H100 = named_device("H100")
MIXED = [Lengths(int(80 * 1.6**k), int(30 * 1.7**k)) for k in range(6)]
"""80 + 30 to 838 + 425 tokens."""


def plan_on(gib: int, lengths: list[Lengths], tensor_parallel: int = 1) -> MemoryPlan:
    return plan_memory(
        LLAMA, gib * GIB, CacheConfig(), SchedulerConfig(), kv_dtypes=("bfloat16",), lengths=lengths, tensor_parallel=tensor_parallel
    )


def served(plan: MemoryPlan, lengths: list[Lengths], rate: float, count: int) -> float:
    """Requests a second that a simulated replica with the settings of ``plan`` completes of Poisson arrivals at ``rate``."""
    chance, now, requests = random.Random(7), 0.0, []
    for number in range(count):
        now += chance.expovariate(rate)
        prompt, output = chance.choice(lengths)
        requests.append(SimRequest(number, now, (own_run(number, prompt),), output))
    s = plan.settings
    config = SimConfig(
        s["kv_memory"] // plan.bytes_per_token[s["kv_dtype"]], block_size=s["block_size"], max_model_len=s["max_model_len"],
        scheduler=SchedulerConfig(s["max_num_seqs"], s["max_num_batched_tokens"]), accounting="none",
    )  # fmt: skip
    return count / simulate(requests, config, roofline(LLAMA.spec, plan.weights, 131_072, H100)).end


@pytest.mark.parametrize("lengths", [[Lengths(161, 339)], MIXED])
def test_a_replica_completes_in_the_simulator_what_the_plan_says(lengths: list[Lengths]) -> None:
    plan = plan_on(18, lengths)
    _, load = plan_load(LLAMA, [plan], lengths, 5.0, H100)
    assert load.num_preemptions > 0  # memory binds, which the estimate by hand does not know
    assert load.capacity < most_completed(roofline(LLAMA.spec, plan.weights, 131_072, H100), lengths, load.at_once)
    assert load.capacity == pytest.approx(served(plan, lengths, 3 * load.capacity, 1000), rel=0.15)


def test_the_planned_share_of_a_replica_is_served_without_a_growing_queue() -> None:
    lengths = [Lengths(161, 339)]
    plan = plan_on(18, lengths)
    _, load = plan_load(LLAMA, [plan], lengths, 5.0, H100)
    rate = UTILISATION * load.capacity
    assert served(plan, lengths, rate, 1000) == pytest.approx(rate, rel=0.1)


def test_a_load_is_shared_out_to_replicas() -> None:
    lengths = [Lengths(161, 339)]
    plan = plan_on(18, lengths)
    few, many = (plan_load(LLAMA, [plan], lengths, rate, H100)[1] for rate in (0.01, 60.0))
    assert few.replicas == 1 and few.capacity == many.capacity
    assert (many.replicas - 1) * UTILISATION * many.capacity < 60.0 <= many.replicas * UTILISATION * many.capacity
    assert many.as_dict()["num_devices"] == many.replicas


def test_devices_share_a_model_where_that_takes_fewer_of_them() -> None:
    """On 18 GiB the weights leave little, so two devices together serve more than twice what one does."""
    lengths = [Lengths(161, 339)]

    def chosen(gib: int, rate: float) -> LoadPlan:
        plans = [plan_on(gib, lengths, degree) for degree in degrees_for(LLAMA, H100)]
        plan, load = plan_load(LLAMA, plans, lengths, rate, H100)
        assert plan.tensor_parallel == load.tensor_parallel
        return load

    assert chosen(18, 1.0).tensor_parallel == 1  # one device is enough
    shared, alone = chosen(18, 100.0), plan_load(LLAMA, [plan_on(18, lengths)], lengths, 100.0, H100)[1]
    assert shared.tensor_parallel > 1 and shared.num_devices < alone.num_devices
    assert chosen(80, 100.0).tensor_parallel == 1


def test_degrees_are_powers_of_two_and_a_measured_machine_is_one() -> None:
    profile = Profile("llama-3.1-8b", "auto", None, "an abacus", 16, LinearLatency(per_step=0.01), {}, {})
    assert degrees_for(LLAMA, H100) == [1, 2, 4, 8] and degrees_for(KNOWN_MODELS["smollm2-135m"], H100) == [1]
    assert degrees_for(LLAMA, profile) == [1]
    _, load = plan_load(LLAMA, [plan_on(18, [Lengths(20, 10)])], [Lengths(20, 10)], 1.0, profile)
    assert load.source == "measured on an abacus"
    with pytest.raises(ConfigError, match="measured alone, not as one of tensor_parallel=2"):
        plan_load(LLAMA, [plan_on(18, MIXED, 2)], MIXED, 1.0, profile)


def test_the_bound_by_hand() -> None:
    latency = LinearLatency(per_step=0.02, per_token=0.0001)
    step, prefill = 0.02 + 50 * 0.0001, 1000 * 0.0001
    assert most_completed(latency, [Lengths(1000, 100)], at_once=50) == pytest.approx(1 / (100 * step / 50 + prefill))


def test_completions_by_hand() -> None:
    """Ten requests of one token each, two a step: nine have ended with the fifth step."""
    queue = [SimRequest(i, 0.0, (own_run(i, 4),), 1) for i in range(10)]
    config = SimConfig(1000, scheduler=SchedulerConfig(2, 64), max_model_len=100, accounting="none")
    assert completed(queue, config, LinearLatency(per_step=0.5)) == (pytest.approx(9 / 2.5), 0)


def test_a_larger_device_serves_more() -> None:
    def bound(name: str) -> float:
        latency = roofline(LLAMA.spec, LLAMA.weight_bytes("bfloat16"), 131_072, named_device(name))
        return most_completed(latency, [Lengths(500, 200)], 64)

    assert bound("l4") < bound("a100-40gb") < bound("h100")
    assert roofline(LLAMA.spec, 1, 1, H100, 2).seconds(StepLoad(1, 1, 1, 1, 1)) > 0.002


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="positive number of requests"):
        plan_load(LLAMA, [plan_on(18, MIXED)], MIXED, rate, H100)


def test_no_number_of_replicas_serves_what_does_not_fit() -> None:
    long = [Lengths(100_000, 10)]
    plan = plan_on(18, long)
    for plans in ([plan], [replace(plan, settings={})], []):
        with pytest.raises(ConfigError, match="no number of replicas"):
            plan_load(LLAMA, plans, long, 1.0, H100)
