"""Float weights into blocks of 32 with int8 or 4-bit codes, defined in NumPy: the formats Q8_0 and Q4_1 of ``dequantize.py``.

    Q8_0  d = half(max |w| / 127)                            q = round(w / d)        in [-127, 127]
    Q4_1  d, m by the search below                           q = round((w - m) / d)  in [0, 15]

``half`` rounds to float16; codes are computed with the rounded scale and minimum, ties to even. The native kernels give the same
bits: every sum runs over the 32 weights in ascending order, and every product and sum rounds to float32.

The search of Q4_1 minimises the squared error of a group. With t = (w - min) / (max - min), each pair of shifts (a, b) maps [a, 1 - b] onto
the 16 codes; a straight line t = slope * q + offset is fitted to these codes by least squares, and the pair whose line explains most of
t's variance wins: first among all pairs of ``SHIFTS``, then among its neighbours (``STEPS``). From its line, codes and line are improved in
turn (``REFINEMENTS`` times), now with d and m rounded. The best of all these and of plain (min, max) is kept, so the error is never
above that of min and max. The idea of fitting lines to shifted codes is that of ggml's K formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.dequantize import FORMATS, Bytes, Floats

VERSION = 1
"""Grows when the blocks that are made of the same weights change."""
GROUP = 32
NOT_FINITE = "there are weights that are not finite numbers, or too large for float16 scales"
SHIFTS = (-0.02, 0.02, 0.06, 0.1)
"""Shares of a group's range by which its end points move in before codes are assigned."""
STEPS = (-0.02, 0.0, 0.02)
REFINEMENTS = 2
_SMALLEST_RANGE = 1e-30
_CHUNK = 4096

_Encoded = tuple[list[Floats], NDArray[Any]]
"""The float16 numbers of each group, as float32 [groups], and the codes [32, groups]."""


def quantize(format: str, weights: Floats) -> Bytes:
    """Return the blocks (uint8, contiguous) of ``weights``, float32 [rows, columns] with whole groups of 32 in a row.

    Raises ``ValueError`` for a format other than Q8_0 and Q4_1, and for weights that are not finite or whose scales float16 cannot hold.
    """
    check_quantisable(format, weights.shape[-1])
    groups = np.ascontiguousarray(weights, np.float32).reshape(-1, GROUP)
    out = np.empty((len(groups), FORMATS[format][1]), np.uint8)
    with np.errstate(all="ignore"):  # what overflows is refused below
        for start in range(0, len(groups), _CHUNK):
            _write(out[start : start + _CHUNK], *_ENCODERS[format](np.ascontiguousarray(groups[start : start + _CHUNK].T)))
    if not (np.isfinite(groups).all() and np.isfinite(out[:, : 2 * _NUM_HALVES[format]].copy().view(np.float16)).all()):
        raise ValueError(NOT_FINITE)
    return out.reshape(-1)


def check_quantisable(format: str, columns: int) -> None:
    """Raise ``ValueError`` for a format that is not quantised to, or rows that are not whole groups."""
    if format not in _ENCODERS:
        raise ValueError(f"cannot quantise to {format}; choose one of {', '.join(_ENCODERS)}")
    if columns % GROUP:
        raise ValueError(f"rows of {columns} weights are not whole groups of {GROUP}")


def _write(blocks: Bytes, halves: list[Floats], codes: NDArray[Any]) -> None:
    header = np.stack(halves, axis=1).astype(np.float16).view(np.uint8)
    blocks[:, : header.shape[1]] = header
    blocks[:, header.shape[1] :] = codes.T


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _inverse(x: Floats, smallest: float = 0.0) -> Floats:
    return np.where(x > np.float32(smallest), np.float32(1) / x, np.float32(0)).astype(np.float32)


def _q8_0(w: Floats) -> _Encoded:
    d = _half(np.abs(w).max(axis=0) / np.float32(127))
    q = np.clip(np.rint(w * _inverse(d)), -127, 127)
    return [d], q.astype(np.int8).view(np.uint8)


def _q4_1(w: Floats) -> _Encoded:
    low, high = w.min(axis=0), w.max(axis=0)
    span = high - low
    t = (w - low) * _inverse(span, _SMALLEST_RANGE)
    d, m = _half(span / np.float32(15)), _half(low)
    best = [_error(w, t, d, m)[0], d, m]
    slope, offset = _best_line(t, _sum(t))
    for _ in range(1 + REFINEMENTS):
        d, m = _half(slope * span), _half(offset * span + low)
        error, slope, offset = _error(w, t, d, m)
        best = _where(error < best[0], [error, d, m], best)
    _, d, m = best
    q = _codes(w, m, _inverse(d)).astype(np.uint8)
    zero = np.float32(0)
    return [d + zero, m + zero], q[:16] | q[16:] << np.uint8(4)  # + 0 turns -0 into 0


def _codes(x: Floats, start: Any, scale: Any) -> Floats:
    codes: Floats = np.minimum(np.maximum(np.rint((x - start) * scale), np.float32(0)), np.float32(15))
    return codes


def _where(better: NDArray[np.bool_], new: list[Floats], old: list[Floats]) -> list[Floats]:
    return [np.where(better, *pair) for pair in zip(new, old, strict=True)]


def _best_line(t: Floats, total: Floats) -> tuple[Floats, Floats]:
    """Slope and offset of the pair of shifts whose line explains most."""
    best: list[Floats] = [np.full(t.shape[1], value, np.float32) for value in (-1, 0, 0, 0, 0)]
    for moves in np.array(SHIFTS, np.float32), np.array(STEPS, np.float32):
        *_, start, stop = best
        for a, b in ((start + move_a, stop + move_b) for move_a in moves for move_b in moves):
            line = _line(t, _codes(t, a, np.float32(15) / ((np.float32(1) - a) - b)), total)
            best = _where(line[0] > best[0], [*line, a, b], best)
    return best[1], best[2]


def _sum(x: Floats) -> Floats:
    """Over the 32 weights, one after the other."""
    total = np.zeros(x.shape[1], np.float32)
    for row in x:
        total += row
    return total


def _line(t: Floats, q: Floats, total: Floats) -> tuple[Floats, Floats, Floats]:
    """What the least-squares line through (q, t) explains, its slope and its offset."""
    sum_q, sum_qq, sum_qt = _sum(q), _sum(q * q), _sum(q * t)
    covariance: Floats = np.float32(32) * sum_qt - sum_q * total
    variance: Floats = np.maximum(np.float32(32) * sum_qq - sum_q * sum_q, np.float32(1))  # unless it is 0, it is 31 at least
    slope: Floats = covariance / variance
    return covariance * slope, slope, (total - slope * sum_q) * np.float32(1 / 32)


def _error(w: Floats, t: Floats, d: Floats, m: Floats) -> tuple[Floats, Floats, Floats]:
    """Squared error with these d and m; slope and offset of the line through the codes they give."""
    q = _codes(w, m, _inverse(d))
    difference = (d * q + m) - w
    _, slope, offset = _line(t, q, _sum(t))
    return _sum(difference * difference), slope, offset


_ENCODERS: dict[str, Callable[[Floats], _Encoded]] = {"Q8_0": _q8_0, "Q4_1": _q4_1}
_NUM_HALVES = {"Q8_0": 1, "Q4_1": 2}
