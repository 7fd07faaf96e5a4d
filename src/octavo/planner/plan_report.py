"""``octavo plan`` as text: what fits, what the engine would do, and what to start it with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.engine.memory import format_bytes
from octavo.planner.known_models import PlannedModel
from octavo.planner.lengths import Lengths
from octavo.planner.memory_model import MemoryPlan, kv_bytes_of_request
from octavo.planner.tables import table

if TYPE_CHECKING:
    from octavo.planner.load_plan import LoadPlan


def describe_plan(model: PlannedModel, plan: MemoryPlan, lengths: Sequence[Lengths], load: LoadPlan | None) -> str:
    """The whole answer."""
    parts = [_budget(plan), _tokens(model, plan), _fits(plan, lengths)]
    if plan.engine is not None:
        parts.append(f"The engine, started with the settings given and so much memory available:\n  {plan.engine.describe()}")
    else:
        parts.append(f"The engine would not start so: {plan.refusal}")
    if plan.settings:
        parts.append(_start(model, plan))
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
    if any(window is not None for _, window in plan.groups):
        lines.append(_windows(model, plan))
    return "\n".join(lines)


def _windows(model: PlannedModel, plan: MemoryPlan) -> str:
    kv = next(iter(plan.bytes_per_token))
    full, kept = (format_bytes(kv_bytes_of_request(model, plan.max_model_len, kv, windows)) for windows in (False, True))
    groups = ", ".join(f"{count} layers see {'all' if window is None else f'{window:,}'} tokens" for count, window in plan.groups)
    return (
        f"  {groups}; but the engine keeps all tokens of all layers in one pool, so windows save no blocks and all counts are without them\n"
        f"  (one request of {plan.max_model_len:,} tokens takes {full}; with a pool for each group of layers it would take {kept})"
    )


def _fits(plan: MemoryPlan, lengths: Sequence[Lengths]) -> str:
    if not plan.fits:
        return "No block fits."
    which = f"{len(lengths):,} requests" if len(lengths) > 1 else f"{lengths[0].prompt} + {lengths[0].output} tokens"
    rows = [
        [f.kv_dtype, f.block_size, f.num_blocks, f.num_tokens, f.at_maximum, f.at_typical, f.on_average, f.table_entries] for f in plan.fits
    ]
    header = ["KV dtype", "block", "blocks", "tokens", f"at {plan.max_model_len:,}", "typical, at end", "typical, running", "table entries"]
    return f"Requests at once; typical: {which}\n" + table(header, rows) + _too_long(plan, lengths)


def _too_long(plan: MemoryPlan, lengths: Sequence[Lengths]) -> str:
    if not plan.num_too_long:
        return ""
    limit = plan.settings.get("max_model_len", plan.max_model_len)
    return f"\n{plan.num_too_long:,} of {len(lengths):,} request(s) are longer than the {limit:,} tokens that fit: refused, and not counted"


def _start(model: PlannedModel, plan: MemoryPlan) -> str:
    """How to start this engine, or what to tell another."""
    if plan.unsupported is not None:
        named = {"weights": plan.formats, "tensor_parallel": plan.tensor_parallel} | plan.settings
        return "An engine that can, told to use all of it:\n  " + ", ".join(f"{name}={value}" for name, value in named.items())
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in plan.settings.items())
    elsewhere = (
        "" if model.is_here else f"\n  (the weights of {model.name} are not here: name their directory, .gguf file or hub id instead)"
    )
    return f"To use all of it:\n  octavo serve {shlex.quote(model.name)} {flags}{elsewhere}"


def _load(load: LoadPlan) -> str:
    return (
        f"{load.rate:g} requests/s: {load.replicas:,} replica(s) of {load.tensor_parallel} x {load.device}, each used to {100 * load.utilisation:.0f} % of the "
        f"{load.capacity:.2f} requests/s that it completes\n"
        f"  simulated: {load.num_simulated:,} requests that share nothing, all waiting, at most {load.at_once} at once, "
        f"{load.num_preemptions:,} preemptions; {load.step_seconds * 1e3:.1f} ms per output token\n"
        f"  ({load.source}; simulate a trace for the tails)"
    )
