"""The native module (csrc/bindings.cpp). Arrays come as addresses, strides and sizes in elements; ``native.py`` checks them."""

from collections.abc import Sequence

class Kernels:
    @property
    def name(self) -> str: ...

class Pool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def claims(self, num_units: int) -> list[int]:
        """The thread that ran each unit of a job."""
    def fork_join_seconds(self, repeats: int) -> float:
        """Seconds of a job in which every thread takes part, averaged over a step."""

class PackedMatrix:
    def __init__(self, data: int, bias: int, out_features: int, in_features: int, format: int) -> None: ...

class PackSource:
    def __init__(self, data: int, row_order: int, num_rows: int, row_bytes: int, format: int) -> None: ...

class KVLayout:
    def __init__(
        self, base: int, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None: ...
    def read(self, layer: int, keys: int, values: int) -> None: ...
    def fill(self, block: int, value: float) -> None: ...

class AttentionBatch:
    def __init__(
        self,
        query_starts: int,
        table_rows: int,
        block_tables: int,
        table_stride: int,
        positions: int,
        num_requests: int,
        num_rows: int,
    ) -> None: ...

class StepColumns:
    def __init__(
        self,
        table_rows: int,
        num_computed: int,
        num_scheduled: int,
        num_samples: int,
        num_drafts: int,
        num_new_blocks: int,
        new_block_ids: int,
        replaced: int,
        num_requests: int,
    ) -> None: ...

class Program:
    def __init__(self, kernels: Kernels, pool: Pool, share_prefix: bool) -> None: ...
    @property
    def blocks_ahead(self) -> list[int]:
        """The blocks that the last run's plans listed for products to ask for."""
    @property
    def num_shared_rows(self) -> int:
        """Rows of attention, per KV head, that went through shared passes in the last run."""
    def lay_out_rows(
        self,
        columns: StepColumns,
        token_ids: int,
        block_size: int,
        block_tables: int,
        table_stride: int,
        history: int,
        history_stride: int,
        query_starts: int,
        positions: int,
        slots: int,
        /,
    ) -> None: ...
    def lay_out_samples(self, columns: StepColumns, query_starts: int, params: int, sampled_rows: int, rows: int, /) -> None: ...
    def embed(self, token_ids: int, table: PackedMatrix, out: int, out_stride: int, count: int, /) -> None: ...
    def linear(self, x: int, x_stride: int, weight: PackedMatrix, out: int, out_stride: int, count: int, /) -> None: ...
    def rms_norm(
        self,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        out: int,
        out_stride: int,
        out_bf16: bool,
        size: int,
        eps: float,
        count: int,
        /,
    ) -> None: ...
    def rotary(
        self, x: int, x_stride: int, positions: int, cos: int, sin: int, half: int, num_heads: int, head_dim: int, count: int, /
    ) -> None: ...
    def gated_activation(
        self, gate_up: int, stride: int, out: int, out_stride: int, out_bf16: bool, size: int, kind: int, count: int, /
    ) -> None: ...
    def gather_rows(self, x: int, x_stride: int, indices: int, out: int, out_stride: int, size: int, count: int, /) -> None: ...
    def write_kv(self, k: int, k_stride: int, v: int, v_stride: int, slots: int, cache: KVLayout, layer: int, count: int, /) -> None: ...
    def copy_blocks(self, cache: KVLayout, sources: int, targets: int, count: int, /) -> None: ...
    def paged_attention(
        self,
        q: int,
        q_stride: int,
        batch: AttentionBatch,
        cache: KVLayout,
        layer: int,
        out: int,
        out_stride: int,
        out_bf16: bool,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        max_requests: int,
        max_rows: int,
        /,
    ) -> None: ...
    def sample(
        self,
        logits: int,
        logits_stride: int,
        vocab: int,
        rows: int,
        history: int,
        history_stride: int,
        bias_ids: int,
        bias_values: int,
        masks: int,
        mask_stride: int,
        scratch: int,
        scratch_stride: int,
        token_ids: int,
        logprobs: int,
        ranks: int,
        top_ids: int,
        top_stride: int,
        top_logprobs: int,
        count: int,
        /,
    ) -> None: ...
    def run(self) -> None:
        """Run all recorded ops, without the GIL."""
    def profile(self) -> dict[str, float]:
        """Run them once; the seconds that each kind of op took in all."""
    def __len__(self) -> int: ...

def available_isas() -> list[str]:
    """Instruction sets compiled in that this machine runs, best first."""

def select_kernels(name: str) -> Kernels:
    """The kernels of an instruction set, the best for ""; raises ValueError naming what is available."""

def formats() -> list[tuple[str, int, int]]:
    """Element formats of checkpoints: name, weights per block, bytes per block."""

def sample_row_bytes() -> int: ...
def pack(kernels: Kernels, pool: Pool, sources: Sequence[PackSource], out: int, in_features: int, format: int) -> None:
    """Sources into one packed matrix of an element format: F32, BF16, or the quantised one that they all have."""

def matrix_bytes(format: int, out_features: int, in_features: int) -> int:
    """Bytes of a packed matrix."""

def quantize(kernels: Kernels, pool: Pool, source: PackSource, columns: int, to_8_bits: bool, out: int) -> bool:
    """To Q8_0 or Q4_1; False where a weight or scale is not finite."""

def dequantize(kernels: Kernels, source: PackSource, out: int, size: int) -> None:
    """``size`` weights as float32, on the calling thread."""
