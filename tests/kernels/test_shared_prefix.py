"""Requests whose tables begin with the same blocks read those keys together, and every row keeps the bits it has alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo.kernels.ops import AttentionBatch, KVShape, Size
from tests.helpers.isas import isas, needs_native
from tests.helpers.paged import KV_DTYPES, NEVER_READ, Case, Layer, Pool, Stepper

if TYPE_CHECKING:
    from octavo.kernels.native import NativeBackend

pytestmark = [needs_native, pytest.mark.parametrize("isa", isas())]

LAYERS = (Layer(), Layer(window=5), Layer(window=100), Layer(window=512, softcap=4.0))
dtypes = pytest.mark.parametrize("dtype", KV_DTYPES)


@cache
def backend(isa: str, threads: int, shared_prefix: bool) -> NativeBackend:
    from octavo.kernels.native import NativeBackend

    return NativeBackend(threads=threads, isa=isa, shared_prefix=shared_prefix)


@dataclass(frozen=True)
class Branch:
    """A request: its first `shared` tokens are those of request `parent`, and its last `scheduled` ones are this step's."""

    length: int
    parent: int = -1
    shared: int = 0
    scheduled: int = 1


def tokens_of(case: Case, branches: list[Branch]) -> list[Any]:
    tokens = [case.tokens(i) for i in range(len(branches))]
    for i, branch in enumerate(branches):
        if branch.parent >= 0:
            tokens[i][: branch.shared] = tokens[branch.parent][: branch.shared]
    return tokens


def share_blocks(pool: Pool, branches: list[Branch]) -> None:
    """Whole blocks of what a request has in common with its parent; its own copies of them stay full of NaN."""
    for i, branch in enumerate(branches):
        if branch.parent >= 0:
            whole = branch.shared // pool.block_size
            pool.tables[i, :whole] = pool.tables[branch.parent, :whole]


class Last:
    """The last step of some requests, in a pool where earlier steps computed all that comes before it."""

    def __init__(self, native: NativeBackend, case: Case, branches: list[Branch], block_size: int) -> None:
        case = replace(case, lengths=tuple(b.length for b in branches))
        pool = Pool(native, case, block_size, seed=len(branches))
        share_blocks(pool, branches)
        self.branches, self.tokens = branches, tokens_of(case, branches)
        self.stepper = Stepper(native, case, pool, "float32")
        for i, b in enumerate(branches):
            own = b.shared // block_size * block_size if b.parent >= 0 else 0
            if own < b.length - b.scheduled:
                self.stepper.run([(i, own, b.length - b.scheduled)], self.tokens)

    def run(self, requests: list[int]) -> list[list[Any]]:
        """[layer][request] -> [scheduled, columns]."""
        chosen = [self.branches[i] for i in requests]
        self.stepper.run([(i, b.length - b.scheduled, b.length) for i, b in zip(requests, chosen, strict=True)], self.tokens)
        ends = np.cumsum([b.scheduled for b in chosen])
        return [[out[end - b.scheduled : end].copy() for b, end in zip(chosen, ends, strict=True)] for out in self.stepper.outs]

    @property
    def num_shared(self) -> int:
        """Tokens of the last step that read keys together with other requests."""
        program: Any = self.stepper.program
        return int(program.num_shared_rows) // self.stepper.case.group


def assert_same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        for request, (x, y) in enumerate(zip(a, b, strict=True)):
            assert np.isfinite(y).all()
            assert np.array_equal(x.view(np.uint32), y.view(np.uint32)), f"layer {layer}, request {request}"


def check(
    isa: str, case: Case, branches: list[Branch], block_size: int = 16, threads: int = 1, shared: int | None = None
) -> list[list[Any]]:
    """Together in shared passes, together without, and each request alone: all the same bits."""
    everyone = list(range(len(branches)))
    apart = Last(backend(isa, 1, False), case, branches, block_size)
    expected = apart.run(everyone)
    for i in everyone:
        assert_same(apart.run([i]), [[layer[i]] for layer in expected])
    assert apart.num_shared == 0
    together = Last(backend(isa, threads, True), case, branches, block_size)
    found = together.run(everyone)
    assert shared is None or together.num_shared == shared
    assert_same(found, expected)
    assert_same(together.run(everyone[::-1]), [layer[::-1] for layer in expected])
    return found


