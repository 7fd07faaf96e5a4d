"""``octavo plan`` as text: what fits, what the engine would do, and what to start it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.memory import format_bytes
from octavo.errors import ConfigError
from octavo.planner.known_models import PlannedModel
from octavo.planner.latency_model import Device, LatencyModel, roofline
from octavo.planner.memory_model import Lengths, LoadPlan, MemoryPlan, kv_bytes_of_request, plan_load
from octavo.planner.profile import Profile
from octavo.planner.report import table


@dataclass(frozen=True, slots=True)
class Load:
    """Replicas for a load, and on what."""

    plan: LoadPlan
    device: str
    tensor_parallel: int
    source: str
    """Where the speed of the device comes from."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.plan) | {"device": self.device, "tensor_parallel": self.tensor_parallel, "source": self.source}


def load_for(model: PlannedModel, plan: MemoryPlan, lengths: Sequence[Lengths], rate: float, device: Device | Profile | None) -> Load:
    """How many replicas serve ``rate`` requests a second on these devices."""
    if device is None:
        raise ConfigError(
            f"the speed of the device is needed for a rate: name it with --gpu, or measure {model.name} here with `octavo bench kernels`"
        )
    if rate <= 0:
        raise ConfigError(f"rate must be positive, not {rate}")
    at_once = int(plan.settings.get("max_num_seqs", 0))
    if isinstance(device, Profile):
        latency: LatencyModel = device.with_block_size(plan.settings.get("block_size", 16))
        return Load(plan_load(latency, lengths, at_once, rate), "this machine", 1, f"measured on {device.machine}")
    kv_dtype = next(iter(plan.bytes_per_token))
    latency = roofline(model.spec, plan.weights, plan.bytes_per_token[kv_dtype], device, plan.tensor_parallel)
    return Load(plan_load(latency, lengths, at_once, rate), device.name, plan.tensor_parallel, f"estimated from {device.source}")


def describe_plan(model: PlannedModel, plan: MemoryPlan, lengths: Sequence[Lengths], load: Load | None) -> str:
    """The whole answer."""
    parts = [_budget(plan), _tokens(model, plan), _fits(plan, lengths)]
    if plan.engine is not None:
        parts.append(f"The engine, started with the settings given and so much memory available:\n  {plan.engine.describe()}")
    else:
        parts.append(f"The engine would not start so: {plan.refusal}")
    if plan.settings:
        parts.append(f"To use all of it:\n  {_flags(plan)}")
    if plan.advice:
        parts.append("What would fit:\n" + "\n".join(f"  - {line}" for line in plan.advice))
    if load is not None:
        parts.append(_load(load))
    return "\n\n".join(parts)


def _budget(plan: MemoryPlan) -> str:
    devices = f" on each of {plan.tensor_parallel} devices" if plan.tensor_parallel > 1 else ""
    left = format_bytes(plan.kv_memory) if plan.kv_memory > 0 else f"nothing ({format_bytes(-plan.kv_memory)} too little)"
    return (
        f"{plan.model}, weights {plan.formats}, {format_bytes(plan.memory)}{devices} (95 % planned with)\n"
        f"  weights {format_bytes(plan.weights)} + workspace {format_bytes(plan.workspace)}; left for keys and values: {left}"
    )


def _tokens(model: PlannedModel, plan: MemoryPlan) -> str:
    spec = model.spec
    lines = [f"Per token: 2 x {spec.num_layers} layers x {spec.num_kv_heads} kv heads x {spec.head_dim} x bytes = "
             + ", ".join(f"{size:,} bytes ({kv})" for kv, size in plan.bytes_per_token.items())]  # fmt: skip
    windowed = [(count, window) for count, window in plan.groups if window is not None]
    if windowed:
        kv = next(iter(plan.bytes_per_token))
        full, kept = (kv_bytes_of_request(model, plan.max_model_len, kv, windows) for windows in (False, True))
        groups = ", ".join(f"{count} layers see {window:,} tokens" for count, window in windowed)
        lines.append(
            f"  {groups}: one request of {plan.max_model_len:,} needs {format_bytes(kept)} of the {format_bytes(full)} that one pool keeps"
        )
    return "\n".join(lines)


def _fits(plan: MemoryPlan, lengths: Sequence[Lengths]) -> str:
    if not plan.fits:
        return "No block fits."
    which = f"the trace's {len(lengths):,} requests" if len(lengths) > 1 else f"{lengths[0].prompt} + {lengths[0].output} tokens"
    rows = [
        [f.kv_dtype, f.block_size, f.num_blocks, f.num_tokens, f.at_maximum, f.at_typical, f.on_average, f.table_entries] for f in plan.fits
    ]
    header = ["KV dtype", "block", "blocks", "tokens", f"at {plan.max_model_len:,}", "typical, at end", "typical, running", "table entries"]
    return f"Requests at once; typical: {which}\n" + table(header, rows)


def _flags(plan: MemoryPlan) -> str:
    command = "octavo generate " if plan.tensor_parallel == 1 else ""
    return command + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in plan.settings.items())


def _load(load: Load) -> str:
    p = load.plan
    return (
        f"{p.rate:g} requests/s: {p.replicas} replica(s) of {load.tensor_parallel} x {load.device}, each used to 80 % of "
        f"{p.capacity:.2f} requests/s at {p.at_once} at once, {p.step_seconds * 1e3:.1f} ms per output token\n"
        f"  ({load.source}; simulate a trace for the tails)"
    )
