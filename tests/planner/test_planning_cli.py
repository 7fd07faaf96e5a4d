"""``octavo plan`` and ``octavo simulate`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.planner.latency_model import LinearLatency
from octavo.planner.profile import AttentionTime, Profile, profile_path, read_profile

PROFILE = Profile(
    "smollm2-135m", "auto", None, "an abacus", 16, LinearLatency(per_step=0.01, per_token=1e-5, per_context=1e-6),
    {1: AttentionTime(2e-9, 1e-9), 16: AttentionTime(1e-9, 1e-9)}, {"p50": 0.01, "p90": 0.02, "sum": 0.0},
)  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_plan_prints_what_fits() -> None:
    result = run("plan", "llama-3.1-8b", "--memory", "24GiB", "--max-model-len", "8192")
    assert result.exit_code == 0
    for part in ("131,072 bytes (bfloat16)", "3,888", "The engine, started", "--kv-memory 8153726976"):
        assert part in result.output


def test_plan_as_json_with_a_load() -> None:
    result = run("plan", "llama-3.1-70b", "--gpu", "H100", "--rate", "50", "--json")
    data = json.loads(result.output)
    assert data["tensor_parallel"] == 2 and data["load"]["replicas"] >= 2 and data["settings"]["block_size"] == 16


def test_plan_of_what_does_not_fit_fails_and_says_what_would() -> None:
    result = run("plan", "llama-3.1-70b", "--memory", "24GiB")
    assert result.exit_code == 1 and "What would fit" in result.output and "8 such devices" in result.output


def test_simulate_a_trace_with_two_schemes(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:00:{i:02d},{100 + i},{5 + i}" for i in range(30)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    profile = tmp_path / "profile.json"
    PROFILE.save(profile)
    result = run("simulate", "--trace", str(trace), "--scheme", "paged,oracle", "--profile", str(profile), "--kv-memory", "2GiB", "--json")
    data = json.loads(result.output)
    assert set(data["runs"]) == {"paged", "oracle"} and data["runs"]["paged"]["requests"]["completed"] == 30


def test_a_profile_of_the_model_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert "published figures of A100-40GB" in run("simulate", "-m", "smollm2-135m", "--num-requests", "20").output
    PROFILE.save(profile_path("smollm2-135m"))
    assert read_profile(profile_path("smollm2-135m")) == PROFILE
    swept = run("simulate", "-m", "smollm2-135m", "--num-requests", "20", "--block-size", "1,16", "--kv-memory", "1GiB").output
    assert "measured on an abacus" in swept and "attention, us/1k keys" in swept
    assert "published figures of H100" in run("simulate", "-m", "smollm2-135m", "--num-requests", "20", "--gpu", "H100").output
    assert "measured on an abacus" in run("plan", "smollm2-135m", "--memory", "4GiB", "--rate", "3").output


def test_wrong_arguments_say_what_is_legal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.json").write_text('{"per_day": 3}')
    for arguments, says in (
        (("simulate", "weather"), "chat, code"),
        (("simulate", "--gpu", "abacus"), "H100"),
        (("simulate", "--profile", str(tmp_path / "l.json")), "octavo bench kernels"),
        (("simulate", "--scheme", "slab"), "oracle"),
        (("plan", "no-such-model", "--memory", "1GiB"), "llama-3.1-8b"),
        (("plan", "llama-3.1-8b", "--memory", "24GiB", "--rate", "3"), "--gpu"),
    ):
        result = run(*arguments)
        assert result.exit_code != 0 and says in str(result.exception), arguments