def family(size: int, shared: int, own: int, scheduled: int = 1) -> list[Branch]:
    """Requests of growing lengths that share the first one's beginning."""
    return [Branch(shared + own, scheduled=scheduled), *family_members(size - 1, shared, own + 1, scheduled)]


def family_members(size: int, shared: int, own: int, scheduled: int = 1) -> list[Branch]:
    return [Branch(shared + own + i, 0, shared, scheduled) for i in range(size)]


SMALL = Case((), kv_heads=2, group=3, head_dim=32, layers=LAYERS)


@dtypes
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64])
def test_block_sizes(isa: str, dtype: str, block_size: int) -> None:
    check(isa, replace(SMALL, dtype=dtype), family(3, 192, 7), block_size, shared=3)


@dtypes
@pytest.mark.parametrize("shared", [128, 144, 160, 480, 496, 512, 528, 544, 1008, 1024, 1040])
def test_lengths_across_the_borders_of_tiles_and_chunks(isa: str, dtype: str, shared: int) -> None:
    check(isa, replace(SMALL, kv_heads=1, dtype=dtype), [*family(3, shared, 1), *family_members(2, shared, 31)], threads=2, shared=5)


@pytest.mark.parametrize("size", [2, 5, 21, 22, 44])
def test_group_sizes(isa: str, size: int) -> None:
    check(isa, replace(SMALL, kv_heads=1), family(size, 160, 3), shared=size)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 80), (4, 128), (8, 16), (7, 50), (4, 256)])
def test_shapes_of_heads(isa: str, group: int, head_dim: int) -> None:
    case = Case((), kv_heads=1, group=group, head_dim=head_dim, layers=LAYERS)
    check(isa, case, family(5, 180, 9), shared=5)


def test_requests_without_keys_of_their_own(isa: str) -> None:
    """The newest key of some is the last of the last shared tile, wherever in a chunk that is."""
    for length in (128, 512, 544, 1024):
        branches = [Branch(length), Branch(length, 0, length), Branch(length + 70, 0, length), Branch(length + 1, 0, length)]
        check(isa, replace(SMALL, kv_heads=1), branches, 32, threads=2, shared=4)


def test_equal_requests_have_equal_rows(isa: str) -> None:
    rows = check(isa, replace(SMALL, spread=0.0), [Branch(128), Branch(128, 0, 128), Branch(140, 0, 128)], shared=3)
    assert_same([[layer[1]] for layer in rows], [[layer[0]] for layer in rows])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_mix_of_groups_and_others_on_threads(isa: str, threads: int) -> None:
    branches = [
        Branch(700), Branch(300), Branch(650, 0, 640), Branch(64), Branch(320, 1, 256), Branch(1, -1), Branch(900, 0, 640),
        Branch(310, 1, 256), Branch(90), Branch(720, 6, 700), Branch(33, 1, 32), Branch(1500),
    ]  # fmt: skip
    check(isa, replace(SMALL, kv_heads=1), branches, threads=threads, shared=7)


def test_nested_prefixes_are_shared_where_most_is_saved(isa: str) -> None:
    """Four requests share 128 tokens, three of them 256: three in one pass of 256 save more than four in one of 128."""
    branches = [Branch(300), Branch(310, 0, 256), Branch(305, 0, 256), Branch(200, 0, 128)]
    check(isa, SMALL, branches, shared=3)
    branches = [Branch(300), *(Branch(290 + i, 0, 224) for i in range(8)), Branch(320, 1, 256)]
    check(isa, SMALL, branches, shared=10)


def random_tree(rng: np.random.Generator) -> list[Branch]:
    branches = [Branch(int(rng.integers(1, 700)))]
    while len(branches) < 14:
        parent = int(rng.integers(len(branches)))
        shared = int(rng.integers(0, branches[parent].length + 1))
        length, scheduled = shared + int(rng.integers(1, 200)), int(rng.choice([1, 1, 1, 3, 9]))
        branches.append(Branch(length, parent, shared, min(scheduled, length - shared)))
    return branches


@dtypes
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_of_requests(isa: str, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 8, 16, 32, 128]))
    case = Case((), kv_heads=1, group=int(rng.integers(1, 5)), layers=LAYERS, dtype=dtype)
    check(isa, case, random_tree(rng), block_size, threads=1 + seed % 4)


