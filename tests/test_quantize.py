"""``quantize`` from the outside: what runs, what is refused, and that the second start gives the tokens of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import LLM, ConfigError, SamplingParams
from octavo.cli import app
from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.memory import plan_cache
from octavo.kernels.backends import describe
from octavo.planner.memory_model import plan_memory
from tests.models import tiny

pytest.importorskip("transformers")

DEVICES = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not describe()["native"], reason="the native module is not built"))]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
PROMPTS = [[5, 9, 200], [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture
def floats(tmp_path: Path) -> str:
    tiny.write("untied", tmp_path / "model", **SIZES)
    tiny.write_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A GGUF whose matrices have four formats, three of them in one stack."""
    path = tmp_path / "mixed.gguf"
    formats = {"attn_q": "Q4_1", "attn_k": "Q8_0", "attn_v": "F16", "ffn_down": "Q5_1", "token_embd": "Q8_0"}
    tiny.write_gguf("untied", path, "Q4_0", formats=formats, **SIZES)
    return str(path)


def start(model: str, **settings: object) -> LLM:
    return LLM(model, num_blocks=100, max_num_seqs=4, max_num_batched_tokens=32, threads=1, **settings)  # type: ignore[arg-type]


def results(llm: LLM) -> list[tuple[object, ...]]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_second_start_is_the_first_to_the_bit(
    device: str, quantize: str, floats: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[tuple[object, ...]], str]:
        with start(floats, device=device, quantize=quantize) as llm:
            return results(llm), llm.describe()

    (first, made), (second, found) = run(), run()
    monkeypatch.setenv("OCTAVO_CACHE", "/dev/null")
    third, alone = run()
    assert first == second == third
    assert "kept in" in made and "found in" in found and "not kept for the next start: " in alone


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "Q4_0 + Q8_0 + Q4_1 + Q5_1 (kept), float32 (from F16)"),
        ({"quantize": "native"}, "Q4_0 + Q8_0 + Q4_1 + Q5_1 (kept), float32 (from F16)"),
        ({"dtype": "bfloat16"}, "bfloat16 (from Q4_0 + Q8_0 + Q4_1 + F16 + Q5_1)"),
        ({"dtype": "float32"}, "float32 (from Q4_0 + Q8_0 + Q4_1 + F16 + Q5_1)"),
        ({"quantize": "int8"}, "Q8_0 (quantised from Q4_0 + Q4_1 + F16 + Q5_1), Q8_0 (kept)"),
        ({"quantize": "int4"}, "Q4_1 (quantised from Q8_0 + F16 + Q5_1), Q4_0 + Q4_1 + Q8_0 (kept)"),
    ],
)  # fmt: skip
def test_what_runs_of_a_mixed_file(settings: dict[str, str], expected: str, mixed: str, cache: Path) -> None:
    with start(mixed, **settings) as llm:
        weights = llm.stats()["weights"]
        assert weights["formats"] == expected and f"weights: {expected}, " in llm.describe()
        assert len(results(llm)) == 3
        assert llm._open.weights.formats.nbytes == weights["bytes"]


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_plan_and_the_start_agree_to_the_block(quantize: str | None, mixed: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.cli_planning import find_model

    memory = 2**22
    monkeypatch.setattr("octavo.engine.build.available_memory", lambda: memory)
    plan = plan_memory(find_model(mixed), memory, CacheConfig(), SchedulerConfig(4, 32), quantize=quantize)
    with LLM(mixed, max_num_seqs=4, max_num_batched_tokens=32, threads=1, quantize=quantize) as llm:
        assert plan.engine == llm._open.cache
        assert plan.weights == llm._open.weights.nbytes and plan.formats == llm._open.weights.formats.describe()
    assert plan.settings.get("quantize") == quantize


def test_quantised_weights_leave_more_to_the_cache(floats: str, cache: Path) -> None:
    from octavo.cli_planning import find_model

    model = find_model(floats)
    kept = {q: plan_memory(model, 2**24, CacheConfig(), SchedulerConfig(4, 32), quantize=q).kv_memory for q in (None, "int8", "int4")}
    assert kept[None] < kept["int8"] < kept["int4"]
    with pytest.raises(ConfigError, match="has none"):
        plan_memory(model, 2**24, CacheConfig(), SchedulerConfig(), quantize="native")
    with pytest.raises(ConfigError, match="quantize is for weights that the engine runs"):
        plan_memory(model, 2**24, CacheConfig(), SchedulerConfig(), dtype="fp8", quantize="int8")


def test_weights_that_do_not_fit_name_the_way_out() -> None:
    from octavo.errors import MemoryConfigError
    from octavo.planner.known_models import KNOWN_MODELS

    with pytest.raises(MemoryConfigError, match="quantize='int4'"):
        plan_cache(KNOWN_MODELS["llama-3.1-8b"].spec, "bfloat16", CacheConfig(), SchedulerConfig(), 2**30)


def test_refusals(floats: str) -> None:
    with pytest.raises(ConfigError, match=r"quantize 'int5' is not known; choose one of native, int8, int4, or None"):
        start(floats, quantize="int5")
    with pytest.raises(ConfigError, match=r"keeps quantised weights as they are, but this model has none \(F32\)"):
        start(floats, quantize="native")


def test_the_command_line(floats: str, cache: Path) -> None:
    run = CliRunner().invoke
    result = run(
        app, ["generate", "ab", "--model", floats, "--quantize", "int8", "--num-blocks", "50", "--max-tokens", "4", "--threads", "1"]
    )
    assert result.exit_code == 0 and len(list(cache.iterdir())) == 1
    result = run(app, ["plan", floats, "--memory", "1GiB", "--quantize", "int4"])
    assert result.exit_code == 0 and "weights Q4_1 + Q8_0 (quantised from floats)" in result.output and "--quantize int4" in result.output
