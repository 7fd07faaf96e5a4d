"""Stage 7 of 7: from logits to tokens. Before it: ``models.decoder``. After it: the scheduler's commit.

The choosing itself is the op ``sample``; this file turns requests' parameters into its arrays, and its arrays
into a ``StepResult``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import MAX_TOP, SAMPLE_ROW, Int32, SampleBatch, SampleOutput
from octavo.request import SamplingParams, num_candidates
from octavo.runner.grammar import GrammarRows
from octavo.scheduler.step import Admission, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Bias:
    """What is added to a request's logits: always, and before its ``min_tokens``."""

    always: dict[int, float]
    early: dict[int, float]
    min_tokens: int

    def at(self, num_output: int) -> dict[int, float]:
        return self.early if num_output < self.min_tokens else self.always


@dataclass(frozen=True, slots=True)
class _Scored:
    """A prompt position whose token's log-probability is wanted."""

    request_id: int
    position: int


class Sampler:
    """Parameters of the running requests, one row each, and the buffers of the op ``sample``."""

    def __init__(self, max_num_seqs: int, max_samples: int, vocab_size: int, history: Int32) -> None:
        self.params = np.zeros(max_num_seqs, SAMPLE_ROW)
        """[max_num_seqs] parameters of each row's request"""
        self._biases: dict[int, _Bias] = {}
        self._scorers: dict[int, SamplingParams] = {}
        self._reporting: set[int] = set()
        """Rows whose requests want log-probabilities of their output."""
        self._scored: list[_Scored] = []
        self._history = history
        self._vocab_size = vocab_size
        self.batch = SampleBatch(
            rows=np.zeros(max_samples, SAMPLE_ROW),
            history=history,
            bias_ids=np.zeros(max_num_seqs * vocab_size, np.int32),
            bias_values=np.zeros(max_num_seqs * vocab_size, np.float32),
            masks=np.zeros((max_num_seqs, -(-vocab_size // 32)), np.uint32),
        )
        self._grammars = GrammarRows(self.batch.masks, history)
        self.output = SampleOutput(
            token_ids=np.zeros(max_samples, np.int32),
            logprobs=np.zeros(max_samples, np.float32),
            ranks=np.zeros(max_samples, np.int32),
            top_ids=np.zeros((max_samples, MAX_TOP), np.int32),
            top_logprobs=np.zeros((max_samples, MAX_TOP), np.float32),
        )
        self._token_ids = self.output.token_ids.data

    def admit(self, row: int, admission: Admission) -> None:
        """Give a row its request's parameters."""
        p = admission.params
        entry = self.params[row]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            entry[name] = getattr(p, name)
        entry["repetition"], entry["frequency"], entry["presence"] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        entry["num_logprobs"] = _num_logprobs(p, len(admission.stop_ids))
        self._reporting.discard(row)
        if entry["num_logprobs"] >= 0:
            self._reporting.add(row)
        entry["target"] = -1
        entry["history_row"] = row if p.penalised else -1
        entry["prompt_len"] = admission.prompt_len
        bound = self._grammars.admit(row, p, admission.prompt_len)
        entry["mask_row"] = row if bound else self._set_mask(row, p)
        entry["sample_index"], entry["seed"] = admission.sample_index, np.uint64(admission.seed)
        self._set_bias(row, p, admission.stop_ids)
        self._scorers.pop(row, None)
        if p.prompt_logprobs is not None:
            self._scorers[row] = p

    def _set_mask(self, row: int, params: SamplingParams) -> int:
        if params.allowed_token_ids is None:
            return -1
        ids = np.asarray(params.allowed_token_ids, np.int64)
        self.batch.masks[row] = 0
        np.bitwise_or.at(self.batch.masks[row], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return row

    def _set_bias(self, row: int, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        always = dict(params.logit_bias or {}) | dict.fromkeys(params.forbidden_token_ids, -np.inf)
        early = always | dict.fromkeys(stop_ids, -np.inf) if params.min_tokens else always
        self._biases.pop(row, None)
        self.params[row]["bias_count"] = 0
        if early:
            self._biases[row] = _Bias(dict(sorted(always.items())), dict(sorted(early.items())), params.min_tokens)

    def pack(self, plan: StepPlan, rows: array[int], sampled_rows: Int32) -> int:
        """Set what no column of a plan says, where request i has row ``rows[i]``. Returns how many rows are sampled.

        The op ``lay_out_samples`` does the first sum(plan.sampled) of ``sampled_rows``; those of prompt positions to score follow.
        """
        if self._grammars:
            self._grammars.fill(plan, rows)
        if self._biases:
            self._pack_biases(plan, rows)
        self._scored.clear()
        num_sampled = sum(plan.sampled)
        return self._pack_scored(plan, rows, sampled_rows, num_sampled) if self._scorers else num_sampled

    def _pack_biases(self, plan: StepPlan, rows: array[int]) -> None:
        end = 0
        for row, known, sampled in zip(rows, plan.num_known, plan.sampled, strict=True):
            bias = self._biases.get(row)
            if bias is None or not sampled:
                continue
            params = self.params[row]
            entries = bias.at(known - int(params["prompt_len"]))
            start, end = end, end + len(entries)
            self.batch.bias_ids[start:end] = list(entries)
            self.batch.bias_values[start:end] = list(entries.values())
            params["bias_start"], params["bias_count"] = start, len(entries)

    def _pack_scored(self, plan: StepPlan, rows: array[int], sampled_rows: Int32, n: int) -> int:
        """Add a row for each prompt position whose next prompt token is to be scored.

        position p is scheduled now: its logits score the prompt's token p + 1, if there is one
        """
        end_row = 0
        for i, row in enumerate(rows):
            first_row, end_row = end_row, end_row + plan.num_scheduled[i]
            params = self._scorers.get(row)
            if params is None:
                continue
            start, last = plan.num_computed[i], int(self.params[row]["prompt_len"]) - 1
            for position in range(start, min(start + plan.num_scheduled[i], last)):
                sampled_rows[n] = first_row + position - start
                entry = self.batch.rows[n]
                entry["num_logprobs"], entry["target"] = params.prompt_logprobs, self._history[row, position + 1]
                self._scored.append(_Scored(plan.request_ids[i], position + 1))
                n += 1
        return n

    def result(self, plan: StepPlan) -> StepResult:
        """What the op ``sample`` left in the buffers, as a value."""
        n = sum(plan.sampled)
        logprobs = self._output_logprobs(n) if self._reporting else {}
        prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        for s, scored in enumerate(self._scored, n):
            prompt_logprobs.setdefault(scored.request_id, []).append((scored.position, self._logprobs(s)))
        return StepResult(array("i", self._token_ids[:n].tobytes()), logprobs, prompt_logprobs)

    def _output_logprobs(self, num_sampled: int) -> dict[int, TokenLogprobs]:
        asked = np.flatnonzero(self.batch.rows["num_logprobs"][:num_sampled] >= 0).tolist()
        return {s: self._logprobs(s) for s in asked if self.output.token_ids[s] >= 0}

    def _logprobs(self, s: int) -> TokenLogprobs:
        out, k = self.output, min(int(self.batch.rows[s]["num_logprobs"]), self._vocab_size)
        return TokenLogprobs(
            token_id=int(out.token_ids[s]),
            logprob=float(out.logprobs[s]),
            rank=int(out.ranks[s]),
            top_ids=tuple(out.top_ids[s, :k].tolist()),
            top_logprobs=tuple(out.top_logprobs[s, :k].tolist()),
        )


def _num_logprobs(params: SamplingParams, num_stop_ids: int) -> int:
    """Best tokens whose log-probabilities are wanted; -1 if none at all are. A beam's are its continuations."""
    wanted = -1 if params.num_logprobs is None else params.num_logprobs
    return wanted if params.beam_width is None else max(wanted, num_candidates(params.beam_width, num_stop_ids))
