"""How long a step takes, from what it computes: fitted to measurements, or from a device's published figures.

A step is described by few sums over its plan (``StepLoad``); a model maps them to seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple, Protocol

from octavo.errors import ConfigError
from octavo.models.spec import DecoderSpec
from octavo.scheduler.step import StepPlan


class StepLoad(NamedTuple):
    """What one step computes."""

    num_tokens: int
    """Rows that go through the layers."""
    num_requests: int
    num_sampled: int
    """Rows that go through the output head."""
    num_context: int
    """Keys that are read: tokens before and in this step, summed over requests."""
    num_pairs: int
    """Products of a query with a key, per head: each token with all up to itself."""
    num_copied: int = 0
    """Slots of the cache moved from one place to another."""


def load_of(plan: StepPlan, num_copied: int = 0) -> StepLoad:
    """Sum up a plan."""
    num_tokens, num_requests = plan.num_tokens, plan.num_requests
    context = sum(plan.num_computed) + num_tokens
    pairs = context
    if num_tokens > num_requests:
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(plan.num_computed, plan.num_scheduled, strict=True))
    return StepLoad(num_tokens, num_requests, sum(plan.sampled), context, pairs, num_copied)


class LatencyModel(Protocol):
    """Seconds that a step takes."""

    def seconds(self, load: StepLoad) -> float:
        """Of one step."""

    def decodes(self, rows: int, contexts: Iterable[int]) -> list[float]:
        """Of steps that decode one token of each of ``rows`` requests, with so many keys to read in each step: to the bit as ``seconds`` says."""


@dataclass(frozen=True, slots=True)
class LinearLatency:
    """Seconds as a sum of terms, each with a coefficient fitted to measured steps, none negative.

    Prefill and decode differ in what a pair costs: a chunk's queries share each key that is read, so ``per_context``
    counts keys once per request and ``per_pair`` what its later queries add.
    """

    per_step: float = 0.0
    per_token: float = 0.0
    per_large_row: float = 0.0
    """Of each token after the first ``SMALL_ROWS``, on top: before them reading the weights binds, then arithmetic."""
    per_request: float = 0.0
    per_sampled: float = 0.0
    per_context: float = 0.0
    """Of each key read."""
    per_pair: float = 0.0
    """Of each query and key beyond the first query of a request."""
    per_copied: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        total = 0.0
        for coefficient, term in zip(self.coefficients(), terms(load), strict=True):
            total += coefficient * term  # in this order, as decodes() adds them; sum() may compensate
        return total

    def decodes(self, rows: int, contexts: Iterable[int]) -> list[float]:
        fixed, key = self.seconds(StepLoad(rows, rows, rows, 0, 0)), self.per_context
        return [fixed + key * context for context in contexts]

    def coefficients(self) -> tuple[float, ...]:
        """In the order of ``terms``."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


SMALL_ROWS = 8
"""Rows of a tile of the CPU products (docs/kernels.md)."""


def terms(load: StepLoad) -> tuple[float, ...]:
    """What the coefficients of ``LinearLatency`` are multiplied with."""
    return (
        1.0, load.num_tokens, max(0, load.num_tokens - SMALL_ROWS), load.num_requests, load.num_sampled,
        load.num_context, load.num_pairs - load.num_context, load.num_copied,
    )  # fmt: skip


def fit(loads: Sequence[StepLoad], seconds: Sequence[float]) -> LinearLatency:
    """The non-negative coefficients that fit best, and give all steps together the time they took.

    Least squares, each weighted by one over its time: first the measured one, then three times what was fitted before; so the sum of the
    residuals vanishes (as in Poisson regression), and noise that is larger in longer steps does not pull. Raises ConfigError for no
    measurements.
    """
    if not loads or len(loads) != len(seconds) or min(seconds) <= 0:
        raise ConfigError(f"a latency model needs one positive time for each step, not {len(seconds)} times for {len(loads)} steps")
    rows, weights = [terms(load) for load in loads], [1 / s for s in seconds]
    for _ in range(4):
        model = _weighted(rows, seconds, weights)
        weights = [1 / max(model.seconds(load), 1e-9) for load in loads]
    return model


def _weighted(rows: Sequence[tuple[float, ...]], seconds: Sequence[float], weights: Sequence[float]) -> LinearLatency:
    """Normal equations, whose columns are scaled to unit length."""
    columns = [[float(x) for x in column] for column in zip(*rows, strict=True)]
    weighed = [[x * w for x, w in zip(column, weights, strict=True)] for column in columns]
    scales = [sum(map(float.__mul__, a, b)) ** 0.5 or 1.0 for a, b in zip(columns, weighed, strict=True)]
    gram = [
        [sum(map(float.__mul__, a, b)) / (p * q) for b, q in zip(columns, scales, strict=True)]
        for a, p in zip(weighed, scales, strict=True)
    ]  # fmt: skip
    target = [sum(map(float.__mul__, column, seconds)) / scale for column, scale in zip(weighed, scales, strict=True)]
    return LinearLatency(*(x / scale for x, scale in zip(_descend(gram, target), scales, strict=True)))


