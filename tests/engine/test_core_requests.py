"""What is refused at submission, and in which words."""

from __future__ import annotations

import re

import pytest

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.limits import RequestLimits, derive_seed, make_request
from octavo.request import SamplingParams

LIMITS = RequestLimits(vocab_size=100, max_model_len=20, num_slots=64, eos_token_ids=frozenset({2}), seed=5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 100], "unknown token id: 100 at index 1; legal are 0 to 99"),
        ([1, 2, -1], "unknown token id: -1 at index 2; legal are 0 to 99"),
        ([2**40], "from 0 to 99; 1099511627776 at index 0"),
        ([1, 2.5], "from 0 to 99; 2.5 at index 1"),
        ([True], "unknown token id: True at index 0"),
        (["a"], "'a' at index 0"),
        ("text", "it is of type str"),
        (7, "it is of type int"),
    ],
)
def test_bad_prompts(prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        make_request(0, prompt, SamplingParams(), LIMITS, 0.0)


def test_what_can_never_fit_names_the_numbers_and_the_way_out() -> None:
    with pytest.raises(ContextLengthError, match=r"has 20 tokens, but max_model_len is 20 tokens.*shorten the prompt to 19 tokens"):
        make_request(0, [1] * 20, SamplingParams(max_tokens=1), LIMITS, 0.0)
    with pytest.raises(ContextLengthError, match=r"15 prompt tokens and max_tokens=6 make 21.*lower max_tokens to 5"):
        make_request(0, [1] * 15, SamplingParams(max_tokens=6), LIMITS, 0.0)
    with pytest.raises(ContextLengthError, match="the KV cache holds 8 tokens"):
        make_request(0, [1] * 5, SamplingParams(max_tokens=6), RequestLimits(100, 20, 8), 0.0)
    assert make_request(0, [1] * 15, SamplingParams(max_tokens=5), LIMITS, 0.0).max_tokens == 5
    assert make_request(0, [1] * 19, SamplingParams(max_tokens=None), LIMITS, 0.0).max_tokens == 1


@pytest.mark.parametrize("name", ["stop_token_ids", "forbidden_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_in_parameters(name: str) -> None:
    for bad in (100, -1):
        value = {bad: 1.0} if name == "logit_bias" else [5, bad]
        with pytest.raises(InvalidRequestError, match=f"{name} has an unknown token id: {bad}; legal are 0 to 99"):
            make_request(0, [1], SamplingParams(**{name: value}), LIMITS, 0.0)  # type: ignore[arg-type]


def test_parameters_that_leave_no_token() -> None:
    for params in (
        SamplingParams(allowed_token_ids=[3, 4], forbidden_token_ids=[4, 3]),
        SamplingParams(allowed_token_ids=[2], min_tokens=1),
    ):
        with pytest.raises(InvalidRequestError, match="leave none of allowed_token_ids"):
            make_request(0, [1], params, LIMITS, 0.0)
    make_request(0, [1], SamplingParams(allowed_token_ids=[2], min_tokens=1, ignore_eos=True), LIMITS, 0.0)


def test_stop_ids_and_seeds() -> None:
    request = make_request(3, [1, 2], SamplingParams(stop_token_ids=[9]), LIMITS, 1.5)
    assert (request.stop_ids, request.prompt_len, request.arrival_time) == ({2, 9}, 2, 1.5)
    assert request.token_ids.typecode == "i" and request.token_ids.tolist() == [1, 2]
    assert make_request(3, [1], SamplingParams(ignore_eos=True), LIMITS, 0.0).stop_ids == frozenset()
    assert request.seed == derive_seed(5, 3)
    assert make_request(3, [1], SamplingParams(seed=-1), LIMITS, 0.0).seed == 2**64 - 1
    assert len({derive_seed(engine, number) for engine in range(30) for number in range(30)}) == 900


def test_splitmix64_is_the_published_one() -> None:
    from octavo.splitmix import splitmix64

    # First outputs of the reference implementation seeded with 1234567.
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, or None for no beam search, not 0"),
        ({"beam_width": 4, "temperature": 1.0}, "set temperature=0.0 with beam_width, not 1.0"),
        ({"beam_width": 4, "stop": "end"}, "cannot end at stop strings"),
        ({"beam_width": 4, "repetition_penalty": 1.1}, "leave repetition_penalty at 1.0, not 1.1"),
        ({"beam_width": 4, "logit_bias": {3: 1.0}}, "leave logit_bias at None"),
        ({"beam_width": 4, "early_stopping": "always"}, "must be True, False or \"never\", not 'always'"),
        ({"beam_width": 4, "length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"length_penalty": 2.0}, "give beam_width too"),
        ({"early_stopping": True}, "give beam_width too"),
    ],
)
def test_what_beam_search_cannot_be_combined_with(params: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]


def test_beams_that_are_too_many_name_the_largest_legal_width() -> None:
    limits = RequestLimits(1000, 200, 16 * 100, frozenset({2}), block_size=16, max_num_seqs=30)
    wide = SamplingParams(temperature=0.0, beam_width=31)
    with pytest.raises(InvalidRequestError, match="lower beam_width to 30, or start the engine with a larger max_num_seqs"):
        make_request(0, [1], wide, limits, 0.0)
    for stops, width in (((), 30), ((5,), 21), ((5, 6, 7), 12)):
        make_request(0, [1], SamplingParams(temperature=0.0, beam_width=width, stop_token_ids=stops), limits, 0.0)
    with pytest.raises(
        InvalidRequestError, match=r"13 with 4 stop tokens looks at 65 continuations a step, but 64 is the most.*width to 12"
    ):
        make_request(0, [1], SamplingParams(temperature=0.0, beam_width=13, stop_token_ids=[5, 6, 7]), limits, 0.0)
    with pytest.raises(InvalidRequestError, match="name at most 63 stop_token_ids"):
        make_request(0, [1], SamplingParams(temperature=0.0, beam_width=1, stop_token_ids=range(10, 90)), limits, 0.0)


def test_beams_that_never_fit_name_the_longest_output() -> None:
    """20 blocks of 4: a prompt of 10 tokens shares 2 of them and leaves each of 4 beams 4 of its own, for positions 8 to 23."""
    limits = RequestLimits(100, 80, 80, block_size=4)
    for given, max_tokens in ((15, 15), (None, 15)):
        params = SamplingParams(temperature=0.0, beam_width=4, max_tokens=given)
        assert make_request(0, [1] * 10, params, limits, 0.0).max_tokens == max_tokens
    with pytest.raises(ContextLengthError, match="the KV cache holds 4 beams of 25 tokens: lower max_tokens to 15"):
        make_request(0, [1] * 10, SamplingParams(temperature=0.0, beam_width=4), limits, 0.0)
    with pytest.raises(ContextLengthError, match="the prompt alone has 78: lower beam_width"):
        make_request(0, [1] * 78, SamplingParams(temperature=0.0, beam_width=4, max_tokens=1), limits, 0.0)
