"""A runner without a model: it books every slot of the cache and checks each plan against its own ledger."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.request import SamplingParams, num_candidates
from octavo.scheduler.beams import Candidates
from octavo.scheduler.step import StepPlan, StepResult, TokenLogprobs

VOCAB = 1000


def canned_token(seed: int, position: int, sample_index: int = 0) -> int:
    """The token "sampled" at a position: a function of seed, position and sample alone. Every fourth seed repeats itself."""
    position = position % 5 if seed % 4 == 3 else position
    return (seed * 2654435761 + position * 40503 + (position >> 3) * 97 + sample_index * 7919) % VOCAB


def canned_logprob(token: int) -> float:
    """The log-probability that goes with a token."""
    return -(token % 13) / 4


def canned_candidates(seed: int, token_ids: Sequence[int], count: int) -> Candidates:
    """The continuations of a beam, in a small part of the vocabulary: a function of seed and all tokens before."""
    chance = random.Random(hash((seed, *token_ids)))
    logprobs = [-chance.choice([0.5, 1.0])]
    while len(logprobs) < count:
        logprobs.append(logprobs[-1] - chance.choice([0.0, 0.25, 1.0]))
    return Candidates(chance.sample(range(100), count), logprobs)


@dataclass
class Row:
    prompt_len: int
    params: SamplingParams
    seed: int
    sample_index: int
    tokens: list[int]
    blocks: list[int]
    num_stop_ids: int
    computed: int = -1
    contents: list[int] = field(default_factory=list)

    def content(self, position: int) -> int:
        """What a real cache would hold at a position: something that depends on all tokens up to it."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else 0
            self.contents.append(hash((before, self.tokens[len(self.contents)])))
        return self.contents[position]