@pytest.mark.parametrize("scheduled", [2, 5, 10])
def test_prompts_that_share_with_decodes(isa: str, scheduled: int) -> None:
    branches = [*family(3, 192, 30), Branch(230, 0, 192, scheduled), Branch(192 + scheduled, 0, 192, scheduled), Branch(240, 0, 192, 48)]
    check(isa, SMALL, branches, threads=2, shared=3 + 2 * scheduled)


def test_rows_that_do_not_see_all_of_what_tables_have_in_common(isa: str) -> None:
    """A prompt whose first rows lie within the common blocks shortens what is shared; one that begins too early is left out."""
    branches = [Branch(400), Branch(410, 0, 320), Branch(320, 0, 320, 8), Branch(130, 0, 128, 8)]
    for block_size in (8, 16, 64):
        check(isa, SMALL, branches, block_size, shared=10)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_long_prefixes_are_divided_over_threads(isa: str, threads: int) -> None:
    case = Case((), kv_heads=1, group=2, layers=(Layer(), Layer(window=1100)))
    for shared in (4096, 4160):
        check(isa, case, [*family(3, shared, 10), Branch(shared + 1500, 0, shared), Branch(2100)], threads=threads, shared=4)


def test_fewer_keys_than_are_worth_it_are_read_by_each_request(isa: str) -> None:
    check(isa, SMALL, family(3, 127, 9), shared=0)


def test_requests_beyond_the_states_that_a_plan_keeps_go_on_alone(isa: str) -> None:
    case = Case((), kv_heads=1, group=1, head_dim=16)
    branches = family(12, 160, 40, 32)
    together = Last(backend(isa, 1, True), case, branches, 16)
    rows = together.run(list(range(12)))
    assert 0 < together.num_shared < 12 * 32
    assert_same(rows, Last(backend(isa, 1, False), case, branches, 16).run(list(range(12))))


def long_decodes(native: NativeBackend) -> tuple[int, Any]:
    """Three pairs of requests that share 12,288 keys each, of 128 query heads, in a plan for no more than these."""
    kv_heads, group, dim, keys, size = 4, 32, 16, 12_288, 256
    cache = native.kv_cache(KVShape(1, 3 * keys // size + 6, size, kv_heads, dim, "bfloat16"))
    rng = np.random.default_rng(0)
    sizes = np.zeros(len(Size), np.int32)
    kv = rng.standard_normal((cache.shape.num_blocks * size, kv_heads * dim), np.float32)
    writes = native.program(sizes)
    writes.write_kv(kv, kv[::-1].copy(), np.arange(len(kv), dtype=np.int32), cache, 0)
    sizes[Size.ROWS] = len(kv)
    writes.run()
    tables = np.arange(3 * keys // size, dtype=np.int32).reshape(3, -1).repeat(2, axis=0)
    tables = np.column_stack([tables, np.arange(6, dtype=np.int32) + 3 * keys // size]).astype(np.int32)
    six = np.arange(6, dtype=np.int32)
    batch = AttentionBatch(np.arange(7, dtype=np.int32), six, tables, keys + 9 * six, np.zeros(6, np.int32))
    q = rng.standard_normal((6, kv_heads * group * dim), np.float32)
    out = np.empty_like(q)
    program = native.program(sizes)
    program.paged_attention(q, batch, cache, 0, out, 0.25)
    sizes[Size.ROWS] = sizes[Size.REQUESTS] = 6
    program.run()
    return program.num_shared_rows // group, out


def test_passes_that_divide_leave_room_for_the_others(isa: str) -> None:
    """Chunks of the first passes could fill the workspace, but all passes need two states."""
    (none, expected), (all_of_them, found) = long_decodes(backend(isa, 1, False)), long_decodes(backend(isa, 4, True))
    assert (none, all_of_them) == (0, 6)
    assert_same([[found]], [[expected]])


def test_tables_are_not_read_past_their_requests(isa: str) -> None:
    """Entries after a request's last block end the process where they are followed."""
    assert NEVER_READ > 1 << 29
    check(isa, SMALL, [Branch(160), Branch(161, 0, 160), Branch(2000, 0, 160)], 16, threads=2, shared=3)
