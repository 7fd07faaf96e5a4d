"""The engine's strongest test: whatever the schedule, each request gets the tokens and log-probabilities it gets alone.

Random arrivals, lengths, budgets, block sizes, thread counts and aborts, in a pool so small that requests are preempted; samples that
fork or are computed apart, beams, prompts that begin alike, under salts, with the prefix cache on or off; drafts, right and wrong ones.
The pool is full of NaN at the start, and a block is filled with NaN again when it is handed out.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.build import build_core, build_runner
from octavo.engine.core import EngineCore
from octavo.engine.memory import CachePlan
from octavo.errors import InvalidRequestError
from octavo.kernels.backends import describe
from octavo.kernels.ops import Backend
from octavo.kernels.reference import ReferenceBackend
from octavo.models.decoder import Decoder
from octavo.models.decoder_weights import pack_weights
from octavo.models.weight_formats import choose_formats
from octavo.request import Request, SamplingParams
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.step import FinishedBeam
from tests.helpers.drafts import AnyDrafts, draft_with
from tests.helpers.random_model import TINY, quantised, random_checkpoint, super_quantised, with_window

MAX_MODEL_LEN = 640
FORMATS = [
    ("float32", "float32"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("quantised", "bfloat16"),
    ("quantised", "int8"),
    ("super_quantised", "float32"),
]
"""Of weights and of the KV cache."""
QUANTISED = {
    "quantised": (replace(TINY, hidden_size=64, ffn_size=96), quantised),
    "super_quantised": (replace(TINY, hidden_size=256, ffn_size=256, num_heads=8), super_quantised),
}
"""Models whose rows are made of whole blocks, and what quantises them."""
formats = pytest.mark.parametrize(("format", "kv_dtype"), FORMATS)
native_only = pytest.mark.skipif(not describe()["native"], reason="the native module is not built")


@cache
def decoder_for(kind: str, format: str, threads: int, window: int, shared_prefix: bool) -> tuple[Decoder, Backend]:
    backend: Backend
    if kind == "reference":
        backend = ReferenceBackend()
    else:
        from octavo.kernels.native import NativeBackend

        backend = NativeBackend(threads, None if kind == "native" else kind, shared_prefix)
    tiny, quantise = QUANTISED.get(format, (TINY, lambda checkpoint: checkpoint))
    spec = with_window(tiny, window) if window else tiny
    checkpoint = quantise(random_checkpoint(spec))
    formats = choose_formats(spec, checkpoint.formats(), "auto" if format in QUANTISED else format, None).formats
    return Decoder(spec, pack_weights(checkpoint, backend, formats, MAX_MODEL_LEN)), backend


def make_core(
    kind: str, format: str, threads: int, window: int, cache_plan: CachePlan, scheduler: SchedulerConfig, caching: bool, shared_prefix: bool
) -> EngineCore:
    """An engine whose blocks hold NaN until they are written."""
    decoder, backend = decoder_for(kind, format, threads, window, shared_prefix)
    cache_config = CacheConfig(cache_plan.block_size, None, cache_plan.num_blocks, enable_prefix_caching=caching)
    config = EngineConfig(cache=cache_config, scheduler=scheduler)
    runner = build_runner(decoder, backend, cache_plan, config)
    core = build_core(runner, cache_plan, config, decoder.spec.vocab_size, frozenset({0}))
    poison_new_blocks(core, runner)
    return core


def poison_new_blocks(core: EngineCore, runner: ModelRunner) -> None:
    runner.cache.fill(range(runner.cache.shape.num_blocks), float("nan"))
    pool = core._scheduler.blocks.pool
    allocate = pool.allocate

    def allocate_poisoned(count: int) -> list[int]:
        blocks = allocate(count)
        if blocks:
            runner.cache.fill(blocks, float("nan"))
        return blocks

    pool.allocate = allocate_poisoned  # type: ignore[method-assign]


@dataclass
class Sample:
    """What one sample of a request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    beam: FinishedBeam | None = None
    finished: bool = False


