"""From a plan's columns to rows: native and reference against plain lists, over random steps of random requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.ops import SAMPLE_ROW, AttentionBatch, Backend, Size, StepColumns
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native

BACKENDS = ["reference", *isas()[:1]]
MAX_SEQS, MAX_ROWS, MAX_SAMPLES, MAX_BLOCKS = 4, 24, 12, 20
SENTINEL = -7


@dataclass
class Row:
    """What a table row's request looks like."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """What a step does for one table row: tokens to schedule, whether its last block is replaced, samples to draw."""

    row: int
    count: int
    replaced: bool
    samples: int
    drafts: bool = False
    """Whether the samples are those of drafts, which are the last of the tokens."""

    def num_drafts(self, num_tokens: int) -> int:
        return self.samples - 1 if self.drafts and 1 < self.samples <= num_tokens else 0


turns = st.lists(
    st.builds(Turn, st.integers(0, MAX_SEQS - 1), st.integers(1, 6), st.booleans(), st.integers(0, 3), st.booleans()),
    min_size=1, max_size=MAX_SEQS, unique_by=lambda turn: turn.row,
)  # fmt: skip


def i32(*shape: int) -> Any:
    return np.full(shape, SENTINEL, np.int32)


class Layout:
    """The two ops, recorded once, with their arrays."""

    def __init__(self, name: str, block_size: int) -> None:
        backend: Backend = ReferenceBackend() if name == "reference" else native(name)
        self.sizes = np.zeros(len(Size), np.int32)
        self.columns = StepColumns(
            i32(MAX_SEQS), i32(MAX_SEQS), i32(MAX_SEQS), i32(MAX_SEQS), i32(MAX_SEQS), i32(MAX_ROWS + MAX_SEQS), np.zeros(MAX_SEQS, np.int8)
        )
        self.batch = AttentionBatch(i32(MAX_SEQS + 1), i32(MAX_SEQS), i32(MAX_SEQS, MAX_BLOCKS), i32(MAX_ROWS), i32(MAX_ROWS))
        self.token_ids, self.history = i32(MAX_ROWS), i32(MAX_SEQS, 64)
        self.params, self.rows = np.zeros(MAX_SEQS, SAMPLE_ROW), np.zeros(MAX_SAMPLES, SAMPLE_ROW)
        self.params["seed"], self.params["prompt_len"], self.params["sample_index"] = range(MAX_SEQS), range(MAX_SEQS), 9
        self.sampled_rows = i32(MAX_SAMPLES)
        self.program = backend.program(self.sizes)
        self.program.lay_out_rows(self.columns, self.batch, self.token_ids, self.history, block_size)
        self.program.lay_out_samples(self.columns, self.batch, self.params, self.sampled_rows, self.rows)

    def run(self, step: list[tuple[Turn, int, list[int], list[int]]]) -> None:
        """step: per request its turn, tokens computed before, new tokens and new blocks."""
        c = self.columns
        for i, (turn, computed, tokens, blocks) in enumerate(step):
            self.batch.table_rows[i], c.num_computed[i], c.num_scheduled[i] = turn.row, computed, len(tokens)
            c.num_drafts[i] = turn.num_drafts(len(tokens))
            c.num_samples[i], c.num_new_blocks[i], c.replaced[i] = turn.samples, len(blocks), turn.replaced and bool(blocks)
        for array, lists in ((c.new_block_ids, [s[3] for s in step]), (self.token_ids, [s[2] for s in step])):
            flat = [x for one in lists for x in one]
            array[: len(flat)] = flat
        self.sizes[Size.REQUESTS], self.sizes[Size.ROWS] = len(step), sum(len(s[2]) for s in step)
        self.program.run()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=60)
@given(steps=st.lists(turns, min_size=1, max_size=6), block_size=st.sampled_from([1, 2, 4, 16]))
def test_rows_and_samples_are_those_of_the_plan(backend: str, steps: list[list[Turn]], block_size: int) -> None:
    layout, requests = Layout(backend, block_size), [Row() for _ in range(MAX_SEQS)]
    next_block = 100
    for step in steps:
        planned = []
        for turn in step:
            request = requests[turn.row]
            end = min(len(request.tokens) + turn.count, MAX_BLOCKS * block_size, 64)
            tokens = list(range(len(request.tokens) + 1, end + 1))
            replaced = turn.replaced and bool(request.blocks)
            count = -(-end // block_size) - len(request.blocks) + replaced
            blocks = list(range(next_block, next_block + count))
            next_block += count
            if tokens:
                planned.append((Turn(turn.row, turn.count, replaced, turn.samples, turn.drafts), len(request.tokens), tokens, blocks))
                request.blocks[len(request.blocks) - replaced :] = blocks
                request.tokens += tokens
        if planned:
            layout.run(planned)
            check(layout, planned, requests, block_size)


def check(layout: Layout, step: list[tuple[Turn, int, list[int], list[int]]], requests: list[Row], block_size: int) -> None:
    row = s = 0
    for i, (turn, computed, tokens, _) in enumerate(step):
        request = requests[turn.row]
        assert layout.batch.query_starts[i] == row
        assert layout.batch.block_tables[turn.row, : len(request.blocks)].tolist() == request.blocks
        assert layout.history[turn.row].tolist() == request.tokens + [SENTINEL] * (64 - len(request.tokens))
        for position in range(computed, computed + len(tokens)):
            assert layout.batch.positions[row] == position
            assert layout.batch.slots[row] == request.blocks[position // block_size] * block_size + position % block_size
            row += 1
        for index in range(turn.samples):
            num_drafts = turn.num_drafts(len(tokens))
            left = num_drafts - index if num_drafts else 0
            entry, known = layout.rows[s], len(request.tokens) - left
            assert (entry["seed"], entry["num_known"], int(entry["position"])) == (turn.row, known, (known - turn.row) % 2**32)
            assert entry["sample_index"] == (index if turn.samples > 1 and not num_drafts else 9)
            assert layout.sampled_rows[s] == row - 1 - left
            s += 1
    assert layout.batch.query_starts[len(step)] == row


def test_only_the_sampled_rows_are_written() -> None:
    for backend in BACKENDS:
        layout = Layout(backend, 4)
        layout.run([(Turn(0, 2, False, 1), 0, [1, 2], [5]), (Turn(2, 1, False, 0), 0, [1], [6])])
        assert layout.sampled_rows.tolist() == [1] + [SENTINEL] * (MAX_SAMPLES - 1)
        assert not layout.rows[1:]["num_known"].any()
