"""The contract of the kernels: what a backend provides to the decoder, the runner and the sampler.

A backend hands out a ``Program``. Calling an op on a program *records* it: arrays are named by address, once.
``run()`` performs all recorded ops in order and reads how much there is to do from ``sizes``, one int32 array
that the runner fills anew for each step. So a program recorded once serves every step, whatever its shape:
what CUDA graphs are on a GPU.

All arrays are allocated for the largest step. ``rows`` below means the first ``sizes[count]`` of them.
Activations and the residual are float32. A bfloat16 array is ``ml_dtypes.bfloat16``: only inputs of products
and the KV cache are rounded to it, to nearest even. The reference also runs in float64.

Every result of a row is a function of that row's own data and absolute position: never of the other rows in the
step, of how a prompt was cut into steps, of block size or of the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.splitmix import GOLDEN, mix64

Array = NDArray[Any]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

MAX_TOP = 64
"""Most log-probabilities returned per row besides the chosen token's."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

KV_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes of an element of the KV pool."""


class Size(IntEnum):
    """Entries of ``sizes``."""

    ROWS = 0  # tokens scheduled in this step
    REQUESTS = 1  # requests scheduled in this step
    SAMPLES = 2  # rows whose logits are needed
    COPIES = 3  # blocks to copy before the forward pass


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A matrix or vector as it lies in a checkpoint file."""

    name: str
    shape: tuple[int, ...]
    """Logical shape; a matrix is (out_features, in_features), rows one after the other."""
    format: str
    """Name of the element format: F32, F16, BF16, or a GGUF quantisation such as Q4_1."""
    data: NDArray[np.uint8]
    """The mapped bytes, not a copy."""
    row_order: Int32 | None = None
    """Logical row r lies at row ``row_order[r]`` of the file; None is the identity."""


class LinearWeight(Protocol):
    """One packed matrix [out_features, in_features] with its optional bias; the only place that knows its format."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def input_dtype(self) -> str:
        """What ``linear`` takes as x: "bfloat16" where the matrix is, else "float32"."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV pool of a model: per layer, logically, ``[num_blocks, block_size, num_kv_heads, head_dim]`` keys and as many values."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """float32, bfloat16 or int8 (the reference: float64 too).

    int8: a token's key, and its value, of one head is ``codes x scale``, codes from -127 to 127. The scale is the largest magnitude / 127,
    rounded up to bfloat16; what is all zero has scale 0, and what is not finite is NaN as a whole.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, scales included.

        >>> KVShape(1, 1, 16, 1, 64, "bfloat16").nbytes, KVShape(1, 1, 16, 1, 64, "int8").nbytes
        (4096, 2112)
        """
        scale = 2 if self.dtype == "int8" else 0
        token = self.head_dim * KV_DTYPES[self.dtype] + scale
        return 2 * self.num_layers * self.num_blocks * self.block_size * self.num_kv_heads * token


