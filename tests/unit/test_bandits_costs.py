"""The cost model: medians resist outliers, curves never fall, a busy machine changes no ratio."""

import math
from itertools import pairwise

import numpy as np
import pytest

from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.errors import BadOption

WIDTHS = (1, 3, 5, 9, 17)


def true_cost(width):
    return 0.055 + 0.00185 * (width - 1)


def measured(rounds=60, noise=0.03, seed=0, model=None, slow=1.0, widths=WIDTHS):
    model, rng = model or CostModel(), np.random.default_rng(seed)
    for turn in range(rounds):
        width = widths[turn % len(widths)]
        model.note_forward(width, slow * true_cost(width) * (1 + noise * float(rng.standard_normal())))
    return model


def test_sane_before_any_sample():
    model = CostModel(slope=0.03)
    assert model.forward(9) / model.forward(1) == pytest.approx(1.24)
    assert model.draft("a@8") == 0.0


def test_one_sample_gives_the_assumed_shape():
    model = CostModel(slope=0.03)
    model.note_forward(9, 0.124)
    assert model.forward(1) == pytest.approx(0.1)
    assert model.forward(11) == pytest.approx(0.13)


def test_interpolates_between_known_widths():
    model = CostModel()
    model.note_forward(1, 0.050)
    model.note_forward(9, 0.090)
    assert model.forward(5) == pytest.approx(0.070)


def test_learns_the_costs():
    model = measured()
    for width in (1, 2, 5, 7, 12, 17):
        assert model.forward(width) == pytest.approx(true_cost(width), rel=0.04)


def test_never_less_for_more_tokens():
    model, rng = CostModel(), np.random.default_rng(1)
    for _ in range(200):
        model.note_forward(int(rng.integers(1, 700)), float(rng.uniform(0.01, 0.2)))
        costs = [model.forward(width) for width in range(0, 2000, 7)]
        assert all(low <= high + 1e-12 for low, high in pairwise(costs))


def test_outliers_change_little():
    model = measured()
    before = model.forward(9)
    for turn in range(20):  # a quarter of the samples is ten times too long
        model.note_forward(9, true_cost(9) * (10 if turn % 4 == 0 else 1 + 1e-4 * turn))
    assert model.forward(9) == pytest.approx(before, rel=0.05)


def test_a_busy_machine_keeps_the_ratios():
    """Another process takes half the machine while only width 9 is played: width 1 was measured before."""
    model = measured()
    ratio = model.forward(9) / model.forward(1)
    for turn in range(60):
        model.note_forward(9, 2.0 * true_cost(9) * (1 + 1e-4 * turn))
        assert model.forward(9) / model.forward(1) == pytest.approx(ratio, rel=0.06)
    assert model.forward(1) == pytest.approx(2 * true_cost(1), rel=0.06)
    measured(30, model=model, seed=3)
    assert model.forward(1) == pytest.approx(true_cost(1), rel=0.06)


def test_drafts_by_arm_follow_the_median_and_the_load():
    model = measured()
    for seconds in (0.004, 0.005, 0.090, 0.004, 0.005):
        model.note_draft("eagle@5", seconds)
    assert model.draft("eagle@5") == pytest.approx(0.005)
    assert model.draft("suffix@8") == 0.0


def test_rows_of_one_forward_count_once():
    model = CostModel()
    for seconds in (0.05, 0.06, 0.07):
        for _ in range(8):
            model.note_forward(4, seconds)
    for _ in range(8):
        model.note_forward(4, 0.5)
    assert model.forward(4) == pytest.approx(0.065)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_broken_clocks_are_refused(seconds):
    with pytest.raises(BadOption, match="seconds of a forward"):
        CostModel().note_forward(1, seconds)
    with pytest.raises(BadOption, match="seconds of a draft"):
        CostModel().note_draft("a@8", seconds)


def test_a_clock_of_zero_is_survived():
    model = CostModel()
    model.note_forward(1, 0.0)
    assert model.forward(9) > 0.0
