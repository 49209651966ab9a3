"""Counter-based randomness: the same numbers in every version, even, and never twice for different purposes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from metasd_langchain.engine.draws import Draws

STREAMS = (Draws.SPLIT, Draws.TAIL, Draws.RESIDUAL, Draws.ACCEPT)
SEEDS = (0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**64), 2**100 + 5, -(2**100))
GOLDEN_UNIFORM = [0.039100134381790164, 0.2636528653339184, 0.40568022532489045]
GOLDEN_ACCEPT = 0.15046883253983412
GOLDEN_GUMBEL = [0.9475150147872625, 0.30738387337808354, -0.5230194204319463]
GOLDEN_COMPLETION = 0.31491944823377016
GOLDEN_NEGATIVE = 0.24779992507735915


def test_golden_numbers_stay_so_that_a_seed_gives_the_same_answer_in_the_next_version() -> None:
    draws = Draws(7)
    assert [draws.uniform(position, Draws.SPLIT) for position in range(3)] == GOLDEN_UNIFORM
    assert draws.uniform(1, Draws.ACCEPT, trial=2) == GOLDEN_ACCEPT
    assert draws.gumbel(3, [0, 1, 262_143]).tolist() == pytest.approx(GOLDEN_GUMBEL, rel=1e-14)  # log is the machine's
    assert Draws(7, completion=1).uniform(0, Draws.SPLIT) == GOLDEN_COMPLETION
    assert Draws(-(2**70) - 3).uniform(0, Draws.TAIL) == GOLDEN_NEGATIVE


def test_noise_of_a_token_depends_on_nothing_but_seed_position_and_token() -> None:
    together = Draws(3).gumbel(5, np.arange(100))
    alone = [float(Draws(3).gumbel(5, [token])[0]) for token in range(100)]
    assert together.tolist() == alone
    assert Draws(3).gumbel(5, [9, 4]).tolist() == [together[9], together[4]]
    assert Draws(3).gumbel(5, []).shape == (0,)


def test_no_two_answers_of_a_seed_and_no_two_seeds_share_their_numbers() -> None:
    keys = [(seed, completion) for seed in SEEDS for completion in (0, 1, 2, 7)]
    first = {key: Draws(*key).uniform(0, Draws.SPLIT) for key in keys}
    assert len(set(first.values())) == len(keys)
    assert Draws(3, 5).uniform(0, Draws.SPLIT) != Draws(5, 3).uniform(0, Draws.SPLIT)
    assert Draws(1, 1).uniform(0, Draws.SPLIT) != Draws(0, 0).uniform(0, Draws.SPLIT)


def test_positions_streams_and_trials_do_not_collide() -> None:
    draws = Draws(11)
    places = itertools.product(range(40), STREAMS, range(5))
    numbers = [draws.uniform(*place) for place in places]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_whole_number_is_a_seed_and_gives_numbers_strictly_between_0_and_1(seed: int) -> None:
    draws = Draws(seed)
    numbers = [draws.uniform(position, stream) for position in range(50) for stream in STREAMS]
    assert all(0.0 < number < 1.0 for number in numbers)
    assert np.isfinite(draws.gumbel(2**40, np.arange(1000))).all()  # and no overflow warning, which would be an error


def test_the_largest_and_smallest_hash_stay_inside_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from metasd_langchain.engine import draws

    for value in (0, 2**64 - 1):
        monkeypatch.setattr(draws, "_mix", lambda z, value=value: value)
        monkeypatch.setattr(draws, "_mix_array", lambda z, value=value: np.full_like(z, value))
        assert 0.0 < Draws(0).uniform(0, 1) < 1.0
        assert np.isfinite(Draws(0).gumbel(0, [1])).all()


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_over_positions_and_over_seeds(stream: int) -> None:
    over_positions = [Draws(5).uniform(position, stream) for position in range(4000)]
    over_seeds = [Draws(seed).uniform(0, stream) for seed in range(4000)]
    assert stats.kstest(over_positions, "uniform").pvalue > 1e-4
    assert stats.kstest(over_seeds, "uniform").pvalue > 1e-4


def test_gumbel_over_tokens_and_over_positions() -> None:
    assert stats.kstest(Draws(1).gumbel(0, np.arange(20_000)), "gumbel_r").pvalue > 1e-4
    over_positions = np.concatenate([Draws(1).gumbel(position, [17]) for position in range(4000)])
    assert stats.kstest(over_positions, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("step", [1, 2, 256])
def test_neighbouring_positions_are_not_correlated(step: int) -> None:
    draws = Draws(9)
    one = np.array([draws.uniform(position, Draws.ACCEPT) for position in range(4000)])
    two = np.array([draws.uniform(position + step, Draws.ACCEPT) for position in range(4000)])
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.08  # 5 standard errors
    rows = np.stack([draws.gumbel(position, np.arange(500)) for position in (0, step)])
    assert abs(np.corrcoef(rows)[0, 1]) < 0.23


def test_streams_of_a_position_are_not_correlated() -> None:
    draws = Draws(2)
    numbers = np.array([[draws.uniform(position, stream) for position in range(4000)] for stream in STREAMS])
    assert np.abs(np.corrcoef(numbers) - np.eye(len(STREAMS))).max() < 0.08


def test_a_position_may_be_very_far() -> None:
    assert len({Draws(0).uniform(position, 1) for position in (0, 2**20, 2**40, 2**50)}) == 4
