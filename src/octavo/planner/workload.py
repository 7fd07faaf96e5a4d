"""What a simulated engine is asked: requests with arrival times, lengths and shared beginnings, but no text.

A prompt is runs of equal tokens, so that it takes no memory until it arrives, and so that two prompts begin alike exactly
as far as their runs do:

    Run(shared 7, 512) Run(shared 9, 300) Run(own 41, 88)      the first 812 tokens are those of another request
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.planner.arrivals import Arrivals, Lengths
from octavo.request import MAX_BEST_OF

VOCAB_SIZE = 2**31 - 1
"""Simulated tokens are below this."""
_SHARED = 2**30


class Run(NamedTuple):
    """``length`` times the same token."""

    token: int
    length: int


def shared_run(number: int, length: int) -> Run:
    """Tokens that all requests with this number share."""
    return Run(_SHARED + number % (_SHARED - 1), length)


def own_run(request_id: int, length: int) -> Run:
    """Prompt tokens that no other request has."""
    return Run(2 * request_id % _SHARED, length)


def output_token(request_id: int, sample: int = 0) -> int:
    """The token that the output of one sample of a simulated request is made of; no other of the first four million has it."""
    return (2 * (MAX_BEST_OF * request_id + sample) + 1) % _SHARED


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload."""

    id: int
    """Its number in the workload."""
    arrival: float
    """Seconds from the start; with ``follows``, seconds after that request's end."""
    prompt: tuple[Run, ...]
    output_len: int
    follows: int | None = None
    """The request whose answer this one goes on from (a chat's next turn): it arrives after that one has ended."""
    cancel_after: float | None = None
    """Its caller gives up so many seconds after its arrival."""
    n: int = 1
    """Outputs: samples that share the prompt, or with ``beams`` the beams of a search."""
    beams: bool = False

    @property
    def prompt_len(self) -> int:
        return sum(run.length for run in self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens of each of its samples at the end: prompt and output."""
        return self.prompt_len + self.output_len

    def token_ids(self, most: int | None = None) -> array[int]:
        """The prompt, or its first ``most`` tokens; type code 'i'."""
        tokens, left = array("i"), self.prompt_len if most is None else most
        for run in self.prompt:
            length = min(run.length, left)
            tokens.extend(array("i", [run.token]) * length)
            left -= length
        return tokens


def with_outputs(requests: Iterable[SimRequest], n: int | None = None, beam_width: int | None = None) -> list[SimRequest]:
    """The same requests, each with ``n`` samples or with the beams of a search. Raises ConfigError for both, and for numbers out of range."""
    count = n if beam_width is None else beam_width
    if count is None or (n is not None and beam_width is not None):
        raise ConfigError("requests draw n samples or keep beam_width beams: give one of the two")
    if not 1 <= count <= MAX_BEST_OF:
        raise ConfigError(f"{count} outputs of a request are not legal: from 1 to {MAX_BEST_OF}")
    return [replace(request, n=count, beams=beam_width is not None) for request in requests]


ONE = Lengths("fixed", 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """A way to draw requests. Every figure is an assumption of ours, written down here; none is a measurement."""

    name: str
    about: str
    arrivals: Arrivals
    prompt: Lengths
    """Tokens of the prompt that are the request's own."""
    output: Lengths
    num_prefixes: int = 0
    """Different shared beginnings (system prompts, documents, few-shot examples); each request takes one at random."""
    prefix: Lengths = ONE
    """Tokens of a shared beginning, cut where no prompt and output of mean lengths would fit behind it."""
    turns: Lengths = ONE
    """Requests of a conversation; each repeats all that was said before, and adds its own."""
    think_time: float = 0.0
    """Mean seconds, exponential, between an answer and the next turn."""
    cancelled: float = 0.0
    """Share of requests that their callers give up, after an exponential time of mean ``patience``."""
    patience: float = 10.0
    max_model_len: int = 8192
    """Requests are drawn to fit into this."""

    def at_rate(self, rate: float) -> Workload:
        """The same with another number of requests a second."""
        return replace(self, arrivals=replace(self.arrivals, rate=rate))

    def requests(self, count: int, seed: int = 0) -> list[SimRequest]:
        """Draw ``count`` requests; the same ones for the same seed. Conversations start at the arrival process's rate over their turns."""
        return list(islice(self._draw(seed, count), count))

    def _draw(self, seed: int, count: int) -> Iterator[SimRequest]:
        chance = random.Random(f"{self.name}-{seed}")
        prefixes = [shared_run(number, min(self.prefix.draw(chance), self._longest_prefix)) for number in range(self.num_prefixes)]
        turns = [self.turns.draw(chance) for _ in range(count)]
        arrivals = replace(self.arrivals, rate=self.arrivals.rate * count / sum(turns))
        request_id = 0
        for arrival, num_turns in zip(arrivals.times(chance), turns, strict=False):
            said: tuple[Run, ...] = (chance.choice(prefixes),) if prefixes and self._longest_prefix else ()
            for turn in range(num_turns):
                request = self._turn(chance, request_id, arrival, said, turn)
                yield request
                said = (*request.prompt, Run(output_token(request.id), request.output_len))
                request_id += 1
                if sum(run.length for run in said) + max(2.0, self.prompt.mean) > self.max_model_len:
                    break

    @property
    def _longest_prefix(self) -> int:
        """Most tokens of a shared beginning: what mean lengths leave, or half where they leave less; none where two tokens are all."""
        return max(self.max_model_len - round(self.prompt.mean + self.output.mean), (self.max_model_len - 1) // 2)

    def _turn(self, chance: random.Random, request_id: int, arrival: float, said: tuple[Run, ...], turn: int) -> SimRequest:
        room = self.max_model_len - sum(run.length for run in said)
        prompt_len = max(1, min(self.prompt.draw(chance), room - 1))
        output_len = max(1, min(self.output.draw(chance), room - prompt_len))
        cancel = chance.expovariate(1 / self.patience) if chance.random() < self.cancelled else None
        follows = request_id - 1 if turn else None
        if turn:
            arrival = chance.expovariate(1 / self.think_time) if self.think_time else 0.0
        return SimRequest(request_id, arrival, (*said, own_run(request_id, prompt_len)), output_len, follows, cancel)


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS = _named(
    Workload(
        "chat",
        "People talking: short turns, each repeating what was said; one of 4 system prompts.",
        Arrivals("poisson", 4.0),
        prompt=Lengths("lognormal", 80, 1.2, high=2048),
        output=Lengths("lognormal", 240, 0.9, high=2048),
        num_prefixes=4,
        prefix=Lengths("fixed", 200),
        turns=Lengths("lognormal", 3.5, 0.8, high=20),
        think_time=20.0,
        cancelled=0.03,
    ),
    Workload(
        "code",
        "Completion in an editor: long context of its own, short answers, many given up as typing goes on.",
        Arrivals("gamma", 6.0, cv=2.0),
        prompt=Lengths("lognormal", 1800, 0.8, high=7000),
        output=Lengths("lognormal", 40, 1.0, high=512),
        num_prefixes=1,
        prefix=Lengths("fixed", 60),
        cancelled=0.25,
        patience=2.0,
    ),
    Workload(
        "rag",
        "Questions over retrieved passages: one system prompt, then passages that rarely repeat in the same order.",
        Arrivals("poisson", 3.0),
        prompt=Lengths("lognormal", 2500, 0.5, high=7000),
        output=Lengths("lognormal", 180, 0.7, high=1024),
        num_prefixes=1,
        prefix=Lengths("fixed", 350),
    ),
    Workload(
        "agent",
        "Tool loops: a long fixed prompt of tools, many quick turns that grow, short answers, bursts.",
        Arrivals("bursts", 4.0, burst=15.0, peak=3.0),
        prompt=Lengths("lognormal", 250, 1.0, high=4000),
        output=Lengths("lognormal", 90, 1.0, high=1024),
        num_prefixes=3,
        prefix=Lengths("fixed", 1500),
        turns=Lengths("lognormal", 8, 0.7, high=40),
        think_time=1.0,
        max_model_len=16_384,
    ),
    Workload(
        "document",
        "Questions about long documents: 40 documents, each asked about again and again.",
        Arrivals("poisson", 1.0),
        prompt=Lengths("lognormal", 60, 0.7, high=512),
        output=Lengths("lognormal", 300, 0.8, high=2048),
        num_prefixes=40,
        prefix=Lengths("lognormal", 6000, 0.5, low=1000, high=12_000),
        max_model_len=16_384,
    ),
    Workload(
        "enterprise",
        "A company's day: few long system prompts, forms in, reports out, everybody at the same hours.",
        Arrivals("bursts", 3.0, burst=30.0, peak=2.0),
        prompt=Lengths("lognormal", 700, 1.0, high=5000),
        output=Lengths("lognormal", 400, 0.8, high=2048),
        num_prefixes=6,
        prefix=Lengths("fixed", 800),
    ),
    Workload(
        "classify",
        "Long texts in, one label out: arithmetic binds, memory does not, so paging gains nothing.",
        Arrivals("poisson", 8.0),
        prompt=Lengths("lognormal", 1500, 0.4, high=4000),
        output=Lengths("fixed", 1),
    ),
)  # fmt: skip


def named_workload(name: str) -> Workload:
    """A workload by its name. Raises ConfigError with the list."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is not known; choose one of {', '.join(WORKLOADS)}, or give a trace file")
    return WORKLOADS[name]
