"""The event loop: times worked out by hand, the order of simultaneous events, fleets and routers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.planner.latency_model import LinearLatency
from octavo.planner.replica import Record, Replica, SimConfig
from octavo.planner.report import latency, summarise, timeline, tpot, ttft
from octavo.planner.router import ROUTERS, LeastLoaded, PrefixAware, RoundRobin
from octavo.planner.simulate import ARRIVES, GIVES_UP, STEP_BEGINS, STEP_ENDS, Fleet, SimResult, simulate
from octavo.planner.workload import WORKLOADS, SimRequest, own_run, shared_run

CONFIG = SimConfig(4096, "paged", 16, SchedulerConfig(8, 64), 1024)
SECOND = LinearLatency(per_step=1.0)


def request(number: int, arrival: float, prompt: int = 10, output: int = 3, **more: object) -> SimRequest:
    return SimRequest(number, arrival, (own_run(number, prompt),), output, **more)  # type: ignore[arg-type]


def by_id(result: SimResult) -> dict[int, Record]:
    return {record.request.id: record for record in result.records}


def test_one_request_by_hand() -> None:
    result = simulate([request(0, 5.0, prompt=100, output=4)], CONFIG, LinearLatency(per_step=1.0, per_token=0.01))
    [record] = result.records
    # 64 and 36 prompt tokens, then 3 decodes.
    assert ttft(record) == pytest.approx(2 + 1.0) and latency(record) == pytest.approx(5 + 1.03)
    assert tpot(record) == pytest.approx(1.01) and result.seconds == pytest.approx(6.03)


def test_a_request_waits_for_the_step_that_runs() -> None:
    result = by_id(simulate([request(0, 0.0, output=3), request(1, 0.5, output=1), request(2, 1.0, output=1)], CONFIG, SECOND))
    assert ttft(result[1]) == pytest.approx(1.5)
    # It arrives just as the first step ends, and the next one begins with it.
    assert ttft(result[2]) == pytest.approx(1.0)


def test_simultaneous_events_happen_in_their_order() -> None:
    fleet = Fleet([Replica(0, CONFIG, SECOND)], RoundRobin(1))
    fleet.keep_order = True
    requests = [request(0, 0.0, output=2), request(1, 1.0, output=1), request(2, 0.0, output=9, cancel_after=1.0)]
    result = fleet.run(requests, CONFIG)
    assert [kind for time, kind in fleet.order if time == 1.0] == [STEP_ENDS, ARRIVES, GIVES_UP, STEP_BEGINS]
    given_up = by_id(result)[2]
    assert given_up.reason == "abort" and given_up.num_output == 1
    assert [time for time, _ in fleet.order] == sorted(time for time, _ in fleet.order)


def test_arrivals_at_the_same_time_keep_the_order_of_the_workload() -> None:
    one_at_a_time = SimConfig(4096, "paged", 16, SchedulerConfig(1, 64), 1024)
    result = simulate([request(number, 2.0, output=2) for number in range(6)], one_at_a_time, SECOND)
    assert [record.request.id for record in result.records] == list(range(6))


def test_a_caller_gives_up_between_two_steps() -> None:
    result = by_id(simulate([request(0, 0.0, output=9, cancel_after=2.5), request(1, 0.0, output=5)], CONFIG, SECOND))
    assert result[0].reason == "abort" and result[0].num_output == 3
    assert result[0].metrics is not None and result[0].metrics.finish_time == 3.0
    assert result[1].completed


def test_giving_up_after_the_end_changes_nothing() -> None:
    result = by_id(simulate([request(0, 0.0, output=2, cancel_after=50.0)], CONFIG, SECOND))
    assert result[0].completed


def test_the_next_turn_comes_after_the_answer() -> None:
    first = request(0, 1.0, prompt=40, output=30)
    second = SimRequest(1, 5.0, (*first.prompt, *request(1, 0.0).prompt), 2, follows=0)
    result = by_id(simulate([first, second], CONFIG, SECOND))
    assert result[1].arrival == 1.0 + 30 + 5.0
    assert result[1].metrics is not None and result[1].metrics.num_cached_tokens == 40


def test_what_is_too_long_is_refused_and_counted() -> None:
    result = by_id(simulate([request(0, 0.0, prompt=1023, output=9), request(1, 0.0)], CONFIG, SECOND))
    assert result[0].reason == "refused" and result[1].completed


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_answers_everybody(router: str) -> None:
    requests = WORKLOADS["agent"].at_rate(20.0).requests(150)
    config = SimConfig(40_000, "paged", 16, SchedulerConfig(64, 1024), 16_384)
    fleet = Fleet([Replica(i, config, LinearLatency(per_step=0.01, per_token=1e-5)) for i in range(3)], ROUTERS[router](3))
    result = fleet.run(requests, config)
    assert {r.request.id for r in result.records} == set(range(150))
    assert {r.replica for r in result.records} == {0, 1, 2}
    assert not any(replica.core.has_work or replica.live for replica in fleet.replicas)


@pytest.mark.parametrize("router", ["round_robin", "sticky"])
def test_processes_change_nothing(router: str) -> None:
    workload = WORKLOADS["rag" if router == "round_robin" else "agent"]
    requests = [replace(r, n=2) if r.id % 9 == 0 else r for r in workload.at_rate(20.0).requests(150)]
    requests.append(request(150, 3.0, prompt=17_000))  # refused
    config = SimConfig(40_000, "paged", 16, SchedulerConfig(64, 1024), 16_384)
    latency = LinearLatency(per_step=0.01, per_token=1e-5)
    one, several = (simulate(requests, config, latency, 7, router, processes) for processes in (1, 2))
    assert sorted(one.records, key=lambda r: r.request.id) == sorted(several.records, key=lambda r: r.request.id)
    assert (one.start, one.end) == (several.start, several.end)
    assert summarise(one) == summarise(several) and timeline(one) == timeline(several)


def test_turns_of_a_conversation_stay_at_a_sticky_replica() -> None:
    requests = WORKLOADS["agent"].at_rate(20.0).requests(150)
    config = SimConfig(40_000, "paged", 16, SchedulerConfig(64, 1024), 16_384)
    result = by_id(simulate(requests, config, LinearLatency(per_step=0.01, per_token=1e-5), 3, "sticky"))
    assert all(result[r.id].replica == result[r.follows].replica for r in requests if r.follows is not None)


def test_a_fleet_of_one_and_a_replica_by_itself_are_the_same() -> None:
    requests = WORKLOADS["chat"].at_rate(8.0).requests(60)
    model = LinearLatency(per_step=0.01, per_token=1e-4)
    assert simulate(requests, CONFIG, model).records == simulate(requests, CONFIG, model, 1, LeastLoaded(1)).records


def test_routers_choose_as_they_say() -> None:
    robin = RoundRobin(3)
    assert [robin.choose(request(i, 0.0)) for i in range(4)] == [0, 1, 2, 0]
    least = LeastLoaded(2)
    sizes = [100, 10, 10, 200]
    assert [least.choose(request(i, 0.0, prompt=n)) for i, n in enumerate(sizes)] == [0, 1, 1, 1]
    least.ended(request(3, 0.0, prompt=200), 1)
    assert least.load == [100, 20]


def test_the_prefix_router_follows_beginnings_until_it_is_lopsided() -> None:
    router, chance = PrefixAware(4), random.Random(0)

    def asks(number: int) -> SimRequest:
        return SimRequest(number, 0.0, (shared_run(7, 500), own_run(number, chance.randint(1, 9))), 1)

    homes = [router.choose(asks(i)) for i in range(3)]
    assert homes[0] == homes[1]
    assert len({router.choose(asks(i)) for i in range(3, 40)}) > 1


def test_prefix_routing_finds_more_than_round_robin() -> None:
    requests = WORKLOADS["document"].at_rate(3.0).requests(200)
    config = SimConfig(120_000, "paged", 16, SchedulerConfig(64, 2048), 16_384)
    found = {}
    for router in ("round_robin", "prefix_aware"):
        result = simulate(requests, config, LinearLatency(per_step=0.005, per_token=1e-5), 4, router)
        found[router] = sum(r.metrics.num_cached_tokens for r in result.records if r.metrics is not None)
    assert found["prefix_aware"] > 1.2 * found["round_robin"]


def test_an_unknown_router_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="prefix_aware"):
        simulate([request(0, 0.0)], CONFIG, SECOND, 2, "psychic")
