"""Sampling on the native backend against an oracle that sorts in float64, and against brute force."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.kernels.ops import MAX_TOP, Backend
from octavo.kernels.reference import ReferenceBackend
from tests.helpers.isas import isas, native, needs_native
from tests.helpers.sampling import Inputs, Oracle, oracle, rows_of, sample

U = 2.0**-24
# A weight is off by e^x's 2e-7 and 3 U |x| (|x| < 20 where weights matter); a block's sum of 256 adds at most 20 U.
WEIGHT_ERROR = 2e-7 + (3 * 20 + 20) * U
KINDS = ("normal", "peaked", "ties", "few")

every_isa = pytest.mark.parametrize("isa", isas())


def logits_of(kind: str, vocab: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(vocab)
    if kind == "peaked":
        x = 3 * x
        x[rng.integers(0, vocab, 5)] += rng.uniform(5, 15, 5)
    elif kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "few":
        x[rng.random(vocab) < 0.8] = -np.inf
        x[rng.integers(vocab)] = 1
    return x.astype(np.float32)


@cache
def oracles_of(x: bytes, slack: float, **params: Any) -> list[Oracle]:
    return [oracle(np.frombuffer(x, np.float32), **params, shift=shift) for shift in ((-slack, 0.0, slack) if slack else (0.0,))]


def check(backend: Backend, x: Any, positions: int, slack: float = 0.0, **params: Any) -> set[int]:
    """Sample one row of logits at many positions; each token must be the oracle's. Returns those seen.

    With ``slack`` the cut-offs of the filters may lie that much to either side.
    """
    oracles = oracles_of(x.tobytes(), slack, **params)
    rows = rows_of(*({**params, "seed": 11, "position": p} for p in range(positions)))
    tokens = sample(backend, x, rows).token_ids
    for token, row in zip(tokens.tolist(), rows, strict=True):
        assert any(expected.agrees(token, row, WEIGHT_ERROR + slack) for expected in oracles)
    return set(tokens.tolist())


@needs_native
@settings(max_examples=150, deadline=None)
@given(
    isa=st.sampled_from(isas() or [""]), kind=st.sampled_from(KINDS), vocab=st.integers(1, 5000), seed=st.integers(0, 999),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.5]), top_k=st.sampled_from([0, -1, 1, 2, 7, 50, 400, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]), min_p=st.sampled_from([0.0, 0.001, 0.1, 0.99]),
)  # fmt: skip
def test_tokens_are_those_of_the_sorted_oracle(
    isa: str, kind: str, vocab: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    x = logits_of(kind, vocab, seed)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assume(oracle(x, **filters).margin > 2 * WEIGHT_ERROR)
    check(native(isa), x, 12, **filters)


@every_isa
@pytest.mark.parametrize("vocab", [49152, 100003])
@pytest.mark.parametrize("kind", ["normal", "peaked"])
def test_large_vocabularies(isa: str, vocab: int, kind: str) -> None:
    x = logits_of(kind, vocab, 3)
    for params in (
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 20000, "top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
    ):
        check(native(isa), x, 8, temperature=0.8, **params)


@every_isa
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 12, "min_p": 0.5},
        {"top_p": 0.8, "min_p": 0.2},
        {},
    ],
)
@pytest.mark.parametrize("levels", [1, 3, 40])
def test_support_is_exactly_what_the_filters_leave(isa: str, params: dict[str, Any], levels: int) -> None:
    """40 tokens, few distinct logits: of equal ones at the border the lower ids stay, and each token that stays is drawn."""
    x = (np.random.default_rng(5).integers(0, levels, 40) / 16).astype(np.float32)
    seen = check(native(isa), x, 3000, temperature=1.0, **params)
    assert seen == set(np.flatnonzero(oracle(x, 1.0, **params).weights).tolist())


@every_isa
@pytest.mark.parametrize("num", [64, 65, 1000, 3000])
def test_all_equal(isa: str, num: int) -> None:
    """Nothing to tell the tokens apart by: top-k keeps the k lowest ids, top-p half of all."""
    x = np.zeros(num, np.float32)
    for params, size in (({"top_k": 50}, 50), ({"top_p": 0.5}, (num + 1) // 2), ({"top_k": 60, "top_p": 0.25}, 15), ({"min_p": 1.0}, num)):
        rows = rows_of(*({"seed": 1, "position": p, **params} for p in range(1500)))
        tokens = sample(native(isa), x, rows).token_ids
        assert tokens.min() == 0 or size > 500
        assert size * 0.99 - 3 <= tokens.max() < size


@every_isa
def test_distribution(isa: str) -> None:
    """Pearson's statistic of 20,000 draws from 50 tokens stays within 5 deviations of its mean."""
    x, num = logits_of("normal", 50, 1), 20000
    rows = rows_of(*({"temperature": 1.3, "seed": 3, "sample_index": i % 2, "position": i // 2} for i in range(num)))
    counts = np.bincount(sample(native(isa), x, rows).token_ids, minlength=50)
    weights = np.exp(x.astype(np.float64) / 1.3)
    expected = num * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(2 * 49)


@every_isa
@pytest.mark.parametrize("vocab", [1, 15, 17, 1023, 1024, 1025, 5000])
def test_greedy_takes_the_lowest_of_the_best(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    x = np.round(rng.standard_normal((40, vocab)) * 2).astype(np.float32)
    x[1], x[2] = -np.inf, np.arange(vocab)
    x[2, vocab // 2] = np.inf
    tokens = sample(native(isa), x, rows_of(*[{"temperature": 0.0}] * 40)).token_ids
    expected = x.argmax(-1)
    expected[1] = -1
    assert tokens.tolist() == expected.tolist()


@every_isa
@pytest.mark.parametrize("vocab", [1, 16, 17, 64, 70, 1100])
def test_no_token_where_logits_are_nan_or_nothing_is_allowed(isa: str, vocab: int) -> None:
    x = np.zeros((4, vocab), np.float32)
    x[0, 0] = x[1, vocab - 1] = x[2, vocab // 2] = np.nan
    masks = np.zeros((1, (vocab + 31) // 32), np.uint32)
    for params in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"num_logprobs": 3}):
        out = sample(native(isa), x, rows_of(params, params, params, {**params, "mask_row": 0}), Inputs(masks=masks))
        assert out.token_ids.tolist() == [-1] * 4


def adjusted_by_hand(x: Any, row: dict[str, Any], inputs: Inputs) -> Any:
    """Bias, mask and penalties one token at a time, each step rounded to float32."""
    z = [np.float32(v) for v in x]
    for i in range(row["bias_start"], row["bias_start"] + row["bias_count"]):
        z[inputs.bias_ids[i]] += inputs.bias_values[i]
    known = inputs.history[row["history_row"]][: row["num_known"]].tolist()
    output = known[row["prompt_len"] :]
    for t in range(len(z)):
        if not inputs.masks[row["mask_row"], t // 32] >> (t % 32) & 1:
            z[t] = np.float32(-np.inf)
        if t in known:
            z[t] = z[t] / np.float32(row["repetition"]) if z[t] > 0 else z[t] * np.float32(row["repetition"])
        if t in output:
            z[t] -= np.float32(row["frequency"]) * np.float32(output.count(t)) + np.float32(row["presence"])
    return np.array(z)


@needs_native
@settings(max_examples=60, deadline=None)
@given(isa=st.sampled_from(isas() or [""]), vocab=st.integers(2, 300), seed=st.integers(0, 9999), known=st.integers(0, 60), data=st.data())
def test_bias_mask_and_penalties(isa: str, vocab: int, seed: int, known: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    x, bias = logits_of("ties", vocab, seed), data.draw(st.integers(0, vocab))
    inputs = Inputs(
        rng.integers(0, vocab, (2, 64)).astype(np.int32),
        np.concatenate([[0, 0], np.sort(rng.permutation(vocab)[:bias])]).astype(np.int32),
        np.concatenate([[9, 9], rng.choice([-np.inf, -1, 0.5, 3], bias)]).astype(np.float32),
        rng.integers(0, 2**32, (2, (vocab + 31) // 32), dtype=np.uint32),
    )
    row = {
        "history_row": 1, "prompt_len": data.draw(st.integers(0, known)), "num_known": known, "bias_start": 2, "bias_count": bias,
        "mask_row": 1, "repetition": data.draw(st.sampled_from([1.0, 1.3, 0.7])), "frequency": data.draw(st.sampled_from([0.0, 0.4, -1.0])),
        "presence": data.draw(st.sampled_from([0.0, 0.9])), "seed": seed,
    }  # fmt: skip
    z = adjusted_by_hand(x, row, inputs)
    rows = rows_of({**row, "temperature": 0.0}, row)
    greedy, drawn = sample(native(isa), x, rows, inputs).token_ids.tolist()
    if not (z > -np.inf).any():
        assert (greedy, drawn) == (-1, -1)
    else:
        assert greedy == z.argmax()
        assert oracle(z, 1.0).agrees(drawn, rows[1], WEIGHT_ERROR)


@every_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num"), [(5, 64), (100, 64), (3000, 5), (3000, 0), (49152, 20), (49152, 64)])
def test_logprobs_and_ranks_are_of_the_raw_distribution(isa: str, kind: str, vocab: int, num: int) -> None:
    x = logits_of(kind, vocab, 2)
    inputs = Inputs(bias_ids=np.array([vocab - 1], np.int32), bias_values=np.array([50], np.float32))
    chosen = rows_of({"num_logprobs": num, "bias_count": 1}, {"num_logprobs": num, "target": vocab // 2})
    out = sample(native(isa), x, chosen, inputs)
    z = x.astype(np.float64)
    logprobs = z - (z.max() + np.log(np.exp(z - z.max()).sum()))
    order = np.lexsort((np.arange(vocab), -x))[:num]
    for s, token in enumerate(out.token_ids):
        assert token == (vocab - 1 if s == 0 and x[-1] > -np.inf else vocab // 2) or s == 0
        assert out.ranks[s] == 1 + (x > x[token]).sum()
        assert close(out.logprobs[s], logprobs[token])
        assert out.top_ids[s, : len(order)].tolist() == order.tolist()
        assert all(map(close, out.top_logprobs[s, : len(order)], logprobs[order]))
        assert np.all(out.top_ids[s, len(order) :] == -2), "nothing is written past the best"
    assert out.top_ids.shape[1] == MAX_TOP


def close(found: Any, exact: Any) -> bool:
    """Within the error of the total's logarithm, and of rounding the result."""
    return bool(found == exact or abs(found - exact) <= WEIGHT_ERROR + 2 * U * abs(exact))


@every_isa
def test_rows_do_not_depend_on_the_batch_or_on_threads(isa: str) -> None:
    rng = np.random.default_rng(0)
    num, vocab = 40, 3001
    x = np.stack([logits_of(KINDS[i % 4], vocab, i) for i in range(num)])
    inputs = Inputs(rng.integers(0, vocab, (num, 50)).astype(np.int32))
    params = [
        {
            "temperature": [0.0, 0.6, 1.0][i % 3], "top_k": [0, 0, 40, 700][i % 4], "top_p": [1.0, 0.9][i % 2],
            "min_p": [0.0, 0.0, 0.02][i % 3], "num_logprobs": i % 7 - 1, "history_row": i if i % 5 == 0 else -1,
            "num_known": 50, "prompt_len": 20, "repetition": 1.2, "seed": i, "position": i,
        }
        for i in range(num)
    ]  # fmt: skip
    together = sample(native(isa, 2), x, rows_of(*params), inputs)
    for i in rng.permutation(num).tolist():
        alone = sample(native(isa), x[i : i + 1], rows_of(params[i]), inputs)
        for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
            assert getattr(alone, name)[0].tobytes() == getattr(together, name)[i].tobytes(), name


@every_isa
def test_agrees_with_the_reference_backend(isa: str) -> None:
    num, vocab = 64, 500
    x = np.stack([logits_of(KINDS[i % 3], vocab, i) for i in range(num)])
    rows = rows_of(
        *(
            {"top_k": i % 9 * 10, "top_p": 1 - i % 5 / 10, "temperature": i % 4 / 2, "seed": i * 2**57, "num_logprobs": 4}
            for i in range(num)
        )
    )
    found, expected = sample(native(isa), x, rows), sample(ReferenceBackend(), x, rows)
    assert (found.token_ids == expected.token_ids).mean() > 0.98  # a draw may lie within rounding of a border
    same = found.token_ids == expected.token_ids
    assert np.array_equal(found.ranks[same], expected.ranks[same])
    assert np.array_equal(found.top_ids, expected.top_ids)
    assert np.abs(found.top_logprobs - expected.top_logprobs)[:, :4].max() <= WEIGHT_ERROR + 2 * U * 40
