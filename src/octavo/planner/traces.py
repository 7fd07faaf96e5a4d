"""Requests from trace files: CSV or JSON lines with arrival times, lengths and, where known, what prompts share."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.planner.workload import SimRequest, own_run, shared_run
from octavo.request import MAX_BEST_OF

_NAMES = {
    "time": ("TIMESTAMP", "timestamp", "arrival", "arrival_time", "arrived_at"),
    "prompt": ("ContextTokens", "input_length", "prompt_len", "num_prefill_tokens", "request_tokens"),
    "output": ("GeneratedTokens", "output_length", "output_len", "num_decode_tokens", "response_tokens"),
}
_FORM = (
    "a trace is a CSV file or JSON lines; each request has its arrival (seconds, or ISO date and time; in JSON lines called "
    f"'timestamp': milliseconds), prompt and output tokens, under one of the names {_NAMES['time']}, {_NAMES['prompt']} and "
    f"{_NAMES['output']}; it may have hash_ids, one for each hash_block (512) tokens of the prompt, and n samples or a beam_width"
)


def read_trace(path: Path, count: int | None = None, hash_block: int = 512, speed: float = 1.0) -> list[SimRequest]:
    """The first ``count`` requests of a trace, in order of arrival, times counted from the first one and divided by ``speed``.

    Equal ``hash_ids`` at the beginnings of two prompts mean equal tokens there, ``hash_block`` tokens for each id
    (Mooncake, FAST 2025). Raises ConfigError that names file, line and what a trace is.
    """
    if not path.is_file():
        raise ConfigError(f"there is no trace {path}; {_FORM}")
    if speed <= 0:
        raise ConfigError(f"speed must be positive, not {speed}")
    requests = []
    for index, line in enumerate(islice(_lines(path), count)):
        try:
            requests.append(_request(index, line, hash_block))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, request {index + 1}: {error}; {_FORM}") from None
    if not requests:
        raise ConfigError(f"{path} has no requests; {_FORM}")
    requests.sort(key=lambda r: (r.arrival, r.id))
    first = requests[0].arrival
    return [replace(r, id=index, arrival=(r.arrival - first) / speed) for index, r in enumerate(requests)]


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number} is not JSON: {error}; {_FORM}") from None


def _request(index: int, line: Mapping[str, Any], hash_block: int) -> SimRequest:
    prompt_len, output_len = int(_field(line, "prompt")), int(_field(line, "output"))
    if prompt_len < 1 or output_len < 0:
        raise ValueError(f"{prompt_len} prompt and {output_len} output tokens")
    left, runs = prompt_len, []
    for hash_id in line.get("hash_ids") or ():
        length = min(left, hash_block)
        if length > 0:
            runs.append(shared_run(int(hash_id), length))
        left -= length
    if left > 0:
        runs.append(own_run(index, left))
    beams = line.get("beam_width") or None
    n = int(beams or line.get("n") or 1)
    if not 1 <= n <= MAX_BEST_OF:
        raise ValueError(f"{n} outputs; legal are 1 to {MAX_BEST_OF}")
    return SimRequest(index, _time(line), tuple(runs), max(1, output_len), n=n, beams=beams is not None)


def _field(line: Mapping[str, Any], kind: str) -> Any:
    for name in _NAMES[kind]:
        if line.get(name) is not None:
            return line[name]
    raise ValueError(f"none of the fields {_NAMES[kind]}")


def _time(line: Mapping[str, Any]) -> float:
    value = _field(line, "time")
    if isinstance(value, int | float):
        return value / 1000 if "timestamp" in line else float(value)
    try:
        return float(value)
    except ValueError:
        pass
    text = str(value)
    date, _, fraction = text.partition(".")  # Azure writes seven digits
    return datetime.fromisoformat(date).timestamp() + (float(f"0.{fraction}") if fraction.isdigit() else 0.0)
