"""A checkpoint opened: its spec, and its tensors under one set of names, whatever the file format.

    embed · head (absent when tied) · final_norm · layers.{i}.attn_norm | q | k | v | o | ffn_norm | gate | up | down,
    and each of the matrices with suffix .bias where the spec has biases

All tensors are checked against the spec at opening: one that is missing, has another shape, or that the decoder would
leave unused is an error. Nothing is copied: a ``TensorSource`` is a view of the mapped file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.kernels.dequantize import dequantize
from octavo.kernels.ops import TensorSource
from octavo.models.architectures import spec_from_gguf, spec_from_hf
from octavo.models.gguf import GGUFFile
from octavo.models.safetensors import SafetensorsFile
from octavo.models.spec import DecoderSpec

_HF_NAMES = {
    "embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_GGUF_NAMES = {
    "embed": "token_embd", "head": "output", "final_norm": "output_norm", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_HF_UNUSED = re.compile(r".*rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")
_ROPE_FREQS = "rope_freqs.weight"
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class Generation:
    """What the checkpoint says about beginning and ending a text."""

    eos_token_ids: frozenset[int]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. The files stay mapped as long as it, or a tensor of it, is referenced."""

    path: Path
    """The .gguf file, or the directory."""
    spec: DecoderSpec
    generation: Generation
    metadata: Mapping[str, Any] | None
    """A GGUF file's metadata, for the tokenizer and the chat template; None for a directory."""
    names: tuple[str, ...]
    """The canonical names of all tensors."""
    _find: Callable[[str], TensorSource]
    _release: Callable[[TensorSource], None]

    def tensor(self, name: str) -> TensorSource:
        """A tensor by its canonical name, such as ``layers.0.q`` or ``layers.0.q.bias``."""
        return self._find(name)

    def formats(self) -> dict[str, str]:
        """Canonical name of each tensor -> its element format."""
        return {name: self._find(name).format for name in self.names}

    def release(self, source: TensorSource) -> None:
        """Give back the memory of its file pages, once it is packed; touching it again reads the file again."""
        self._release(source)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what ``locate`` found; raises ``ModelLoadError`` that names the field or tensor at fault."""
    return _open_directory(path) if path.is_dir() else _open_gguf(path)


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of every tensor of a model."""
    biases = {"q": spec.qkv_bias, "k": spec.qkv_bias, "v": spec.qkv_bias, "o": spec.output_bias}
    vectors = {"attn_norm": (spec.hidden_size,), "ffn_norm": (spec.hidden_size,)}
    vectors |= {f"{name}.bias": shape[:1] for name, shape in spec.layer_matrices().items() if biases.get(name, spec.mlp_bias)}
    shapes: dict[str, tuple[int, ...]] = {**spec.matrix_shapes(), "final_norm": (spec.hidden_size,)}
    return shapes | {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in vectors.items()}


def _file_name(name: str, names: Mapping[str, str], layers: str) -> str:
    """``layers.0.q.bias`` -> ``model.layers.0.self_attn.q_proj.bias`` or ``blk.0.attn_q.bias``."""
    stem = name.removesuffix(".bias")
    suffix = ".bias" if stem != name else ".weight"
    if not stem.startswith("layers."):
        return names[stem] + suffix
    _, layer, part = stem.split(".")
    return f"{layers}.{layer}.{names[part]}{suffix}"


def _match(
    path: Path, spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str], unused: Iterable[str]
) -> dict[str, str]:
    """Canonical name -> name in the file, after checking that file and spec agree on every tensor."""
    found = {}
    for name, shape in _expected_within(path, spec, len(shapes)):
        file_name = rename(name)
        if file_name not in shapes:
            raise ModelLoadError(f"{path}: tensor {file_name} of shape {shape} is missing")
        if shapes[file_name] != shape:
            raise ModelLoadError(f"{path}: tensor {file_name} has shape {shapes[file_name]}; the config asks for {shape}")
        found[name] = file_name
    extra = shapes.keys() - set(found.values()) - set(unused)
    if extra:
        raise ModelLoadError(
            f"{path}: tensor {min(extra)} is not part of {spec.architecture} as Octavo computes it, "
            f"so the model would be run wrongly ({len(extra)} such tensors)"
        )
    return found


