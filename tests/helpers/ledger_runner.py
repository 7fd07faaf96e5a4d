"""A runner without a model: it books every slot of the cache and checks each plan against its own ledger."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.request import SamplingParams
from octavo.scheduler.step import StepPlan, StepResult

VOCAB = 1000


def canned_token(seed: int, position: int) -> int:
    """The token "sampled" at a position: a function of seed and position alone."""
    return (seed * 2654435761 + position * 40503 + (position >> 3) * 97) % VOCAB


@dataclass
class Row:
    prompt_len: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    blocks: list[int]
    computed: int


class LedgerRunner:
    """Keeps a row per running request, as a real runner does, and the owner, position and token of every slot.

    A plan that schedules a position twice, leaves one out, names the wrong token, or whose table does not lead to
    what was stored before, fails an assertion.
    """

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int = 10**9, max_seqs: int = 10**9) -> None:
        self.block_size, self.max_tokens, self.max_seqs = block_size, max_tokens, max_seqs
        self.slots: list[tuple[int, int, int] | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.plans: list[StepPlan] = []
        self.max_rows = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.released:
            self.rows.pop(request_id, None)
        for new in plan.admitted:
            assert new.request_id not in self.rows, "admitted twice"
            assert new.request_id in plan.request_ids, "admitted but not scheduled"
            self.rows[new.request_id] = Row(new.prompt_len, new.params, new.seed, list(new.token_ids), list(new.block_ids), -1)
        self._check_size(plan)
        self._append_blocks(plan)
        self._check_owners()
        sampled = array("i")
        offset = 0
        for i, request_id in enumerate(plan.request_ids):
            count = plan.num_scheduled[i]
            token = self._run(request_id, plan.num_computed[i], plan.token_ids[offset : offset + count].tolist(), bool(plan.sampled[i]))
            sampled.extend([token] if plan.sampled[i] else [])
            offset += count
        assert offset == len(plan.token_ids)
        return StepResult(sampled)

    def _check_size(self, plan: StepPlan) -> None:
        columns = (plan.num_computed, plan.num_scheduled, plan.num_new_blocks, plan.sampled)
        assert {len(column) for column in columns} == {plan.num_requests} and plan.num_requests > 0
        assert len(set(plan.request_ids)) == plan.num_requests, "scheduled twice"
        assert min(plan.num_scheduled) >= 1 and sum(plan.num_scheduled) == plan.num_tokens <= self.max_tokens
        assert len(self.rows) <= self.max_seqs
        self.max_rows = max(self.max_rows, len(self.rows))

    def _append_blocks(self, plan: StepPlan) -> None:
        offset = 0
        for request_id, count in zip(plan.request_ids, plan.num_new_blocks, strict=True):
            self.rows[request_id].blocks.extend(plan.new_block_ids[offset : offset + count])
            offset += count
        assert offset == len(plan.new_block_ids)

    def _check_owners(self) -> None:
        blocks = [block for row in self.rows.values() for block in row.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two tables"

    def _run(self, request_id: int, start: int, tokens: list[int], sampled: bool) -> int:
        row = self.rows[request_id]
        end = start + len(tokens)
        assert row.computed in (-1, start), "positions are left out or computed twice"
        assert tokens == row.tokens[start:end], "other tokens than those known"
        assert sampled == (end == len(row.tokens))
        assert -(-end // self.block_size) == len(row.blocks), "the table has not exactly the blocks needed"
        places = [row.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(end)]
        for position in range(start):
            assert self.slots[places[position]] == (request_id, position, row.tokens[position]), "a stored token was lost"
        for position in range(start, end):
            self.slots[places[position]] = (request_id, position, row.tokens[position])
        row.computed = end
        if sampled:
            row.tokens.append(canned_token(row.seed, end))
        return row.tokens[-1]