class LedgerRunner:
    """Keeps a row per running request, as a real runner does, and what every slot holds.

    A plan that schedules a position twice, leaves one out, names the wrong token, or whose table does not lead to the
    request's own tokens at every position that attention would read, fails an assertion. Copies are done first, then all
    rows write, then all read: as in each layer of a real step.
    """

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int = 10**9, max_seqs: int = 10**9) -> None:
        self.block_size, self.max_tokens, self.max_seqs = block_size, max_tokens, max_seqs
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.plans: list[StepPlan] = []
        self.max_rows = 0
        self.num_copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.released:
            self.rows.pop(request_id, None)
        for new in plan.admitted:
            assert new.request_id not in self.rows, "admitted twice"
            assert new.request_id in plan.request_ids, "admitted but not scheduled"
            row = Row(new.prompt_len, new.params, new.seed, new.sample_index, list(new.token_ids), list(new.block_ids), len(new.stop_ids))
            self.rows[new.request_id] = row
        self._check_size(plan)
        self._append_blocks(plan)
        self._copy(plan)
        offset = 0
        drafts = plan.num_drafts or [0] * plan.num_requests
        for i, request_id in enumerate(plan.request_ids):
            count = plan.num_scheduled[i]
            self._write(request_id, plan.num_computed[i], plan.token_ids[offset : offset + count].tolist(), drafts[i])
            offset += count
        assert offset == len(plan.token_ids)
        return self._read_and_sample(plan)

    def _check_size(self, plan: StepPlan) -> None:
        columns = (plan.num_computed, plan.num_scheduled, plan.num_new_blocks, plan.sampled, plan.replaced)
        assert {len(column) for column in columns} == {plan.num_requests} and plan.num_requests > 0
        assert len(plan.num_drafts) in (0, plan.num_requests)
        assert all(not drafts or drafts == sampled - 1 for drafts, sampled in zip(plan.num_drafts, plan.sampled, strict=False))
        assert len(set(plan.request_ids)) == plan.num_requests, "scheduled twice"
        assert min(plan.num_scheduled) >= 1 and sum(plan.num_scheduled) == plan.num_tokens <= self.max_tokens
        assert len(self.rows) <= self.max_seqs
        self.max_rows = max(self.max_rows, len(self.rows))

    def _append_blocks(self, plan: StepPlan) -> None:
        offset = 0
        for i, (request_id, count) in enumerate(zip(plan.request_ids, plan.num_new_blocks, strict=True)):
            new, blocks = plan.new_block_ids[offset : offset + count], self.rows[request_id].blocks
            if request_id not in {admission.request_id for admission in plan.admitted}:
                del blocks[-(-plan.num_computed[i] // self.block_size) :]  # room for drafts that were not accepted
            if plan.replaced[i]:
                copied = dict(zip(plan.copy_targets, plan.copy_sources, strict=True))
                assert copied[new[0]] == blocks.pop(), "the last block was replaced by a copy of another one"
            blocks.extend(new)
            offset += count
        assert offset == len(plan.new_block_ids)

    def _copy(self, plan: StepPlan) -> None:
        size, targets = self.block_size, set(plan.copy_targets)
        assert len(targets) == len(plan.copy_targets) == len(plan.copy_sources), "a block is copied to twice"
        assert not targets & set(plan.copy_sources), "a target is a source"
        for source, target in zip(plan.copy_sources, plan.copy_targets, strict=True):
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        self.num_copies += len(targets)

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, request_id: int, start: int, tokens: list[int], num_drafts: int) -> None:
        row = self.rows[request_id]
        end = start + len(tokens)
        assert row.computed in (-1, start), "positions are left out or computed twice"
        if row.params.beam_width is not None and start == len(row.tokens):
            row.tokens += tokens  # the scheduler's choice; whether it was right, its outputs tell
        if num_drafts:
            assert end - num_drafts == len(row.tokens), "drafts do not follow the last known token"
            row.tokens += tokens[-num_drafts:]
        assert tokens == row.tokens[start:end], "other tokens than those known"
        assert -(-end // self.block_size) == len(row.blocks), "the table has not exactly the blocks needed"
        for position in range(start, end):
            self.slots[self._slot(row, position)] = row.content(position)
        row.computed = end

    def _read_and_sample(self, plan: StepPlan) -> StepResult:
        sampled, logprobs = array("i"), dict[int, TokenLogprobs]()
        for i, request_id in enumerate(plan.request_ids):
            row = self.rows[request_id]
            for position in range(row.computed):
                assert self.slots[self._slot(row, position)] == row.content(position), f"position {position} holds something else"
            assert (plan.sampled[i] > 0) == (row.computed == len(row.tokens))
            if row.params.beam_width is not None:
                if plan.sampled[i]:
                    assert plan.sampled[i] == 1
                    count = num_candidates(row.params.beam_width, row.num_stop_ids)
                    found = canned_candidates(row.seed, row.tokens, count)
                    logprobs[len(sampled)] = TokenLogprobs(
                        found.token_ids[0], found.logprobs[0], 1, tuple(found.token_ids), tuple(found.logprobs)
                    )
                    sampled.append(found.token_ids[0])
                continue
            if plan.num_drafts and plan.num_drafts[i]:
                self._verify(row, plan.num_drafts[i], sampled, logprobs)
                continue
            for number in range(plan.sampled[i]):
                token = canned_token(row.seed, row.computed, number if plan.sampled[i] > 1 else row.sample_index)
                if row.params.num_logprobs is not None:
                    logprobs[len(sampled)] = TokenLogprobs(token, canned_logprob(token), 1, (), ())
                sampled.append(token)
            if plan.sampled[i]:
                row.tokens.append(sampled[len(sampled) - plan.sampled[i]])
        return StepResult(sampled, logprobs)

    def _verify(self, row: Row, num_drafts: int, sampled: array[int], logprobs: dict[int, TokenLogprobs]) -> None:
        """A token in the place of each draft and one behind; the row keeps what a runner alone would have sampled."""
        first = len(row.tokens) - num_drafts
        drafts, right = row.tokens[first:], True
        del row.tokens[first:], row.contents[first:]
        for place in range(num_drafts + 1):
            token = canned_token(row.seed, first + place, row.sample_index)
            if row.params.num_logprobs is not None:
                logprobs[len(sampled)] = TokenLogprobs(token, canned_logprob(token), 1, (), ())
            sampled.append(token)
            if right:
                row.tokens.append(token)
            right = right and place < num_drafts and drafts[place] == token
        row.computed = len(row.tokens) - 1
