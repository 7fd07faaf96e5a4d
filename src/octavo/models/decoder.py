"""Stage 6 of 7: the model. Before it: ``kernels`` (paged attention). After it: ``runner.sampler``.

The one transformer, written once over the ops. Calling ``record`` writes a step's ops into a program; the program
then runs for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.kernels.ops import Array, AttentionBatch, Backend, Int32, KVCache, LinearWeight, Program, Size
from octavo.models.decoder_weights import DecoderWeights, LayerWeights
from octavo.models.spec import DecoderSpec

Inputs = Mapping[str, Array]
"""What feeds products: an array for each ``input_dtype`` of the weights it meets."""


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """A step's intermediate arrays, allocated for the largest step."""

    residual: Array
    """[max_rows, hidden] float32, what the layers add to"""
    delta: Array
    """[max_rows, hidden] float32, what one half layer adds"""
    normed: Inputs
    """[max_rows, hidden]"""
    qkv: Array
    """[max_rows, (heads + 2 kv_heads) x head_dim] float32"""
    attended: Inputs
    """[max_rows, heads x head_dim]"""
    gate_up: Array
    """[max_rows, 2 ffn] float32"""
    activated: Inputs
    """[max_rows, ffn]"""
    sampled_residual: Array
    """[max_samples, hidden] float32"""
    sampled_delta: Array
    sampled_normed: Inputs
    """[max_samples, hidden]"""
    logits: Array
    """[max_samples, vocab] float32"""

    @classmethod
    def allocate(cls, backend: Backend, decoder: Decoder, max_rows: int, max_samples: int) -> Activations:
        """Arrays for steps of up to ``max_rows`` tokens and ``max_samples`` rows of logits. Pages not touched take no memory."""

        def rows(size: int, dtype: str = "float32") -> Array:
            return backend.empty((max_rows, size), dtype)

        def samples(size: int, dtype: str = "float32") -> Array:
            return backend.empty((max_samples, size), dtype)

        def inputs(weights: Iterable[LinearWeight], size: int) -> Inputs:
            return {dtype: rows(size, dtype) for dtype in {weight.input_dtype for weight in weights}}

        spec, layers, head = decoder.spec, decoder.weights.layers, decoder.weights.head
        hidden = spec.hidden_size
        return cls(
            residual=rows(hidden),
            delta=rows(hidden),
            normed=inputs((weight for layer in layers for weight in (layer.qkv, layer.gate_up)), hidden),
            qkv=rows(spec.qkv_size),
            attended=inputs((layer.o for layer in layers), spec.num_heads * spec.head_dim),
            gate_up=rows(2 * spec.ffn_size),
            activated=inputs((layer.down for layer in layers), spec.ffn_size),
            sampled_residual=samples(hidden),
            sampled_delta=samples(hidden),
            sampled_normed={head.input_dtype: samples(hidden, head.input_dtype)},
            logits=samples(spec.vocab_size),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInputs:
    """What the runner fills in for each step."""

    token_ids: Int32
    """[max_rows]"""
    batch: AttentionBatch
    sampled_rows: Int32
    """[max_samples] rows whose logits are needed"""


class Decoder:
    """A transformer that can be recorded."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights

    def record(self, program: Program, inputs: DecoderInputs, cache: KVCache, x: Activations) -> None:
        """Record one step: tokens in, logits of the sampled rows out."""
        eps = self.spec.norm_eps
        program.embed(inputs.token_ids, self.weights.embed, x.residual)
        for i, layer in enumerate(self.weights.layers):
            normed = x.normed[layer.qkv.input_dtype]
            if i == 0:
                program.rms_norm(x.residual, layer.attn_norm, normed, eps)
            else:
                program.add_rms_norm(x.delta, x.residual, layer.attn_norm, normed, eps)
            self._attention(program, layer, i, inputs.batch, cache, x)
            program.add_rms_norm(x.delta, x.residual, layer.ffn_norm, x.normed[layer.gate_up.input_dtype], eps)
            self._mlp(program, layer, x)
        program.gather_rows(x.delta, inputs.sampled_rows, x.sampled_delta)
        program.gather_rows(x.residual, inputs.sampled_rows, x.sampled_residual)
        normed = x.sampled_normed[self.weights.head.input_dtype]
        program.add_rms_norm(x.sampled_delta, x.sampled_residual, self.weights.final_norm, normed, eps, Size.SAMPLES)
        program.linear(normed, self.weights.head, x.logits, Size.SAMPLES)

    def _attention(self, program: Program, layer: LayerWeights, i: int, batch: AttentionBatch, cache: KVCache, x: Activations) -> None:
        """normed -> delta, through the paged cache.

        qkv   [ q: heads x head_dim | k: kv_heads x head_dim | v: kv_heads x head_dim ]
                                    ^ q_end                  ^ k_end
        """
        spec, w = self.spec, self.weights
        q_end = spec.num_heads * spec.head_dim
        k_end = q_end + spec.num_kv_heads * spec.head_dim
        q, k, v = x.qkv[:, :q_end], x.qkv[:, q_end:k_end], x.qkv[:, k_end:]
        attended = x.attended[layer.o.input_dtype]
        program.linear(x.normed[layer.qkv.input_dtype], layer.qkv, x.qkv)
        program.rotary(x.qkv[:, :k_end], batch.positions, w.cos, w.sin, spec.num_heads + spec.num_kv_heads)
        program.write_kv(k, v, batch.slots, cache, i)
        program.paged_attention(q, batch, cache, i, attended, spec.attention_scale, spec.window(i), spec.attention_softcap)
        program.linear(attended, layer.o, x.delta)

    def _mlp(self, program: Program, layer: LayerWeights, x: Activations) -> None:
        """normed -> delta."""
        activated = x.activated[layer.down.input_dtype]
        program.linear(x.normed[layer.gate_up.input_dtype], layer.gate_up, x.gate_up)
        program.gated_activation(x.gate_up, activated, self.spec.activation)
        program.linear(activated, layer.down, x.delta)
