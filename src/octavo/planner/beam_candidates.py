"""Continuations that a simulated beam search chooses among: which beams survive decides what they share.

An assumption, not a model of language: at each position of each beam, the best continuation has a probability drawn from a beta
distribution and each further one is less likely by the same factor. ``docs/planning.md`` compares what is saved with measurements.
"""

from __future__ import annotations

import math
import random

from octavo.scheduler.step import TokenLogprobs

SURE, UNSURE = 0.9, 0.6
"""Parameters of the distribution: the best continuation is often nearly certain, and sometimes one of many."""


def candidates(first_token: int, beam: int, position: int, count: int) -> TokenLogprobs:
    """The best ``count`` continuations of a beam; the same for the same arguments. ``first_token`` tells requests apart."""
    chance = random.Random(first_token << 40 ^ beam << 20 ^ position)
    best = min(max(chance.betavariate(SURE, UNSURE), 1e-3), 1 - 1e-3)
    logprobs = tuple(math.log(best) + rank * math.log1p(-best) for rank in range(count))
    tokens = tuple(range(first_token, first_token + 2 * count, 2))
    return TokenLogprobs(tokens[0], logprobs[0], 1, tokens, logprobs)
