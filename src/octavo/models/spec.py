"""What a decoder is: the numbers and switches from which ``decoder.py`` builds any model of the family.

Knows no arrays, so the planner can read it in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
INT8_SCALE_BYTES = 2
"""Of a key or a value in int8, per head."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (Su et al., arXiv 2104.09864), half-split ("neox") pairing.

    The frequencies are computed at load, scaled as ``scaling`` says.
    """

    head_dim: int
    """Dimensions that rotate, from the first; even."""
    base: float = 10_000.0
    scaling: str = "none"
    """none, linear, dynamic, llama3 or yarn; the parameters below mean what config.json calls them."""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] | None = None
    """One divisor per frequency, [head_dim / 2], where the file brings them ready-made (GGUF ``rope_freqs``)."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer of the Llama family.

    Each layer is ``h += attention(norm(h)); h += down(act(gate(norm(h))) * up(norm(h)))``.
    """

    architecture: str
    """Name in the checkpoint, such as LlamaForCausalLM."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int
    """Longest context the model was made for, in tokens."""
    rotary: RotarySpec
    norm_eps: float = 1e-5
    activation: str = "silu"
    """silu, gelu (erf) or gelu_tanh."""
    tied_head: bool = True
    """The output head is the embedding table."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; None is all."""
    window_layers: tuple[bool, ...] | None = None
    """Which layers the window holds for; None is all."""
    attention_softcap: float | None = None

    @property
    def qkv_size(self) -> int:
        """Columns of the fused q, k, v product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer."""
        if self.window_layers is None or self.window_layers[layer]:
            return self.sliding_window
        return None

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token over all layers: 2 x layers x kv heads x head_dim x bytes, or x (head_dim + 2) in int8.

        >>> from octavo.models.spec import DecoderSpec, RotarySpec
        >>> spec = DecoderSpec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, 8192, RotarySpec(64))
        >>> spec.kv_bytes_per_token("bfloat16"), spec.kv_bytes_per_token("int8")
        (23040, 11880)
        """
        per_head = self.head_dim + INT8_SCALE_BYTES if dtype == "int8" else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * per_head

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """Name of each matrix of a layer -> (out_features, in_features)."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, ffn = self.hidden_size, self.ffn_size
        return {
            "q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query),
            "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
        }  # fmt: skip

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Canonical name of each matrix of the model (``models.weights``) -> (out_features, in_features)."""
        table = (self.vocab_size, self.hidden_size)
        tables = {"embed": table} if self.tied_head else {"embed": table, "head": table}
        layer = self.layer_matrices()
        return tables | {f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in layer.items()}

    @property
    def num_layer_weights(self) -> int:
        """Elements of the matrices of all layers, without norms and biases."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        return self.num_layers * (attention + 3 * self.hidden_size * self.ffn_size)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all matrices once packed; norms and biases are under a thousandth of it."""
        head = self.hidden_size * self.vocab_size * (1 if self.tied_head else 2)
        return (self.num_layer_weights + head) * DTYPE_BYTES[dtype]
