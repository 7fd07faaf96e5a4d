"""Stage 1 of 7: what an engine can run, and requests held against it at submission. Before it: the caller. After it: ``scheduler``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as index_of

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.request import MAX_LOGPROBS, Request, SamplingParams, num_candidates
from octavo.splitmix import MASK, splitmix64


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can run: requests are held against it at submission."""

    vocab_size: int
    max_model_len: int
    """Most tokens of one request, prompt and output together."""
    num_slots: int
    """Tokens that the whole KV cache holds."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's own tokens that end an output."""
    seed: int = 0
    """The engine's seed."""
    block_size: int = 1
    """Tokens of a block of the KV cache."""
    max_num_seqs: int = 2**31 - 1
    """Most requests, or beams, that run in one step."""


def make_request(request_id: int, token_ids: Sequence[int], params: SamplingParams, limits: RequestLimits, arrival_time: float) -> Request:
    """Check a prompt and its parameters against the limits and make the request.

    Raises InvalidRequestError (an empty prompt, a token id that the model does not have) or ContextLengthError
    (a prompt, or a prompt with its ``max_tokens``, that can never fit). ``request_id`` is the request's number,
    from which its seed derives where ``params.seed`` is None.
    """
    prompt = _prompt_array(token_ids, limits.vocab_size)
    max_tokens = _max_output(len(prompt), params, limits)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_token_ids)
    _check_param_ids(params, stop_ids, limits.vocab_size)
    if params.beam_width is not None:
        _check_beam_width(params.beam_width, len(stop_ids), limits)
    seed = derive_seed(limits.seed, request_id) if params.seed is None else params.seed & MASK
    num_samples = params.num_samples if params.beam_width is None else 1
    return Request(request_id, len(prompt), params, max_tokens, stop_ids, seed, prompt, arrival_time, num_samples=num_samples)


def derive_seed(engine_seed: int, number: int) -> int:
    """A 64-bit seed for the request with this number: two rounds of splitmix64.

    >>> hex(derive_seed(0, 0))
    '0xa706dd2f4d197e6f'
    """
    return splitmix64(splitmix64(engine_seed) ^ number)


def _prompt_array(token_ids: Sequence[int], vocab_size: int) -> array[int]:
    try:
        prompt = array("i", token_ids)
    except (TypeError, OverflowError):
        raise InvalidRequestError(
            f"the prompt must be a list of token ids from 0 to {vocab_size - 1}; {_first_bad(token_ids, vocab_size)}"
        ) from None
    _require(len(prompt) > 0, "the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size or (not isinstance(token_ids, array) and bool in set(map(type, token_ids))):
        raise InvalidRequestError(
            f"the prompt has an unknown token id: {_first_bad(token_ids, vocab_size)}; legal are 0 to {vocab_size - 1}"
        )
    return prompt


def _first_bad(token_ids: object, vocab_size: int) -> str:
    """Name the first entry that is no token id."""
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes):
        for index, token in enumerate(token_ids):
            if not _is_token(token, vocab_size):
                return f"{token!r} at index {index}"
    return f"it is of type {type(token_ids).__name__}"


def _is_token(token: object, vocab_size: int) -> bool:
    try:
        return not isinstance(token, bool) and 0 <= index_of(token) < vocab_size  # type: ignore[arg-type]
    except TypeError:
        return False


def _max_output(prompt_len: int, params: SamplingParams, limits: RequestLimits) -> int:
    longest = min(limits.max_model_len, limits.num_slots)
    why = f"max_model_len is {longest} tokens" if longest == limits.max_model_len else f"the KV cache holds {longest} tokens"
    if prompt_len >= longest:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens, but {why}, and at least one must be left for the output: "
            f"shorten the prompt to {longest - 1} tokens, or start the engine with a larger limit"
        )
    if params.beam_width is not None and (held := _longest_beams(prompt_len, params.beam_width, limits)) < longest:
        longest, why = held, f"the KV cache holds {params.beam_width} beams of {held} tokens"
    if prompt_len >= longest:
        raise ContextLengthError(
            f"{why}, and the prompt alone has {prompt_len}: lower beam_width, or start the engine with a larger KV cache"
        )
    if params.max_tokens is None:
        return longest - prompt_len
    if prompt_len + params.max_tokens > longest:
        raise ContextLengthError(
            f"{prompt_len} prompt tokens and max_tokens={params.max_tokens} make {prompt_len + params.max_tokens}, but {why}: "
            f"lower max_tokens to {longest - prompt_len} (or None, the rest of the context), or shorten the prompt"
        )
    return params.max_tokens


def _longest_beams(prompt_len: int, beam_width: int, limits: RequestLimits) -> int:
    """Most tokens, prompt included, of beams that share no more than the prompt's full blocks; the last token needs no slot.

    column   0 ... shared - 1 | shared ............. shared + own - 1
    blocks   1 each           | beam_width each, as far as they last
    """
    shared = prompt_len // limits.block_size
    own = (limits.num_slots // limits.block_size - shared) // beam_width
    return (shared + own) * limits.block_size + 1


def _check_beam_width(width: int, num_stop_ids: int, limits: RequestLimits) -> None:
    _require(
        width <= limits.max_num_seqs,
        f"beam_width={width} beams run together, but max_num_seqs is {limits.max_num_seqs}: "
        f"lower beam_width to {limits.max_num_seqs}, or start the engine with a larger max_num_seqs",
    )
    _require(
        width <= limits.vocab_size, f"beam_width={width} beams are more than the model has tokens: lower beam_width to {limits.vocab_size}"
    )
    wanted, most = num_candidates(width, num_stop_ids), MAX_LOGPROBS // num_candidates(1, num_stop_ids)
    fix = f"lower beam_width to {most}" if most else f"name at most {MAX_LOGPROBS - 1} stop_token_ids"
    _require(
        wanted <= MAX_LOGPROBS,
        f"beam_width={width} with {num_stop_ids} stop tokens looks at {wanted} continuations a step, but {MAX_LOGPROBS} is the most: {fix}",
    )


def _check_param_ids(params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
    named = {
        "stop_token_ids": params.stop_token_ids,
        "forbidden_token_ids": params.forbidden_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": tuple(params.logit_bias or ()),
    }
    for name, ids in named.items():
        for token in ids:
            _require(_is_token(token, vocab_size), f"{name} has an unknown token id: {token!r}; legal are 0 to {vocab_size - 1}")
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids).difference(params.forbidden_token_ids, stop_ids if params.min_tokens else ())
        _require(bool(left), "forbidden_token_ids, or the stop tokens before min_tokens, leave none of allowed_token_ids to choose from")
