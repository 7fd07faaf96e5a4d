"""What all routes share: prompts into the engine, outputs out of it, with the limits of the server in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from octavo.config import ServerConfig
from octavo.engine.async_engine import AsyncEngine, Numbered, Submission
from octavo.engine.outputs import RequestOutput
from octavo.engine.text_engine import Message
from octavo.errors import DeadlineError, EngineClosedError, InvalidRequestError, OctavoError, QueueFullError
from octavo.request import Constraint, FinishReason, SamplingParams
from octavo.server.observe import Observer
from octavo.server.tools import detect_parser
from octavo.text.grammar import GrammarSource
from octavo.text.template_worker import TemplateWorker

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Prompts = list[tuple[str | None, list[int]]]
"""Text, where the client gave text, and token ids."""

_INLINE_CHARS = 4096
"""Texts up to this length are tokenized in the event loop, in well under a millisecond; longer ones in a thread."""


class ModelNotFoundError(OctavoError):
    """The client asked for a model that is not served."""

    http_status = 404
    code = "model_not_found"


class ClientGoneError(OctavoError):
    """The client has closed its connection."""

    http_status = 499
    code = "client_closed_request"


class Service:
    """One model, served."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, names: Sequence[str], max_num_seqs: int) -> None:
        self.engine = engine
        self.config = config
        self.names = tuple(names)
        self.observer = Observer()
        self.created = int(time.time())
        template = engine.text.chat_template
        if template is not None:
            template.compile()
        self.template = None if template is None else TemplateWorker(template)
        self.tool_parser = detect_parser(template) if config.tool_parser == "auto" else config.tool_parser
        self.draining = False
        self.jobs: set[Job] = set()
        self._max_live = max_num_seqs + config.max_queue
        self._num_live = 0

    @property
    def max_model_len(self) -> int:
        return self.engine.text.core.limits.max_model_len

    @staticmethod
    def created_now() -> int:
        """The time of a reply, in seconds since 1970."""
        return int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name that replies give; raises ModelNotFoundError."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ModelNotFoundError(f"the model {name[:200]!r} is not served here; there is {', '.join(map(repr, self.names))}")
        return name

    async def encode(self, prompt: str | Sequence[Any]) -> Prompts:
        """Token ids of a prompt, or of several."""
        prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not prompts:
            raise InvalidRequestError("prompt is an empty list; give at least one prompt of at least one token")
        if len(prompts) > self.config.max_prompts:
            raise InvalidRequestError(
                f"prompt is a list of {len(prompts)}, but max_prompts is {self.config.max_prompts}: send fewer at once"
            )

        def encode_all() -> Prompts:
            return [(p if isinstance(p, str) else None, self.engine.text.encode(p)) for p in prompts]

        if sum(len(p) for p in prompts if isinstance(p, str)) <= _INLINE_CHARS:
            return encode_all()
        return await asyncio.to_thread(encode_all)

    async def render(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        template, tokenizer = self.template, self.engine.text.tokenizer
        if template is None:
            raise InvalidRequestError("this model has no chat template; send the text of a prompt to /v1/completions")
        return await asyncio.to_thread(lambda: tokenizer.encode(template.render(messages, **variables), add_special_tokens=False))

    async def compile(self, grammars: Sequence[GrammarSource]) -> Constraint | None:
        """What binds the output of a request that names these; compiled in a thread."""
        if not grammars:
            return None
        if len(grammars) > 1:
            names = " and ".join(grammar.field for grammar in grammars)
            raise InvalidRequestError(f"{names} each bind the output to a grammar; give one of them")
        return await asyncio.to_thread(self.engine.text.compile_grammar, grammars[0])

    def close(self) -> None:
        """End what the service has started; the engine is its caller's."""
        if self.template is not None:
            self.template.close()

    async def submit(self, request_id: str, prompts: Prompts, params: SamplingParams, stream: bool) -> Job:
        """Queue one request for each prompt. Raises InvalidRequestError, QueueFullError or EngineClosedError."""
        if self.draining:
            raise EngineClosedError("the server is shutting down and takes no more requests")
        num_samples = len(prompts) * max(params.num_samples, params.beam_width or 1)
        if self._num_live and self._num_live + num_samples > self._max_live:
            retry_after = min(60, max(1, round(self.observer.mean_latency)))
            raise QueueFullError(f"{self._num_live} samples run or wait, and {self._max_live} is the most: try again later", retry_after)
        self._num_live += num_samples
        try:
            submission = await self.engine.submit(prompts, params, incremental=stream, deltas=stream)
        except BaseException:
            self._num_live -= num_samples
            raise
        job = Job(self, request_id, submission, num_samples)
        self.jobs.add(job)
        return job

    def leave(self, job: Job) -> None:
        """A job has ended, in whatever way."""
        if job in self.jobs:
            self.jobs.remove(job)
            self._num_live -= job.num_samples

    def drain(self) -> None:
        """Take no more requests, and end those that still run when drain_timeout is over."""
        self.draining = True
        asyncio.get_running_loop().call_later(self.config.drain_timeout, self._end_jobs)

    def _end_jobs(self) -> None:
        for job in list(self.jobs):
            job.give_up(EngineClosedError("the server is shutting down"))

    def why_not_ready(self) -> str | None:
        """What keeps the server from answering requests; None if nothing does."""
        if self.draining:
            return "shutting down"
        stalled = self.engine.stalled_for
        if stalled > self.config.stall_timeout:
            return "the engine has ended" if stalled == float("inf") else f"a step of the engine has run for {stalled:.0f} s"
        return None

    async def watch_engine(self) -> None:
        """Log when a step of the engine hangs, and when it goes on; runs until it is cancelled."""
        hung = False
        while True:
            stalled = self.engine.stalled_for
            if (stalled > self.config.stall_timeout) != hung:
                hung = not hung
                ids = [job.request_id for job in self.jobs]
                logger.error("the engine %s; requests: %s", f"has hung for {stalled:.0f} s" if hung else "goes on", ids)
            await asyncio.sleep(self.config.stall_timeout / 4)

    async def metrics(self) -> bytes:
        """The text that Prometheus scrapes; of a hung engine, its last figures."""
        try:
            self.observer.engine.update(await asyncio.wait_for(self.engine.stats(), 1.0))
        except (TimeoutError, EngineClosedError):
            logger.warning("the engine gives no figures; /metrics repeats the last ones")
        return self.observer.render()


class Job:
    """The requests of one HTTP call, from submission to their last output."""

    def __init__(self, service: Service, request_id: str, submission: Submission, num_samples: int) -> None:
        self.request_id = request_id
        self.num_samples = num_samples
        self._service = service
        self._submission = submission
        self._cause: OctavoError | None = None
        self._num_tokens: dict[int, int] = {}
        timeout = service.config.request_timeout
        self._deadline = time.monotonic() + timeout if timeout else None

    def give_up(self, cause: OctavoError) -> None:
        """Abort what runs; whoever reads the outputs gets ``cause``."""
        self._cause = self._cause or cause
        self._submission.abort()

    async def outputs(self) -> AsyncIterator[list[Numbered]]:
        """Outputs as they come, all that are there at once; an empty list where there was none for ``keep_alive`` seconds.

        Raises what ended the requests, if it was not their own end. Leaving the iterator aborts them.
        """
        try:
            while not self._submission.finished:
                batch = await self._submission.next(self._patience())
                for _, output in batch:
                    self._look_at(output)
                yield batch
        except OctavoError as error:
            if error.http_status >= 500:
                logger.error("request %s (in the engine %s) ends: %s", self.request_id, self._submission.request_ids, error)
            raise
        finally:
            self._submission.abort()
            self._service.leave(self)

    async def results(self, receive: Receive) -> list[RequestOutput]:
        """The finished output of each prompt; ``receive`` tells when the client has gone."""
        found: dict[int, RequestOutput] = {}
        watcher = asyncio.create_task(self.watch(receive))
        try:
            async with aclosing(self.outputs()) as outputs:  # type: ignore[type-var]
                async for batch in outputs:
                    found.update(batch)
        finally:
            watcher.cancel()
        return [found[index] for index in range(len(found))]

    async def watch(self, receive: Receive) -> None:
        """Abort the requests once the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.give_up(ClientGoneError("the client has gone"))

    def _patience(self) -> float:
        keep_alive = self._service.config.keep_alive
        if self._deadline is None:
            return keep_alive
        left = self._deadline - time.monotonic()
        if left <= 0:
            limit = self._service.config.request_timeout
            raise DeadlineError(
                f"the request took more than {limit:g} s, the server's limit: ask for fewer tokens, or raise request_timeout"
            )
        return min(left, keep_alive)

    def _look_at(self, output: RequestOutput) -> None:
        count = self._num_tokens.get(output.request_id, 0) + sum(len(o.token_ids) for o in output.outputs)
        self._num_tokens[output.request_id] = count
        if output.error is not None:
            raise output.error
        if any(o.finish_reason is FinishReason.ABORT for o in output.outputs):
            raise self._cause or EngineClosedError("the engine was shut down while this request was running")
        if output.finished:
            self._service.observer.saw_end(output, count)
