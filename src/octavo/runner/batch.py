"""From a plan's columns to the buffers of a step. Keeps a row per running request; is sent only what is new.

Columns are copied as they are: a step of one request touches no array code. The op ``lay_out_rows`` makes rows of them.
"""

from __future__ import annotations

from array import array

import numpy as np

from octavo.kernels.ops import AttentionBatch, StepColumns
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

    def of(self, request_ids: array[int]) -> array[int]:
        """Rows of the requests; type code 'i'."""
        row_of = self._row_of
        return array("i", [row_of[request_id] for request_id in request_ids])


class Batch:
    """The decoder's inputs, in buffers that are filled anew for each step."""

    def __init__(self, max_num_seqs: int, max_rows: int, max_samples: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.history = np.zeros((max_num_seqs, max_model_len), np.int32)
        """[max_num_seqs, max_model_len] tokens of each row's request: those known, then drafts of this step or of one before"""
        self.columns = StepColumns(
            num_computed=np.zeros(max_num_seqs, np.int32),
            num_scheduled=np.zeros(max_num_seqs, np.int32),
            num_samples=np.zeros(max_num_seqs, np.int32),
            num_drafts=np.zeros(max_num_seqs, np.int32),
            num_new_blocks=np.zeros(max_num_seqs, np.int32),
            new_block_ids=np.zeros(max_rows + max_num_seqs, np.int32),
            replaced=np.zeros(max_num_seqs, np.int8),
        )
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
        columns = self.columns
        self._per_request = [
            column.data
            for column in (
                self.inputs.batch.table_rows, columns.num_computed, columns.num_scheduled, columns.num_samples, columns.num_new_blocks
            )
        ]  # fmt: skip
        self._replaced, self._new_block_ids, self._token_ids, self._num_drafts = (
            column.data for column in (columns.replaced, columns.new_block_ids, self.inputs.token_ids, columns.num_drafts)
        )
        self._no_drafts = array("i", [0]) * max_num_seqs

    def admit(self, row: int, admission: Admission) -> None:
        """Give a row its request's whole table and tokens."""
        self.inputs.batch.block_tables[row, : len(admission.block_ids)] = admission.block_ids
        self.history[row, : len(admission.token_ids)] = admission.token_ids

    def pack(self, plan: StepPlan, rows: array[int]) -> None:
        """Fill the columns for a plan whose request i has row ``rows[i]``."""
        n = plan.num_requests
        per_request = rows, plan.num_computed, plan.num_scheduled, plan.sampled, plan.num_new_blocks
        for column, values in zip(self._per_request, per_request, strict=True):
            column[:n] = values
        self._num_drafts[:n] = plan.num_drafts or self._no_drafts[:n]
        self._replaced[: len(plan.replaced)] = plan.replaced
        self._new_block_ids[: len(plan.new_block_ids)] = plan.new_block_ids
        self._token_ids[: plan.num_tokens] = plan.token_ids
