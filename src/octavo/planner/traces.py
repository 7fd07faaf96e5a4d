"""Requests from trace files: CSV or JSON lines with arrival times, lengths and, where known, what prompts share."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

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
    if not (speed > 0 and math.isfinite(speed)):
        raise ConfigError(f"speed must be a positive number, not {speed}")
    requests = []
    for index, line in enumerate(islice(_lines(path), count)):
        try:
            requests.append(_request(index, line, hash_block))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}, request {index + 1}: {error}; {_FORM}") from None
    if not requests:
        raise ConfigError(f"{path} has no requests; {_FORM}")
    requests.sort(key=lambda r: (r.arrival, r.id))
    first = requests[0].arrival
    return [replace(r, id=index, arrival=(r.arrival - first) / speed) for index, r in enumerate(requests)]


def _lines(path: Path) -> Iterator[Any]:
    """What each line holds, whatever it is."""
    read = _csv_lines if path.suffix.lower() == ".csv" else _json_lines
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from read(path, file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}; {_FORM}") from None
    except csv.Error as error:
        raise ConfigError(f"{path} is not CSV: {error}; {_FORM}") from None


def _csv_lines(path: Path, file: TextIO) -> Iterator[Any]:
    yield from csv.DictReader(file)


def _json_lines(path: Path, file: TextIO) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}; {_FORM}") from None


def _request(index: int, line: Any, hash_block: int) -> SimRequest:
    if not isinstance(line, Mapping):
        raise ValueError(f"it has no fields: {str(line)[:40]}")
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
    """Seconds. Raises ValueError for what is no time, and for one that never comes."""
    value = _field(line, "time")
    if isinstance(value, int | float):
        seconds = value / 1000 if "timestamp" in line else float(value)
    else:
        try:
            seconds = float(value)
        except ValueError:
            seconds = _iso_time(str(value))
    if not math.isfinite(seconds):
        raise ValueError(f"it arrives at {value}")
    return seconds


def _iso_time(text: str) -> float:
    """Seconds of an ISO date and time, with any number of digits of a second (Azure writes seven), and an offset or none.

    >>> round(_iso_time("2024-05-10 00:00:00.5099300+00:00") - _iso_time("2024-05-10 02:00:00+02:00"), 6)
    0.50993
    """
    fraction = re.search(r"(?<=:\d\d)\.\d+", text)
    whole = text if fraction is None else text[: fraction.start()] + text[fraction.end() :]
    moment = datetime.fromisoformat(whole)
    return moment.timestamp() + (0.0 if fraction is None else float(fraction[0]))
