"""Stage 6 of 7: the model. Before it: ``kernels`` (paged attention). After it: ``runner.sampler``.

The one transformer, written once over the ops. Calling ``record`` writes a step's ops into a program; the program
then runs for every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.ops import Array, AttentionBatch, Backend, Int32, KVCache, Program, Size
from octavo.models.decoder_weights import DecoderWeights, LayerWeights
from octavo.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """A step's intermediate arrays, allocated for the largest step. "input" arrays feed products and have the weights' dtype."""

    residual: Array
    """[max_rows, hidden] float32, what the layers add to"""
    delta: Array
    """[max_rows, hidden] float32, what one half layer adds"""
    normed: Array
    """[max_rows, hidden] input"""
    qkv: Array
    """[max_rows, (heads + 2 kv_heads) x head_dim] float32"""
    attended: Array
    """[max_rows, heads x head_dim] input"""
    gate_up: Array
    """[max_rows, 2 ffn] float32"""
    activated: Array
    """[max_rows, ffn] input"""
    sampled_residual: Array
    """[max_samples, hidden] float32"""
    sampled_delta: Array
    sampled_normed: Array
    """[max_samples, hidden] input"""
    logits: Array
    """[max_samples, vocab] float32"""

    @classmethod
    def allocate(cls, backend: Backend, spec: DecoderSpec, dtype: str, max_rows: int, max_samples: int) -> Activations:
        """Arrays for steps of up to ``max_rows`` tokens and ``max_samples`` rows of logits. Pages not touched take no memory."""

        def rows(size: int, dtype: str = "float32") -> Array:
            return backend.empty((max_rows, size), dtype)

        def samples(size: int, dtype: str = "float32") -> Array:
            return backend.empty((max_samples, size), dtype)

        hidden = spec.hidden_size
        return cls(
            residual=rows(hidden),
            delta=rows(hidden),
            normed=rows(hidden, dtype),
            qkv=rows(spec.qkv_size),
            attended=rows(spec.num_heads * spec.head_dim, dtype),
            gate_up=rows(2 * spec.ffn_size),
            activated=rows(spec.ffn_size, dtype),
            sampled_residual=samples(hidden),
            sampled_delta=samples(hidden),
            sampled_normed=samples(hidden, dtype),
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
            if i == 0:
                program.rms_norm(x.residual, layer.attn_norm, x.normed, eps)
            else:
                program.add_rms_norm(x.delta, x.residual, layer.attn_norm, x.normed, eps)
            self._attention(program, layer, i, inputs.batch, cache, x)
            program.add_rms_norm(x.delta, x.residual, layer.ffn_norm, x.normed, eps)
            self._mlp(program, layer, x)
        program.gather_rows(x.delta, inputs.sampled_rows, x.sampled_delta)
        program.gather_rows(x.residual, inputs.sampled_rows, x.sampled_residual)
        program.add_rms_norm(x.sampled_delta, x.sampled_residual, self.weights.final_norm, x.sampled_normed, eps, Size.SAMPLES)
        program.linear(x.sampled_normed, self.weights.head, x.logits, Size.SAMPLES)

    def _attention(self, program: Program, layer: LayerWeights, i: int, batch: AttentionBatch, cache: KVCache, x: Activations) -> None:
        """normed -> delta, through the paged cache.

        qkv   [ q: heads x head_dim | k: kv_heads x head_dim | v: kv_heads x head_dim ]
                                    ^ q_end                  ^ k_end
        """
        spec, w = self.spec, self.weights
        q_end = spec.num_heads * spec.head_dim
        k_end = q_end + spec.num_kv_heads * spec.head_dim
        q, k, v = x.qkv[:, :q_end], x.qkv[:, q_end:k_end], x.qkv[:, k_end:]
        program.linear(x.normed, layer.qkv, x.qkv)
        program.rotary(x.qkv[:, :k_end], batch.positions, w.cos, w.sin, spec.num_heads + spec.num_kv_heads)
        program.write_kv(k, v, batch.slots, cache, i)
        program.paged_attention(q, batch, cache, i, x.attended, spec.attention_scale, spec.window(i), spec.attention_softcap)
        program.linear(x.attended, layer.o, x.delta)

    def _mlp(self, program: Program, layer: LayerWeights, x: Activations) -> None:
        """normed -> delta."""
        program.linear(x.normed, layer.gate_up, x.gate_up)
        program.gated_activation(x.gate_up, x.activated, self.spec.activation)
        program.linear(x.activated, layer.down, x.delta)
