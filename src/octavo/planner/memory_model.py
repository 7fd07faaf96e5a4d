"""What fits: bytes per token, blocks, requests at once; from a model's numbers alone.

The blocks are those of the engine: the same function settles them at its start (``engine.memory.plan_cache``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.blocks import blocks_for
from octavo.config import DTYPES, KV_DTYPES, LEGAL_BLOCK_SIZES, CacheConfig, SchedulerConfig
from octavo.engine.memory import CachePlan, format_bytes, plan_cache
from octavo.errors import ConfigError, MemoryConfigError
from octavo.models.spec import DecoderSpec
from octavo.planner.known_models import BYTES, KNOWN_MODELS, PlannedModel, PlannedWeights
from octavo.planner.lengths import Lengths, check_lengths, mean_blocks, that_fit, typical_lengths

SPARE = 0.95
"""Share of the memory that is planned with; the rest is for fragmentation and the runtime."""


def longest_request(spec: DecoderSpec, scheduler: SchedulerConfig) -> int:
    """Most tokens of one request that model and settings allow."""
    return min(scheduler.max_model_len or spec.max_position, spec.max_position)


def workspace_bytes(spec: DecoderSpec, scheduler: SchedulerConfig) -> int:
    """Activations of the largest step, in float32: each row's buffers in one layer, and a row of logits per request."""
    rows = scheduler.max_num_batched_tokens
    row = 3 * spec.hidden_size + spec.qkv_size + spec.num_heads * spec.head_dim + 3 * spec.ffn_size
    return 4 * (rows * row + min(rows, scheduler.max_num_seqs) * spec.vocab_size)


def left_for_kv(memory: int, weights: int, workspace: int, degree: int = 1) -> int:
    """Bytes for keys and values on ``degree`` devices of ``memory`` bytes that share the weights; each has a workspace. May be negative."""
    return int(degree * memory * SPARE) - weights - degree * workspace


def layer_groups(spec: DecoderSpec) -> list[tuple[int, int | None]]:
    """(layers, window) for each window that occurs; None is all tokens."""
    windows = [spec.window(layer) for layer in range(spec.num_layers)]
    return [(windows.count(window), window) for window in sorted(set(windows), key=lambda w: w or 0)]


