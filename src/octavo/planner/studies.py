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
from octavo.planner.known_models import PlannedModel, PlannedWeights
from octavo.planner.latency_model import DEVICES, Device, LatencyModel, roofline
from octavo.planner.memory_model import check_degree, kv_dtypes_for, left_for_kv, legal_degrees, workspace_bytes
from octavo.planner.profile import AttentionTime, Profile
from octavo.planner.replica import SimConfig, slots_for
from octavo.planner.report import summarise, timeline_columns, unlimited_hit_rate
from octavo.planner.simulate import SimResult, simulate
from octavo.planner.tables import comparison, describe_refusals
from octavo.planner.workload import SimRequest

ALL_SCHEMES = ("paged", *SCHEMES, "paged+static", "maximum+static")


def named_placement(name: str) -> Placement:
    """Where contiguous regions go, by name. Raises ConfigError with the list."""
    if name not in ("first_fit", "buddy"):
        raise ConfigError(f"placement {name!r} is not known; choose first_fit or buddy")
    return "buddy" if name == "buddy" else "first_fit"


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
    """Bytes of one device, or of the machine."""
    dtype: str = "auto"
    quantize: str | None = None
    """These two as in ``config.ModelConfig``, or a dtype of other machines."""
    kv_dtype: str = "auto"
    tensor_parallel: int = 1
    """Devices that share the model in each replica."""
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
    max_ttft: float = 2.0
    max_tpot: float = 0.2
    """Seconds to the first token, and of each that follows: the limits of goodput."""

    def __post_init__(self) -> None:
        SchedulerConfig(max_model_len=self.max_model_len)
        for name, seconds in (("first token", self.max_ttft), ("following token", self.max_tpot)):
            if not seconds > 0:
                raise ConfigError(f"the limit of goodput on the {name} must be a positive number of seconds, not {seconds}")
        self._check_devices()

    def _check_devices(self) -> None:
        check_degree(self.model.spec, self.tensor_parallel)
        if not isinstance(self.device, Profile):
            return
        profile = self.device
        asked, measured = (self.dtype, self.quantize), (profile.dtype, profile.quantize)
        if asked not in (measured, ("auto", None)) or self.kv_dtype != "auto" or self.tensor_parallel > 1:
            raise ConfigError(
                f"the profile of {profile.model} was measured with dtype={profile.dtype} and quantize={profile.quantize} on one device: leave "
                "other dtypes and --tensor-parallel out, or name a --gpu without a profile"
            )

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def weights(self) -> PlannedWeights:
        """As they lie in memory; those that were measured, with a profile."""
        if isinstance(self.device, Profile):
            return self.model.weights(self.device.dtype, self.device.quantize)
        return self.model.weights(self.dtype, self.quantize)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, over all layers and devices."""
        [kv_dtype] = kv_dtypes_for((self.kv_dtype,), self.weights)
        return self.model.kv_bytes_per_token(kv_dtype)

    def kv_sizes(self) -> dict[str, int]:
        """Bytes for keys and values of one replica: those given; or what weights and workspace leave of a device's memory, and on a machine
        that was measured what the engine takes there."""
        if self.kv_memory is not None:
            return {text.strip(): parse_bytes(text) for text in self.kv_memory.split(",")}
        weights, workspace = self.weights, workspace_bytes(self.model.spec, self.scheduler)
        if isinstance(self.device, Profile):
            assert weights.dtype is not None, "the engine was measured with these weights"
            left = plan_cache(self.model.spec, weights.dtype, CacheConfig(), self.scheduler, self.memory, weights.nbytes).nbytes
        else:
            left = left_for_kv(self.memory, weights.nbytes, workspace, self.tensor_parallel)
        if left < self.token_bytes:
            raise ConfigError(self._no_memory(weights.nbytes, workspace))
        return {format_bytes(left): left}

    def _no_memory(self, weights: int, workspace: int) -> str:
        """Why there is none for keys and values, and what would help."""
        request = self.token_bytes * self.max_model_len
        enough = (d for d in legal_degrees(self.model.spec) if left_for_kv(self.memory, weights, workspace, d) >= request)
        degree = next(enough, None)
        more = f"give --tensor-parallel {degree}, " if degree is not None else ""
        devices = f"{self.tensor_parallel} x " if self.tensor_parallel > 1 else ""
        return (
            f"{self.model.name} leaves no memory for keys and values on {devices}{format_bytes(self.memory)} (weights {format_bytes(weights)}): "
            f"{more}choose another --gpu or --model, --quantize its weights, or give --kv-memory"
        )

    def latency_model(self, config: SimConfig) -> LatencyModel:
        """The time of a step with the blocks of one run."""
        if isinstance(self.device, Profile):
            return self.device.with_block_size(config.block_size if config.scheme == "paged" else None)
        return roofline(self.model.spec, self.weights.nbytes, self.token_bytes, self.device, self.tensor_parallel)

    def attention_time(self, config: SimConfig) -> AttentionTime | None:
        """Of attention by itself, where it was measured with blocks of this size."""
        measured = self.device.attention if isinstance(self.device, Profile) else {}
        return measured.get(config.block_size) if config.scheme == "paged" else None

    @property
    def timing(self) -> str:
        """Where the time of a step comes from, in words."""
        if isinstance(self.device, Profile):
            return f"the profile of {self.device.model} measured on {self.device.machine}"
        devices = f"{self.tensor_parallel} x " if self.tensor_parallel > 1 else ""
        return f"the published figures of {devices}{self.device.name}"

    def configs(self) -> dict[str, SimConfig]:
        """What is run, by name. Raises ConfigError for settings that cannot be run."""
        if not self.schemes:
            raise ConfigError(f"no scheme is named; choose among paged, {', '.join(SCHEMES)}, each alone or with +static behind it; or all")
        placement, token, memories, found = named_placement(self.placement), self.token_bytes, self.kv_sizes(), {}
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
            raise ConfigError(f"block sizes {','.join(self.block_sizes)!r} are not legal; choose among {legal}, or sweep")
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
            "weights": self.study.weights.name,
            "kv_bytes_per_token": self.study.token_bytes,
            "goodput_limits": {"ttft": self.study.max_ttft, "tpot": self.study.max_tpot},
            "num_slots": self.num_slots,
            "timing": self.study.timing,
            "unlimited_hit_rate": self.unlimited_hit_rate,
            "runs": {name: s | {"timeline": timeline_columns(self.results[name])} for name, s in self.summaries.items()},
        }

    def describe(self) -> str:
        """Tables, as text."""
        study, any_run = self.study, next(iter(self.summaries.values()))
        counts = any_run["requests"]
        head = (
            f"{study.title}: {counts['all']:,} requests ({describe_refusals(self.summaries)}), "
            f"{study.num_replicas} replica(s) of {study.model.name} in {study.weights.name}, timed by {study.timing}\n"
            f"KV memory {', '.join(study.kv_sizes())}: {', '.join(f'{n:,}' for n in self.num_slots)} tokens each; seconds throughout; "
            f"goodput: first token within {study.max_ttft:g} s, then {study.max_tpot:g} s a token"
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
    summaries = {name: summarise(result, study.max_ttft, study.max_tpot, study.token_bytes) for name, result in results.items()}
    for name, config in configs.items():
        if (time := study.attention_time(config)) is not None:
            summaries[name]["attention"] = {"us_per_1000_keys": 1e9 * time.decode, "us_per_1000_pairs": 1e9 * time.prefill}
    fitting = [request for request in requests if request.num_tokens <= study.max_model_len]
    num_slots = sorted({config.num_slots for config in configs.values()})
    return StudyResult(study, results, summaries, num_slots, unlimited_hit_rate(fitting))


def show(result: StudyResult, plot: Path | None, html: Path | None, as_json: bool) -> None:
    """Print it, and write the figures asked for."""
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.describe())
    if plot is not None:
        from octavo.planner.plots import write_plot

        write_plot(result, plot)
    if html is not None:
        from octavo.planner.html_report import write_html

        write_html(result, html)
