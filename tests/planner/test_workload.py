"""Workloads and traces: what they share, when they arrive, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.planner.traces import read_trace
from octavo.planner.workload import WORKLOADS, Run, SimRequest, named_workload, output_token, own_run, shared_run

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not beside the repository")


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_reproducible_and_fit(name: str) -> None:
    workload = WORKLOADS[name]
    requests = workload.requests(120, seed=3)
    assert requests == workload.requests(120, seed=3) != workload.requests(120, seed=4)
    assert [r.id for r in requests] == list(range(120))
    assert all(r.output_len >= 1 and r.prompt_len >= 1 and r.num_tokens <= workload.max_model_len for r in requests)


def test_requests_arrive_at_the_rate_of_the_workload() -> None:
    requests = WORKLOADS["rag"].at_rate(50.0).requests(5000)
    assert 5000 / requests[-1].arrival == pytest.approx(50.0, rel=0.06)


def test_a_turn_repeats_what_was_said() -> None:
    requests = WORKLOADS["chat"].requests(200)
    followers = [r for r in requests if r.follows is not None]
    assert followers
    for request in followers:
        before = requests[request.follows or 0]
        said = before.token_ids().tolist() + [output_token(before.id)] * before.output_len
        assert request.token_ids().tolist()[: len(said)] == said


def test_prompts_share_no_more_than_they_should() -> None:
    a, b = (SimRequest(i, 0.0, (shared_run(7, 5), own_run(i, 3)), 1) for i in (1, 2))
    x, y = a.token_ids().tolist(), b.token_ids().tolist()
    assert len(x) == len(y) == 8 and x[:5] == y[:5] and not set(x[5:]) & set(y[5:])
    assert not {output_token(1), output_token(2)} & {*x, *y}


def test_an_unknown_workload_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="chat, code, rag"):
        named_workload("weather")


def test_csv_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01.5000000,10,2\n2023-11-16 18:00:00.2500000,20,0\n")
    first, second = read_trace(path)
    assert (first.id, first.arrival, first.prompt_len, first.output_len) == (0, 0.0, 20, 1)
    assert (second.arrival, second.prompt_len, second.output_len) == (pytest.approx(1.25), 10, 2)
    assert read_trace(path, speed=5)[1].arrival == pytest.approx(0.25)


def test_json_trace_shares_by_hash(tmp_path: Path) -> None:
    lines = [{"timestamp": 2000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1 + i // 2, 9 + i]} for i in range(3)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    a, b, c = (r.token_ids().tolist() for r in read_trace(path))
    assert (len(a), a[:1024] == b[:1024], a[1024] == b[1024], a[:512] == c[:512], a[512] == c[512]) == (1100, True, False, True, False)
    assert [r.arrival for r in read_trace(path)] == [0.0, 2.0, 4.0]


def test_a_trace_may_ask_for_samples_and_beams(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 5} | more) for more in ({}, {"n": 3}, {"beam_width": 4}))
    )
    assert [(r.n, r.beams) for r in read_trace(path)] == [(1, False), (3, False), (4, True)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:00:01,10\n", "request 1"),
        ("b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,10,3\n", "request 1"),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("d.jsonl", "{nonsense", "line 1"),
        ("e.jsonl", '{"timestamp": 0, "input_length": -3, "output_length": 1}', "-3 prompt"),
        ("f.jsonl", '{"timestamp": 0, "input_length": 3, "output_length": 1, "n": 1000}', "1000 outputs"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="no trace"):
        read_trace(tmp_path / "absent.csv")


@needs_traces
def test_the_shared_traces_are_read() -> None:
    conversation = read_trace(TRACES / "azure_llm_2023_conv.csv")
    assert len(conversation) == 19_366 and (conversation[0].prompt_len, conversation[0].output_len) == (374, 44)
    mooncake = read_trace(TRACES / "mooncake_conversation.jsonl", 50)
    assert mooncake[0].prompt[0] == mooncake[1].prompt[0] == Run(2**30, 512)
    assert [r.prompt_len for r in mooncake[:3]] == [6758, 7322, 7236]
