"""``octavo simulate``: one workload through several schemes and block sizes, and what came out, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.config import LEGAL_BLOCK_SIZES, CacheConfig, SchedulerConfig, parse_bytes
from octavo.engine.memory import format_bytes, plan_cache
from octavo.errors import ConfigError
from octavo.planner.allocators import SCHEMES, Placement
from octavo.planner.known_models import PlannedModel
from octavo.planner.latency_model import DEVICES, Device, LatencyModel, roofline
from octavo.planner.memory_model import SPARE, workspace_bytes
from octavo.planner.profile import AttentionTime, Profile
from octavo.planner.replica import SimConfig, slots_for
from octavo.planner.report import comparison, describe_refusals, summarise, unlimited_hit_rate
from octavo.planner.simulate import SimResult, simulate
from octavo.planner.workload import SimRequest

ALL_SCHEMES = ("paged", *SCHEMES, "paged+static", "maximum+static")


def split_scheme(name: str) -> tuple[str, Literal["continuous", "static"]]:
    """How requests get memory, and how they are batched.

    >>> split_scheme("paged"), split_scheme("oracle+static")
    (('paged', 'continuous'), ('oracle', 'static'))
    """
    scheme, plus, batching = name.partition("+")
    if scheme not in ("paged", *SCHEMES) or (plus and batching != "static"):
        raise ConfigError(
            f"scheme {name!r} is not known; choose among paged, {', '.join(SCHEMES)}, each alone or with +static behind it; or all"
        )
    return scheme, "static" if plus else "continuous"


@dataclass(frozen=True, slots=True)
class Study:
    """What to run, in the words of the command line."""

    title: str
    model: PlannedModel
    device: Device | Profile = DEVICES["a100-40gb"]
    """What tells the time of a step: published figures, or measurements."""
    memory: int = 40 * 2**30
    kv_memory: str | None = None
    """Sizes, comma-separated, each of which is run."""
    schemes: tuple[str, ...] = ("paged",)
    """``paged`` or a contiguous scheme, each with ``+static`` behind it for static batching; or ``all``."""
    block_sizes: tuple[str, ...] = ("16",)
    placement: str = "first_fit"
    prefix_caching: bool = True
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_replicas: int = 1
    router: str = "round_robin"
    processes: int = 1
    """Most that replicas are shared out to, where the router allows it."""

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens)

    def kv_sizes(self) -> dict[str, int]:
        """Bytes for keys and values of one replica: those given; or what weights and workspace leave of a device's memory, and on a machine
        that was measured what the engine takes there."""
        if self.kv_memory is not None:
            return {text.strip(): parse_bytes(text) for text in self.kv_memory.split(",")}
        if isinstance(self.device, Profile):
            weights = self.model.weights(self.device.dtype, self.device.quantize)
            assert weights.dtype is not None, "the engine was measured with these weights"
            left = plan_cache(self.model.spec, weights.dtype, CacheConfig(), self.scheduler, self.memory, weights.nbytes).nbytes
            return {format_bytes(left): left}
        left = int(self.memory * SPARE) - self.model.weight_bytes("bfloat16") - workspace_bytes(self.model.spec, self.scheduler)
        if left <= 0:
            raise ConfigError(
                f"{self.model.name} leaves no memory for keys and values on {format_bytes(self.memory)}: choose another --gpu or --model, "
                "or give --kv-memory"
            )
        return {format_bytes(left): left}

    def latency_model(self, config: SimConfig) -> LatencyModel:
        """The time of a step with the blocks of one run."""
        if isinstance(self.device, Profile):
            return self.device.with_block_size(config.block_size if config.scheme == "paged" else None)
        token = self.model.kv_bytes_per_token("bfloat16")
        return roofline(self.model.spec, self.model.weight_bytes("bfloat16"), token, self.device)

    def attention_time(self, config: SimConfig) -> AttentionTime | None:
        """Of attention by itself, where it was measured with blocks of this size."""
        measured = self.device.attention if isinstance(self.device, Profile) else {}
        return measured.get(config.block_size) if config.scheme == "paged" else None

    @property
    def timing(self) -> str:
        """Where the time of a step comes from, in words."""
        if isinstance(self.device, Profile):
            return f"the profile of {self.device.model} measured on {self.device.machine}"
        return f"the published figures of {self.device.name}"

    def configs(self) -> dict[str, SimConfig]:
        """What is run, by name."""
        if self.placement not in ("first_fit", "buddy"):
            raise ConfigError(f"placement {self.placement!r} is not known; choose first_fit or buddy")
        placement: Placement = "buddy" if self.placement == "buddy" else "first_fit"
        token, memories, found = self.model.kv_bytes_per_token("bfloat16"), self.kv_sizes(), {}
        for name in ALL_SCHEMES if self.schemes == ("all",) else self.schemes:
            scheme, batching = split_scheme(name)
            sizes = self._sizes() if scheme == "paged" else (16,)
            for size in sizes:
                for label, memory in memories.items():
                    run = " ".join([name, *([str(size)] if len(sizes) > 1 else []), *([label] if len(memories) > 1 else [])])
                    found[run] = SimConfig(
                        slots_for(memory, token), scheme, size, self.scheduler, self.max_model_len, self.prefix_caching, placement, batching
                    )
        return found

    def _sizes(self) -> tuple[int, ...]:
        if self.block_sizes == ("sweep",):
            return LEGAL_BLOCK_SIZES
        try:
            sizes = tuple(map(int, self.block_sizes))
        except ValueError:
            sizes = (0,)
        if not sizes or not set(sizes) <= set(LEGAL_BLOCK_SIZES):
            legal = ", ".join(map(str, LEGAL_BLOCK_SIZES))
            raise ConfigError(f"block sizes {','.join(self.block_sizes)} are not legal; choose among {legal}, or sweep")
        return sizes


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What came out."""

    study: Study
    results: dict[str, SimResult]
    summaries: dict[str, dict[str, Any]]
    num_slots: list[int]
    """Tokens that each KV memory holds."""
    unlimited_hit_rate: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.study.title,
            "model": self.study.model.name,
            "num_slots": self.num_slots,
            "timing": self.study.timing,
            "unlimited_hit_rate": self.unlimited_hit_rate,
            "runs": self.summaries,
        }

    def describe(self) -> str:
        """Tables, as text."""
        study, any_run = self.study, next(iter(self.summaries.values()))
        counts = any_run["requests"]
        head = (
            f"{study.title}: {counts['all']:,} requests ({describe_refusals(self.summaries)}), "
            f"{study.num_replicas} replica(s) of {study.model.name}, timed by {study.timing}\n"
            f"KV memory {', '.join(study.kv_sizes())}: {', '.join(f'{n:,}' for n in self.num_slots)} tokens each; seconds throughout; "
            f"goodput: first token within 2 s, then 0.2 s a token"
        )
        bound = f"\nPrefix hit rate of a cache without limits, shared by all: {self.unlimited_hit_rate:.1%}"
        return f"{head}\n\n{comparison(self.summaries)}\n{bound}"


def run_study(study: Study, requests: Sequence[SimRequest]) -> StudyResult:
    """Run every scheme and block size on the same requests."""
    configs = study.configs()
    results = {
        name: simulate(requests, config, study.latency_model(config), study.num_replicas, study.router, study.processes)
        for name, config in configs.items()
    }
    token = study.model.kv_bytes_per_token("bfloat16")
    summaries = {name: summarise(result, kv_bytes_per_token=token) for name, result in results.items()}
    for name, config in configs.items():
        if (time := study.attention_time(config)) is not None:
            summaries[name]["attention"] = {"us_per_1000_keys": 1e9 * time.decode, "us_per_1000_pairs": 1e9 * time.prefill}
    fitting = [request for request in requests if request.num_tokens <= study.max_model_len]
    num_slots = sorted({config.num_slots for config in configs.values()})
    return StudyResult(study, results, summaries, num_slots, unlimited_hit_rate(fitting))


def show(result: StudyResult, plot: Path | None, html: Path | None, as_json: bool) -> None:
    """Print it, and write the figures asked for."""
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.describe())
    if plot is not None or html is not None:
        from octavo.planner.plots import write_html, write_plot

        if plot is not None:
            write_plot(result, plot)
        if html is not None:
            write_html(result, html)
