"""``octavo chat``: a conversation on the terminal."""

from __future__ import annotations

import sys

from octavo.errors import ContextLengthError
from octavo.llm import LLM
from octavo.request import SamplingParams


def talk(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read messages and stream answers until the end of input or /exit."""
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    if sys.stdin.isatty():
        print(f"{llm.describe()}\nCtrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts anew.")
    while (text := _ask()) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(first)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except ContextLengthError as error:
                messages.pop()
                print(f"{error}\nThe conversation is full: /reset starts anew.")


def _ask() -> str | None:
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream an answer; Ctrl-C ends it early and keeps what has been said."""
    parts: list[str] = []
    stream = llm.stream_chat(messages, params)
    try:
        for output in stream:
            parts.append(output.outputs[0].text)
            print(parts[-1], end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        stream.close()
    print()
    return "".join(parts)
