"""The measurement of attention runs in every type that a KV cache can have."""

from __future__ import annotations

import pytest

from octavo.bench.attention import AttentionCase
from octavo.kernels.backends import describe
from octavo.planner.known_models import KNOWN_MODELS


@pytest.mark.skipif(not describe()["native"], reason="the native module is not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_attention_is_measured_in_each_kv_dtype(dtype: str) -> None:
    from octavo.kernels.native import NativeBackend

    AttentionCase(NativeBackend(1), KNOWN_MODELS["smollm2-135m"].spec, dtype, 16, 2, 40, 1).run()
