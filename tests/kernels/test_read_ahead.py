"""Which blocks a step lists for products to ask for: a hint, so that only its completeness is to be checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.kernels.native import NativeBackend
from tests.helpers.isas import needs_native
from tests.helpers.paged import Case, Layer, Pool, Stepper

pytestmark = needs_native

CASE = Case((), kv_heads=2, group=3, head_dim=32, layers=(Layer(), Layer()))
MOST = 4096
"""kMaxRead of attention_plan.h."""


def read_blocks(
    lengths: tuple[int, ...], scheduled: tuple[int, ...], block_size: int, threads: int = 1, shared: int = 0
) -> tuple[list[int], list[int]]:
    """What the last step listed, and what its requests' tables hold; the first ``shared`` keys of all requests are the same."""
    native = NativeBackend(threads=threads)
    case = replace(CASE, lengths=lengths)
    pool = Pool(native, case, block_size, seed=1)
    pool.tables[1:, : shared // block_size] = pool.tables[0, : shared // block_size]
    stepper = Stepper(native, case, pool, "float32")
    tokens = [case.tokens(i) for i in range(len(lengths))]
    before = [(i, 0, length - new) for i, (length, new) in enumerate(zip(lengths, scheduled, strict=True)) if length > new]
    if before:
        stepper.run(before, tokens)
    stepper.run([(i, length - new, length) for i, (length, new) in enumerate(zip(lengths, scheduled, strict=True))], tokens)
    program: Any = stepper.program
    tables = [pool.tables[i, : -(-length // block_size)] for i, length in enumerate(lengths)]
    return program.read_blocks, np.concatenate(tables).tolist()


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_once(block_size: int, threads: int) -> None:
    """Decodes and short prompts; a long context is divided over threads by chunks."""
    found, expected = read_blocks((1, 31, 33, 200, 1100), (1, 1, 33, 1, 1), block_size, threads)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("size", [3, 30])
def test_what_is_shared_is_listed_once(size: int) -> None:
    """Also where a group has more rows than one pass takes."""
    found, expected = read_blocks(tuple(range(200, 200 + size)), (1,) * size, 16, shared=192)
    assert sorted(found) == sorted(set(expected))


def test_the_list_ends_where_it_is_full() -> None:
    found, expected = read_blocks((MOST - 10, 50, 30), (1, 1, 1), 1)
    assert len(found) == MOST < len(expected)
    assert len(set(found)) == MOST and set(found) < set(expected)