def kv_bytes_of_request(model: PlannedModel, num_tokens: int, dtype: str, windows: bool = False) -> int:
    """Bytes of keys and values of one request. With ``windows``, layers keep no more than their window, as a pool per layer group would.

    The engine's one pool keeps all tokens of all layers: its block manager knows no windows, so they save reads and no blocks.
    """
    layer = model.kv_bytes_per_token(dtype) // model.spec.num_layers
    kept = (count * min(num_tokens, window) if windows and window else count * num_tokens for count, window in layer_groups(model.spec))
    return layer * sum(kept)


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits with one block size and KV dtype."""

    block_size: int
    kv_dtype: str
    num_blocks: int
    num_tokens: int
    at_maximum: int
    """Requests of max_model_len at once."""
    at_typical: int
    """Requests of typical length at once, each at its end; of those that fit at all, as below."""
    on_average: float
    """Requests of the trace (or typical ones) at once, weighted by how long they stay, each as long as it is at the time."""
    table_entries: int
    """Of a request of max_model_len."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything ``octavo plan`` tells."""

    model: str
    memory: int
    """Bytes of one device, or of the machine."""
    formats: str
    """Of the weights, for people."""
    max_model_len: int
    tensor_parallel: int
    weights: int
    workspace: int
    kv_memory: int
    """Bytes left for keys and values, over all devices; may be negative."""
    bytes_per_token: dict[str, int]
    groups: list[tuple[int, int | None]]
    fits: list[Fit]
    engine: CachePlan | None
    """What the engine settles at its start with the given settings and so much memory available, or None where it refuses ..."""
    refusal: str | None
    """... and why."""
    unsupported: str | None
    """Why the engine runs this with no settings: other weights, another KV dtype, or several devices. None where it can."""
    settings: dict[str, Any]
    """Arguments of ``LLM`` that use all of the memory; empty where nothing fits."""
    num_too_long: int
    """Requests longer than what ``settings`` allow, and counted nowhere."""
    advice: list[str]
    """What would fit, where this does not."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_memory(
    model: PlannedModel,
    memory: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    kv_dtypes: Sequence[str] = ("auto", "int8"),
    lengths: Sequence[Lengths] | None = None,
    tensor_parallel: int | None = None,
) -> MemoryPlan:
    """Work out what fits into ``memory`` bytes. ``tensor_parallel`` devices of that size, or as few as will do.

    ``dtype`` and ``quantize`` are those of ``config.ModelConfig``; fp8 and int8 are dtypes of weights on other machines. The first of
    ``kv_dtypes`` is the one of the engine's start and of the settings; auto is the weights' dtype. Raises ConfigError for settings
    that are not legal, and where no request of ``lengths`` (default: a typical one) is legal.
    """
    longest = longest_request(model.spec, scheduler)
    lengths = [typical_lengths(longest)] if lengths is None else lengths
    check_lengths(lengths, longest)
    planned, workspace = model.weights(dtype, quantize), workspace_bytes(model.spec, scheduler)
    weights, kvs = planned.nbytes, kv_dtypes_for(kv_dtypes, planned)
    degree = _tensor_parallel(model, memory, weights, workspace, kvs[0]) if tensor_parallel is None else tensor_parallel
    check_degree(model.spec, degree)
    left = left_for_kv(memory, weights, workspace, degree)
    fits = [fit for kv in kvs for size in LEGAL_BLOCK_SIZES if (fit := _fit(model, left, size, kv, longest, lengths)).num_blocks]
    unsupported = _unsupported(model, planned, kvs[0], degree)
    engine, refusal = (None, unsupported) if unsupported else _engine_start(model, memory, cache, scheduler, planned, kvs[0])
    settings = _settings(model, left, cache, scheduler, kvs[0], longest, lengths)
    if settings and planned.dtype is not None:
        settings |= {name: value for name, value in (("dtype", dtype), ("quantize", quantize)) if value not in ("auto", None)}
    return MemoryPlan(
        model=model.name,
        memory=memory,
        formats=planned.name,
        max_model_len=longest,
        tensor_parallel=degree,
        weights=weights,
        workspace=workspace * degree,
        kv_memory=left,
        bytes_per_token={kv: model.kv_bytes_per_token(kv) for kv in kvs},
        groups=layer_groups(model.spec),
        fits=fits,
        engine=engine,
        refusal=refusal,
        unsupported=unsupported,
        settings=settings,
        num_too_long=len(lengths) - len(that_fit(lengths, settings.get("max_model_len", longest))),
        advice=[] if settings.get("max_model_len") == longest else _advice(model, memory, weights, workspace, kvs[0], longest),
    )


def kv_dtypes_for(names: Sequence[str], weights: PlannedWeights) -> list[str]:
    """KV dtypes without auto, which is that of the weights, and without repetitions. Raises ConfigError with the legal ones."""
    for name in names:
        if name != "auto" and name not in BYTES:
            raise ConfigError(f"KV dtype {name!r} is not known to the planner; choose one of auto, {', '.join(BYTES)}")
    return list(dict.fromkeys(weights.kv_dtype if name == "auto" else name for name in names))


def legal_degrees(spec: DecoderSpec) -> list[int]:
    """Numbers of devices that can share a model: each gets whole kv heads."""
    return [degree for degree in range(1, spec.num_kv_heads + 1) if spec.num_kv_heads % degree == 0]


def check_degree(spec: DecoderSpec, degree: int) -> None:
    """Raises ConfigError where so many devices cannot share a model."""
    if degree not in (legal := legal_degrees(spec)):
        raise ConfigError(
            f"tensor_parallel={degree} does not share {spec.num_kv_heads} kv heads out evenly; choose one of {', '.join(map(str, legal))}"
        )


def _fit(model: PlannedModel, left: int, size: int, kv_dtype: str, longest: int, lengths: Sequence[Lengths]) -> Fit:
    num_blocks = max(0, left) // (model.kv_bytes_per_token(kv_dtype) * size)
    served = that_fit(lengths, min(longest, num_blocks * size))
    typical = sum(n.total for n in served) // max(1, len(served))
    return Fit(
        block_size=size,
        kv_dtype=kv_dtype,
        num_blocks=num_blocks,
        num_tokens=num_blocks * size,
        at_maximum=num_blocks // blocks_for(longest, size),
        at_typical=num_blocks // blocks_for(typical, size) if served else 0,
        on_average=num_blocks / mean_blocks(served, size) if served else 0.0,
        table_entries=blocks_for(longest, size),
    )


def _unsupported(model: PlannedModel, weights: PlannedWeights, kv_dtype: str, degree: int) -> str | None:
    """Why the engine cannot be started so with any memory."""
    if weights.dtype is None:
        return f"the engine does not run {model.name} in {weights.name}; it runs the Llama family in {', '.join(DTYPES[1:])} or quantised"
    if kv_dtype not in KV_DTYPES:
        return f"the engine does not keep keys and values in {kv_dtype}; choose one of {', '.join(KV_DTYPES)}"
    return "it runs on one device" if degree > 1 else None


def _engine_start(
    model: PlannedModel, memory: int, cache: CacheConfig, scheduler: SchedulerConfig, weights: PlannedWeights, kv_dtype: str
) -> tuple[CachePlan | None, str | None]:
    assert weights.dtype is not None, "weights that the engine runs have a dtype"
    try:
        return plan_cache(model.spec, weights.dtype, replace(cache, kv_dtype=kv_dtype), scheduler, memory, weights.nbytes), None
    except MemoryConfigError as error:
        return None, str(error)


def _settings(
    model: PlannedModel, left: int, cache: CacheConfig, scheduler: SchedulerConfig, kv_dtype: str, longest: int, lengths: Sequence[Lengths]
) -> dict[str, Any]:
    """Arguments that use what is left, in whole blocks."""
    size = cache.block_size
    block_bytes = model.kv_bytes_per_token(kv_dtype) * size
    num_blocks = left // block_bytes
    if num_blocks < blocks_for(2, size):
        return {}
    limit = min(longest, num_blocks * size)
    served = that_fit(lengths, limit)
    at_once = max(1, int(num_blocks / mean_blocks(served, size))) if served else 1
    return {
        "kv_dtype": kv_dtype,
        "block_size": size,
        "kv_memory": num_blocks * block_bytes,
        "max_model_len": limit,
        "max_num_seqs": min(at_once, scheduler.max_num_seqs),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def _tensor_parallel(model: PlannedModel, memory: int, weights: int, workspace: int, kv_dtype: str) -> int:
    """The fewest devices, a power of two that divides the kv heads, that leave a tenth of the memory to keys and values; or 1."""
    degree = 1
    while model.spec.num_kv_heads % degree == 0:
        if degree * (memory * SPARE - workspace) - weights >= max(0.1 * degree * memory, model.kv_bytes_per_token(kv_dtype) * 256):
            return degree
        degree *= 2
    return 1


def _advice(model: PlannedModel, memory: int, weights: int, workspace: int, kv_dtype: str, longest: int) -> list[str]:
    request, token = kv_bytes_of_request(model, longest, kv_dtype), model.kv_bytes_per_token(kv_dtype)
    need = int((weights + workspace + request) / SPARE) + 1
    found = [
        f"a device with {format_bytes(need)}: weights {format_bytes(weights)}, one request of {longest:,} tokens {format_bytes(request)}"
    ]
    tokens = (int(memory * SPARE) - weights - workspace) // token
    if tokens >= 256:
        found.append(f"max_model_len={tokens // 256 * 256}, at most {tokens:,} tokens for one request")
    degree = _tensor_parallel(model, memory, weights, workspace, kv_dtype)
    if degree > 1:
        found.append(f"{degree} such devices by tensor parallelism")
    if weights + workspace + 2048 * token > memory * SPARE:
        smaller = [m for m in KNOWN_MODELS.values() if m.num_parameters is None and _smallest(m, kv_dtype) <= memory * SPARE]
        if smaller:
            found.append(f"a smaller model, such as {max(smaller, key=lambda m: m.weight_bytes('bfloat16')).name}")
    return found


def _smallest(model: PlannedModel, kv_dtype: str) -> int:
    """Bytes with which a model is of any use: 2,048 tokens of KV."""
    workspace = workspace_bytes(model.spec, SchedulerConfig())
    return model.weight_bytes("bfloat16") + workspace + 2048 * model.kv_bytes_per_token(kv_dtype)
