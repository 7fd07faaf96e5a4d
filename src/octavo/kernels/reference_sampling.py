"""Stage 7 of 7, defined: how one row of logits becomes a token. Native code must agree; ``ops.sample`` tells the order."""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import Array, SampleBatch, SampleOutput, uniform


def sample(raw: Array, batch: SampleBatch, s: int, out: SampleOutput) -> None:
    """Fill entry ``s`` of ``out`` from ``raw`` [vocab], the logits of sampled row ``s``."""
    row = batch.rows[s]
    token = int(row["target"])
    if token < 0:
        token = choose(adjusted(raw.astype(np.float32), batch, row), row)
    out.token_ids[s] = token
    if row["num_logprobs"] >= 0 and token >= 0:
        report_logprobs(raw, token, int(row["num_logprobs"]), out, s)


def adjusted(logits: Array, batch: SampleBatch, row: np.void) -> Array:
    """Bias, mask and penalties. Repetition looks at prompt and output, frequency and presence at the output."""
    z = logits.copy()
    entries = slice(int(row["bias_start"]), int(row["bias_start"]) + int(row["bias_count"]))
    z[batch.bias_ids[entries]] += batch.bias_values[entries]
    if row["mask_row"] >= 0:
        bits = np.unpackbits(batch.masks[row["mask_row"]].view(np.uint8), bitorder="little")[: len(z)]
        z[bits == 0] = -np.inf
    if row["history_row"] >= 0:
        _penalise(z, batch.history[row["history_row"]], row)
    return z


def _penalise(z: Array, history: Array, row: np.void) -> None:
    prompt_len, num_known = int(row["prompt_len"]), int(row["num_known"])
    seen = np.unique(history[:num_known])
    penalty = np.float32(row["repetition"])
    z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
    output, counts = np.unique(history[prompt_len:num_known], return_counts=True)
    z[output] -= np.float32(row["frequency"]) * counts.astype(np.float32) + np.float32(row["presence"])


def choose(z: Array, row: np.void) -> int:
    """The token, or -1 where none can be chosen."""
    if np.isnan(z).any() or not (z > -np.inf).any():
        return -1
    if row["temperature"] == 0:
        return int(np.argmax(z))
    z = (z - z.max()) / np.float32(row["temperature"])
    weights = np.exp(z.astype(np.float64))
    weights[~kept(weights, row)] = 0
    cumulative = np.cumsum(weights)
    u = uniform(int(row["seed"]), int(row["sample_index"]), int(row["position"]))
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def kept(weights: Array, row: np.void) -> Array:
    """Which tokens top-k, then top-p, then min-p leave; ties go to the lower id."""
    keep = weights > 0
    order = np.lexsort((np.arange(len(weights)), -weights))
    if 0 < row["top_k"] < len(weights):
        keep[order[row["top_k"] :]] = False
    if row["top_p"] < 1:
        mass = np.cumsum(np.where(keep, weights, 0)[order])
        keep[order[np.searchsorted(mass, np.float64(row["top_p"]) * mass[-1]) + 1 :]] = False
    if row["min_p"] > 0:
        keep &= weights >= np.float64(row["min_p"]) * weights.max()
    return np.asarray(keep)


def report_logprobs(raw: Array, token: int, num: int, out: SampleOutput, s: int) -> None:
    """Log-probability and rank of ``token`` and the ``num`` best, in the raw distribution."""
    z = raw.astype(np.float64)
    total = z.max() + np.log(np.exp(z - z.max()).sum())
    out.logprobs[s] = z[token] - total
    out.ranks[s] = 1 + np.count_nonzero(raw > raw[token])
    best = np.lexsort((np.arange(len(raw)), -raw))[:num]
    out.top_ids[s, : len(best)] = best
    out.top_logprobs[s, : len(best)] = z[best] - total
