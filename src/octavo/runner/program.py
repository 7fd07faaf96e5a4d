"""A whole step as one program: recorded once, when the runner is made, and replayed for every plan."""

from __future__ import annotations

from octavo.kernels.ops import Array, Backend, Int32, KVCache, Program
from octavo.models.decoder import Activations, Decoder
from octavo.runner.batch import Batch
from octavo.runner.sampler import Sampler


def record_step(
    decoder: Decoder, backend: Backend, sizes: Int32, batch: Batch, cache: KVCache, copies: Int32,
    sampler: Sampler, max_rows: int, max_samples: int,
) -> tuple[Program, Array]:  # fmt: skip
    """The plan's rows, copies of shared blocks, the decoder, the sampler. Returns the program and the array of logits it writes.

    copies: [2, max] block ids, sources and targets.
    """
    program = backend.program(sizes)
    activations = Activations.allocate(backend, decoder, max_rows, max_samples)
    inputs = batch.inputs
    program.lay_out_rows(batch.columns, inputs.batch, inputs.token_ids, batch.history, cache.shape.block_size)
    program.lay_out_samples(batch.columns, inputs.batch, sampler.params, inputs.sampled_rows, sampler.batch.rows)
    program.copy_blocks(cache, copies[0], copies[1])
    decoder.record(program, inputs, cache, activations)
    program.sample(activations.logits, sampler.batch, sampler.output)
    return program, activations.logits
