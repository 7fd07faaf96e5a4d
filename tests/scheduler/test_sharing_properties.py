"""Random workloads that share: samples, beams, common prefixes, salts, aborts of one sample or all, little room.

Each step the books are proved and the ledger follows every slot; see ``Simulation``. At the end each sample must have the tokens it
gets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from tests.helpers.ledger_runner import VOCAB
from tests.helpers.simulation import Simulation

MAX_MODEL_LEN = 40


@st.composite
def settings_of_engine(draw: st.DrawFn) -> Simulation:
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    smallest = -(-MAX_MODEL_LEN // block_size)
    return Simulation(
        num_blocks=draw(st.integers(smallest, 3 * smallest)),
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, 10)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 5, 16, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_passed_over=draw(st.integers(0, 4)),
        speculative_tokens=draw(st.sampled_from([0, 0, 1, 3, 9])),
        any_drafts=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        fork_mode=draw(st.sampled_from(["copy_on_write", "recompute"])),
    )


@dataclass(frozen=True)
class Work:
    arrival: int
    family: int
    shared_len: int
    own_len: int
    max_tokens: int
    num_samples: int
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    priority: int
    stops: list[int]
    salt: str | None
    cache: bool
    abort_step: int | None
    abort_sample: int | None
    between: bool


works = st.builds(
    Work,
    arrival=st.integers(0, 30),
    family=st.integers(0, 1),
    shared_len=st.sampled_from([0, 3, 8, 16, 21, 30]),
    own_len=st.integers(0, 8),
    max_tokens=st.integers(1, MAX_MODEL_LEN),
    num_samples=st.sampled_from([1, 1, 2, 3, 7]),
    beam_width=st.sampled_from([None, None, None, 2, 3, 5]),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    priority=st.integers(-1, 1),
    stops=st.lists(st.integers(0, 999), max_size=3) | st.just(list(range(0, 1000, 7))),
    salt=st.sampled_from([None, None, "a"]),
    cache=st.sampled_from([True, True, False]),
    abort_step=st.none() | st.integers(0, 60),
    abort_sample=st.none() | st.integers(0, 6),
    between=st.booleans(),
)


def submit(sim: Simulation, index: int, work: Work) -> int:
    prompt = [(work.family * 500 + p) % VOCAB for p in range(work.shared_len)] + [(index * 31 + p) % VOCAB for p in range(work.own_len)]
    prompt = prompt or [index]
    limit = min(work.max_tokens, MAX_MODEL_LEN - len(prompt))
    if work.beam_width is not None:
        try:
            return sim.add(
                prompt, limit, priority=work.priority, seed=work.family, stop_token_ids=[stop % 100 for stop in work.stops[:3]],
                min_tokens=min(2, limit), n=min(work.num_samples, work.beam_width), temperature=0.0, beam_width=work.beam_width,
                length_penalty=work.length_penalty, early_stopping=work.early_stopping, cache_salt=work.salt, cache_prefix=work.cache,
            )  # fmt: skip
        except InvalidRequestError:
            pass  # these beams can never run together in this engine
    return sim.add(
        prompt, limit, priority=work.priority, seed=work.family + index % 3, stop_token_ids=work.stops, min_tokens=min(2, limit),
        n=work.num_samples, cache_salt=work.salt, cache_prefix=work.cache,
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(settings_of_engine(), st.lists(works, min_size=1, max_size=10))
def test_every_sample_finishes_with_its_own_tokens(sim: Simulation, work: list[Work]) -> None:
    work.sort(key=lambda w: w.arrival)
    ids: dict[int, int] = {}
    samples = sum(max(w.num_samples, w.beam_width or 0) for w in work)
    bound = 31 + samples * MAX_MODEL_LEN * samples
    while len(ids) < len(work) or sim.scheduler.has_work:
        assert sim.steps < bound
        now, during = sim.steps, None
        for index, w in enumerate(work):
            if w.arrival <= now and index not in ids:
                ids[index] = submit(sim, index, w)
            if w.abort_step is not None and w.abort_step <= now and index in ids and sim.live(ids[index]):
                if w.between and during is None:
                    during = ids[index], w.abort_sample
                else:
                    sim.abort(ids[index], w.abort_sample)
                    sim.scheduler.check()
        if during is not None:
            if sim.step(*during) is None:
                sim.abort(*during)
        else:
            sim.step()
    sim.check_end()
    assert not sim.scheduler._groups and not sim.scheduler._queues.searches
    assert sim.blocks.sharing.num_fork_copies <= sim.blocks.sharing.num_forks
    if not sim.prefix_caching:
        assert sim.blocks.stats().cached == 0 and sim.blocks.sharing.num_tokens_saved == 0
