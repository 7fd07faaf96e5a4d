"""Well-known models by name, so that a plan needs no file. The numbers are those of each model's published config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.config import DTYPES, ModelConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.models.architectures import spec_from_hf
from octavo.models.spec import DecoderSpec, RotarySpec
from octavo.models.weight_formats import choose_formats

BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Bytes of a weight as the planner counts them; scales of int8 and fp8 are under a hundredth."""


class PlannedWeights(NamedTuple):
    """Weights as they will lie in memory."""

    name: str
    """Their formats, for people."""
    nbytes: int
    dtype: str | None
    """Of the engine's KV cache beside them; None where the engine does not run such weights."""

    @property
    def kv_dtype(self) -> str:
        """What ``auto`` means for the keys and values beside them."""
        return self.dtype or ("float32" if self.name == "float32" else "bfloat16")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a plan needs to know of a model."""

    name: str
    spec: DecoderSpec
    num_parameters: int | None = None
    """Where the spec does not give them: models outside the Llama family."""
    formats: Mapping[str, str] | None = None
    """Tensor name -> its format in the checkpoint, where there is one; else all are floats."""
    is_here: bool = True
    """Whether ``name`` leads to its weights; not for a model of the table below, of which only the numbers are known."""

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights, all of them in one dtype."""
        if self.num_parameters is None:
            return self.spec.weight_bytes("bfloat16") * int(BYTES[dtype] * 2) // 4
        return int(self.num_parameters * BYTES[dtype])

    def weights(self, dtype: str, quantize: str | None) -> PlannedWeights:
        """The weights with these settings of ``config.ModelConfig``, or in a dtype of other machines (fp8, int8).

        Raises ``ConfigError`` for settings that are not known or do not go together.
        """
        if dtype not in DTYPES and dtype not in BYTES:
            raise ConfigError(f"dtype {dtype!r} is not known to the planner; choose one of {', '.join(dict.fromkeys((*DTYPES, *BYTES)))}")
        if dtype in DTYPES and self.num_parameters is None:
            ModelConfig(self.name, dtype, quantize)
            chosen = choose_formats(self.spec, self.formats or dict.fromkeys(self.spec.matrix_shapes(), "floats"), dtype, quantize)
            return PlannedWeights(chosen.describe(), chosen.nbytes, chosen.dtype)
        if quantize is not None:
            raise ConfigError(f"quantize is for weights that the engine runs, not for {self.name} in {dtype}")
        plain = "bfloat16" if dtype == "auto" else dtype
        return PlannedWeights(plain, self.weight_bytes(plain), None)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token over all layers, as the engine's; fp8, which the engine does not have, without scales."""
        return self.spec.kv_bytes_per_token("bfloat16") // 2 if dtype == "fp8" else self.spec.kv_bytes_per_token(dtype)


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int,
    *, tied: bool = False, head_dim: int | None = None, architecture: str = "LlamaForCausalLM", window: int | None = None,
    every_other: bool = False, parameters: int | None = None,
) -> PlannedModel:  # fmt: skip
    """``every_other``: the window holds for layers 0, 2, 4, ... alone."""
    dim = head_dim or hidden // heads
    windowed = tuple(layer % 2 == 0 for layer in range(layers)) if every_other else None
    spec = DecoderSpec(architecture, layers, hidden, heads, kv_heads, dim, ffn, vocab, context, RotarySpec(dim), tied_head=tied,
                       qkv_bias=architecture.startswith("Qwen2"), sliding_window=window, window_layers=windowed)  # fmt: skip
    return PlannedModel(name, spec, parameters, is_here=False)


_QWEN = "Qwen2ForCausalLM"

KNOWN_MODELS = {model.name: model for model in (
    _llama("smollm2-135m", 30, 576, 9, 3, 1536, 49_152, 8192, tied=True),
    _llama("smollm2-360m", 32, 960, 15, 5, 2560, 49_152, 8192, tied=True),
    _llama("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49_152, 8192, tied=True),
    _llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32_000, 2048),
    _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000, 4096),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13_824, 32_000, 4096),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28_672, 32_000, 4096),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256, 8192),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14_336, 128_256, 131_072),
    _llama("llama-3.1-70b", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128_256, 131_072, tied=True),
    _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128_256, 131_072, tied=True),
    _llama("mistral-7b-v0.1", 32, 4096, 32, 8, 14_336, 32_000, 32_768, architecture="MistralForCausalLM", window=4096),
    _llama("mistral-7b-v0.3", 32, 4096, 32, 8, 14_336, 32_768, 32_768, architecture="MistralForCausalLM"),
    _llama("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936, 32_768, tied=True, architecture=_QWEN),
    _llama("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936, 32_768, tied=True, architecture=_QWEN),
    _llama("qwen2.5-3b", 36, 2048, 16, 2, 11_008, 151_936, 32_768, tied=True, architecture=_QWEN),
    _llama("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064, 32_768, architecture=_QWEN),
    _llama("qwen2.5-14b", 48, 5120, 40, 8, 13_824, 152_064, 32_768, architecture=_QWEN),
    _llama("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064, 32_768, architecture=_QWEN),
    _llama("qwen2.5-72b", 80, 8192, 64, 8, 29_568, 152_064, 32_768, architecture=_QWEN),
    _llama("opt-13b", 40, 5120, 40, 40, 20_480, 50_272, 2048, tied=True, architecture="OPTForCausalLM", parameters=12_853_473_280),
    _llama("gemma-2-9b", 42, 3584, 16, 8, 14_336, 256_000, 8192, tied=True, head_dim=256, architecture="Gemma2ForCausalLM",
           window=4096, every_other=True, parameters=9_241_705_984),
)}  # fmt: skip
"""The engine runs neither OPT, here for the study of the paper, nor Gemma 2, here for its windows in every other layer."""


def model_from_config(path: Path) -> PlannedModel:
    """A model from its config.json, named by its directory. Raises ModelLoadError naming the field that is wrong or not supported."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a config.json: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a config.json: it holds no object")
    return PlannedModel(str(path.parent), spec_from_hf(config), is_here=any(path.parent.glob("*.safetensors")))
