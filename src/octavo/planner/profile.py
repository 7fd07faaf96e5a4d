"""What ``octavo bench kernels`` measured of a model on a machine; ``octavo plan`` and ``octavo simulate`` look for it by the model's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.planner.latency_model import LinearLatency
from octavo.user_cache import cache_directory


class AttentionTime(NamedTuple):
    """Seconds of paged attention in one layer."""

    decode: float
    """Of each key that a decoding request reads."""
    prefill: float
    """Of each query and key of a prompt."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of one model on one machine."""

    model: str
    dtype: str
    quantize: str | None
    """These two as in ``config.ModelConfig``."""
    machine: str
    """Processor, threads and kernels."""
    block_size: int
    """With which the steps were measured."""
    latency: LinearLatency
    """Fitted to them."""
    attention: Mapping[int, AttentionTime]
    """Measured for each block size."""
    error: Mapping[str, float]
    """Of steps predicted from other workloads: p50 and p90 of the relative error, and ``sum``, that of all steps together."""

    @property
    def weights(self) -> str:
        """What the weights were, for a file's name."""
        return self.quantize or self.dtype

    def with_block_size(self, block_size: int | None) -> LinearLatency:
        """The latency with other blocks: the terms of keys and pairs change as attention does. None is one region: the largest blocks."""
        size = max(self.attention, default=self.block_size) if block_size is None else block_size
        if size not in self.attention or self.block_size not in self.attention:
            return self.latency
        ours, theirs, fitted = self.attention[size], self.attention[self.block_size], self.latency
        return replace(
            fitted,
            per_context=fitted.per_context * ours.decode / theirs.decode,
            per_pair=fitted.per_pair * ours.prefill / theirs.prefill,
        )

    def save(self, path: Path) -> None:
        """Write it as JSON, and the folders that it takes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"attention": {size: t._asdict() for size, t in self.attention.items()}}, indent=1))


def profile_path(model: str, weights: str = "auto") -> Path:
    """Where the profile of a model is kept: a file named after it in the folder ``profiles`` of ``user_cache.cache_directory``."""
    return cache_directory() / "profiles" / f"{Path(model).name.lower()}-{weights}.json"


def find_profile(model: str, weights: str = "auto") -> Path | None:
    """The file of a model's profile, if it was measured here."""
    try:
        path = profile_path(model, weights)
    except OSError:  # there is no place for one
        return None
    return path if path.is_file() else None


def read_profile(path: Path) -> Profile:
    """Raises ConfigError for a file that holds none."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        latency = LinearLatency(**{name: float(value) for name, value in values.pop("latency").items()})
        attention = {int(size): AttentionTime(**times) for size, times in values.pop("attention").items()}
        return Profile(latency=latency, attention=attention, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no profile ({error!r}): let `octavo bench kernels --output {path}` write one") from error
