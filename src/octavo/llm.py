"""The offline interface: prompts in, completions out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

from octavo.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.build import BuiltEngine, build_engine
from octavo.engine.outputs import RequestOutput, refused, with_delta
from octavo.engine.text_engine import Message, Prompt, TextEngine
from octavo.errors import EngineClosedError, InvalidRequestError
from octavo.request import SamplingParams
from octavo.text.tokenizer import Tokenizer

Report = Callable[[dict[str, Any]], None]
"""Hears of the engine's ``stats()`` after each step."""


class LLM(AbstractContextManager["LLM"]):
    """A model, loaded and ready.

    ``model`` is a directory with config.json and safetensors, a .gguf file, a hub id, or the short name of an
    installed model package. All other arguments are optional and documented in ``octavo.config``.
    Raises ConfigError, MemoryConfigError or ModelLoadError, each saying what to change.

        with LLM("smollm2-135m") as llm:
            [out] = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
            print(out.outputs[0].text)
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        dtype: str = "auto",
        quantize: str | None = None,
        kv_dtype: str = "auto",
        block_size: int = 16,
        kv_memory: str | int | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        policy: Literal["fcfs", "priority"] = "fcfs",
        enable_prefix_caching: bool = True,
        fork_mode: Literal["copy_on_write", "recompute"] = "copy_on_write",
        speculative_tokens: int = 0,
        speculative_ngram_min: int = 2,
        speculative_ngram_max: int = 8,
        threads: int | None = None,
        device: str = "auto",
        shared_prefix_attention: bool = True,
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(model, dtype, quantize),
            cache=CacheConfig(block_size, kv_memory, num_blocks, enable_prefix_caching, kv_dtype),
            scheduler=SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                policy,
                fork_mode=fork_mode,
                speculative_tokens=speculative_tokens,
                speculative_ngram_min=speculative_ngram_min,
                speculative_ngram_max=speculative_ngram_max,
            ),
            device=DeviceConfig(device, threads, shared_prefix_attention),
            seed=seed,
        )
        self.config = config
        self._built: BuiltEngine | None = build_engine(config, _LoadingBar())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        report: Report | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once. Returns one output per prompt, in their order; also for one prompt a list.

        ``params`` are for all prompts, or a list with one for each. A prompt that cannot be run raises
        InvalidRequestError, naming its index, before anything runs; with ``errors="return"`` it becomes that
        output's ``error`` and the others run.
        """
        return self._run([*self._many(prompts)], params, errors, report, self._open.engine.encode)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
        report: Report | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; see ``generate``.

        A conversation is a list of messages such as ``{"role": "user", "content": "Hello"}``.
        """
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        return self._run(conversations, params, errors, report, self._open.engine.render)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Complete one prompt, yielding an output per step that brought text; the ``text`` of each sample is what is new.

        Leaving the iterator early aborts the request.
        """
        return self._stream(prompt, self._open.engine.encode(prompt), params or SamplingParams())

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Answer one conversation; see ``stream``."""
        return self._stream(None, self._open.engine.render(messages), params or SamplingParams())

    def stats(self) -> dict[str, Any]:
        """Requests running and waiting, preemptions, blocks, waste by kind, formats of weights; of this moment and since the start."""
        weights = self._open.weights
        return self._open.engine.core.stats() | {"weights": {"formats": weights.formats.describe(), "bytes": weights.nbytes}}

    def reset_prefix_cache(self) -> None:
        """Forget all that is cached of earlier requests; what they computed is computed again when it is needed."""
        self._open.engine.core.reset_prefix_cache()

    def check(self) -> None:
        """Prove that no block is lost; AssertionError says where the books do not balance."""
        self._open.engine.core.check()

    def describe(self) -> str:
        """Model, kernels and KV cache, for people."""
        built = self._open
        model = f"{self.config.model.model} ({built.spec.architecture}) on {built.backend.name}"
        return "\n".join([model, built.weights.describe(), built.cache.describe()])

    @property
    def engine(self) -> TextEngine:
        """What steps the requests; hand it to an ``AsyncEngine``, and then use it through that alone."""
        return self._open.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with ``encode`` and ``decode``."""
        return self._open.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self._open.cache.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._open.spec.vocab_size

    def close(self) -> None:
        """Give back all memory. Nothing can be generated afterwards."""
        self._built = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _open(self) -> BuiltEngine:
        if self._built is None:
            raise EngineClosedError("this LLM has been closed; make a new one")
        return self._built

    @staticmethod
    def _many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            return [prompts]  # type: ignore[list-item]
        return prompts  # type: ignore[return-value]

    def _run(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        errors: Literal["raise", "return"],
        report: Report | None,
        encode: Callable[[Any], list[int]],
    ) -> list[RequestOutput]:
        each = _params_for_each(params, len(prompts))
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        accepted = []
        for index, (prompt, its_params) in enumerate(zip(prompts, each, strict=True)):
            token_ids: list[int] = []
            try:
                token_ids = encode(prompt)
                self._open.engine.check(token_ids, its_params)
                accepted.append((index, prompt, token_ids, its_params))
            except InvalidRequestError as error:
                if errors == "raise":
                    raise type(error)(f"prompt {index}: {error}") from error
                outputs[index] = refused(-1, prompt if isinstance(prompt, str) else None, token_ids, error)
        for index, output in self._complete(accepted, report):
            outputs[index] = output
        return [output for output in outputs if output is not None]

    def _complete(
        self, accepted: list[tuple[int, Any, list[int], SamplingParams]], report: Report | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        engine = self._open.engine
        indices: dict[int, int] = {}
        try:
            for index, prompt, token_ids, params in accepted:
                indices[engine.add(prompt, token_ids, params, incremental=False)] = index
            while indices:
                for output in engine.step():
                    yield indices.pop(output.request_id), output
                if report is not None:
                    report(engine.core.stats())
        finally:
            for request_id in indices:
                engine.abort(request_id)

    def _stream(self, prompt: Prompt | None, token_ids: list[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        engine = self._open.engine
        request_id = engine.add(prompt, token_ids, params, incremental=True)
        sent, finished = [0] * params.n, False
        try:
            while not finished:
                for output in engine.step():
                    finished = output.finished
                    lengths = [len(completion.text) for completion in output.outputs]
                    if finished or lengths != sent:
                        yield with_delta(output, sent)
                        sent = lengths
        finally:
            if not finished:
                engine.abort(request_id)


def _params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts and {len(params)} SamplingParams; give one for all, or one for each prompt")
    return list(params)


class _LoadingBar:
    """Shows progress on a terminal once loading has taken a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty() or time.monotonic() - self._start < 1.0:
            return
        end = "\r\x1b[K" if done == total else ""
        print(f"\r{what}: {done}/{total}{end}", end="", file=sys.stderr, flush=True)
