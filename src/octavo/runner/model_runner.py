"""Runs plans on a model: packs each one into arrays, replays the recorded step, hands back the result."""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import Backend, KVCache, Size
from octavo.models.decoder import Decoder
from octavo.request import MAX_BEST_OF
from octavo.runner.batch import Batch, RequestRows
from octavo.runner.program import record_step
from octavo.runner.sampler import Sampler
from octavo.scheduler.step import StepPlan, StepResult


class ModelRunner:
    """Owns the KV cache and all arrays; knows requests only as rows.

    ``max_rows`` is the most tokens a plan may schedule, ``max_model_len`` the most tokens of one request.
    """

    def __init__(self, decoder: Decoder, backend: Backend, cache: KVCache, max_num_seqs: int, max_rows: int, max_model_len: int) -> None:
        self.cache = cache
        max_samples = max_rows + MAX_BEST_OF - 1
        self._rows = RequestRows(max_num_seqs)
        self._batch = Batch(max_num_seqs, max_rows, max_samples, max_model_len, cache.shape.block_size)
        self._sampler = Sampler(max_num_seqs, max_samples, decoder.spec.vocab_size, self._batch.history)
        sizes = np.zeros(len(Size), np.int32)
        self._counts = sizes.data
        self._copies = np.zeros((2, max_num_seqs), np.int32)
        self._program, self.logits = record_step(
            decoder, backend, sizes, self._batch, cache, self._copies, self._sampler, max_rows, max_samples
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        self._pack(plan)
        self._program.run()
        return self._sampler.result(plan)

    def _pack(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self._rows.release(request_id)
        for admission in plan.admitted:
            row = self._rows.admit(admission.request_id)
            self._batch.admit(row, admission)
            self._sampler.admit(row, admission)
        rows = self._rows.of(plan.request_ids)
        self._batch.pack(plan, rows)
        num_samples = self._sampler.pack(plan, rows, self._batch.inputs.sampled_rows)
        num_copies = len(plan.copy_sources)
        if num_copies:
            self._copies[0, :num_copies], self._copies[1, :num_copies] = plan.copy_sources, plan.copy_targets
        counts = self._counts
        counts[Size.ROWS], counts[Size.REQUESTS] = plan.num_tokens, plan.num_requests
        counts[Size.SAMPLES], counts[Size.COPIES] = num_samples, num_copies
