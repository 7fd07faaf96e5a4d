"""Products that ask for the keys and values of the next attention: the list of blocks is right, and no result changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.kernels.native import NativeBackend
from octavo.kernels.ops import LinearWeight, Program, TensorSource
from tests.helpers.isas import isas, needs_native
from tests.helpers.paged import KV_DTYPES, Case, Layer, Pool, Stepper
from tests.helpers.products import multiply
from tests.helpers.quantised import random_source

pytestmark = needs_native

CASE = Case((), kv_heads=2, group=3, head_dim=32, layers=(Layer(), Layer()))
MOST = 4096
"""kMaxBlocksAhead of attention_plan.h."""


class Listed:
    """The list of a step in which each request computes its last tokens; the rest of them were computed before."""

    def __init__(self, lengths: tuple[int, ...], block_size: int, threads: int = 1, scheduled: int = 1, shared_prefix: bool = True) -> None:
        native = NativeBackend(threads=threads, shared_prefix=shared_prefix)
        self.case = replace(CASE, lengths=lengths)
        self.pool = Pool(native, self.case, block_size, seed=1)
        self.stepper = Stepper(native, self.case, self.pool, "float32")
        self._scheduled = scheduled

    def share(self, requests: range, num_keys: int) -> None:
        """The first keys of these requests are the same."""
        self.pool.tables[requests, : num_keys // self.pool.block_size] = self.pool.tables[requests[0], : num_keys // self.pool.block_size]

    def run(self) -> list[int]:
        lengths, new = self.case.lengths, self._scheduled
        tokens = [self.case.tokens(i) for i in range(len(lengths))]
        self.stepper.run([(i, 0, length - new) for i, length in enumerate(lengths) if length > new], tokens)
        self.stepper.run([(i, max(0, length - new), length) for i, length in enumerate(lengths)], tokens)
        program: Any = self.stepper.program
        return list(program.blocks_ahead)

    @property
    def in_tables(self) -> set[int]:
        size = self.pool.block_size
        return {int(block) for i, length in enumerate(self.case.lengths) for block in self.pool.tables[i, : -(-length // size)]}


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize(("threads", "scheduled"), [(1, 1), (3, 1), (2, 300)])
def test_every_block_once(block_size: int, threads: int, scheduled: int) -> None:
    """Decodes and prompts; a long context is divided over threads by chunks, a prompt into blocks of rows."""
    listed = Listed((2, 31, 33, 200, 1100), block_size, threads, scheduled)
    found = listed.run()
    assert len(found) == len(set(found))
    assert set(found) == listed.in_tables


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_requests_share_is_listed_once(groups: int, shared_prefix: bool) -> None:
    """Also where a group has more rows than one pass takes, and where groups have a common stem."""
    size = 30 // groups
    listed = Listed(tuple(range(330, 330 + size * groups)), 16, shared_prefix=shared_prefix)
    for group in range(groups):
        listed.share(range(group * size, (group + 1) * size), 320)
    listed.share(range(size * groups), 32)
    found = listed.run()
    assert len(found) == len(set(found))
    assert set(found) == listed.in_tables


def test_the_list_ends_where_it_is_full() -> None:
    listed = Listed((MOST - 10, 50, 30), 1)
    found = listed.run()
    assert len(found) == len(set(found)) == MOST
    assert set(found) < listed.in_tables


class Between(Stepper):
    """Two layers of attention, and products of as many rows as the step has tokens before each of them."""

    def __init__(self, backend: NativeBackend, case: Case, pool: Pool, x: Any, weight: LinearWeight) -> None:
        self.x, self.weight = x, weight
        self.products = [backend.empty((len(x), weight.out_features), "float32") for _ in case.layers]
        super().__init__(backend, case, pool, "float32")

    def _record(self, program: Program) -> None:
        q, k, _ = np.cumsum(self.case.columns)
        for i, (layer, out, product) in enumerate(zip(self.case.layers, self.outs, self.products, strict=True)):
            program.linear(self.x, self.weight, product)
            program.write_kv(self.qkv[:, q:k], self.qkv[:, k:], self.slots, self.pool.cache, i)
            program.paged_attention(self.qkv[:, :q], self.batch, self.pool.cache, i, out, self.case.scale, layer.window, layer.softcap)


def random_weight(native: NativeBackend, format: str, rows: int, columns: int) -> LinearWeight:
    if format.startswith("Q"):
        return native.pack([random_source(format, rows, columns, 3)], "quantised")
    values = np.random.default_rng(3).standard_normal((rows, columns), np.float32)
    return native.pack([TensorSource("w", values.shape, "F32", values.reshape(-1).view(np.uint8))], format)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layers", [(Layer(), Layer(), Layer()), (Layer(), Layer(window=20), Layer())])
@pytest.mark.parametrize(
    ("format", "columns"), [("float32", 1), ("bfloat16", 1), ("float32", 256), ("bfloat16", 256), ("Q8_0", 256), ("Q4_1", 256)]
)
def test_products_between_attentions(isa: str, kv_dtype: str, format: str, layers: tuple[Layer, ...], columns: int) -> None:
    """Over steps in which lists grow and shrink, of fewer rows than ask for anything and of more, the bits are those of products alone."""
    native = NativeBackend(threads=2, isa=isa)
    weight = random_weight(native, format, 40, columns)
    lengths = (90, 40, 17)
    case = replace(CASE, lengths=lengths, dtype=kv_dtype, layers=layers)
    x = native.empty((sum(lengths), columns), weight.input_dtype)
    x[:] = np.random.default_rng(5).standard_normal(x.shape, np.float32)
    between = Between(native, case, Pool(native, case, 16, seed=2), x, weight)
    tokens = [case.tokens(i) for i in range(len(lengths))]
    for step in ([(0, 0, 60), (1, 0, 30)], [(0, 60, 75), (1, 30, 40), (2, 0, 5)], [(2, 5, 8)], [(0, 75, 90), (2, 8, 17)]):
        between.run(step, tokens)
        rows = sum(end - first for _, first, end in step)
        alone = multiply(native, x[:rows], weight)
        for product in between.products:
            assert np.array_equal(product[:rows].view(np.uint32), alone.view(np.uint32))