def _expected_within(path: Path, spec: DecoderSpec, num_tensors: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.num_layers > num_tensors:  # before a list of a hostile number of layers is made
        raise ModelLoadError(f"{path}: the config has {spec.num_layers} layers, but the checkpoint only {num_tensors} tensors")
    yield from expected_shapes(spec).items()


def _open_directory(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    spec = spec_from_hf(config)
    files = _safetensors_files(path)
    owners = {name: file for file in files for name in file.shapes}
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    unused = [name for name in shapes if _HF_UNUSED.fullmatch(name) or (spec.tied_head and name == "lm_head.weight")]
    names = _match(path, spec, shapes, lambda name: _file_name(name, _HF_NAMES, "model.layers"), unused)
    return Checkpoint(
        path,
        spec,
        _hf_generation(path, config),
        None,
        tuple(names),
        lambda name: owners[names[name]].source(names[name]),
        lambda source: owners[source.name].release(source),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ``ModelLoadError``."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def _safetensors_files(path: Path) -> list[SafetensorsFile]:
    """The files an index names, or else all there are."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [SafetensorsFile(file) for file in sorted(path.glob("*.safetensors"))]
    weight_map = read_json(index).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise ModelLoadError(f"{index}: weight_map must give each tensor the name of a file beside it")
    return [SafetensorsFile(path / file) for file in sorted(set(map(str, files)))]


def _hf_generation(path: Path, config: Mapping[str, Any]) -> Generation:
    """generation_config.json where it speaks, config.json where it does not."""
    file = path / "generation_config.json"
    sources = [read_json(file), config] if file.is_file() else [config]
    eos = next((ids for source in sources if (ids := _token_ids(source.get("eos_token_id")))), [])
    bos = next((ids for source in sources if (ids := _token_ids(source.get("bos_token_id")))), [])
    return Generation(frozenset(eos), bos[0] if bos else None)


def _token_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelLoadError(f"{path} is one of several parts; merge them into one file with llama.cpp's gguf-split --merge")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    spec = spec_from_gguf(file.metadata, shapes, _rope_divisors(file))
    names = _match(path, spec, shapes, lambda name: _file_name(name, _GGUF_NAMES, "blk"), [_ROPE_FREQS])
    orders = _row_orders(spec) if file.metadata["general.architecture"] == "llama" else {}

    def find(name: str) -> TensorSource:
        source = file.source(names[name])
        order = orders.get(name.removesuffix(".bias").rpartition(".")[2])
        return source if order is None else dataclasses.replace(source, row_order=order)

    return Checkpoint(path, spec, _gguf_generation(file.metadata), file.metadata, tuple(names), find, file.release)


def _rope_divisors(file: GGUFFile) -> tuple[float, ...] | None:
    if _ROPE_FREQS not in file.tensors:
        return None
    source = file.source(_ROPE_FREQS)
    values = dequantize(source.format, source.data, int(np.prod(source.shape)))
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelLoadError(f"{file.path}: tensor {_ROPE_FREQS} must hold positive numbers")
    return tuple(values.tolist())


def _row_orders(spec: DecoderSpec) -> dict[str, NDArray[np.int32]]:
    """The rows of q and k that GGUF files of kind ``llama`` permute for interleaved rotary pairs.

    file, within a head      x0 y0 x1 y1 x2 y2 ...     pair i at rows 2i, 2i + 1
    logical (half-split)     x0 x1 x2 ... y0 y1 y2 ... pair i at rows i, i + head_dim / 2
    """
    within = np.arange(spec.head_dim).reshape(-1, 2).T.reshape(-1)
    return {
        part: (np.arange(heads)[:, None] * spec.head_dim + within).reshape(-1).astype(np.int32)
        for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads))
    }


def _gguf_generation(metadata: Mapping[str, Any]) -> Generation:
    """The ids the file names, and the control tokens known to end a turn (older files name just one of them)."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = {i for key in keys for i in _token_ids(metadata.get(f"tokenizer.ggml.{key}"))}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(tokens) == len(kinds):
        eos |= {i for i in np.flatnonzero(kinds == _CONTROL).tolist() if tokens[i] in _END_OF_TURN}
    bos = _token_ids(metadata.get("tokenizer.ggml.bos_token_id"))
    return Generation(frozenset(eos), bos[0] if bos else None)
