"""Rotary tables against transformers' ROPE_INIT_FUNCTIONS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.models.architectures import spec_from_hf
from octavo.models.rotary import attention_factor, frequencies, rotary_table
from octavo.models.spec import RotarySpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
]


@pytest.mark.parametrize("rope", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_equal_to_transformers(rope: dict[str, Any], theta: float) -> None:
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=1024, rope_parameters=rope | {"rope_theta": theta})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    spec = spec_from_hf(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rotary
    np.testing.assert_allclose(frequencies(spec, 1024), rotary.inv_freq.numpy(), rtol=3e-6)
    assert attention_factor(spec) == pytest.approx(rotary.attention_scaling, rel=1e-12)
    positions = torch.arange(300)[None]
    cos, sin = (t[0, :, :16].numpy() for t in rotary(torch.zeros(1), positions))
    found = rotary_table(spec, 300)
    for ours, theirs in zip(found, (cos, sin), strict=True):
        assert ours.dtype == np.float32 and ours.shape == (300, 16)
        np.testing.assert_allclose(ours, theirs, atol=300 * 3e-7)  # float32 rounds a frequency, and the angle is 300 times that


def test_dynamic_beyond_the_original_length_is_the_base_transformers_ends_at() -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=1024, rope_parameters=rope)
    spec = spec_from_hf(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rotary
    theirs, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=3072)
    for num_positions in (1025, 2000, 3072):
        np.testing.assert_allclose(frequencies(spec, num_positions), theirs.numpy(), rtol=3e-6)


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    spec = RotarySpec(32, scaling="yarn", factor=4.0, original_max_position=64)
    assert np.array_equal(rotary_table(spec, 100)[0], rotary_table(spec, 200)[0][:100])


def test_divisors_of_a_gguf_file() -> None:
    spec = RotarySpec(8, frequency_divisors=(1.0, 2.0, 4.0, 8.0))
    assert np.array_equal(frequencies(spec, 1), frequencies(RotarySpec(8), 1) / [1, 2, 4, 8])