@dataclass
class Job:
    """One request of a workload, and what it got."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort_at: int | None = None
    abort_sample: int | None = None
    """None aborts all."""
    request_id: int = -1
    refused: bool = False
    """Its beams can never run together in this engine."""
    prompt_logprobs: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = [Sample() for _ in range(self.params.num_samples)]


def random_prompt(chance: random.Random, longest: int) -> list[int]:
    """Some begin alike, in few families, up to somewhere in a block."""
    family = [random.Random(chance.randrange(3)).randrange(1, TINY.vocab_size) for _ in range(longest)]
    shared_len = chance.choice([0, 0, chance.randint(1, longest // 2), longest // 3])
    own_len = chance.choice([1, 2, chance.randint(3, 40), chance.randint(30, longest // 4)])
    if chance.random() < 0.1:
        own_len = longest // 2 + 20 - shared_len
    return (family[:shared_len] + [chance.randrange(1, TINY.vocab_size) for _ in range(max(0, own_len))])[: longest - 10]


def random_job(chance: random.Random, longest: int) -> Job:
    prompt = random_prompt(chance, longest)
    sampled = chance.random() < 0.6
    best_of = chance.choice([1, 1, 2, 5])
    arrival, abort_at = chance.randint(0, 12), chance.randint(0, 40) if chance.random() < 0.2 else None
    if chance.random() < 0.3:
        return Job(prompt, random_beams(chance, longest - len(prompt)), arrival, abort_at)
    params = SamplingParams(
        n=min(best_of, chance.choice([1, 5, 5])),
        best_of=best_of,
        cache_prefix=chance.random() < 0.8,
        cache_salt=chance.choice([None, None, "one", "two"]),
        temperature=chance.choice([0.5, 1.0, 1.5]) if sampled else 0.0,
        top_k=chance.choice([0, 0, 5]),
        top_p=chance.choice([1.0, 0.9]),
        min_p=chance.choice([0.0, 0.02]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        frequency_penalty=chance.choice([0.0, 0.3]),
        presence_penalty=chance.choice([0.0, 0.2]),
        logit_bias=chance.choice([None, {5: 2.0, 17: -3.0}]),
        forbidden_token_ids=chance.choice([(), (3, 4)]),
        min_tokens=chance.choice([0, 0, 3]),
        max_tokens=chance.randint(3, min(chance.choice([30, longest // 4, longest // 3]), longest - len(prompt))),
        ignore_eos=chance.random() < 0.7,
        seed=chance.randrange(2**64) if chance.random() < 0.5 else chance.randrange(100),
        logprobs=chance.choice([0, 3]),
        prompt_logprobs=chance.choice([None, None, None, 1]),
        priority=chance.randrange(3),
    )
    return Job(prompt, params, arrival, abort_at, chance.choice([None, chance.randrange(best_of)]))


def random_beams(chance: random.Random, longest: int) -> SamplingParams:
    width = chance.choice([2, 3, 4, 6])
    return SamplingParams(
        n=chance.randint(1, width),
        beam_width=width,
        length_penalty=chance.choice([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=chance.choice((True, False, "never")),
        temperature=0.0,
        cache_prefix=chance.random() < 0.8,
        cache_salt=chance.choice([None, "one"]),
        max_tokens=chance.randint(1, min(chance.choice([12, 30, 60]), longest)),
        min_tokens=chance.choice([0, 1]),
        stop_token_ids=chance.choice([(), (5,), tuple(range(0, 200, 20))]),
        ignore_eos=chance.random() < 0.5,
        logprobs=chance.choice([None, 2]),
        prompt_logprobs=chance.choice([None, None, None, 1]),
        priority=chance.randrange(3),
    )


def run(core: EngineCore, jobs: list[Job]) -> None:
    """Run jobs by their arrival and abort steps, checking the books after each step."""
    step, ids = 0, {}
    pending = sorted(jobs, key=lambda job: job.arrival)
    while pending or core.has_work:
        while pending and pending[0].arrival <= step:
            job = pending.pop(0)
            try:
                job.request_id = core.add_request(job.prompt, job.params)
                ids[job.request_id] = job
            except InvalidRequestError:
                assert job.params.beam_width is not None
                job.refused = True
        for request_id, job in ids.items():
            if job.abort_at is not None and step == job.arrival + job.abort_at:
                core.abort(request_id, job.abort_sample)
        for update in core.step():
            job = ids[update.request_id]
            sample = job.samples[update.sample_index]
            sample.tokens += update.token_ids
            sample.beam = update.beam
            sample.finished |= update.finish_reason is not None
            for found in update.logprobs:
                sample.logprobs.append((found.logprob, found.rank, found.top_ids, found.top_logprobs))
            for position, entry in update.prompt_logprobs:
                assert job.prompt_logprobs.setdefault(position, entry.logprob) == entry.logprob
        core.check()
        step += 1
        assert step < 20_000, "no progress"


def alone(kind: str, format: str, kv_dtype: str, window: int, job: Job) -> Job:
    """The same request with the engine to itself: one thread, one block size, nothing cached, sample after sample from its prompt on."""
    rows = job.params.beam_width or 1
    plan = CachePlan(rows * MAX_MODEL_LEN // 16, 16, 1, MAX_MODEL_LEN, kv_dtype)
    scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=MAX_MODEL_LEN, fork_mode="recompute")
    single = Job(job.prompt, job.params, 0)
    run(make_core(kind, format, 1, window, plan, scheduler, caching=False, shared_prefix=False), [single])
    return single


def check_schedule(kind: str, format: str, kv_dtype: str, seed: int, num_jobs: int, longest: int) -> Counter[str]:
    """One random workload under one random configuration, against each of its requests alone."""
    chance = random.Random(seed)
    block_size = chance.choice([1, 4, 16, 64, 256])
    window = chance.choice([0, 0, 0, 7, 50])
    fewest = -(-longest // block_size)
    plan = CachePlan(fewest + chance.randint(0, fewest // 2), block_size, 1, longest, kv_dtype)
    scheduler = SchedulerConfig(
        max_num_seqs=chance.choice([3, 8, 16]),
        max_num_batched_tokens=chance.choice([5, 17, 64, 300]),
        policy=chance.choice(["fcfs", "priority"]),
        fork_mode=chance.choice(["copy_on_write", "copy_on_write", "recompute"]),
    )
    scheduler = replace(scheduler, speculative_tokens=random.Random(seed).choice([0, 1, 4, 9]))
    jobs = [random_job(chance, longest) for _ in range(num_jobs)]
    core = make_core(
        kind, format, chance.choice([1, 2, 3]), window, plan, scheduler, caching=chance.random() < 0.75, shared_prefix=seed % 2 == 0
    )
    singles = [alone(kind, format, kv_dtype, window, job) for job in jobs]
    if seed % 3:
        draft_any(core, jobs, singles)
    run(core, jobs)
    stats = core.stats()
    assert stats["blocks"]["free"] == stats["blocks"]["total"], "blocks leaked"
    assert stats["sharing"]["copies"] <= stats["sharing"]["forks"]
    for job, expected in zip(jobs, singles, strict=True):
        if job.refused:
            continue
        for sample, own in zip(job.samples, expected.samples, strict=True):
            if sample.finished:
                assert sample.tokens == own.tokens and sample.beam == own.beam
            assert sample.tokens == own.tokens[: len(sample.tokens)]
            assert sample.logprobs == own.logprobs[: len(sample.logprobs)]
        if any(sample.tokens for sample in job.samples):
            assert job.prompt_logprobs == expected.prompt_logprobs
    return Counter(
        running=stats["max_num_running"],
        preemptions=stats["num_preemptions"],
        beams=sum(sample.beam is not None for job in jobs for sample in job.samples),
        forks=stats["sharing"]["forks"],
        fork_copies=stats["sharing"]["copies"],
        hits=stats["prefix_cache"]["hits"],
        prefix_copies=stats["prefix_cache"]["copies"],
        evictions=stats["prefix_cache"]["evictions"],
        drafted=stats["speculation"]["drafted"],
        accepted=stats["speculation"]["accepted"],
    )


def draft_any(core: EngineCore, jobs: list[Job], singles: list[Job]) -> None:
    """Draft what the requests got alone, or something else."""

    def following(request: Request) -> list[int]:
        single = next(single for job, single in zip(jobs, singles, strict=True) if job.request_id == request.group_id)
        return single.samples[request.sample_index].tokens[request.num_output :]

    scheduler = core._scheduler
    draft_with(scheduler, AnyDrafts(scheduler.config, following))


def check_schedules(kind: str, format: str, kv_dtype: str, seeds: range, num_jobs: int, longest: int, at_least: dict[str, int]) -> None:
    seen = sum((check_schedule(kind, format, kv_dtype, seed, num_jobs, longest) for seed in seeds), Counter[str]())
    print(dict(seen))
    assert all(seen[name] >= least for name, least in at_least.items()), seen


@formats
def test_schedules_do_not_show_on_the_reference(format: str, kv_dtype: str) -> None:
    least = {"running": 18, "preemptions": 3, "beams": 5, "forks": 10, "fork_copies": 3, "hits": 5, "prefix_copies": 1, "accepted": 30}
    check_schedules("reference", format, kv_dtype, range(6), 8, 120, least)


@native_only
@formats
def test_schedules_do_not_show_natively(format: str, kv_dtype: str) -> None:
    least = {
        "running": 60, "preemptions": 10, "beams": 15, "forks": 50, "fork_copies": 20, "hits": 20, "prefix_copies": 5, "evictions": 50,
        "accepted": 500,
    }  # fmt: skip
    check_schedules("native", format, kv_dtype, range(100, 112), 14, MAX_MODEL_LEN, least)


@native_only
@pytest.mark.parametrize("isa", [isa for isa in describe()["isas"] if isa != describe()["isa"]])
def test_schedules_do_not_show_on_other_instruction_sets(isa: str) -> None:
    for seed, (format, kv_dtype) in enumerate(FORMATS, 200):
        check_schedule(isa, format, kv_dtype, seed, num_jobs=8, longest=400)


@pytest.mark.slow
@native_only
@formats
def test_many_schedules(format: str, kv_dtype: str) -> None:
    for seed in range(1000, 1200):
        check_schedule("native", format, kv_dtype, seed, num_jobs=12, longest=MAX_MODEL_LEN)
