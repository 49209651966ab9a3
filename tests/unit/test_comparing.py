"""Drafts compared before the choice: how agreement counts, who is asked, what it teaches, when it is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.assemble import make_pool
from metasd_langchain.bandits.policies.hinted_ucb import HintedUCB, create
from metasd_langchain.drafters.fused import Fused
from metasd_langchain.drafters.lookup import LookupDrafter
from metasd_langchain.drafters.suffix import SuffixDrafter
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sessions import Sessions, agreed
from metasd_langchain.errors import BadOption
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.drafter_contract import DRAWS
from metasd_langchain.testing.drafters import HalfDrafter, RaisingDrafter
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import PLAIN, Choice, Draft, Request, Sampling, Situation
from tests.listening import Listener

MODEL, TOKENIZER = tiny_model(), tiny_tokenizer()
PROMPT = (2, 40, 41, 42, 43, 40, 41, 42, 44, 40, 41)
RNG = np.random.default_rng(0)
ARMS = ("suffix@8", "suffix@3", "recycling_tree@6", PLAIN)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(load_target((MODEL, TOKENIZER)))
    yield made
    made.close()


def answer(engine: Engine, pool: object, request: Request) -> tuple[int, ...]:
    return tuple(token for step in engine.generate(request, pool) for token in step.tokens)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ({}, {}),
        ({"a": Draft.chain([1, 2])}, {}),
        ({"a": Draft.chain([1, 2, 3]), "b": Draft.chain([1, 2, 4])}, {"a": 2, "b": 2}),
        ({"a": Draft.chain([1, 2]), "b": Draft.chain([2, 1])}, {"a": 0, "b": 0}),
        ({"a": Draft.chain([1]), "b": Draft.chain([9]), "c": Draft.chain([1, 5])}, {"a": 1, "b": 0, "c": 1}),
        # a tree: 7 and 1 below the root, 8 below 1
        ({"a": Draft((7, 1, 8), (-1, -1, 1)), "b": Draft.chain([1, 8, 2])}, {"a": 2, "b": 2}),
        # the same token at another depth is no agreement
        ({"a": Draft.chain([3, 4]), "b": Draft.chain([4, 3])}, {"a": 0, "b": 0}),
    ],
)
def test_agreement_by_hand(drafts: dict[str, Draft], expected: dict[str, int]) -> None:
    assert agreed(drafts) == expected


def test_only_near_free_drafters_with_an_idea_are_asked() -> None:
    pool = make_pool(["suffix@8", "lookup@8", (HalfDrafter({PROMPT: (41, 42)}, 1000), 4), PLAIN])
    sessions = Sessions(Request(PROMPT), pool, 1000)
    assert sessions.compared(PROMPT, 10, DRAWS) == {"suffix": 4, "lookup": 4}  # 42 44 40 41 came last
    assert sessions.compared([*PROMPT, 99], 10, DRAWS) == {}  # nobody knows 99
    assert Sessions(Request(PROMPT), make_pool(["suffix@8", PLAIN]), 1000).compared(PROMPT, 10, DRAWS) == {}
    assert sessions.compared(PROMPT, 3, DRAWS) == {"suffix": 3, "lookup": 3}


def test_one_that_raises_is_left_out_and_benched() -> None:
    broken = RaisingDrafter()
    broken.near_free = True
    sessions = Sessions(Request(PROMPT), make_pool(["suffix@8", "lookup@8", (broken, 4)]), 1000)
    assert sessions.compared(PROMPT, 8, DRAWS) == {"suffix": 4, "lookup": 4}


def test_a_fused_drafter_is_near_free_when_all_parts_are() -> None:
    assert Fused([SuffixDrafter(), LookupDrafter()]).near_free
    assert not Fused([SuffixDrafter(), HalfDrafter({PROMPT: (41, 42)}, 1000)]).near_free


def test_the_policy_is_told_by_arm(engine: Engine) -> None:
    watcher = Listener("recycling_tree@6", compares=True)
    request = Request(PROMPT, max_tokens=40)
    answer(engine, make_pool(ARMS, watcher), request)
    told = [situation.seconded for situation in watcher.seen]
    assert all(set(seconded) in ({"suffix@8", "suffix@3", "recycling_tree@6"}, set()) for seconded in told)
    assert all(seconded["suffix@8"] == seconded["suffix@3"] for seconded in told if seconded)
    assert any(seconded for seconded in told)


def test_policies_that_do_not_ask_are_told_nothing(engine: Engine) -> None:
    watcher = Listener()
    answer(engine, make_pool(ARMS, watcher), Request(PROMPT, max_tokens=10))
    assert watcher.seen
    assert not any(situation.seconded for situation in watcher.seen)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shared", [ARMS, ("suffix@8", "lookup@4", "recycling@4", PLAIN)])
def test_comparing_changes_no_answer(engine: Engine, sampling: Sampling, shared: tuple[str, ...]) -> None:
    request = Request(PROMPT, sampling, max_tokens=60)
    plain = answer(engine, make_pool([PLAIN]), request)
    assert answer(engine, make_pool(shared, policy_options={"compare": True}), request) == plain


def test_rejection_mode_refuses(engine: Engine) -> None:
    pool = make_pool(ARMS, policy_options={"compare": True})
    with pytest.raises(BadOption, match="as the policy compares drafts"):
        engine.generate(Request(PROMPT, verify="rejection"), pool)
    with pytest.raises(BadOption, match="as the policy compares drafts"):
        MetaSDLLM(model=(MODEL, TOKENIZER), verify="rejection", policy_options={"compare": True})
    options = {"verify": "rejection", "policy_options": {"compare": True}}
    assert MetaSDLLM(model=(MODEL, TOKENIZER), speculative=False, **options).verify == "rejection"  # nothing to compare


def test_the_option_is_checked() -> None:
    with pytest.raises(BadOption, match="True or False"):
        create({"compare": "yes"})
    assert create({"compare": True}).compares
    assert not create({}).compares


def test_a_seconded_draft_is_believed_more_and_learned_apart() -> None:
    policy = HintedUCB(compare=True)
    arms, hints = ("a@8", PLAIN), {"a@8": 3.0}
    alone, backed, unknown = (Situation(arms, hints, seconded=told) for told in ({"a@8": 2}, {"a@8": 3}, {}))
    for _ in range(40):
        policy.update(alone, Choice("a@8"), {"a@8": 0.0})
        policy.update(backed, Choice("a@8"), {"a@8": 0.5})
    assert policy.select(alone, RNG).arm == PLAIN
    assert policy.select(backed, RNG).arm == "a@8"
    cells = policy.dump()["arms"]["a@8"]["cells"]
    assert set(cells) == {"3-4+", "3-4-"}
    policy.update(unknown, Choice("a@8"), {"a@8": 0.2})
    assert set(policy.dump()["arms"]["a@8"]["cells"]) == {"3-4", "3-4+", "3-4-"}
    other = HintedUCB(compare=True)
    other.load(policy.dump())
    assert other.dump() == policy.dump()


def test_a_silent_arm_stays_plain_however_it_compares() -> None:
    policy = HintedUCB(compare=True)
    situation = Situation(("a@8", PLAIN), {"a@8": 0.0}, seconded={"a@8": 0})
    assert policy.select(situation, RNG).arm == PLAIN
    policy.update(situation, Choice("a@8"), {"a@8": 0.05})
    assert math.isclose(policy.dump()["plain"]["count"], 2.0)
