"""What ``octavo bench sharing`` measures, on requests so small that the answer can be counted."""

from __future__ import annotations

import pytest

from octavo import LLM
from octavo.bench.sharing import DATASETS, _saved, draw_requests, measure_times
from octavo.bench.workloads import spread_lengths


@pytest.mark.parametrize("prompt_len", [40, 48])
def test_blocks_saved_by_samples_are_those_of_the_prompt(idle: LLM, prompt_len: int) -> None:
    n, num_tokens, size = 4, 12, 16
    used = saved = 0
    for step in range(num_tokens):
        if step == 0:
            used += -(-prompt_len // size)
            continue
        each, shared = -(-(prompt_len + step) // size), prompt_len // size
        used += shared + n * (each - shared)
        saved += (n - 1) * shared
    assert _saved(idle, [(list(range(100, 100 + prompt_len)), num_tokens)], "sampling", n) == saved / (saved + used)


def test_beams_save_more_than_samples(idle: LLM) -> None:
    requests = [(idle.tokenizer.encode("Once upon a time, in a village by the sea, there lived an old fisherman and his wife"), 40)]
    assert _saved(idle, requests, "beams", 4) > _saved(idle, requests, "sampling", 4) > 0


def test_lengths_have_the_means_of_the_data_sets() -> None:
    for lengths in DATASETS:
        values = spread_lengths(200, lengths.mean_input, 10**6)
        assert sum(values) / 200 == pytest.approx(lengths.mean_input, rel=0.02)
        requests = draw_requests(lengths, 12, list(range(3000)), 2048)
        assert all(prompt == list(range(prompt[0], prompt[0] + len(prompt))) and m >= 1 for prompt, m in requests)


def test_times_are_of_the_same_work_with_and_without_sharing(idle: LLM) -> None:
    prefix, samples = measure_times(idle, num_repeats=1, num_requests=4, prefix_len=64, n=3)
    assert (prefix.computed_without, prefix.computed_with) == (4 * (96 + 15), 96 + 3 * 32 + 4 * 15)
    assert (samples.computed_without, samples.computed_with) == (3 * (256 + 31), 256 + 3 * 31)
