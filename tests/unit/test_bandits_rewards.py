"""Rewards on outcomes worked out by hand."""

import math

import pytest

from metasd_langchain.bandits.registry import reward_named, reward_names
from metasd_langchain.bandits.rewards import BD, BE, EXPECTED_LENGTH, LENGTH, THROUGHPUT, Reward
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.values import PLAIN, Outcome

PLAIN_ROUND = Outcome(PLAIN, 0, 0, 0, 1, draft_s=0.0, score_s=0.055, plain_s=0.055)


def outcome(**given):
    return Outcome(**{"arm": "a@4", "budget": 4, "drafted": 4, "accepted": 2, "committed": 3, **given})


def test_plain_is_worth_one_plain_step_or_no_draft():
    assert THROUGHPUT(PLAIN_ROUND) == 1.0
    assert BD(PLAIN_ROUND) == 0.0
    assert BE(PLAIN_ROUND) == 0.0


def test_throughput_is_tokens_a_second_relative_to_plain():
    # 3 tokens in 10 + 65 ms against one in 50 ms
    assert THROUGHPUT(outcome(draft_s=0.010, score_s=0.065, plain_s=0.050)) == pytest.approx(3 * 50 / 75)


def test_throughput_saturates_instead_of_failing():
    wide = outcome(budget=64, drafted=64, accepted=64, committed=65, score_s=0.05, plain_s=0.05)
    assert THROUGHPUT(wide) == THROUGHPUT.high


def test_throughput_without_clock_counts_tokens():
    assert THROUGHPUT(outcome()) == 3.0


def test_block_divergence_counts_undrafted_positions_as_zero():
    assert BD(outcome(agreement=(0.9, 0.8, 0.1, 0.2))) == pytest.approx(2.0 / 4)
    assert BD(outcome(drafted=2, agreement=(0.9, 0.8))) == pytest.approx(1.7 / 4)


def test_block_divergence_wants_agreement():
    assert BD.needs_agreement
    with pytest.raises(BadOption, match="'bd'"):
        BD(outcome())


def test_block_efficiency():
    assert BE(outcome()) == 0.5
    assert not BE.needs_agreement


def test_length_counts_tokens_of_a_round_the_bonus_included():
    assert LENGTH(outcome()) == 3.0
    assert LENGTH(outcome(drafted=0, accepted=0, committed=1)) == LENGTH(PLAIN_ROUND) == 1.0
    assert LENGTH.rescaled(3.0) == pytest.approx(3 / 17)
    assert not LENGTH.needs_agreement


def test_length_ranks_arms_of_any_budget():
    """A share of the own budget would put plain (1 of 1) and 2 of 2 above 8 of 16."""
    plain, two, eight = (
        LENGTH(given)
        for given in (
            PLAIN_ROUND,
            outcome(budget=2, drafted=2, accepted=2, committed=3),
            outcome(budget=16, drafted=16, accepted=8, committed=9),
        )
    )
    assert plain < two < eight


def test_expected_length_by_hand():
    # 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.1 + 0.9 * 0.8 * 0.1 * 0.2
    assert EXPECTED_LENGTH(outcome(agreement=(0.9, 0.8, 0.1, 0.2))) == pytest.approx(2.7064)
    assert EXPECTED_LENGTH(PLAIN_ROUND) == 1.0
    assert EXPECTED_LENGTH(outcome(agreement=(1.0,) * 4)) == 5.0
    assert EXPECTED_LENGTH(outcome(agreement=(0.0, 1.0, 1.0, 1.0))) == 1.0  # what a rejection cuts off counts nothing
    assert EXPECTED_LENGTH.rescaled(2.7064) == pytest.approx(2.7064 / 17)


def test_expected_length_is_the_sum_in_the_paper():
    agreement = (0.7, 0.2, 0.95, 0.5)
    stops = [*agreement, 0.0]  # the bonus token always ends the round
    paper = sum(k * (1 - stops[k - 1]) * math.prod(stops[: k - 1]) for k in range(1, 6))
    assert EXPECTED_LENGTH(outcome(agreement=agreement)) == pytest.approx(paper)


def test_expected_length_is_what_length_is_on_average():
    """Two tokens, accepted with 0.6 and then 0.5: 1 with 0.4, 2 with 0.3, 3 with 0.3."""
    drawn = 0.4 * 1 + 0.3 * 2 + 0.3 * 3
    assert EXPECTED_LENGTH(outcome(budget=2, drafted=2, agreement=(0.6, 0.5))) == pytest.approx(drawn)


def test_expected_length_wants_agreement():
    assert EXPECTED_LENGTH.needs_agreement
    with pytest.raises(BadOption, match="'expected_length'"):
        EXPECTED_LENGTH(outcome())


def test_lengths_saturate_instead_of_failing():
    wide = outcome(budget=64, drafted=64, accepted=64, committed=65, agreement=(1.0,) * 64)
    assert LENGTH(wide) == LENGTH.high == 17.0
    assert EXPECTED_LENGTH(wide) == EXPECTED_LENGTH.high == 17.0


@pytest.mark.parametrize("value", [-0.1, 2.1, math.nan, math.inf])
def test_out_of_range_names_the_reward(value):
    odd = Reward("odd", 0.0, 2.0, False, lambda _: value)
    with pytest.raises(BadOption, match=r"'odd'.*0 to 2"):
        odd(outcome())


def test_rounding_is_forgiven_and_clamped():
    assert BD(outcome(agreement=(1.0 + 1e-9,) * 4)) == 1.0


def test_rescaling_is_linear():
    reward = Reward("odd", -1.0, 3.0, False, lambda _: 0.0)
    assert [reward.rescaled(value) for value in (-1.0, 0.0, 1.0, 3.0)] == [0.0, 0.25, 0.5, 1.0]
    assert THROUGHPUT.rescaled(1.0) == 1 / 16


def test_an_empty_range_is_refused():
    with pytest.raises(BadOption, match="low < high"):
        Reward("odd", 1.0, 1.0, False, lambda _: 1.0)


def test_rewards_by_name():
    assert set(reward_names()) >= {"bd", "be", "expected_length", "length", "throughput"}
    assert reward_named("bd") is BD
    assert reward_named(BE) is BE
    assert reward_named("metasd_langchain.bandits.rewards:BE") is BE
    with pytest.raises(UnknownName, match="throughput"):
        reward_named("througput")
