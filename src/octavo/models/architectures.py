"""Checkpoint configs turned into ``DecoderSpec``: Hugging Face's config.json and GGUF metadata.

A field whose effect the decoder does not have is refused by name, never ignored. Knows no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ModelLoadError
from octavo.models.spec import DecoderSpec, RotarySpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn")

_HF_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers assumes where config.json is silent
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "num_key_value_heads": None, "sliding_window": None},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
}
_HF_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_HF_NEUTRAL: dict[str, Any] = {"partial_rotary_factor": 1.0, "is_encoder_decoder": False, "quantization_config": None}
_GGUF_NEUTRAL: dict[str, Any] = {
    "expert_count": 0, "logit_scale": 1.0, "attention.scale": 0.0, "residual_scale": 1.0, "embedding_scale": 1.0,
    "attention.causal": True, "use_parallel_residual": False, "attention.clamp_kqv": 0.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip


def spec_from_hf(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a config.json; raises ``ModelLoadError`` naming the field that is wrong or not supported."""
    fields = _Fields(config, "config.json")
    architecture = _hf_architecture(config)
    for name, neutral in _HF_NEUTRAL.items():
        fields.require_neutral(name, neutral)
    defaults = _HF_DEFAULTS[architecture]
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    default_kv_heads = config.get("num_key_value_heads", defaults["num_key_value_heads"]) or heads
    head_dim = fields.integer("head_dim", hidden // heads)
    max_position = fields.integer("max_position_embeddings", defaults["max_position_embeddings"])
    rotary = _hf_rotary(fields, head_dim, max_position)
    window, window_layers = _hf_window(fields, architecture, defaults["sliding_window"])
    llama_bias = architecture == "LlamaForCausalLM" and fields.flag("attention_bias", False)
    return _checked(
        DecoderSpec(
            architecture=architecture,
            num_layers=fields.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", default_kv_heads),
            head_dim=head_dim,
            ffn_size=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            max_position=_max_position(rotary, max_position),
            rotary=rotary,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            activation=fields.choice("hidden_act", "silu", ACTIVATIONS),
            tied_head=fields.flag("tie_word_embeddings", False),
            qkv_bias=llama_bias or architecture == "Qwen2ForCausalLM",
            output_bias=llama_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
            sliding_window=window,
            window_layers=window_layers,
        ),
        fields,
    )


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], frequency_divisors: Sequence[float] | None = None
) -> DecoderSpec:
    """Read GGUF metadata; ``tensors`` are the file's tensor names and logical shapes.

    ``frequency_divisors`` are the values of the tensor rope_freqs, where there is one.
    Raises ``ModelLoadError`` naming the key that is wrong or not supported.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _GGUF_ARCHITECTURES:
        raise ModelLoadError(f"GGUF architecture {kind!r} is not supported; supported are {', '.join(_GGUF_ARCHITECTURES)}")
    fields = _Fields(metadata, "GGUF metadata", kind + ".")
    for name, neutral in _GGUF_NEUTRAL.items():
        fields.require_neutral(name, neutral)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.require_neutral(name, head_dim)
    max_position = fields.integer("context_length")
    rotary = _gguf_rotary(fields, head_dim, max_position, frequency_divisors)
    return _checked(
        DecoderSpec(
            architecture=_GGUF_ARCHITECTURES[kind],
            num_layers=fields.integer("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=fields.integer("feed_forward_length"),
            vocab_size=tensors.get("token_embd.weight", (0,))[0],
            max_position=_max_position(rotary, max_position),
            rotary=rotary,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tied_head="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            sliding_window=fields.integer("attention.sliding_window", 0, least=0) or None,
        ),
        fields,
    )


class _Fields:
    """Typed look-ups in a config that anyone may have written. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], place: str, prefix: str = "") -> None:
        self.values, self.place, self.prefix = values, place, prefix

    def error(self, name: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.place}: {self.prefix}{name} {problem}")

    def get(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise self.error(name, f"must be one whole number of at least {least}, not {_short(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, f"must be a positive number, not {_short(value)}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {_short(value)}")
        return value

    def choice(self, name: str, default: str, legal: Mapping[str, str]) -> str:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in legal:
            raise self.error(name, f"is {_short(value)}, which is not supported; supported are {', '.join(legal)}")
        return legal[value]

    def require_neutral(self, name: str, neutral: Any) -> None:
        value = self.get(name)
        if value is not None and not (isinstance(value, int | float) and value == neutral):
            expected = "absent" if neutral is None else f"absent or {neutral}"
            raise self.error(name, f"is {_short(value)}, which is not supported; it must be {expected}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hf_architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else _HF_MODEL_TYPES.get(str(config.get("model_type")))
    if not isinstance(first, str) or first not in _HF_DEFAULTS:
        found = f"architecture {_short(first)}" if first else f"model_type {_short(config.get('model_type'))}"
        raise ModelLoadError(f"config.json: {found} is not supported; supported are {', '.join(_HF_DEFAULTS)}")
    return first


def _hf_window(fields: _Fields, architecture: str, default: int | None) -> tuple[int | None, tuple[bool, ...] | None]:
    """The sliding window and the layers it holds for."""
    used = fields.flag("use_sliding_window", False) if architecture == "Qwen2ForCausalLM" else True
    present = "sliding_window" in fields.values
    if not used or architecture == "LlamaForCausalLM" or (present and fields.get("sliding_window") is None):
        return None, None
    window = fields.integer("sliding_window", default)
    return window, _window_layers(fields) if architecture == "Qwen2ForCausalLM" else None


def _window_layers(fields: _Fields) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(layer >= first for layer in range(num_layers))
    legal = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in legal for kind in kinds):
        raise fields.error("layer_types", f"must name one of {' or '.join(legal)} for each of {num_layers} layers, not {_short(kinds)}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _hf_rotary(fields: _Fields, head_dim: int, max_position: int) -> RotarySpec:
    """Read rope_parameters (transformers 5) or rope_scaling and rope_theta (before)."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    values = fields.get(name) or {}
    if not isinstance(values, Mapping) or any(isinstance(value, Mapping) for value in values.values()):
        raise fields.error(name, f"must be one flat object for all layers, not {_short(values)}")
    rope = _Fields(values, f"{fields.place}: {name}")
    rope.require_neutral("partial_rotary_factor", 1.0)
    base = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    legal = {scaling: scaling for scaling in SCALINGS} | {"default": "none"}
    scaling = rope.choice("rope_type" if rope.get("rope_type") is not None else "type", "default", legal)
    if scaling == "none":
        return RotarySpec(head_dim, base)
    original = max_position if scaling in ("linear", "dynamic") else rope.integer("original_max_position_embeddings", max_position)
    if scaling in ("llama3", "yarn"):
        original = fields.integer("original_max_position_embeddings", original)
    return RotarySpec(
        head_dim,
        base,
        scaling,
        factor=rope.number("factor", max_position / original if scaling == "yarn" else None),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if scaling == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if scaling == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _gguf_rotary(fields: _Fields, head_dim: int, max_position: int, divisors: Sequence[float] | None) -> RotarySpec:
    base = fields.number("rope.freq_base", 10_000.0)
    scaling = fields.choice("rope.scaling.type", "none", {"none": "none", "linear": "linear", "yarn": "yarn"})
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if scaling == "none" and fields.get("rope.scale_linear") is not None:
        scaling = "linear"
    if divisors is not None and len(divisors) != head_dim // 2:
        raise ModelLoadError(f"tensor rope_freqs has {len(divisors)} values; head size {head_dim} needs {head_dim // 2}")
    return RotarySpec(
        head_dim,
        base,
        scaling,
        factor=factor,
        original_max_position=fields.integer("rope.scaling.original_context_length", max_position),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.optional_number("rope.scaling.attn_factor"),
        frequency_divisors=None if divisors is None else tuple(divisors),
    )


def _max_position(rotary: RotarySpec, stated: int) -> int:
    """By convention linear and yarn scaling extend the length that the config states for the original model.

    ``dynamic`` would too, but with other rotations for short prompts, so that is left to an explicit choice.
    """
    if rotary.scaling in ("linear", "yarn"):
        return max(stated, int(rotary.original_max_position * rotary.factor))
    return stated


def _checked(spec: DecoderSpec, fields: _Fields) -> DecoderSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise fields.error("", f"has {spec.num_heads} attention heads, which do not divide among {spec.num_kv_heads} key/value heads")
    if spec.head_dim % 2 or (spec.rotary.scaling == "dynamic" and spec.head_dim < 4):
        raise fields.error("", f"has head size {spec.head_dim}; rotary embeddings need an even one")
    if spec.rotary.scaling == "llama3" and spec.rotary.low_freq_factor >= spec.rotary.high_freq_factor:
        raise fields.error("", "has a llama3 rotary scaling whose low_freq_factor is not below its high_freq_factor")
    return spec
