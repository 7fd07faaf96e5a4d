"""How often, and how far, a round of admissions looks past requests that do not fit."""

from __future__ import annotations

from octavo.limits import RequestLimits, make_request
from octavo.request import Request, SamplingParams
from octavo.scheduler.admission import Passing


def request(number: int) -> Request:
    return make_request(number, [1], SamplingParams(), RequestLimits(10, 32, 32), 0.0)


def test_each_skipped_request_counts_those_that_pass_it() -> None:
    passing, first, second = Passing(2), request(0), request(1)
    passing.skip(first)
    passing.admitted()
    passing.skip(second)
    assert passing.allowed
    passing.admitted()
    assert (first.num_passed_over, second.num_passed_over, passing.allowed) == (2, 1, False)
    later = Passing(2)
    later.skip(first)
    assert not later.allowed


def test_no_step_looks_at_more_than_its_share_of_a_long_queue() -> None:
    passing = Passing(3)
    for number in range(3):
        passing.skip(request(number))
        assert passing.allowed
    passing.skip(request(3))
    assert not passing.allowed


def test_zero_lets_nobody_pass() -> None:
    passing = Passing(0)
    assert passing.allowed
    passing.skip(request(0))
    assert not passing.allowed
