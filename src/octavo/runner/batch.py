"""From a plan's columns to the arrays of a step. Keeps a row per running request; is sent only what is new."""

from __future__ import annotations

from array import array

import numpy as np

from octavo.kernels.ops import AttentionBatch, Int32
from octavo.models.decoder import DecoderInputs
from octavo.scheduler.step import Admission, StepPlan


class RequestRows:
    """Which row of the runner's arrays belongs to which running request."""

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._row_of: dict[int, int] = {}

    def release(self, request_id: int) -> None:
        """Give a row back; a request without one (its first step failed) is passed over."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def admit(self, request_id: int) -> int:
        assert request_id not in self._row_of, f"request {request_id} has a row already"
        row = self._row_of[request_id] = self._free.pop()
        return row

    def of(self, request_ids: array[int]) -> Int32:
        """Rows of the requests, [len(request_ids)]."""
        row_of = self._row_of
        return np.fromiter((row_of[i] for i in request_ids), np.int32, len(request_ids))


class Batch:
    """The decoder's inputs, in buffers that are filled anew for each step."""

    def __init__(self, max_num_seqs: int, max_rows: int, max_samples: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self.history = np.zeros((max_num_seqs, max_model_len), np.int32)
        """[max_num_seqs, max_model_len] tokens of each row's request: those known, then drafts of this step or of one before"""
        self.inputs = DecoderInputs(
            token_ids=np.zeros(max_rows, np.int32),
            batch=AttentionBatch(
                query_starts=np.zeros(max_num_seqs + 1, np.int32),
                table_rows=np.zeros(max_num_seqs, np.int32),
                block_tables=np.zeros((max_num_seqs, max_blocks), np.int32),
                positions=np.zeros(max_rows, np.int32),
                slots=np.zeros(max_rows, np.int32),
            ),
            sampled_rows=np.zeros(max_samples, np.int32),
        )

    def admit(self, row: int, admission: Admission) -> None:
        """Give a row its request's whole table and tokens."""
        self.inputs.batch.block_tables[row, : len(admission.block_ids)] = admission.block_ids
        self.history[row, : len(admission.token_ids)] = admission.token_ids

    def pack(self, plan: StepPlan, rows: Int32) -> None:
        """Fill the buffers for a plan whose request i has row ``rows[i]``."""
        inputs, batch = self.inputs, self.inputs.batch
        requests, tokens = plan.num_requests, plan.num_tokens
        counts = np.frombuffer(plan.num_scheduled, np.int32)
        self._append_blocks(plan, rows)
        batch.table_rows[:requests] = rows
        np.cumsum(counts, out=batch.query_starts[1 : requests + 1])
        first = np.frombuffer(plan.num_computed, np.int32) - batch.query_starts[:requests]
        positions = np.arange(tokens, dtype=np.int32) + np.repeat(first, counts)
        row_of_token = np.repeat(rows, counts)
        block, offset = np.divmod(positions, np.int32(self._block_size))
        inputs.token_ids[:tokens] = plan.token_ids
        batch.positions[:tokens] = positions
        batch.slots[:tokens] = batch.block_tables[row_of_token, block] * np.int32(self._block_size) + offset
        self.history[row_of_token, positions] = inputs.token_ids[:tokens]

    def _append_blocks(self, plan: StepPlan, rows: Int32) -> None:
        """Behind the blocks that the computed tokens take; what lay there was room for drafts that were not accepted."""
        if not plan.new_block_ids:
            return
        counts = np.frombuffer(plan.num_new_blocks, np.int32)
        held = -(-np.frombuffer(plan.num_computed, np.int32) // np.int32(self._block_size))
        if plan.copy_targets:
            held -= np.frombuffer(plan.replaced, np.int8)
        starts = held - (np.cumsum(counts, dtype=np.int32) - counts)
        columns = np.arange(len(plan.new_block_ids), dtype=np.int32) + np.repeat(starts, counts)
        self.inputs.batch.block_tables[np.repeat(rows, counts), columns] = plan.new_block_ids
