"""Tiny random checkpoints with odd shapes, written by transformers: for tests against its own computation of them.

>>> sorted(VARIANTS)[:3]
['bf16', 'biases', 'many_kv_heads']
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
MAX_POSITION = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITION, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-5, "initializer_range": 0.15,
}  # fmt: skip


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "wide_heads": ("Llama", {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "one_kv_head": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16}),
    "many_kv_heads": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 10}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "odd_sizes": (
        "Llama",
        {
            "hidden_size": 45, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14,
            "intermediate_size": 37, "vocab_size": 301, "num_hidden_layers": 3,
        },
    ),
    "rope_linear": ("Llama", _rope("linear", factor=4.0)),
    "rope_dynamic": ("Llama", _rope("dynamic", factor=2.0)),
    "rope_llama3": (
        "Llama", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "rope_yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral_window": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "num_hidden_layers": 3}),
    "bf16": ("Llama", {"tie_word_embeddings": False}),
}  # fmt: skip
"""Name -> (model family, its config's values over ``_BASE``)."""


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return the transformers model (float32; variant "bf16": bfloat16) of one variant, with random weights, norms and biases."""
    import torch
    import transformers

    family, values = VARIANTS[name]
    config = getattr(transformers, f"{family}Config")(**_BASE | values | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros at first, which would hide mistakes
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    return model.to(torch.bfloat16) if name == "bf16" else model


def write(name: str, path: Path, seed: int = 0, max_shard_size: str = "5GB", **changes: Any) -> Any:
    """Write one variant as a Hugging Face directory and return its transformers model. No tokenizer is written."""
    model = build(name, seed, **changes)
    model.save_pretrained(path, safe_serialization=True, max_shard_size=max_shard_size)
    return model


def write_tokenizer(path: Path) -> None:
    """Add a byte-level tokenizer of 256 bytes and three control tokens, in ids 0 to 258, to a directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<pad>", "<s>", "</s>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(path)


def write_gguf(
    name: str, path: Path, quantisation: str = "F32", seed: int = 0, formats: dict[str, str] | None = None, **changes: Any
) -> Any:
    """Write one Llama or Qwen2 variant without rotary scaling as a GGUF file, by the gguf package; return its model.

    Matrices take ``quantisation``, or what ``formats`` says for the last part of their name (attn_q, ...), where whole blocks fit into
    their rows; q and k of Llama are permuted as llama.cpp does.
    """
    import gguf

    model = build(name, seed, **changes).float()
    config, kind = model.config, VARIANTS[name][0].lower()
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    _add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if kind == "llama" and ("q_proj" in parameter or "k_proj" in parameter):
            array = _interleave(array, _head_dim(config))
        tensor = names.get_name(parameter, (".weight", ".bias"))
        part = tensor.removesuffix(".weight").rpartition(".")[2]
        _add_tensor(writer, tensor, array, (formats or {}).get(part, quantisation))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _interleave(array: Any, head_dim: int) -> Any:
    """llama.cpp's permutation: the rows of a head's two halves, alternating."""
    halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape).copy()


def _add_tensor(writer: Any, name: str, array: Any, quantisation: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[quantisation]
    if array.ndim == 2 and quantisation != "F32" and array.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array)


def _add_vocabulary(writer: Any, size: int) -> None:
    from tokenizers import pre_tokenizers

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [5] * (size - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
