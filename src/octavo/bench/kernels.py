"""``octavo bench kernels``: how long steps and kernels take here, as a profile for ``octavo plan`` and ``octavo simulate``."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.attention import REPEATS, measure_block_sizes
from octavo.bench.steps import CALIBRATION, LONGEST, StepMeter, Steps, calibrate, fit_all, predicted_from_others, relative_errors, warm_up
from octavo.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.build import build_engine
from octavo.planner.profile import Profile
from octavo.planner.report import percentiles
from octavo.planner.tables import table

POOL_TOKENS, MAX_NUM_SEQS, BUDGET = 6400, 64, 512
"""Settings of the engine that is measured: small, so that a step of many rows and one of many tokens are both seen."""
STEP_REPEATS = 3
NUM_PARTS = len(CALIBRATION) * STEP_REPEATS + REPEATS + 1
"""Times that ``progress`` is called."""


def engine_config(
    model: str, dtype: str = "auto", quantize: str | None = None, block_size: int = 16, threads: int | None = None, device: str = "auto"
) -> EngineConfig:
    """Settings of an engine to measure."""
    return EngineConfig(
        ModelConfig(model, dtype, quantize),
        CacheConfig(block_size, num_blocks=POOL_TOKENS // block_size),
        SchedulerConfig(MAX_NUM_SEQS, BUDGET, LONGEST),
        DeviceConfig(device, threads),
    )


def measure_profile(config: EngineConfig, progress: Callable[[], None] = lambda: None) -> tuple[Profile, list[Steps]]:
    """Build an engine and measure it. Returns its profile, and the steps of each calibration workload."""
    built = build_engine(config)
    meter, vocab_size = StepMeter(built.engine.core), built.spec.vocab_size
    warm_up(meter, vocab_size)
    measured = calibrate(meter, vocab_size, STEP_REPEATS, progress)
    attention = measure_block_sizes(built.backend, built.spec, built.cache.kv_dtype, progress)
    return Profile(
        model=config.model.model,
        dtype=config.model.dtype,
        quantize=config.model.quantize,
        machine=f"{processor()}, {built.backend.name}",
        block_size=config.cache.block_size,
        latency=fit_all(measured),
        attention=attention,
        error=_errors(measured),
    ), measured


def processor() -> str:
    """The processor by its name, as far as the system tells."""
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _errors(measured: Sequence[Steps]) -> dict[str, float]:
    pairs = predicted_from_others(measured)
    errors = percentiles(abs(error) for steps, model in pairs for error in relative_errors(model, steps))
    predicted = sum(model.seconds(load) for steps, model in pairs for load in steps.loads)
    return {"p50": errors["p50"], "p90": errors["p90"], "sum": predicted / sum(sum(s.seconds) for s in measured) - 1}


def describe_profile(profile: Profile, measured: Sequence[Steps]) -> str:
    """Tables: the fit with its errors, and attention by block size."""
    micro = {name: f"{1e6 * value:.4g}" for name, value in profile.latency.as_dict().items()}
    attention = [
        [size, f"{1e9 * t.decode:.2f}", f"{t.decode / profile.attention[profile.block_size].decode:.2f}x", f"{1e9 * t.prefill:.3f}",
         f"{t.prefill / profile.attention[profile.block_size].prefill:.2f}x"]
        for size, t in profile.attention.items()
    ]  # fmt: skip
    return "\n\n".join([
        f"{profile.model}, weights {profile.weights}, on {profile.machine}; blocks of {profile.block_size}",
        "Seconds of a step, fitted (microseconds each): " + ", ".join(f"{name} {value}" for name, value in micro.items()),
        "Errors of the fit, and of each workload predicted from the others:\n" + _error_table(profile, measured),
        "Paged attention in one layer, nanoseconds:\n"
        + table(["block size", "a key decoded", "", "a pair of a prompt", ""], attention),
    ])  # fmt: skip


def _error_table(profile: Profile, measured: Sequence[Steps]) -> str:
    rows: list[list[object]] = []
    for workload, (steps, model) in zip(CALIBRATION, predicted_from_others(measured), strict=True):
        rows.append([workload.name, len(steps.loads), *_figures(profile.latency, steps), *_figures(model, steps)])
    header = ["workload", "steps", "fit p50", "p90", "sum", "predicted p50", "p90", "sum"]
    return table(header, rows)


def _figures(model: Any, steps: Steps) -> list[str]:
    errors = percentiles(map(abs, relative_errors(model, steps)))
    total = sum(map(model.seconds, steps.loads)) / sum(steps.seconds) - 1
    return [f"{errors['p50']:.1%}", f"{errors['p90']:.1%}", f"{total:+.1%}"]
