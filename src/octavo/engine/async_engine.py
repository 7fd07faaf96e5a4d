"""The engine for many clients at once: one thread steps it, asyncio tasks submit requests and listen to their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from octavo.engine.outputs import RequestOutput
from octavo.engine.text_engine import Prompt, TextEngine
from octavo.errors import EngineClosedError
from octavo.request import SamplingParams

T = TypeVar("T")


class AsyncEngine:
    """Owns the thread in which the engine lives; nothing else touches the engine once it runs.

    Use it as an async context manager, or call ``close``. Requests are aborted when their iterator is closed.
    """

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, Callable[[RequestOutput], None]] = {}
        self._closed = False
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
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        token_ids = await asyncio.to_thread(self._engine.encode, prompt)

        def submit() -> int:
            request_id = self._engine.add(prompt, token_ids, params, incremental)
            self._listeners[request_id] = lambda output: _deliver(loop, outputs, output)
            return request_id

        request_id = await asyncio.wrap_future(self._call(submit))
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                finished = output.finished
                yield output
        finally:
            if not finished and not self._closed:
                self._call(lambda: self._abort(request_id))

    async def reset_prefix_cache(self) -> None:
        """See ``LLM.reset_prefix_cache``."""
        await asyncio.wrap_future(self._call(self._engine.core.reset_prefix_cache))

    async def stats(self) -> dict[str, Any]:
        """See ``LLM.stats``."""
        return await asyncio.wrap_future(self._call(self._engine.core.stats))

    def close(self) -> None:
        """Abort what runs and end the thread."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        self._thread.join()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread, between two steps."""
        if self._closed:
            raise EngineClosedError("the engine has been shut down; start a new one")
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def _run(self) -> None:
        open_ = True
        while open_:
            open_ = self._serve_calls(wait=not self._engine.core.has_work)
            if open_ and self._engine.core.has_work:
                self._step()
        for request_id in list(self._listeners):
            self._abort(request_id)

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
        for output in self._engine.step():
            self._notify(output)

    def _abort(self, request_id: int) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._notify(output)

    def _notify(self, output: RequestOutput) -> None:
        listener = self._listeners.pop(output.request_id) if output.finished else self._listeners[output.request_id]
        listener(output)


def _deliver(loop: asyncio.AbstractEventLoop, outputs: asyncio.Queue[RequestOutput], output: RequestOutput) -> None:
    with contextlib.suppress(RuntimeError):  # the client's loop is gone; its request has no listener any more
        loop.call_soon_threadsafe(outputs.put_nowait, output)
