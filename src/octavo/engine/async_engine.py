"""The engine for many clients at once: one thread steps it, asyncio tasks submit requests and listen to their outputs.

engine thread   calls | step | calls | step ...        one call_soon_threadsafe per step and event loop,
                           \\              \\            whatever the number of requests
event loop                  deliver        deliver
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from octavo.engine.outputs import RequestOutput, refused
from octavo.engine.text_engine import Prompt, TextEngine
from octavo.errors import EngineClosedError, EngineError, OctavoError
from octavo.request import SamplingParams

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Numbered(NamedTuple):
    """An output, and which of the requests that were submitted together it belongs to."""

    number: int
    output: RequestOutput


class Submission:
    """Requests that were submitted together, and their outputs as they come. Used in the event loop that made it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_ids: list[int] = []
        """One per prompt, once they are accepted."""
        self._engine = engine
        self._ready: list[Numbered] = []
        self._num_running = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all outputs have been taken."""
        return not self._num_running and not self._ready

    async def next(self, timeout: float | None = None) -> list[Numbered]:
        """All outputs that are there, at least one; or none after ``timeout`` seconds, or if all have been taken."""
        if not self._ready and self._num_running:
            self._waiter = self.loop.create_future()
            timer = None if timeout is None else self.loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        ready, self._ready = self._ready, []
        return ready

    def abort(self) -> None:
        """Give up what has not ended, before the engine's next step; each then has a last output."""
        if self._num_running:
            self._engine.abort_soon(self.request_ids)

    def push(self, item: Numbered) -> None:
        """Take an output over; called by the engine's delivery."""
        self._ready.append(item)
        self._num_running -= item.output.finished
        self._wake()

    def accept(self, request_ids: list[int]) -> None:
        """The engine has taken the requests; called on its thread, before any output."""
        self.request_ids, self._num_running = request_ids, len(request_ids)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Owns the thread in which the engine lives; nothing else touches the engine once it runs.

    Use it as an async context manager, or call ``close``.
    """

    def __init__(self, engine: TextEngine) -> None:
        self.text = engine
        """For what needs no step: its tokenizer, chat template and limits."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, tuple[Submission, int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, each with all of its text so far; the last one is finished.

        Raises InvalidRequestError if it is refused. Leaving the iterator early aborts the request.
        """
        return self._outputs(prompt, params, incremental=True)

    async def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """The finished output of one request."""
        last = None
        async with contextlib.aclosing(self._outputs(prompt, params, incremental=False)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        return last

    async def _outputs(self, prompt: Prompt, params: SamplingParams, incremental: bool) -> AsyncGenerator[RequestOutput, None]:
        token_ids = await asyncio.to_thread(self.text.encode, prompt)
        submission = await self.submit([(prompt, token_ids)], params, incremental)
        try:
            while not submission.finished:
                for _, output in await submission.next():
                    yield output
        finally:
            submission.abort()

    async def submit(
        self, prompts: Sequence[tuple[Prompt | None, Sequence[int]]], params: SamplingParams, incremental: bool, deltas: bool = False
    ) -> Submission:
        """Queue a request for each prompt, given as what the caller knows it by and its token ids.

        Raises InvalidRequestError if any of them is refused, and then none is queued. ``incremental`` and ``deltas``: see ``TextEngine.add``.
        """
        submission = Submission(self)

        def add() -> None:
            for _, token_ids in prompts:
                self.text.check(token_ids, params)
            ids = [self.text.add(prompt, token_ids, params, incremental, deltas) for prompt, token_ids in prompts]
            submission.accept(ids)
            self._listeners.update((request_id, (submission, index)) for index, request_id in enumerate(ids))

        try:
            await asyncio.wrap_future(self._call(add))
        except asyncio.CancelledError:
            self.abort_soon(submission.request_ids, submission)
            raise
        return submission

    def abort_soon(self, request_ids: list[int], submission: Submission | None = None) -> None:
        """Give requests up before the next step; those of ``submission`` where their ids are not known yet."""
        with contextlib.suppress(EngineClosedError):
            self._call(lambda: self._abort(submission.request_ids if submission is not None else request_ids))

    async def reset_prefix_cache(self) -> None:
        """See ``LLM.reset_prefix_cache``."""
        await asyncio.wrap_future(self._call(self.text.core.reset_prefix_cache))

    async def stats(self) -> dict[str, Any]:
        """See ``LLM.stats``."""
        return await asyncio.wrap_future(self._call(self.text.core.stats))

    @property
    def stalled_for(self) -> float:
        """Seconds since the present step began; 0 if the engine is idle, infinite once its thread has ended."""
        since = self._busy_since
        if not self._thread.is_alive():
            return float("inf")
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs and end the thread; ``timeout`` seconds are waited for a step that hangs."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join(timeout)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread, between two steps."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine has been shut down; start a new one")
            self._calls.put(call)
        return future

    def _run(self) -> None:
        core = self.text.core
        while self._serve_calls(wait=not core.has_work):
            if core.has_work:
                self._busy_since = time.monotonic()
                self._step()
                self._busy_since = None
        self._abort([*self._listeners])

    def _serve_calls(self, wait: bool) -> bool:
        """Run queued calls; with ``wait``, at least one. Returns False once the engine is closed."""
        try:
            while True:
                call = self._calls.get(block=wait)
                if call is None:
                    return False
                call()
                wait = False
        except queue.Empty:
            return True

    def _step(self) -> None:
        try:
            self._deliver(self.text.step())
        except Exception as cause:
            ids = [*self._listeners]
            logger.exception("the engine failed between steps; requests %s end with an error", ids)
            error = EngineError(f"the engine failed while this request was running: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._abort(ids, error)

    def _abort(self, request_ids: Sequence[int], error: OctavoError | None = None) -> None:
        """End requests, and tell their listeners, with ``error`` as the reason if there is one."""
        ended = []
        for request_id in request_ids:
            if request_id not in self._listeners:
                continue
            try:
                output = self.text.abort(request_id)
            except Exception:
                logger.exception("request %d could not be aborted", request_id)
                output = None
            if error is not None or output is None:
                error = error or EngineError("the engine has lost this request")
                output = refused(request_id, None, (), error) if output is None else replace(output, error=error)
            ended.append(output)
        self._deliver(ended)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand all outputs of a step to their listeners, waking each event loop once."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Submission, Numbered]]] = {}
        for output in outputs:
            request_id = output.request_id
            submission, index = self._listeners.pop(request_id) if output.finished else self._listeners[request_id]
            batches.setdefault(submission.loop, []).append((submission, Numbered(index, output)))
        for loop, batch in batches.items():
            with contextlib.suppress(RuntimeError):  # the clients' loop is gone; nobody listens any more
                loop.call_soon_threadsafe(_push_all, batch)


def _push_all(batch: list[tuple[Submission, Numbered]]) -> None:
    for submission, item in batch:
        submission.push(item)