class KVCache(Protocol):
    """The pool's memory. A backend chooses the order inside a block."""

    @property
    def shape(self) -> KVShape: ...
    @property
    def nbytes(self) -> int: ...
    def read(self, layer: int) -> tuple[Array, Array]:
        """Keys and values of one layer in logical order, copied, int8 as the float32 that it means; for tests and inspection."""

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Set all slots of some blocks, in all layers, to one value (NaN poisons them, in tests)."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A ragged batch of prefill chunks and decodes, over the step's requests i and rows r.

    rows of request i     query_starts[i] .. query_starts[i+1]
    its keys              positions 0 .. positions[last row of i], through block_tables[table_rows[i]]
    key at position p     block block_tables[table_rows[i], p // block_size], offset p % block_size
    """

    query_starts: Int32
    """[max_requests + 1]"""
    table_rows: Int32
    """[max_requests] row of each request's block table"""
    block_tables: Int32
    """[max_num_seqs, max_blocks_per_request] block ids; entries past a request's blocks are not read"""
    positions: Int32
    """[max_rows] absolute position of each row; consecutive within a request"""
    slots: Int32
    """[max_rows] block id x block size + offset, where the row's key and value are written"""


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What a step's plan says of each request i, in the order of ``AttentionBatch.table_rows``; ``lay_out_rows`` makes rows of it."""

    num_computed: Int32
    """[max_requests] tokens computed before the step: the position of the first scheduled one"""
    num_scheduled: Int32
    """[max_requests] tokens to compute now"""
    num_samples: Int32
    """[max_requests] tokens to sample after the last scheduled one; with drafts one more than these"""
    num_drafts: Int32
    """[max_requests] scheduled tokens, the last ones, that are guesses: each, and the one before them, has a sampled row"""
    num_new_blocks: Int32
    """[max_requests]"""
    new_block_ids: Int32
    """[capacity] the new blocks of all requests, one after the other"""
    replaced: NDArray[np.int8]
    """[max_requests] 1 where the first new block takes the place of the table's last one"""


SAMPLE_ROW = np.dtype(
    [
        ("temperature", "f4"),  # 0: the most likely token
        ("top_k", "i4"),  # <= 0: off
        ("top_p", "f4"),  # 1: off
        ("min_p", "f4"),  # 0: off
        ("repetition", "f4"),  # 1: off
        ("frequency", "f4"),  # 0: off
        ("presence", "f4"),  # 0: off
        ("num_logprobs", "i4"),  # best tokens to report; -1: no log-probabilities at all
        ("target", "i4"),  # >= 0: choose nothing, report this token's log-probability (prompt logprobs)
        ("history_row", "i4"),  # row of `history` that holds the tokens so far; -1: no penalties
        ("prompt_len", "i4"),  # of these the prompt ...
        ("num_known", "i4"),  # ... and all of them
        ("bias_start", "i4"),  # entries of bias_ids and bias_values: added to logits, -inf forbids
        ("bias_count", "i4"),
        ("mask_row", "i4"),  # row of `masks`, bit t of which allows token t; -1: all are allowed
        ("sample_index", "u4"),  # which of the request's samples, and ...
        ("position", "u4"),  # ... which of its output tokens: with the seed, all that chance depends on
        ("seed", "u8"),
    ],
    align=True,
)
"""Parameters of one sampled row."""


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Inputs of ``sample``, over the step's sampled rows."""

    rows: NDArray[np.void]
    """[max_samples] of SAMPLE_ROW"""
    history: Int32
    """[max_num_seqs, max_model_len] tokens known per request, for penalties"""
    bias_ids: Int32
    """[capacity], ids ascending and unique within a row's entries"""
    bias_values: Float32
    masks: NDArray[np.uint32]
    """[max_num_seqs, ceil(vocab / 32)] bit sets, token t at bit t % 32 of word t // 32"""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Results of ``sample``."""

    token_ids: Int32
    """[max_samples] the chosen token (or the target); -1 where none can be chosen: all are forbidden, or logits are NaN"""
    logprobs: Float32
    """[max_samples] its log-probability in the raw distribution; only where num_logprobs >= 0"""
    ranks: Int32
    """[max_samples] 1 + number of tokens with a greater raw logit; only where num_logprobs >= 0"""
    top_ids: Int32
    """[max_samples, MAX_TOP] the num_logprobs best tokens, best first, ties by lower id"""
    top_logprobs: Float32
    """[max_samples, MAX_TOP]"""


class Program(Protocol):
    """A step, recorded once and run many times. Each op writes its last array argument(s) named ``out``."""

    def lay_out_rows(self, columns: StepColumns, batch: AttentionBatch, token_ids: Int32, history: Int32, block_size: int) -> None:
        """From requests to rows: fill ``query_starts``, ``positions`` and ``slots`` of the batch.

        New blocks are put into the block tables, behind the blocks that the computed tokens take; the scheduled tokens go to
        ``history[table_rows[i], position]``. token_ids: [max_rows]; history: [max_num_seqs, max_model_len].
        """

    def lay_out_samples(
        self, columns: StepColumns, batch: AttentionBatch, params: NDArray[np.void], sampled_rows: Int32, rows: NDArray[np.void]
    ) -> None:
        """From requests to sampled rows: ``sampled_rows[s]`` is the last row of its request, ``rows[s]`` its request's ``params``.

        ``num_known`` and ``position`` are set, and ``sample_index`` to 0, 1 ... where a request draws several samples. One with d drafts
        has its last d + 1 rows sampled instead, and for each of them the tokens up to it are those known. Only as many
        entries as the columns' ``num_samples`` sum up to are written. params: [max_num_seqs], rows: [max_samples] of SAMPLE_ROW.
        """

    def embed(self, token_ids: Int32, table: LinearWeight, out: Array) -> None:
        """``out[r] = table[token_ids[r]]`` for the step's rows. out: [max_rows, in_features] float32."""

    def linear(self, x: Array, weight: LinearWeight, out: Array, count: Size = Size.ROWS) -> None:
        """``out[r] = x[r] @ weight.T + bias``.

        x: [max, in_features] of ``weight.input_dtype``; out: [max, out_features] float32.
        One accumulator per output, k ascending, no split over k; the bias is added last.

        A quantised weight is ``scale[o, g] * code[o, k] + minimum[o, g]``, with integer codes and groups g of 16 or 32 along k. It meets
        x rounded to integers by groups of 32: with ``amax`` the greatest magnitude of a group, ``s = amax / 127`` and
        ``q[k] = rint(x[k] * (127 / amax))``, ties to even; below ``amax = 2**-100`` both are 0. Over g ascending, in float32,
        ``out[o] += s * (scale[o, g] * sum(q * code[o]) + minimum[o, g] * sum(q))``, the sums over integers being exact.
        A group that holds NaN or an infinity makes all outputs of its row NaN.
        """

    def rms_norm(self, x: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        """``out[r] = x[r] / sqrt(mean(x[r]**2) + eps) * weight`` (Zhang & Sennrich, arXiv 1910.07467).

        x: [max, hidden] float32; weight: [hidden] float32; out: [max, hidden] float32 or bfloat16.
        """

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, out: Array, eps: float, count: Size = Size.ROWS) -> None:
        """``residual[r] += x[r]``, then ``out[r] = rms_norm(residual[r])``. x, residual: [max, hidden] float32."""

    def rotary(self, x: Array, positions: Int32, cos: Array, sin: Array, num_heads: int) -> None:
        """Rotate in place the first 2 x cos.shape[1] dimensions of each head, pairing dimension d with d + cos.shape[1].

        x: [max_rows, num_heads x head_dim] float32, rows may be strided; cos, sin: [max_positions, rotated / 2] float32.
        ``x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin`` (Su et al., arXiv 2104.09864).
        """

    def write_kv(self, k: Array, v: Array, slots: Int32, cache: KVCache, layer: int) -> None:
        """Write each row's key and value to its slot, rounded to the cache's dtype (int8: see ``KVShape.dtype``).

        k, v: [max_rows, num_kv_heads x head_dim] float32, rows may be strided.
        """

    def paged_attention(
        self, q: Array, batch: AttentionBatch, cache: KVCache, layer: int, out: Array,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        """Causal attention of each row over its request's keys, through the block table.

        A row at position p sees keys ``max(0, p - window + 1) .. p``: out = softmax(softcap(scale * q.k)) @ v, with
        softcap(s) = cap * tanh(s / cap). Query head h reads KV head ``h // (num_heads / num_kv_heads)``.
        q: [max_rows, num_heads x head_dim] float32, rows may be strided, rounded to the cache's dtype as an input of a product;
        so are the probabilities. With a cache in int8 both may enter products as 16-bit integers, relative to the largest of a query, or of a
        tile's probabilities x value scales. out: [max_rows, num_heads x head_dim] float32 or bfloat16.
        """

    def gated_activation(self, gate_up: Array, out: Array, kind: str) -> None:
        """``out[r] = act(gate_up[r, :n]) * gate_up[r, n:]``; kind as in ACTIVATIONS.

        gate_up: [max_rows, 2n] float32; out: [max_rows, n] float32 or bfloat16.
        """

    def gather_rows(self, x: Array, indices: Int32, out: Array) -> None:
        """``out[s] = x[indices[s]]`` for s below sizes[SAMPLES]. float32."""

    def copy_blocks(self, cache: KVCache, sources: Int32, targets: Int32) -> None:
        """Copy sizes[COPIES] whole blocks, in all layers, keys and values. No target is a source of the same step."""

    def sample(self, logits: Array, batch: SampleBatch, out: SampleOutput) -> None:
        """Choose one token per sampled row (Stage 7). logits: [max_samples, vocab] float32, left as they are.

        In this order: bias and mask; penalties; division by temperature; top-k; top-p; min-p; then inversion: with
        candidates in ascending id and u = ``uniform(seed, sample_index, position)``, the first token whose cumulative
        weight exceeds u times the total. top_p is measured in what top-k left, min_p against the best token.
        """

    def run(self) -> None:
        """Perform all recorded ops, in order."""


class Backend(Protocol):
    """An implementation of the ops."""

    @property
    def name(self) -> str:
        """What ``octavo doctor`` calls it, with the instruction set in use."""

    def pack(self, sources: Sequence[TensorSource], format: str, biases: Sequence[TensorSource] = ()) -> LinearWeight:
        """Stack matrices of equal in_features into one weight; biases are all given or none.

        format: "bfloat16" or "float32" rounds all to it. "quantised" keeps the codes, scales and minima of quantised sources as they are;
        sources of floats become float32 beside quantised ones, and bfloat16 where all are floats.
        """

    def quantize(self, source: TensorSource, format: str) -> TensorSource:
        """A matrix in blocks of "Q8_0" or "Q4_1", as ``quantize.py`` defines them, rows in logical order.

        Raises ``ValueError`` where in_features is not a multiple of 32, ``ModelLoadError`` where a weight is not finite.
        """

    def vector(self, source: TensorSource) -> Array:
        """A vector in the dtype of activations."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An aligned array, not initialised, for activations and products' inputs ("float32", "bfloat16")."""

    def kv_cache(self, shape: KVShape) -> KVCache:
        """The memory of a KV pool, not initialised."""

    def program(self, sizes: Int32) -> Program:
        """A new program that reads its counts from ``sizes``, [len(Size)]."""


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1), 53 bits, that is a function of its three arguments alone.

    >>> uniform(7, 0, 0) == uniform(7, 0, 0) != uniform(7, 1, 0)
    True
    """
    state = mix64(seed + GOLDEN)
    state = mix64(state + GOLDEN * (sample_index + 1))
    state = mix64(state + GOLDEN * (position + 1))
    return (state >> 11) * 2.0**-53
