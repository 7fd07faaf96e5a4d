"""Workloads and traces: what they share, when they arrive, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
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


@pytest.mark.parametrize("max_model_len", [2, 3, 50, 1000, 4096, 8192])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_fit_into_a_shorter_context_too(name: str, max_model_len: int) -> None:
    """Shared beginnings are cut as well."""
    requests = replace(WORKLOADS[name], max_model_len=max_model_len).requests(60)
    assert len(requests) == 60
    assert all(r.output_len >= 1 and r.prompt_len >= 1 and r.num_tokens <= max_model_len for r in requests)


def test_a_shared_beginning_leaves_room_for_a_question_and_its_answer() -> None:
    document = WORKLOADS["document"]
    requests = replace(document, max_model_len=8192).requests(300)
    cut = [r for r in requests if r.prompt[0].length == 8192 - 60 - 300]
    assert len(cut) > 30 and sum(r.output_len for r in cut) / len(cut) > 100
    assert document.requests(300) == replace(document, max_model_len=20_000).requests(300)  # nothing is cut that fits


def test_a_prompt_can_be_begun_without_the_rest() -> None:
    request = SimRequest(1, 0.0, (shared_run(7, 5), own_run(1, 10**12)), 1)
    assert request.token_ids(8).tolist() == [*[2**30 + 7] * 5, 2, 2, 2] and len(request.token_ids(3)) == 3


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


@pytest.mark.parametrize("name", ["t.csv", "T.CSV"])
@pytest.mark.parametrize("offset", ["", "+00:00", "Z", "-07:30"])
def test_fractions_of_seconds_count_with_any_offset(tmp_path: Path, name: str, offset: str) -> None:
    path = tmp_path / name
    times = ("00.0099", "00.509930", "01.9", "03")
    rows = "\n".join(f"2024-05-10 00:00:{time}{offset},10,2" for time in times)
    path.write_text(f"\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n", encoding="utf-8")
    assert [r.arrival for r in read_trace(path)] == pytest.approx([0.0, 0.50003, 1.8901, 2.9901], abs=1e-5)


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
        ("g.jsonl", "[1, 2, 3]", "request 1: it has no fields"),
        ("h.jsonl", "5", "request 1: it has no fields"),
        ("i.jsonl", '{"timestamp": 0, "input_length": 1e999, "output_length": 1}', "request 1"),
        ("j.jsonl", '{"timestamp": NaN, "input_length": 3, "output_length": 1}', "request 1: it arrives at nan"),
        ("k.jsonl", '{"arrival": Infinity, "input_length": 3, "output_length": 1}', "request 1: it arrives at inf"),
        ("l.csv", "arrival,ContextTokens,GeneratedTokens\n-inf,10,3\n", "request 1: it arrives at -inf"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": 5}', "request 1"),
        ("n.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe,10,3\n", "not text in UTF-8"),
        ("o.jsonl", b'{"timestamp": "\xff"}', "not text in UTF-8"),
        ("p.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000 + ",10,3\n", "not CSV"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str | bytes, says: str) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="no trace"):
        read_trace(tmp_path / "absent.csv")


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_trace_is_played_at_a_positive_speed(tmp_path: Path, speed: float) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5}')
    with pytest.raises(ConfigError, match="speed must be a positive number"):
        read_trace(path, speed=speed)


@needs_traces
def test_the_shared_traces_are_read() -> None:
    conversation = read_trace(TRACES / "azure_llm_2023_conv.csv")
    assert len(conversation) == 19_366 and (conversation[0].prompt_len, conversation[0].output_len) == (374, 44)
    mooncake = read_trace(TRACES / "mooncake_conversation.jsonl", 50)
    assert mooncake[0].prompt[0] == mooncake[1].prompt[0] == Run(2**30, 512)
    assert [r.prompt_len for r in mooncake[:3]] == [6758, 7322, 7236]
