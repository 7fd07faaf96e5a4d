"""Shared-prefix attention on against off, and beam search against transformers: ``python benchmarks/sharing.py [attention] [beams]``.

Memory saved, the prefix cache and n = 8 are in ``octavo bench sharing``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from common import THREADS, interleaved, show

from octavo import LLM, SamplingParams
from octavo.models.locate import locate


def bench_attention() -> None:
    """64 requests of 2,048 shared and 32 own tokens, 32 out, found in the cache: what differs is how attention reads them."""
    chance = random.Random(0)
    prefix = [chance.randrange(1000, 40_000) for _ in range(2048)]
    prompts = [prefix + [chance.randrange(1000, 40_000) for _ in range(32)] for _ in range(64)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    llms = [LLM(kv_memory="512MiB", max_num_seqs=64, threads=THREADS, shared_prefix_attention=on) for on in (True, False)]
    tokens = [[o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in llms]
    assert tokens[0] == tokens[1], "shared-prefix attention changed a token"
    on, off = interleaved([lambda llm=llm: llm.generate(prompts, params) for llm in llms], 3)  # type: ignore[misc]
    show(
        "shared-prefix attention, 64 requests of 2,048 shared tokens",
        ["on", "off", "times faster"],
        [[f"{on:.2f} s", f"{off:.2f} s", f"{off / on:.2f}"]],
    )


def bench_beams() -> None:
    """Width 4, a prompt of 160 tokens, 64 out."""
    prompt = [1000 + 7 * i for i in range(160)]
    params = SamplingParams(temperature=0.0, beam_width=4, max_tokens=64, ignore_eos=True, cache_prefix=False)
    with LLM(kv_memory="512MiB", threads=THREADS) as llm:
        ours, theirs = interleaved([lambda: llm.generate([prompt], params), transformers_beams(prompt)], 3)
    show(
        "beam search, width 4, bf16",
        ["octavo", "transformers", "times faster"],
        [[f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.2f}"]],
    )


def transformers_beams(prompt: list[int]) -> Callable[[], object]:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    path = locate("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    ).eval()
    ids = torch.tensor([prompt])

    def generate() -> object:
        with torch.no_grad():
            return model.generate(ids, num_beams=4, max_new_tokens=64, min_new_tokens=64, do_sample=False)

    return generate


if __name__ == "__main__":
    which = set(sys.argv[1:]) or {"attention", "beams"}
    if "attention" in which:
        bench_attention()
    if "beams" in which:
        bench_beams()
