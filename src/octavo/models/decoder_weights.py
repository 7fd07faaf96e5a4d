"""A decoder's weights, packed by a backend, each matrix in the format that ``weight_formats.py`` has chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.kernels.ops import Array, Backend, LinearWeight, TensorSource
from octavo.models.rotary import rotary_table
from octavo.models.spec import DecoderSpec
from octavo.models.weight_formats import PACKED_FORMS
from octavo.models.weights import Checkpoint

Progress = Callable[[int, int], None]
"""Told (layers packed, layers in all) while loading."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. q, k, v are one matrix, stacked in this order; so are gate and up."""

    attn_norm: Array
    qkv: LinearWeight
    o: LinearWeight
    ffn_norm: Array
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder. ``head`` is ``embed`` itself when they are tied."""

    embed: LinearWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: LinearWeight
    cos: Array
    """[max_model_len, rotated dimensions / 2] float32, and ``sin`` alike"""
    sin: Array

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        matrices = {id(w): w.nbytes for w in (self.embed, self.head)}
        return sum(matrices.values()) + sum(w.nbytes for x in self.layers for w in (x.qkv, x.o, x.gate_up, x.down))


def pack_weights(
    checkpoint: Checkpoint,
    backend: Backend,
    formats: Mapping[str, str],
    max_model_len: int,
    progress: Progress = lambda done, total: None,
) -> DecoderWeights:
    """Pack a checkpoint's tensors for a backend, layer by layer, giving up each one's file pages once it is packed.

    formats: canonical name of each matrix -> the format it runs in, as ``weight_formats.choose_formats`` gives it. A matrix that is to run
    quantised must have that format already.
    """
    spec = checkpoint.spec
    layers = []
    for i in range(spec.num_layers):
        layers.append(_pack_layer(checkpoint, backend, formats, spec, f"layers.{i}."))
        progress(i + 1, spec.num_layers)
    embed = _pack(checkpoint, backend, formats, ["embed"], False)
    head = embed if spec.tied_head else _pack(checkpoint, backend, formats, ["head"], False)
    cos, sin = rotary_table(spec.rotary, max_model_len)
    return DecoderWeights(embed, tuple(layers), backend.vector(checkpoint.tensor("final_norm")), head, cos, sin)


def _pack_layer(checkpoint: Checkpoint, backend: Backend, formats: Mapping[str, str], spec: DecoderSpec, prefix: str) -> LayerWeights:
    def pack(names: str, bias: bool) -> LinearWeight:
        return _pack(checkpoint, backend, formats, [prefix + name for name in names.split()], bias)

    return LayerWeights(
        attn_norm=backend.vector(checkpoint.tensor(prefix + "attn_norm")),
        qkv=pack("q k v", spec.qkv_bias),
        o=pack("o", spec.output_bias),
        ffn_norm=backend.vector(checkpoint.tensor(prefix + "ffn_norm")),
        gate_up=pack("gate up", spec.mlp_bias),
        down=pack("down", spec.mlp_bias),
    )


def _pack(checkpoint: Checkpoint, backend: Backend, formats: Mapping[str, str], names: list[str], bias: bool) -> LinearWeight:
    sources: list[TensorSource] = [checkpoint.tensor(name) for name in names]
    biases = [checkpoint.tensor(name + ".bias") for name in names] if bias else []
    wanted = {formats[name] for name in names}
    packed = backend.pack(sources, "quantised" if wanted & PACKED_FORMS.keys() else wanted.pop(), biases)
    for source in sources:
        checkpoint.release(source)
    return packed
