"""A tokenizer built from the metadata of a GGUF file: vocabulary, merges and the kind of splitting, as llama.cpp keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# How text is cut before merging, per family. GPT-2's own rule is built into the library's ByteLevel.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "tekken": _TEKKEN,
}  # fmt: skip
_GPT2_KINDS = ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "exaone4", "roberta-bpe")
_DIGITS_KINDS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3")


def build_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a ``tokenizers.Tokenizer`` that adds BOS and EOS as the file says; raises ``ModelLoadError``."""
    kind = metadata.get(_KEY + "model")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if builder is None:
        raise ModelLoadError(f"GGUF metadata: {_KEY}model is {kind!r}; supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)")
    tokens = _texts(metadata, "tokens")
    try:
        backend = builder(metadata, tokens)
        _add_marked_tokens(backend, metadata, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception, for merges that are not in the vocabulary for one
        raise ModelLoadError(f"the GGUF file's tokenizer is damaged: {error}") from error
    if backend.get_vocab_size() > len(tokens):
        raise ModelLoadError("the GGUF file's tokenizer is damaged: a special token is spelled differently in the vocabulary")
    _set_ends(backend, metadata, tokens)
    return backend


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(_KEY + name)
    if not isinstance(values, list) or not values:
        raise ModelLoadError(f"GGUF metadata: {_KEY}{name} is missing; use a file that was converted with its tokenizer")
    return values


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    """One number per token, as a list; None where the file has none."""
    values = metadata.get(_KEY + name)
    if values is None:
        return None
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(numbers, list) or len(numbers) != count:
        raise ModelLoadError(f"GGUF metadata: {_KEY}{name} must have one entry for each of {count} tokens")
    return numbers


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"GGUF metadata: {_KEY}tokens has {len(tokens) - len(vocabulary)} tokens more than once")
    return vocabulary


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in _texts(metadata, "merges")]
    bad = next((pair for pair in pairs if len(pair) != 2), None)
    if bad is not None:
        raise ModelLoadError(f"GGUF metadata: {_KEY}merges has {' '.join(bad)!r}, which is not two tokens with a space between them")
    return pairs  # type: ignore[return-value]  # of length two, as just checked


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    kind = str(metadata.get(_KEY + "pre", "default"))
    whole_words_first = kind in _BOS_BY_DEFAULT  # llama 3 takes a word that is a token as it is, whatever the merges say
    model = models.BPE(vocab=_vocabulary(tokens), merges=_merges(metadata), ignore_merges=whole_words_first)
    backend = Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(kind: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _GPT2_KINDS:
        return gpt2
    if kind in _DIGITS_KINDS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if kind not in _SPLITS:
        known = ", ".join((*_GPT2_KINDS, *_DIGITS_KINDS, *_SPLITS))
        raise ModelLoadError(f"GGUF metadata: {_KEY}pre is {kind!r}, a way of splitting text that is not supported; supported are {known}")
    split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: merges are implied by the scores, unknown characters fall back to bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = _vocabulary(tokens)
    merges = _merges(metadata) if _KEY + "merges" in metadata else _implied_merges(metadata, tokens, vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get(_KEY + "add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _implied_merges(metadata: Mapping[str, Any], tokens: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, best score first (longer left halves first among equals)."""
    scores = _numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise ModelLoadError(f"GGUF metadata: a SentencePiece vocabulary needs {_KEY}scores")
    ranked = [(-score, -len(left), -len(right), left, right) for left, right, score in _cuts(tokens, scores, vocabulary)]
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _cuts(tokens: Sequence[str], scores: Iterable[float], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str, float]]:
    for token, score in zip(tokens, scores, strict=True):
        for i in range(1, len(token)):
            if token[:i] in vocabulary and token[i:] in vocabulary:
                yield token[:i], token[i:], score


def _add_marked_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Control tokens become special ones; user-defined ones are matched whole in text, but are ordinary output."""
    from tokenizers import AddedToken

    kinds = _numbers(metadata, "token_type", len(tokens)) or []
    control = [AddedToken(t, normalized=False, special=True) for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    defined = [AddedToken(t, normalized=False, special=False) for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(defined)


def _set_ends(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    from tokenizers import processors

    is_sentencepiece = metadata.get(_KEY + "model") == "llama"
    bos_default = is_sentencepiece or metadata.get(_KEY + "pre") in _BOS_BY_DEFAULT
    bos = token_id(metadata, "bos", len(tokens)) if metadata.get(_KEY + "add_bos_token", bos_default) else None
    eos = token_id(metadata, "eos", len(tokens)) if metadata.get(_KEY + "add_eos_token", False) else None
    ends = {"bos": bos, "eos": eos}
    special = [(name, i) for name, i in ends.items() if i is not None]
    if special:
        single = [name for name in ("bos", "$A", "eos") if name == "$A" or ends[name] is not None]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id that the file gives to ``bos`` or ``eos``; None where it gives none."""
    value = metadata.get(f"{_KEY}{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise ModelLoadError(f"GGUF metadata: {_KEY}{name}_token_id is {value!r}; the vocabulary has ids 0 to {num_tokens - 1}")
    return value
