"""Memory: cgroup limits, the default pool, what is refused and what the message says to change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import LEGAL_BLOCK_SIZES, CacheConfig, SchedulerConfig, parse_bytes
from octavo.engine.memory import cgroup_limit, plan_cache
from octavo.errors import ConfigError, MemoryConfigError
from octavo.kernels.ops import KVShape
from octavo.models.spec import DecoderSpec, RotarySpec

SMOLLM2 = DecoderSpec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, 8192, RotarySpec(64))
GIB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    me = tmp_path / "self"
    me.write_text("0::/a/b\n")
    write(tmp_path / "cg", memory__max="max\n", memory__current="5\n")
    write(tmp_path / "cg/a", memory__max="4000\n", memory__current="1000\n")
    write(tmp_path / "cg/a/b", memory__max="9000\n", memory__current="10\n")
    assert cgroup_limit(tmp_path / "cg", me) == (4000, 1000)


def test_cgroup_v1_and_none(tmp_path: Path) -> None:
    me = tmp_path / "self"
    me.write_text("3:cpu,cpuacct:/x\n2:memory:/x\n")
    write(tmp_path / "cg/memory/x", memory__limit_in_bytes="777\n", memory__usage_in_bytes="7\n")
    write(tmp_path / "cg/memory", memory__limit_in_bytes=f"{2**63 - 4096}\n")
    assert cgroup_limit(tmp_path / "cg", me) == (777, 7)
    assert cgroup_limit(tmp_path / "nothing", me) is None


@given(
    block_size=st.sampled_from(LEGAL_BLOCK_SIZES),
    kv=st.one_of(st.none(), st.integers(2**20, 4 * GIB)),
    seqs=st.integers(1, 300),
    length=st.one_of(st.none(), st.integers(2, 8192)),
    kv_dtype=st.sampled_from(["auto", "float32", "bfloat16", "int8"]),
)
def test_a_plan_keeps_its_bound_and_one_longest_request_fits(
    block_size: int, kv: int | None, seqs: int, length: int | None, kv_dtype: str
) -> None:
    config = CacheConfig(block_size, kv, kv_dtype=kv_dtype)
    try:
        plan = plan_cache(SMOLLM2, "bfloat16", config, SchedulerConfig(seqs, 512, length), 16 * GIB)
    except MemoryConfigError as error:
        fix = re.search(r"set it to (\d+) bytes|raise kv_memory to (\d+) bytes", str(error))
        assert fix is not None
        repaired = int(next(g for g in fix.groups() if g))
        plan_cache(SMOLLM2, "bfloat16", replace(config, kv_memory=repaired), SchedulerConfig(seqs, 512, length), 16 * GIB)
        return
    assert plan.block_bytes == 2 * 30 * 3 * block_size * {"float32": 256, "bfloat16": 128, "auto": 128, "int8": 66}[kv_dtype]
    assert plan.block_bytes == KVShape(30, 1, block_size, 3, 64, plan.kv_dtype).nbytes
    assert plan.nbytes <= (kv or 4 * GIB)
    assert plan.num_requests(plan.max_model_len) >= 1
    assert plan.max_model_len == min(length or 8192, plan.num_tokens)
    if kv is None:
        assert plan.num_blocks <= seqs * -(-(length or 8192) // block_size)


def test_int8_holds_nearly_twice_the_requests_in_the_same_bytes() -> None:
    half, whole = (
        plan_cache(SMOLLM2, "bfloat16", CacheConfig(kv_memory="256MiB", kv_dtype=dtype), SchedulerConfig(), 8 * GIB)
        for dtype in ("bfloat16", "int8")
    )
    assert half.nbytes <= 2**28 and whole.nbytes <= 2**28
    assert whole.num_requests(500) / half.num_requests(500) > 1.9
    assert "MiB in bfloat16" in half.describe() and "in int8" in whole.describe()


def test_what_does_not_fit_is_refused_with_the_fix() -> None:
    with pytest.raises(MemoryConfigError, match=r"weights of 256\.\d+ MiB and a KV cache of 2\.00 GiB .* lower kv_memory to \d+ bytes"):
        plan_cache(SMOLLM2, "bfloat16", CacheConfig(kv_memory="2GiB"), SchedulerConfig(), GIB)
    with pytest.raises(MemoryConfigError, match="smaller model"):
        plan_cache(SMOLLM2, "bfloat16", CacheConfig(kv_memory="2GiB"), SchedulerConfig(), GIB // 8)
    with pytest.raises(MemoryConfigError, match="set it to 8192 or less"):
        plan_cache(SMOLLM2, "bfloat16", CacheConfig(), SchedulerConfig(max_model_len=10_000), 8 * GIB)


@pytest.mark.parametrize("text", ["", "1XB", "-1GiB", "0", "GiB", "1e3"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
