"""Lengths of the requests that a plan is made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.engine.memory import TYPICAL_TOKENS
from octavo.errors import ConfigError


class Lengths(NamedTuple):
    """Prompt and output tokens of one request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


TYPICAL = Lengths(161, TYPICAL_TOKENS - 161)


def typical_lengths(longest: int, prompt: int | None = None, output: int | None = None) -> Lengths:
    """A typical request; what is not given is as in ``TYPICAL``, or less so that both fit into ``longest`` tokens.

    >>> typical_lengths(8192), typical_lengths(8192, prompt=8000), typical_lengths(60)
    (Lengths(prompt=161, output=339), Lengths(prompt=8000, output=192), Lengths(prompt=20, output=40))
    """
    if prompt is None:
        prompt = min(TYPICAL.prompt, max(1, longest // 3 if output is None else longest - output))
    return Lengths(prompt, min(TYPICAL.output, max(1, longest - prompt)) if output is None else output)


def that_fit(lengths: Sequence[Lengths], longest: int) -> Sequence[Lengths]:
    """Requests of at most ``longest`` tokens; the engine refuses the others."""
    return [n for n in lengths if n.total <= longest]


def check_lengths(lengths: Sequence[Lengths], longest: int) -> None:
    """Raises ConfigError for requests without prompt or output, and where none is of at most ``longest`` tokens."""
    for n in lengths:
        if n.prompt < 1 or n.output < 1:
            raise ConfigError(f"a request has at least 1 prompt and 1 output token, not {n.prompt} and {n.output}")
    if not that_fit(lengths, longest):
        shortest = min(n.total for n in lengths)
        which = "the request has" if len(lengths) == 1 else f"the shortest of {len(lengths):,} requests has"
        raise ConfigError(
            f"{which} {shortest:,} tokens, prompt and output, but max_model_len is {longest:,}: plan for shorter ones, or raise max_model_len "
            "as far as the model allows"
        )


def mean_blocks(lengths: Sequence[Lengths], block_size: int) -> float:
    """Blocks that a running request holds on average.

    A request stays as long as its output, and holds blocks for its prompt and what there is of the output: half, on average, and half a
    block that is not filled.
    """
    stay = sum(n.output for n in lengths)
    held = sum(n.output * (n.prompt + n.output / 2) for n in lengths) / stay
    return held / block_size + (block_size - 1) / (2 * block_size)
