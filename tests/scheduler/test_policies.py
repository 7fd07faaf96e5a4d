"""Queues against sorting."""

from __future__ import annotations

import random

import pytest

from octavo.limits import RequestLimits, make_request
from octavo.request import Request, SamplingParams
from octavo.scheduler.policies import POLICIES, RequestQueue


@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_is_always_sorted(policy: str) -> None:
    rng = random.Random(0)
    queue, model = RequestQueue(POLICIES[policy]), list[Request]()
    for number in range(500):
        if model and rng.random() < 0.4:
            gone = model.pop(rng.randrange(len(model)))
            assert gone in queue
            queue.remove(gone)
            assert gone not in queue
        else:
            params = SamplingParams(priority=rng.randint(-2, 2))
            model.append(make_request(number, [1], params, RequestLimits(10, 32, 32), float(rng.randint(0, 3))))
            queue.add(model[-1])
        key = {
            "fcfs": lambda r: (r.arrival_time, r.id),
            "priority": lambda r: (r.params.priority, r.arrival_time, r.id),
        }[policy]
        assert list(queue) == sorted(model, key=key) and len(queue) == len(model)
