"""SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): seeds and random numbers from integers.

``csrc/sample.cpp`` has the same arithmetic.
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""What the state grows by: 2^64 over the golden ratio, made odd."""
MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finaliser: a bijection of 64-bit integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def splitmix64(state: int) -> int:
    """The output of the generator in this state; the next state is ``state + GOLDEN``."""
    return mix64(state + GOLDEN)
