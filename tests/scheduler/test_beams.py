"""The choice of beams, driven with a model's own logits, against ``transformers.generate`` on the same model."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import pytest

from octavo.request import FinishReason, num_candidates
from octavo.scheduler.beams import BeamGroup, Candidates, EarlyStopping
from tests.helpers.beam_oracle import Search, close_scores, likely_tokens, sharp_model, transformers_beams

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPT = (5, 9, 17, 42, 8)
MODES: tuple[EarlyStopping, ...] = (True, False, "never")


model = cache(sharp_model)
_known: dict[tuple[int, ...], Any] = {}


def distributions(beams: list[tuple[int, ...]]) -> list[Any]:
    """log_softmax in float32 of the logits behind each of these token lists, all of one length: [vocab] each."""
    missing = [beam for beam in beams if beam not in _known]
    if missing:
        with torch.no_grad():
            rows = torch.log_softmax(model()(torch.tensor(missing), logits_to_keep=1).logits[:, -1].float(), -1)
        _known.update(zip(missing, rows, strict=True))
    return [_known[beam] for beam in beams]


def candidates(distribution: Any, count: int) -> Candidates:
    values, ids = torch.sort(distribution, descending=True, stable=True)
    return Candidates(ids[:count].tolist(), values[:count].tolist())


def search(group: BeamGroup, prompt: tuple[int, ...]) -> BeamGroup:
    """Run a group to its end, with what the model says."""
    count = num_candidates(group.width, len(group.stop_ids))
    beams = [prompt]
    while not group.done:
        following = group.advance([candidates(row, count) for row in distributions(beams)])
        beams = [(*beams[beam.parent], beam.token_id) for beam in following]
        assert len(set(beams)) == len(beams) and (group.done or len(beams) == group.width)
        assert [b.cumulative_logprob for b in following] == sorted((b.cumulative_logprob for b in following), reverse=True)
    assert not beams
    return group


def some_cases() -> list[tuple[int, float, EarlyStopping, int, int]]:
    """Every width with every mode, and penalties, numbers of stop tokens and lengths drawn for each."""
    chance = random.Random(7)
    drawn = [
        (width, chance.choice([-1.0, -0.3, 0.0, 0.5, 1.0, 2.0]), mode, stops, chance.choice([1, 2, 7, 16]))
        for width, mode, stops in product(range(2, 9), MODES, (0, 1, 4))
    ]
    # where the three modes are known to end with different beams
    return drawn + [(width, penalty, mode, 4, 16) for width, penalty in ((2, 1.0), (2, 2.0), (4, 1.0), (8, 0.5)) for mode in MODES]


@pytest.mark.parametrize(("width", "penalty", "mode", "num_stops", "max_tokens"), some_cases())
def test_tokens_and_scores_are_those_of_transformers(
    width: int, penalty: float, mode: EarlyStopping, num_stops: int, max_tokens: int
) -> None:
    stop_ids = likely_tokens(PROMPT, num_stops)
    group = search(BeamGroup(width, penalty, mode, frozenset(stop_ids), max_tokens), PROMPT)
    tokens, scores = transformers_beams(Search(PROMPT, width, penalty, mode, stop_ids, max_tokens))
    ours = group.best(width)
    assert [beam.token_ids for beam in ours] == tokens
    assert [beam.score for beam in ours] == close_scores(scores)
    assert group.best(1) == ours[:1]


def test_what_a_finished_beam_says() -> None:
    stop_ids = likely_tokens(PROMPT, 3)
    group = search(BeamGroup(4, 0.7, False, frozenset(stop_ids), 10, num_logprobs=2), PROMPT)
    assert {beam.finish_reason for beam in group.best(4)} >= {FinishReason.STOP}
    for beam in group.best(4):
        prefixes = [PROMPT + beam.token_ids[:i] for i in range(len(beam.token_ids))]
        rows = [distributions([prefix])[0] for prefix in prefixes]
        logprobs = [float(row[token]) for row, token in zip(rows, beam.token_ids, strict=True)]
        assert beam.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-9)
        assert beam.score == pytest.approx(sum(logprobs) / len(logprobs) ** 0.7)
        assert (beam.token_ids[-1] in stop_ids) == (beam.finish_reason is FinishReason.STOP)
        assert [entry.logprob for entry in beam.logprobs] == logprobs
        assert [entry.rank for entry in beam.logprobs] == [
            1 + int((row > row[t]).sum()) for row, t in zip(rows, beam.token_ids, strict=True)
        ]
        assert [entry.top_ids for entry in beam.logprobs] == [tuple(candidates(row, 2).token_ids) for row in rows]


def test_no_beam_ends_before_min_tokens() -> None:
    stop_ids = likely_tokens(PROMPT, 4)
    early = search(BeamGroup(4, -1.0, True, frozenset(stop_ids), 12), PROMPT)
    late = search(BeamGroup(4, -1.0, True, frozenset(stop_ids), 12, min_tokens=6), PROMPT)
    assert min(len(beam.token_ids) for beam in early.best(4)) < 6
    for beam in late.best(4):
        assert len(beam.token_ids) > 6 and not set(beam.token_ids[:6]) & set(stop_ids)


def test_ties_go_to_the_first_beam_then_to_the_first_token() -> None:
    group = BeamGroup(2, 1.0, False, frozenset(), 3)
    same = [-1.0] * 4
    assert [(b.parent, b.token_id) for b in group.advance([Candidates([7, 3, 9, 1], same)])] == [(0, 7), (0, 3)]
    assert [(b.parent, b.token_id) for b in group.advance([Candidates([4, 5, 6, 8], same), Candidates([1, 2, 3, 4], same)])] == [
        (0, 4),
        (0, 5),
    ]


def test_stop_tokens_do_not_starve_the_beams() -> None:
    group = BeamGroup(2, 1.0, "never", frozenset({1, 2, 3}), 5)
    logprobs = [-1.0, -1.1, -1.2, -1.3, -1.4, -1.5, -1.6, -1.7]
    assert num_candidates(2, 3) == 8
    assert [b.token_id for b in group.advance([Candidates([1, 2, 3, 9, 8, 7, 6, 5], logprobs)])] == [9, 8]
    assert [beam.token_ids for beam in group.best(3)] == [(1,), (2,)], "the third best ended too, but is behind the width"


@pytest.mark.parametrize(
    ("mode", "penalty", "done"), [(True, -1.0, True), (False, -1.0, False), ("never", -1.0, False), (False, 0.0, False)]
)
def test_a_negative_penalty_is_judged_at_the_current_length(mode: EarlyStopping, penalty: float, done: bool) -> None:
    group = BeamGroup(2, penalty, mode, frozenset({0}), 10)
    group.advance([Candidates([1, 0, 2, 3], [-1.0, -1.5, -2.0, -9.0])])
    group.advance([Candidates([3, 0, 4, 5], [-0.1, -0.2, -5.0, -9.0]), Candidates([3, 4, 5, 6], [-1.0, -2.0, -5.0, -9.0])])
    assert [beam.token_ids for beam in group.best(2)] == ([(0,), (1, 0)] if penalty else [(1, 0), (0,)])
    assert group.done is done


def test_a_small_vocabulary_gives_fewer_beams_at_first() -> None:
    group = BeamGroup(4, 1.0, False, frozenset({0}), 3)
    two = Candidates([0, 1], [-0.5, -1.0])
    assert [b.token_id for b in group.advance([two])] == [1]
    assert [b.token_id for b in group.advance([two])] == [1]
    assert group.advance([two]) == [] and group.done
    assert [beam.token_ids for beam in group.best(4)] == [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


def test_a_width_of_one_is_greedy() -> None:
    group = search(BeamGroup(1, 1.0, True, frozenset(), 9), PROMPT)
    greedy: tuple[int, ...] = PROMPT
    for _ in range(9):
        greedy += (int(distributions([greedy])[0].argmax()),)
    assert group.best(1)[0].token_ids == greedy[len(PROMPT) :]
