"""Devices for a load: what one replica completes, how many it takes, and how many devices share each.

What a replica completes is not worked out but simulated: the engine's own scheduler and block manager serve a queue, so that
preemptions, prefill and the rest of what keeps a batch from being full are in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.planner.known_models import PlannedModel
from octavo.planner.latency_model import Device, LatencyModel, StepLoad, roofline
from octavo.planner.lengths import Lengths, that_fit
from octavo.planner.memory_model import MemoryPlan, legal_degrees
from octavo.planner.profile import Profile
from octavo.planner.replica import SimConfig
from octavo.planner.simulate import simulate
from octavo.planner.workload import SimRequest, own_run

UTILISATION = 0.8
"""Of what a replica completes when it is full, as much is planned with."""
QUEUE, MIN_QUEUE, MAX_QUEUE = 5, 200, 1000
"""A queue has ``QUEUE`` times the requests that run at once, from ``MIN_QUEUE`` to ``MAX_QUEUE`` ..."""
MAX_QUEUED_TOKENS = 2_000_000
"""... and no more tokens than these in more than 20 requests, so that a plan takes seconds."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Replicas for a target load."""

    rate: float
    """Requests a second wanted."""
    capacity: float
    """Requests a second that one replica completes when it is full, simulated."""
    at_once: int
    """Most requests that run at once then."""
    step_seconds: float
    """Of a step of that many decodes: the time per output token."""
    num_preemptions: int
    """In the simulation ..."""
    num_simulated: int
    """... of so many requests."""
    replicas: int
    tensor_parallel: int
    """Devices of one replica."""
    device: str
    source: str
    """Where the speed of the device comes from."""

    @property
    def utilisation(self) -> float:
        """Share of ``capacity`` that each replica is planned to complete."""
        return UTILISATION

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor_parallel

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"utilisation": self.utilisation, "num_devices": self.num_devices}


@dataclass(frozen=True, slots=True)
class Speed:
    """What times a step of one replica."""

    latency: LatencyModel
    device: str
    source: str


def speed_of(model: PlannedModel, plan: MemoryPlan, device: Device | Profile) -> Speed:
    """Of the devices that share the model in ``plan``, or of the machine that was measured, which shares it with none."""
    if isinstance(device, Profile):
        if plan.tensor_parallel > 1:
            raise ConfigError(
                f"{device.machine} was measured alone, not as one of tensor_parallel={plan.tensor_parallel} devices: leave that out, or name "
                "a device with --gpu"
            )
        latency: LatencyModel = device.with_block_size(plan.settings.get("block_size", 16))
        return Speed(latency, "this machine", f"measured on {device.machine}")
    kv_bytes = plan.bytes_per_token[next(iter(plan.bytes_per_token))]
    return Speed(roofline(model.spec, plan.weights, kv_bytes, device, plan.tensor_parallel), device.name, f"estimated from {device.source}")


def degrees_for(model: PlannedModel, device: Device | Profile) -> list[int]:
    """Numbers of devices that a load may want to share the model: powers of two, and one where a machine was measured."""
    return [1] if isinstance(device, Profile) else [degree for degree in legal_degrees(model.spec) if degree & (degree - 1) == 0]


