"""Configs to specs: against transformers' reading of the same config, and every refusal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from octavo.errors import ModelLoadError
from octavo.models.architectures import spec_from_gguf, spec_from_hf
from octavo.models.spec import RotarySpec

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 100}


def _config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **changes}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
def test_silent_fields_mean_what_transformers_assumes(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kv_heads = {} if family == "Llama" else {"num_key_value_heads": 2}
    theirs = getattr(transformers, f"{family}Config")(**SIZES, **kv_heads)
    ours = spec_from_hf(_config(f"{family}ForCausalLM", **kv_heads))
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.rotary.base == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours == spec_from_hf(theirs.to_dict() | {"architectures": [f"{family}ForCausalLM"]})


def test_biases() -> None:
    assert spec_from_hf(_config("Qwen2ForCausalLM", num_key_value_heads=2)).qkv_bias
    spec = spec_from_hf(_config(attention_bias=True, mlp_bias=True))
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)
    spec = spec_from_hf(_config("Qwen2ForCausalLM", num_key_value_heads=2))
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, False, False)


def test_windows() -> None:
    assert spec_from_hf(_config("MistralForCausalLM", num_key_value_heads=4, sliding_window=None)).sliding_window is None
    mistral = spec_from_hf(_config("MistralForCausalLM", num_key_value_heads=4, sliding_window=7))
    assert [mistral.window(i) for i in range(3)] == [7, 7, 7]
    used = {"use_sliding_window": True, "sliding_window": 7, "num_key_value_heads": 2}
    qwen = spec_from_hf(_config("Qwen2ForCausalLM", **used, max_window_layers=2))
    assert [qwen.window(i) for i in range(3)] == [None, None, 7]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    qwen = spec_from_hf(_config("Qwen2ForCausalLM", **used, layer_types=kinds))
    assert [qwen.window(i) for i in range(3)] == [7, None, None]
    assert spec_from_hf(_config("Qwen2ForCausalLM", **used | {"use_sliding_window": False})).sliding_window is None


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_old_and_new_spellings_of_rotary_scaling(kind: str) -> None:
    old = spec_from_hf(_config(rope_theta=5e5, rope_scaling={kind: "linear", "factor": 2}, max_position_embeddings=100))
    new = spec_from_hf(_config(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5}, max_position_embeddings=100))
    assert old == new
    assert old.rotary == RotarySpec(16, 5e5, "linear", factor=2.0, original_max_position=100)
    assert old.max_position == 200


def test_longest_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    assert spec_from_hf(_config(max_position_embeddings=100, rope_parameters=yarn)).max_position == 400
    assert spec_from_hf(_config(max_position_embeddings=400, rope_parameters=yarn)).max_position == 400
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert spec_from_hf(_config(max_position_embeddings=100, rope_parameters=dynamic)).max_position == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GraniteForCausalLM"]}, "'GraniteForCausalLM' is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "t5"}, "'t5' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be one whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "head size 15"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'.*supported are silu"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "longrope.*supported are none, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat object"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_from_hf(_config(**changes))


GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 64,
    "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 16,
}  # fmt: skip
TENSORS = {"token_embd.weight": (100, 64), "output.weight": (100, 64), "blk.0.attn_q.bias": (64,)}


def test_gguf() -> None:
    spec = spec_from_gguf(GGUF | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, TENSORS)
    assert (spec.vocab_size, spec.tied_head, spec.qkv_bias, spec.output_bias, spec.head_dim) == (100, False, True, False, 16)
    assert spec.rotary == RotarySpec(16, 1e4, "yarn", factor=4.0, original_max_position=128)
    assert spec_from_gguf(GGUF, TENSORS, [1.0] * 8).rotary.frequency_divisors == (1.0,) * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' is not supported; supported are llama, qwen2"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_from_gguf(GGUF | changes, TENSORS)


def test_no_arrays_are_imported() -> None:
    code = "import sys, octavo.models.architectures; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