def _descend(gram: list[list[float]], target: list[float], rounds: int = 20_000) -> list[float]:
    """Minimise x'Gx/2 - t'x over x >= 0, one coordinate at a time."""
    x = [0.0] * len(target)
    for _ in range(rounds):
        moved = 0.0
        for i, row in enumerate(gram):
            if row[i] <= 0:
                continue
            new = max(0.0, x[i] + (target[i] - sum(map(float.__mul__, row, x))) / row[i])
            moved = max(moved, abs(new - x[i]))
            x[i] = new
        if moved < 1e-12 * max(x):
            break
    return x


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its published figures."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Dense bfloat16 products with float32 sums, per second."""
    source: str


def _device(name: str, gib: float, terabytes: float, teraflops: float, source: str) -> Device:
    return Device(name, int(gib * 2**30), terabytes * 1e12, teraflops * 1e12, source)


DEVICES = {device.name.lower(): device for device in (
    _device("A100-40GB", 40, 1.555, 312, "NVIDIA A100 data sheet, 40 GB PCIe/SXM"),
    _device("A100-80GB", 80, 2.039, 312, "NVIDIA A100 data sheet, 80 GB SXM"),
    _device("H100", 80, 3.35, 989.5, "NVIDIA H100 data sheet, SXM, without sparsity"),
    _device("H200", 140, 4.8, 989.5, "NVIDIA H200 data sheet, SXM, without sparsity; its 141 GB are 140 GiB to a program"),
    _device("L4", 24, 0.3, 121, "NVIDIA L4 data sheet, without sparsity"),
    _device("L40S", 48, 0.864, 362, "NVIDIA L40S data sheet, without sparsity"),
    _device("A10G", 24, 0.6, 70, "NVIDIA A10G in AWS G5 data sheet"),
    _device("RTX-4090", 24, 1.008, 165.2, "NVIDIA Ada GPU architecture whitepaper, FP16 with FP32 accumulate"),
    _device("RTX-3090", 24, 0.936, 71, "NVIDIA Ampere GA102 whitepaper, FP16 with FP32 accumulate"),
    _device("MI300X", 192, 5.3, 1307.4, "AMD Instinct MI300X data sheet, without sparsity"),
)}  # fmt: skip


def named_device(name: str) -> Device:
    """A device by its name. Raises ConfigError with the list."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(f"gpu {name!r} is not known; choose one of {', '.join(d.name for d in DEVICES.values())}")
    return device


@dataclass(frozen=True, slots=True)
class RooflineLatency:
    """A step is bound by what it reads or by what it multiplies, whichever takes longer (Williams et al., CACM 2009).

    Published peaks times the share that good kernels reach, plus a constant for launching a step. An estimate: fit
    ``LinearLatency`` to measurements where you have the device.
    """

    weight_bytes: float
    """Read once a step."""
    kv_bytes: float
    """Of one token, read once per request and step that attends to it."""
    flops_per_token: float
    """Twice the weights of all layers."""
    flops_per_sampled: float
    flops_per_pair: float
    """Query times key and probability times value, over all layers and heads."""
    bandwidth: float
    flops: float
    overhead: float = 2e-3
    """Seconds a step: launches, sampling, scheduling."""

    def seconds(self, load: StepLoad) -> float:
        moved = self.weight_bytes + self.kv_bytes * (load.num_context + 2 * load.num_copied)
        work = (
            self.flops_per_token * load.num_tokens
            + self.flops_per_sampled * load.num_sampled
            + self.flops_per_pair * load.num_pairs
        )  # fmt: skip
        return self.overhead + max(moved / self.bandwidth, work / self.flops)

    def decodes(self, rows: int, contexts: Iterable[int]) -> list[float]:
        weights, kv, bandwidth, overhead = self.weight_bytes, self.kv_bytes, self.bandwidth, self.overhead
        fixed, pair, flops = self.flops_per_token * rows + self.flops_per_sampled * rows, self.flops_per_pair, self.flops
        return [overhead + max((weights + kv * context) / bandwidth, (fixed + pair * context) / flops) for context in contexts]


READ_SHARE, WORK_SHARE = 0.8, 0.6
"""Of the published peaks, what well-made kernels reach in long reads and large products."""


def roofline(spec: DecoderSpec, weight_bytes: int, kv_bytes: float, device: Device, tensor_parallel: int = 1) -> RooflineLatency:
    """The model of a decoder on ``tensor_parallel`` devices, whose peaks are added up.

    Two all-reduces a layer add 20 microseconds each where there is more than one.
    """
    head = spec.hidden_size * spec.vocab_size
    reduces = 2 * spec.num_layers * 20e-6 if tensor_parallel > 1 else 0.0
    return RooflineLatency(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops_per_token=2.0 * spec.num_layer_weights,
        flops_per_sampled=2.0 * head,
        flops_per_pair=4.0 * spec.num_layers * spec.num_heads * spec.head_dim,
        bandwidth=device.bandwidth * READ_SHARE * tensor_parallel,
        flops=device.flops * WORK_SHARE * tensor_parallel,
        overhead=2e-3 + reduces,
    )
