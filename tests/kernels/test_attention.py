"""Native paged attention: equal to its definition in float64, and each row's bits a function of its own position alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.isas import isas, native, needs_native
from tests.helpers.paged import KV_DTYPES, NEVER_READ, ROUNDING, Case, Layer, Pool, Stepper, attention, exact_row

pytestmark = [needs_native, pytest.mark.parametrize("isa", isas())]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BORDERS = (1, 31, 32, 33, 511, 512, 513)
dtypes = pytest.mark.parametrize("dtype", KV_DTYPES)


def assert_exact(case: Case, found: list[list[Any]], positions: Any, out_dtype: str = "float32") -> None:
    for layer, per_request in zip(case.layers, found, strict=True):
        for request, rows in enumerate(per_request):
            for position in positions(case.lengths[request]):
                exact, error = exact_row(case, layer, request, position)
                if out_dtype != "float32":
                    error = error + ROUNDING[out_dtype] * (np.abs(exact) + error)
                off = np.abs(rows[position].astype(np.float64) - exact) - error
                assert off.max() <= 0, f"{layer}, position {position} of {case.lengths[request]}: {off.max()} beyond {error.max()}"


def assert_same_bits(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        for request, (x, y) in enumerate(zip(a, b, strict=True)):
            differ = np.flatnonzero((x.view(np.uint32) != y.view(np.uint32)).any(axis=1))
            assert differ.size == 0, f"layer {layer}, request {request}, positions {differ[:8]}"


def some_positions(length: int) -> list[int]:
    return sorted({0, 1 % length, length // 2, *(p - 1 for p in BORDERS if p <= length), length - 1})


@dtypes
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_equals_its_definition(isa: str, dtype: str, head_dim: int) -> None:
    case = Case((1, 40, 77), kv_heads=2, group=3, head_dim=head_dim, dtype=dtype)
    assert_exact(case, attention(native(isa), case), range)


@dtypes
@pytest.mark.parametrize("head_dim", [2, 8, 24, 50])
def test_head_sizes_that_fill_no_whole_vectors(isa: str, dtype: str, head_dim: int) -> None:
    case = Case((1, 40), kv_heads=2, group=3, head_dim=head_dim, dtype=dtype)
    expected = attention(native(isa), case)
    assert_exact(case, expected, range)
    for block_size in (1, 4, 32, 64):
        assert_same_bits(attention(native(isa), case, block_size, (7,)), expected)


@dtypes
@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_per_kv_head(isa: str, dtype: str, group: int) -> None:
    case = Case((35, 2), kv_heads=1 + group % 3, group=group, dtype=dtype)
    assert_exact(case, attention(native(isa), case), range)


def test_more_query_heads_than_a_unit_has_rows(isa: str) -> None:
    case = Case((34,), kv_heads=1, group=71, head_dim=64)
    expected = attention(native(isa), case)
    assert_exact(case, expected, some_positions)
    assert_same_bits(attention(native(isa, 3), case, 8, (1, 5)), expected)


@dtypes
def test_long_contexts(isa: str, dtype: str) -> None:
    case = Case((*BORDERS, 1500), kv_heads=1, group=3, dtype=dtype, spread=4.0)
    assert_exact(case, attention(native(isa, 2), case, chunks=(200, 513)), some_positions)


@dtypes
@pytest.mark.parametrize("spread", [0.0, 30.0, 300.0])
def test_even_and_sharp_probabilities(isa: str, dtype: str, spread: float) -> None:
    case = Case((600,), kv_heads=1, group=2, dtype=dtype, spread=spread)
    assert_exact(case, attention(native(isa), case), some_positions)


@dtypes
@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 63, 64, 65, 512, 513, 599, 600, 10_000])
def test_sliding_windows(isa: str, dtype: str, window: int) -> None:
    case = Case((600, 70), kv_heads=1, dtype=dtype, layers=(Layer(window),))
    assert_exact(case, attention(native(isa), case), lambda n: [*some_positions(n), *range(n - 3, n)])


@dtypes
@pytest.mark.parametrize("block_size", [2, 8, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 5, 33, 64, 130])
def test_keys_that_left_the_window_are_not_touched(isa: str, dtype: str, block_size: int, window: int) -> None:
    """NaN in every slot before the window, no entry in the table for blocks that lie before it, and still the same bits."""
    length = 200
    case = Case((length,), kv_heads=1, group=3, dtype=dtype, layers=(Layer(window),))
    expected = attention(native(isa), case)[0][0]
    pool = Pool(native(isa), case, block_size, seed=1)
    stepper = Stepper(native(isa), case, pool, "float32")
    tokens = [case.tokens(0)]
    stepper.run([(0, 0, length - 1)], tokens)
    gone = length - window
    stepper.run([(0, 0, gone)], [np.full_like(tokens[0], np.nan)])
    pool.tables[0, : gone // block_size] = NEVER_READ
    stepper.run([(0, length - 1, length)], tokens)
    assert_same_bits([[stepper.outs[0][:1]]], [[expected[-1:]]])


@dtypes
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_soft_caps(isa: str, dtype: str, softcap: float) -> None:
    case = Case((40, 130), dtype=dtype, layers=(Layer(softcap=softcap),), spread=5.0)
    assert_exact(case, attention(native(isa), case), some_positions)


def test_bfloat16_output_is_the_rounded_float32_output(isa: str) -> None:
    case = Case((1, 40), head_dim=24)
    exact = attention(native(isa), case)
    rounded = attention(native(isa), case, out_dtype="bfloat16")
    for a, b in zip(exact[0], rounded[0], strict=True):
        assert np.array_equal(a.astype(b.dtype).view(np.uint16), b.view(np.uint16))


SCHEDULES: list[tuple[int, ...]] = [(1 << 20,), (1,), (7, 64, 1), (33,), (500, 3), (31, 32, 33), (100,), (512, 511), (64,)]
LAYERS = (Layer(), Layer(window=5), Layer(window=33), Layer(window=512, softcap=4.0), Layer(softcap=20.0))


@dtypes
@pytest.mark.parametrize("case", [
    Case((*BORDERS, 1500), kv_heads=1, group=3, layers=(Layer(), Layer(window=5))),
    Case((1, 17, 66, 90), kv_heads=2, group=4, head_dim=64, layers=LAYERS),
    Case((70, 33), kv_heads=3, group=1, head_dim=80, layers=LAYERS),
    Case((64, 65), kv_heads=1, group=8, head_dim=256, layers=LAYERS),
], ids=lambda case: f"{case.kv_heads}x{case.group}x{case.head_dim}")  # fmt: skip
def test_bits_depend_on_a_rows_own_position_alone(isa: str, dtype: str, case: Case) -> None:
    """Block sizes, chunkings, batch mixes, places in the pool and thread counts, against each request alone in one step."""
    case = replace(case, dtype=dtype)
    together = attention(native(isa), case)
    for i, (block_size, chunks) in enumerate(zip(BLOCK_SIZES, SCHEDULES, strict=True)):
        if chunks == (1,) and max(case.lengths) > 100:
            chunks = (211, 1, 1, 1)
        assert_same_bits(attention(native(isa, 1 + i % 4), case, block_size, chunks, seed=i), together)


@pytest.mark.parametrize("position", [*(n - 1 for n in BORDERS), 1499])
def test_decoding_alone_gives_the_bits_of_the_prefill(isa: str, position: int) -> None:
    whole = Case((1500,), kv_heads=1, group=3, layers=LAYERS)
    expected = attention(native(isa), whole)
    alone = replace(whole, lengths=(position + 1,))
    # The same first tokens: a case draws its tokens row by row.
    found = attention(native(isa, 3), alone, 16, (position or 1, 1))
    assert_same_bits([[rows[0][-1:]] for rows in found], [[rows[0][position : position + 1]] for rows in expected])


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_a_context_divided_over_threads(isa: str, threads: int) -> None:
    """Few rows of long contexts: chunks of one row block go to different threads, and more chunks than are worth keeping apart."""
    case = Case((5000, 2100), kv_heads=1, group=2, layers=(Layer(), Layer(window=1100)))
    chunks = (4999, 2099, 1, 1)
    assert_same_bits(attention(native(isa, threads), case, 16, chunks), attention(native(isa, 1), case, 16, chunks))
