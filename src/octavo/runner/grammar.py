"""Masks of requests whose output is bound to a grammar: which tokens may come next, in the rows that the op ``sample`` reads.

A row's place in its grammar is a function of its output, so nothing is kept apart from the row: a request that was preempted, or that
has just forked, begins anew and is told all of its output when its next token is due.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.ops import Int32
from octavo.request import ConstraintState, SamplingParams
from octavo.scheduler.step import StepPlan


@dataclass(slots=True)
class _Place:
    """Where a row is in its grammar: after the first ``num_told`` of its tokens."""

    state: ConstraintState
    num_told: int


class GrammarRows:
    """Places of the rows that have a grammar. ``masks`` [rows, words] uint32 is filled, ``history`` [rows, tokens] is read."""

    def __init__(self, masks: NDArray[np.uint32], history: Int32) -> None:
        self._masks = masks
        self._history = history
        self._places: dict[int, _Place] = {}

    def admit(self, row: int, params: SamplingParams, prompt_len: int) -> bool:
        """A request begins on a row; returns whether it has a grammar."""
        self._places.pop(row, None)
        if params.constraint is None:
            return False
        self._places[row] = _Place(params.constraint.start(), prompt_len)
        return True

    def __bool__(self) -> bool:
        return bool(self._places)

    def fill(self, plan: StepPlan, rows: array[int]) -> None:
        """Fill the masks of the rows, ``rows[i]`` for request i, that a plan samples from."""
        end = 0
        for i, row in enumerate(rows):
            start, end = end, end + plan.num_scheduled[i]
            place = self._places.get(row)
            if place is None or not plan.sampled[i]:
                continue
            first = plan.num_computed[i]
            known = first + plan.num_scheduled[i]
            self._history[row, first:known] = plan.token_ids[start:end]  # the step itself will, but too late
            if known > place.num_told:
                place.state.accept(self._history[row, place.num_told : known].tolist())
                place.num_told = known
            mask = self._masks[row]
            place.state.fill(mask.ctypes.data, mask.nbytes)
