"""How much memory there is, and what follows from it: blocks in the KV pool and the longest request.

Standard library only, so that a planner gives the very same answers without loading anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo.blocks import blocks_for
from octavo.config import CacheConfig, SchedulerConfig, parse_bytes
from octavo.errors import MemoryConfigError
from octavo.models.spec import DecoderSpec

TYPICAL_TOKENS = 500
"""Prompt and output of a typical chat request (mean of ShareGPT, arXiv 2309.06180: 161 + 338)."""


def format_bytes(size: int) -> str:
    """A size for people.

    >>> format_bytes(1536 * 2**20), format_bytes(900)
    ('1.50 GiB', '900 B')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> tuple[int, int] | None:
    """The tightest memory limit on this process and its use, in bytes (cgroup v2, then v1), or None without one.

    >>> cgroup_limit(Path("/nonexistent"), Path("/nonexistent")) is None
    True
    """
    found = []
    for folder, limit_name, used_name in _cgroup_files(root, self_cgroup):
        limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
        if limit is not None and limit < 2**60:
            found.append((limit, used or 0))
    return min(found, key=lambda x: x[0] - x[1], default=None)


def _cgroup_files(root: Path, self_cgroup: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process's groups and of all their parents, with the names of the files that tell."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        lines = ["0::/", "0:memory:/"]
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parts = [p for p in path.split("/") if p]
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        files += [(base.joinpath(*parts[:depth]), *names) for depth in range(len(parts) + 1)]
    return files


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that this process can still take: what the system has free, and what its cgroup leaves."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit = cgroup_limit()
    return available if limit is None else max(0, min(available, limit[0] - limit[1]))


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The KV pool of an engine, settled before anything is loaded."""

    num_blocks: int
    block_size: int
    block_bytes: int
    """Bytes of one block over all layers, keys and values."""
    max_model_len: int
    kv_dtype: str

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    def num_requests(self, num_tokens: int) -> int:
        """Requests of this many tokens that fit at once."""
        return self.num_blocks // blocks_for(num_tokens, self.block_size)

    def describe(self) -> str:
        """One line: bytes, blocks, tokens, and how many requests fit."""
        typical = min(TYPICAL_TOKENS, self.max_model_len)
        return (
            f"KV cache {format_bytes(self.nbytes)} in {self.kv_dtype}: {self.num_blocks:,} blocks of {self.block_size} = {self.num_tokens:,} tokens; "
            f"fits {self.num_requests(self.max_model_len):,} requests of {self.max_model_len:,} tokens (the maximum) "
            f"or {self.num_requests(typical):,} of {typical:,}"
        )


def plan_cache(
    spec: DecoderSpec, dtype: str, cache: CacheConfig, scheduler: SchedulerConfig, available: int, weight_bytes: int | None = None
) -> CachePlan:
    """Blocks and longest request for these settings, with ``available`` bytes for weights and KV cache.

    ``weight_bytes``: of the packed matrices; default: all of them in ``dtype``.

    The pool takes ``num_blocks``, or ``kv_memory``, or by default the smaller of a quarter of what is available and
    what ``max_num_seqs`` requests of ``max_model_len`` use. Raises MemoryConfigError, with the numbers and the fix.
    """
    kv_dtype = cache.dtype_for(dtype)
    block_bytes = spec.kv_bytes_per_token(kv_dtype) * cache.block_size
    weights = spec.weight_bytes(dtype) if weight_bytes is None else weight_bytes
    wanted = min(scheduler.max_model_len or spec.max_position, spec.max_position)
    if scheduler.max_model_len is not None and scheduler.max_model_len > spec.max_position:
        raise MemoryConfigError(
            f"max_model_len={scheduler.max_model_len} is more than the model's own limit: set it to {spec.max_position} or less"
        )
    num_blocks = _num_blocks(cache, scheduler, block_bytes, available, blocks_for(wanted, cache.block_size))
    _check_fits(num_blocks, block_bytes, weights, available)
    held = num_blocks * cache.block_size
    if scheduler.max_model_len is not None and wanted > held:
        needed = blocks_for(wanted, cache.block_size)
        raise MemoryConfigError(
            f"one request of max_model_len={wanted} tokens needs {needed} blocks ({format_bytes(needed * block_bytes)}), but the KV cache has "
            f"{num_blocks} ({format_bytes(num_blocks * block_bytes)}): raise kv_memory to {needed * block_bytes} bytes, or num_blocks to {needed}, "
            f"or lower max_model_len to {held}"
        )
    return CachePlan(num_blocks, cache.block_size, block_bytes, min(wanted, held), kv_dtype)


def _num_blocks(cache: CacheConfig, scheduler: SchedulerConfig, block_bytes: int, available: int, longest: int) -> int:
    fewest = blocks_for(2, cache.block_size)
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_memory is None:
        return max(fewest, min(available // 4 // block_bytes, scheduler.max_num_seqs * longest))
    num_blocks = parse_bytes(cache.kv_memory) // block_bytes
    if num_blocks < fewest:
        raise MemoryConfigError(
            f"kv_memory={cache.kv_memory} is less than the smallest useful cache: a block of {cache.block_size} tokens takes "
            f"{format_bytes(block_bytes)}; set it to {(longest if scheduler.max_model_len else fewest) * block_bytes} bytes or more, or lower block_size"
        )
    return num_blocks


def _check_fits(num_blocks: int, block_bytes: int, weights: int, available: int) -> None:
    if weights + num_blocks * block_bytes <= available:
        return
    left = max(0, available - weights) // block_bytes
    fix = (
        f"lower kv_memory to {left * block_bytes} bytes or num_blocks to {left}"
        if left >= 2
        else "choose a smaller model, a smaller dtype or quantize='int4', or a larger machine"
    )
    raise MemoryConfigError(
        f"weights of {format_bytes(weights)} and a KV cache of {format_bytes(num_blocks * block_bytes)} need "
        f"{format_bytes(weights + num_blocks * block_bytes)}, but {format_bytes(available)} is available (cgroup limits counted): {fix}"
    )
