"""Cosine and sine tables of rotary position embeddings, for every scaling a ``RotarySpec`` can name.

Computed in float64 and rounded once, to float32. References: Su et al., arXiv 2104.09864 (rotary); Chen et al.,
arXiv 2306.15595 (linear); bloc97 and emozilla's NTK-aware scaling (dynamic); Peng et al., arXiv 2309.00071 (yarn);
Llama 3.1's reference code (llama3).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.models.spec import RotarySpec

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def rotary_table(spec: RotarySpec, num_positions: int) -> tuple[Float32, Float32]:
    """Return (cos, sin), float32 [num_positions, head_dim / 2] each; yarn's attention factor is multiplied in.

    ``dynamic``: transformers takes a new base whenever the sequence outgrows what it has seen, so a token's rotation
    depends on when it was computed. Here it never does. A table for at most ``original_max_position`` positions has
    the plain base, exactly as in transformers; a longer table has, at all positions, the one base that
    transformers reaches at ``factor * original_max_position`` tokens (as vLLM does). Which of the two it is depends
    on the engine's maximum length alone, never on a request.
    """
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies(spec, num_positions)
    factor = attention_factor(spec)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def frequencies(spec: RotarySpec, num_positions: int) -> Float64:
    """Radians per position, float64 [head_dim / 2]."""
    if spec.scaling == "dynamic":
        scaled = _plain(_dynamic_base(spec, num_positions), spec.head_dim)
    else:
        scaled = _SCALINGS[spec.scaling](spec, _plain(spec.base, spec.head_dim))
    return scaled if spec.frequency_divisors is None else scaled / np.array(spec.frequency_divisors)


def attention_factor(spec: RotarySpec) -> float:
    """What cosines and sines are multiplied by: 1 except for yarn (section 3.4 of its paper)."""
    if spec.scaling != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _yarn_mscale(spec.factor, spec.mscale) / _yarn_mscale(spec.factor, spec.mscale_all_dim)
    return _yarn_mscale(spec.factor, 1.0)


def _plain(base: float, dim: int) -> Float64:
    return np.power(base, -np.arange(0, dim, 2, dtype=np.float64) / dim)


def _none(spec: RotarySpec, plain: Float64) -> Float64:
    return plain


def _linear(spec: RotarySpec, plain: Float64) -> Float64:
    return plain / spec.factor


def _dynamic_base(spec: RotarySpec, num_positions: int) -> float:
    if num_positions <= spec.original_max_position:
        return spec.base
    length = max(spec.factor, 1.0)  # in units of original_max_position
    return float(spec.base * (spec.factor * length - (spec.factor - 1)) ** (spec.head_dim / (spec.head_dim - 2)))


def _llama3(spec: RotarySpec, plain: Float64) -> Float64:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    turns = spec.original_max_position * plain / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = np.clip(blend, 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / spec.factor


def _yarn(spec: RotarySpec, plain: Float64) -> Float64:
    low, high = (_yarn_dimension(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = (np.arange(spec.head_dim // 2, dtype=np.float64) - low) / (high - low if high != low else 0.001)
    kept = 1 - np.clip(ramp, 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / spec.factor


def _yarn_dimension(spec: RotarySpec, turns: float) -> float:
    """The dimension whose wave turns this often over the original context (equation 15 of the paper)."""
    return spec.head_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.base))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable[[RotarySpec, Float64], Float64]] = {
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