def plan_load(
    model: PlannedModel, plans: Iterable[MemoryPlan], lengths: Sequence[Lengths], rate: float, device: Device | Profile
) -> tuple[MemoryPlan, LoadPlan]:
    """The one of ``plans``, which differ in their devices per replica, that serves ``rate`` requests a second with the fewest devices.

    They are compared by ``most_completed``, in which preemptions are missing alike; the chosen one is simulated. Raises ConfigError
    where no request fits, and for a rate that is none.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"rate must be a positive number of requests a second, not {rate}")
    able = [plan for plan in plans if plan.settings and that_fit(lengths, plan.settings["max_model_len"])]
    if not able:
        raise ConfigError(
            "no request fits into what the weights leave, so no number of replicas serves a load: the plan without a rate says what would fit"
        )

    def num_devices(plan: MemoryPlan) -> tuple[int, int]:
        bound = most_completed(speed_of(model, plan, device).latency, _served(plan, lengths), plan.settings["max_num_seqs"])
        return _replicas(rate, bound) * plan.tensor_parallel, plan.tensor_parallel

    chosen = min(able, key=num_devices)
    return chosen, load_of(chosen, _served(chosen, lengths), rate, speed_of(model, chosen, device))


def load_of(plan: MemoryPlan, lengths: Sequence[Lengths], rate: float, speed: Speed) -> LoadPlan:
    """Replicas with the settings of ``plan``, each used to ``UTILISATION`` of what it completes in a simulation."""
    settings, at_once = plan.settings, plan.settings["max_num_seqs"]
    config = SimConfig(
        settings["kv_memory"] // plan.bytes_per_token[settings["kv_dtype"]],
        block_size=settings["block_size"],
        scheduler=SchedulerConfig(at_once, settings["max_num_batched_tokens"]),
        max_model_len=settings["max_model_len"],
        accounting="none",
    )
    queue = _queue(lengths, at_once)
    capacity, num_preemptions = completed(queue, config, speed.latency)
    step = _decode_seconds(speed.latency, lengths, at_once)
    return LoadPlan(
        rate,
        capacity,
        at_once,
        step,
        num_preemptions,
        len(queue),
        _replicas(rate, capacity),
        plan.tensor_parallel,
        speed.device,
        speed.source,
    )


def completed(queue: Sequence[SimRequest], config: SimConfig, latency: LatencyModel) -> tuple[float, int]:
    """Requests a second that a simulated replica completes of a queue, until nine in ten have ended, so that no long last one counts.

    Returns them and the number of preemptions.
    """
    result = simulate(queue, config, latency)
    ends = sorted(r.metrics.finish_time or 0.0 for r in result.records if r.metrics is not None)
    most = max(1, len(ends) * 9 // 10)
    return most / ends[most - 1], sum(figures.stats["num_preemptions"] for figures in result.replicas)


def most_completed(latency: LatencyModel, lengths: Sequence[Lengths], at_once: int) -> float:
    """Requests a second that a replica completes if ``at_once`` of them always run: more than any scheduler reaches.

    Each takes its share of the decode steps, and its prefill by itself.
    """
    chunk, output = sum(n.prompt for n in lengths) // len(lengths), sum(n.output for n in lengths) / len(lengths)
    prefill = latency.seconds(StepLoad(chunk, 1, 1, chunk, chunk * (chunk + 1) // 2)) - latency.seconds(StepLoad(0, 0, 0, 0, 0))
    return 1 / (output * _decode_seconds(latency, lengths, at_once) / at_once + max(0.0, prefill))


def _decode_seconds(latency: LatencyModel, lengths: Sequence[Lengths], at_once: int) -> float:
    """Of a step that decodes ``at_once`` requests, each halfway through its output."""
    context = int(at_once * sum(n.prompt + n.output / 2 for n in lengths) / len(lengths))
    return latency.seconds(StepLoad(at_once, at_once, at_once, context, context))


def _served(plan: MemoryPlan, lengths: Sequence[Lengths]) -> Sequence[Lengths]:
    return that_fit(lengths, plan.settings["max_model_len"])


def _replicas(rate: float, capacity: float) -> int:
    return max(1, math.ceil(rate / (capacity * UTILISATION)))


def _queue(lengths: Sequence[Lengths], at_once: int) -> list[SimRequest]:
    """Requests that all wait from the start, have nothing in common, and are as long as ``lengths``: every k-th by length, shuffled."""
    mean = sum(n.total for n in lengths) / len(lengths)
    count = max(20, min(max(MIN_QUEUE, QUEUE * at_once), MAX_QUEUE, int(MAX_QUEUED_TOKENS / mean)))
    ordered = sorted(lengths, key=lambda n: n.total)
    chosen = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    random.Random(0).shuffle(chosen)
    return [SimRequest(i, 0.0, (own_run(i, n.prompt),), n.output) for i, n in enumerate(chosen)]
