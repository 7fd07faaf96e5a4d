"""Settings: frozen, one class per concern, each field documented where it is declared.

Values derived from them (how many blocks, which maximum length) are made once, in ``engine.build``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from octavo.errors import ConfigError

LEGAL_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
QUANTIZE = ("native", "int8", "int4")
DEVICES = ("auto", "cpu", "reference")
MAX_SPECULATIVE_TOKENS = 64
MAX_NGRAM = 64

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Turn a size into bytes: an int as it is, or text with a unit.

    >>> parse_bytes("1GiB"), parse_bytes("512 MB"), parse_bytes(4096)
    (1073741824, 512000000, 4096)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{text!r} is not a size; write a number of bytes or one with a unit, such as '1GiB' or '512MB'")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"a size must be positive, not {text!r}")
    return size


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = "smollm2-135m"
    """A directory with config.json and safetensors, a .gguf file, a hub id, or the short name of an installed model package."""
    dtype: str = "auto"
    """Type of weights that are not quantised, inputs of their products: auto (bfloat16), float32 or bfloat16. With auto,
    quantised weights are kept as they are; an explicit dtype without ``quantize`` dequantises them."""
    quantize: str | None = None
    """native keeps a file's quantised weights as they are. int8 brings every matrix to Q8_0; int4 those of the layers to Q4_1, and embedding
    and head to Q8_0, but leaves matrices alone that have 4 bits already. Norms and biases are never quantised."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype {self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        legal = self.quantize is None or self.quantize in QUANTIZE
        _require(legal, f"quantize {self.quantize!r} is not known; choose one of {', '.join(QUANTIZE)}, or None")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16
    """Tokens per KV block; a power of two from 1 to 256."""
    kv_memory: str | int | None = None
    """Bytes for the KV cache, such as '1GiB'. Default: the smaller of a quarter of what is available and what max_num_seqs requests can use."""
    num_blocks: int | None = None
    """Number of KV blocks, instead of kv_memory."""
    enable_prefix_caching: bool = True
    """Keep what was computed findable, so that a request whose first tokens are cached does not compute them again."""
    kv_dtype: str = "auto"
    """Type of keys and values: auto (the model's dtype), float32, bfloat16 or int8 (half the bytes of bfloat16, a scale per token and head)."""

    def dtype_for(self, dtype: str) -> str:
        """The KV dtype of a model in ``dtype``."""
        return dtype if self.kv_dtype == "auto" else self.kv_dtype

    def __post_init__(self) -> None:
        _require(self.kv_dtype in KV_DTYPES, f"kv_dtype {self.kv_dtype!r} is not known; choose one of {', '.join(KV_DTYPES)}")
        _require(
            self.block_size in LEGAL_BLOCK_SIZES,
            f"block_size {self.block_size} is not legal; choose one of {', '.join(map(str, LEGAL_BLOCK_SIZES))}",
        )
        _require(
            self.kv_memory is None or self.num_blocks is None,
            "kv_memory and num_blocks both set the size of the KV cache; give one of them",
        )
        _require(self.num_blocks is None or self.num_blocks >= 1, f"num_blocks must be at least 1, not {self.num_blocks}")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    """Most requests that run in one step."""
    max_num_batched_tokens: int = 512
    """Most tokens computed in one step."""
    max_model_len: int | None = None
    """Most tokens, prompt and output together, of one request. Default: what the model and the KV cache allow."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by arrival, or by SamplingParams.priority (lower runs first) and then by arrival."""
    max_passed_over: int = 16
    """How many younger requests may be admitted before a waiting one that does not fit yet; then they wait with it."""
    fork_mode: Literal["copy_on_write", "recompute"] = "copy_on_write"
    """How the samples of a request share its prompt: they fork when it is computed and copy a shared, partly filled block when they
    write into it; or they are separate requests that find the prompt's full blocks in the prefix cache and compute the rest again."""
    speculative_tokens: int = 0
    """Most drafts that a request computes in a step beside its next token: guesses from its own tokens, kept where they are what is
    sampled. Changes time alone, never a token. How many are made, if any, follows from how many were right. 0 makes none; 8 is a good number."""
    speculative_ngram_min: int = 2
    """Drafts are what followed the last tokens where they occurred before: at least so many of them, and ..."""
    speculative_ngram_max: int = 8
    """... of several places the one that agrees in the most last tokens, of which so many count."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        _require(self.max_model_len is None or self.max_model_len >= 2, f"max_model_len must be at least 2, not {self.max_model_len}")
        _require(self.policy in ("fcfs", "priority"), f"policy {self.policy!r} is not known; choose fcfs or priority")
        legal = ("copy_on_write", "recompute")
        _require(self.fork_mode in legal, f"fork_mode {self.fork_mode!r} is not known; choose one of {', '.join(legal)}")
        _require(self.max_passed_over >= 0, f"max_passed_over must not be negative, not {self.max_passed_over}")
        self._check_speculation()

    def _check_speculation(self) -> None:
        drafts, shortest, longest = self.speculative_tokens, self.speculative_ngram_min, self.speculative_ngram_max
        _require(
            0 <= drafts <= MAX_SPECULATIVE_TOKENS, f"speculative_tokens must be from 0 (off) to {MAX_SPECULATIVE_TOKENS}, not {drafts}"
        )
        _require(
            1 <= shortest <= longest <= MAX_NGRAM,
            f"1 <= speculative_ngram_min <= speculative_ngram_max <= {MAX_NGRAM} must hold, but they are {shortest} and {longest}",
        )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str = "auto"
    """auto (the native CPU kernels, or the NumPy reference where they are not built), cpu or reference."""
    threads: int | None = None
    """CPU threads for the kernels. Default: the physical cores that affinity and cgroup quota allow."""
    shared_prefix_attention: bool = True
    """Read keys that requests have in common once for all of them. Changes time alone, never a token."""

    def __post_init__(self) -> None:
        _require(self.device in DEVICES, f"device {self.device!r} is not known; choose one of {', '.join(DEVICES)}")
        _require(self.threads is None or 1 <= self.threads <= 1024, f"threads must be from 1 to 1024, not {self.threads}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    seed: int = 0
    """Seed of requests that bring none; each request's own seed derives from it and the request's number."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server. Times are in seconds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that clients may give as ``model``. Default: the model's name as it was given."""
    api_key: str | None = field(default=None, repr=False)
    """Clients must send it as a bearer token. None lets everybody in."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server from a browser; '*' is all."""
    max_body_size: str | int = "8MiB"
    """Most bytes of a request's body."""
    max_prompts: int = 256
    """Most prompts in one call."""
    max_queue: int = 1024
    """Most samples that may wait, beyond the max_num_seqs that run; more are answered with 429."""
    request_timeout: float = 600.0
    """Most time from a request's arrival to its last token; 0 is no limit."""
    drain_timeout: float = 30.0
    """Time that running requests have left after SIGTERM."""
    stall_timeout: float = 60.0
    """A step that takes longer counts as hung: /ready then fails."""
    keep_alive: float = 10.0
    """A stream without output for this long gets a comment, so that nobody between takes it for dead."""
    tool_parser: Literal["auto", "hermes", "llama3"] = "auto"
    """How the model writes its calls of tools; auto looks at its chat template."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        parse_bytes(self.max_body_size)
        _require(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        _require(self.api_key != "", "the API key is empty; give one of at least one character, or none at all")
        for name in ("max_prompts", "max_queue"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("request_timeout", "drain_timeout"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("stall_timeout", "keep_alive"):
            _require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        legal = ("auto", "hermes", "llama3")
        _require(self.tool_parser in legal, f"tool_parser {self.tool_parser!r} is not known; choose one of {', '.join(legal)}")
        _require(self.ssl_keyfile is None or self.ssl_certfile is not None, "ssl_keyfile needs ssl_certfile too")
