"""Chat templates rendered in a process of their own, which can be ended.

A template is code from wherever the model came from. The sandbox of ``chat_template`` keeps it from the system, but not from nested loops
or from lists of lists of lists that take all memory when they are printed. Here it has a deadline and a limit on memory, and what exceeds
either costs a process that is started again.

    server   {"messages", "variables"}  ->  worker      one line of JSON each way
             {"text"} or {"error"}      <-
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from octavo.errors import InvalidRequestError
from octavo.text.chat_template import ChatTemplate, check_messages

EXTRA_MEMORY = 256 * 2**20
"""Bytes that rendering may take, beyond what the worker has at its start."""


class TemplateWorker:
    """Renders one template; may be used from any thread, one at a time gets its turn."""

    def __init__(self, template: ChatTemplate, timeout: float = 2.0) -> None:
        self.source = template.source
        self._setup = json.dumps({"source": template.source, "tokens": template.tokens}).encode() + b"\n"
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process now, rather than at the first use."""
        with self._lock:
            self._started()

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """As ``ChatTemplate.render``; InvalidRequestError also for a template that takes too long or too much memory."""
        request = json.dumps({"messages": check_messages(messages), "variables": variables}).encode() + b"\n"
        with self._lock:
            reply = self._ask(request)
        if "error" in reply:
            raise InvalidRequestError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + self._timeout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = _read_line(process.stdout, deadline)
        except BrokenPipeError:
            line = b""
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        self._end()
        why = f"took more than {self._timeout:g} s" if time.monotonic() >= deadline else "took more memory than it is given"
        return {"error": f"the model's chat template {why} with these messages; send fewer or shorter ones"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            path = os.pathsep.join(part for part in sys.path if part)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(self._setup)
            self._process.stdin.flush()
            _read_line(self._process.stdout, time.monotonic() + 30)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def _read_line(pipe: IO[bytes], deadline: float) -> bytes:
    """One line, without its end; empty if it does not come in time, or never will."""
    parts = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(pipe.fileno(), 65536) if ready else b""
        if not part:
            return b""
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)[:-1]


def main() -> None:
    """The worker: a template, then conversations, line by line."""
    setup = json.loads(sys.stdin.buffer.readline())
    template = ChatTemplate(setup["source"], setup["tokens"]["bos_token"], setup["tokens"]["eos_token"])
    template.compile()
    _limit_memory()
    _reply({"ready": True})
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            text = template.render(request["messages"], **request["variables"])
            _reply({"text": text})
        except InvalidRequestError as error:
            _reply({"error": str(error)[:2000]})


def _reply(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_MEMORY, size + EXTRA_MEMORY))


if __name__ == "__main__":
    main()
