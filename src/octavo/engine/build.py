"""Puts an engine together from its settings. The only file that names the concrete classes of all stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from octavo.blocks import BlockManager
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.events import EventLog
from octavo.engine.memory import CachePlan, available_memory, format_bytes, plan_cache
from octavo.engine.text_engine import TextEngine
from octavo.kernels.backends import create_backend
from octavo.kernels.ops import Backend, KVShape
from octavo.limits import RequestLimits
from octavo.models.decoder import Decoder
from octavo.models.decoder_weights import pack_weights
from octavo.models.locate import locate
from octavo.models.quantised import quantize
from octavo.models.spec import DecoderSpec
from octavo.models.weight_formats import WeightFormats, choose_formats
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.scheduler import Scheduler
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much of it is done, of how much) while loading."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights as they run."""

    formats: WeightFormats
    nbytes: int
    """Of the packed matrices."""
    cache: str
    """Where weights quantised at load are kept, or why they are not; empty where there are none."""

    def describe(self) -> str:
        """One line, for people.

        >>> from octavo.models.weight_formats import WeightFormats
        >>> LoadedWeights(WeightFormats("bfloat16", {"embed": "Q4_1"}, {"embed": "Q4_1"}, 2**20), 2**20, "").describe()
        'weights: Q4_1 (kept), 1.00 MiB'
        """
        return f"weights: {self.formats.describe()}, {format_bytes(self.nbytes)}" + (f"; {self.cache}" if self.cache else "")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was settled for it at start."""

    engine: TextEngine
    spec: DecoderSpec
    backend: Backend
    cache: CachePlan
    weights: LoadedWeights


def build_engine(config: EngineConfig, progress: Progress = lambda what, done, total: None) -> BuiltEngine:
    """Find the model, settle the memory, load weights, record the step. ``progress`` hears of matrices quantised and layers packed."""
    backend = create_backend(config.device.device, config.device.threads, config.device.shared_prefix_attention)
    checkpoint = open_checkpoint(locate(config.model.model))
    spec = checkpoint.spec
    formats = choose_formats(spec, checkpoint.formats(), config.model.dtype, config.model.quantize)
    plan = plan_cache(spec, formats.dtype, config.cache, config.scheduler, available_memory(), formats.nbytes)
    quantised = quantize(checkpoint, formats.to_quantize, backend, partial(progress, "quantising weights"))
    weights = pack_weights(quantised.checkpoint, backend, formats.formats, plan.max_model_len, partial(progress, "loading weights"))
    runner = build_runner(Decoder(spec, weights), backend, plan, config)
    core = build_core(runner, plan, config, spec.vocab_size, checkpoint.generation.eos_token_ids)
    tokenizer, template = open_text(checkpoint)
    loaded = LoadedWeights(formats, weights.nbytes, quantised.cache)
    return BuiltEngine(TextEngine(core, tokenizer, template), spec, backend, plan, loaded)


def build_runner(decoder: Decoder, backend: Backend, plan: CachePlan, config: EngineConfig) -> ModelRunner:
    """The runner with its KV pool."""
    spec, scheduler = decoder.spec, config.scheduler
    shape = KVShape(spec.num_layers, plan.num_blocks, plan.block_size, spec.num_kv_heads, spec.head_dim, plan.kv_dtype)
    max_num_seqs, max_rows = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    return ModelRunner(decoder, backend, backend.kv_cache(shape), max_num_seqs, max_rows, plan.max_model_len)


def build_core(
    runner: ModelRunner,
    plan: CachePlan,
    config: EngineConfig,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """The loop around a runner."""
    blocks = BlockManager(plan.num_blocks, plan.block_size, config.cache.enable_prefix_caching, plan.block_bytes)
    scheduler = Scheduler(config.scheduler, plan.max_model_len, blocks)
    limits = RequestLimits(
        vocab_size, plan.max_model_len, plan.num_tokens, eos_token_ids, config.seed, plan.block_size, config.scheduler.max_num_seqs
    )
    return EngineCore(scheduler, runner, limits, clock, EventLog())


def open_text(checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
    """The checkpoint's tokenizer, and its chat template if it has one."""
    if checkpoint.metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
        return tokenizer, ChatTemplate.from_gguf(checkpoint.metadata, tokenizer.bos_token, tokenizer.eos_token)
    tokenizer = Tokenizer.from_directory(checkpoint.path)
    return tokenizer, ChatTemplate.from_directory(checkpoint.path, tokenizer.bos_token, tokenizer.eos_token)
