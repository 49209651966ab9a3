"""Fused drafters: how drafts are joined, and that the answer stays plain decoding's."""

from __future__ import annotations

import math

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.drafters.fused import Fused, create, joined
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter, RaisingDrafter
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import Draft

PROMPT = "the cat and the hat and the cat and the hat and"


def test_what_is_common_is_drafted_once():
    tree = joined([Draft.chain([1, 2, 3]), Draft.chain([1, 2, 4, 5])], 16)
    assert tree == Draft((1, 2, 3, 4, 5), (-1, 0, 1, 1, 3))


def test_the_budget_goes_to_the_first_and_a_path_ends_where_it_finds_no_room():
    tree = joined([Draft.chain([1, 2]), Draft((7, 8, 9), (-1, 0, -1))], 3)
    assert tree == Draft((1, 2, 7), (-1, 0, -1))
    assert joined([Draft.chain([1, 2]), Draft.chain([1, 2, 3])], 2) == Draft.chain([1, 2])
    assert joined([Draft(), Draft.chain([4])], 3) == Draft.chain([4])


def test_equal_tokens_on_different_paths_stay_apart():
    tree = joined([Draft((1, 2), (-1, -1)), Draft((2, 1), (-1, 0))], 8)
    assert tree == Draft((1, 2, 1), (-1, -1, 1))


class Short:
    """Another drafter's first few nodes."""

    name = "short"
    candidates = prompt_rows = 0
    hidden_layers = ()

    def __init__(self, drafter, most):
        self._drafter, self._most = drafter, most

    def open(self, request):
        session, most = self._drafter.open(request), self._most

        class Session:
            hint, observe, close = session.hint, session.observe, session.close

            def propose(self, tokens, budget, draws):
                return session.propose(tokens, min(budget, most), draws)

        return Session()

    def forget(self, scope=None):
        pass


class Part:
    candidates = prompt_rows = 0
    hidden_layers = ()

    def __init__(self, name, hint, **facts):
        self.name, self._hint = name, hint
        self.__dict__.update(facts)

    def open(self, request):
        return self

    def hint(self):
        return self._hint

    def forget(self, scope=None):
        pass


@pytest.mark.parametrize(("hints", "hint"), [((0.0, 3.0), 3.0), ((2.0, 5.0), 2.0), ((0.0, 0.0), 0.0)])
def test_the_hint_is_that_of_the_first_part_that_would_draft(hints, hint):
    fused = Fused([Part("a", hints[0]), Part("b", hints[1])])
    assert fused.open(None).hint() == hint


def test_no_idea_is_not_nothing():
    assert math.isnan(Fused([Part("a", 0.0), Part("b", math.nan)]).open(None).hint())


def test_it_asks_for_what_any_part_asks_for():
    parts = [
        Part("a", 0, candidates=4, memory_bytes=3),
        Part("b", 0, hidden_layers=(2,), hidden_window=64, prompt_rows=5),
    ]
    fused = Fused(parts)
    assert (fused.candidates, fused.prompt_rows, fused.hidden_layers, fused.hidden_window) == (4, 5, (2,), 64)
    assert (fused.name, fused.memory_bytes) == ("a+b", 3)


def parts(pair, options):
    """Plain decoding's token ids, and scripted drafters that know them."""
    plain = [token for step in MetaSDLLM(speculative=False, **options).steps(PROMPT) for token in step.tokens]
    facts = {"answers": lambda prompt: plain, "vocab": pair[0].config.vocab_size}
    return plain, facts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("verify", ["invariant", "rejection"])
def test_lossless(temperature, verify):
    pair = (tiny_model(), tiny_tokenizer())
    options = {"model": pair, "max_tokens": 40, "temperature": temperature, "seed": 5, "dtype": "float32"}
    plain, facts = parts(pair, options)
    arms = ["fused:suffix+recycling_tree@12", (Fused([HalfDrafter(**facts), create({})], "half"), 8)]
    steps = list(MetaSDLLM(drafters=arms, verify=verify, policy="random", **options).steps(PROMPT))
    if verify == "invariant" or temperature == 0.0:
        assert [token for step in steps for token in step.tokens] == plain
        assert sum(step.accepted for step in steps) > 0
    assert {step.arm for step in steps} & {"fused-suffix+recycling_tree@12", "half@8"}


def test_a_later_part_backs_up_a_wrong_one():
    pair = (tiny_model(), tiny_tokenizer())
    options = {"model": pair, "max_tokens": 40, "dtype": "float32"}
    plain, facts = parts(pair, options)
    wrong, right = HostileDrafter(facts["vocab"], facts["answers"]), PerfectDrafter(**facts)

    def accepted(*drafters, budget):
        llm = MetaSDLLM(drafters=[(Fused(drafters, "both"), budget)], policy="fixed", **options)
        steps = list(llm.steps(PROMPT))
        assert [token for step in steps for token in step.tokens] == plain
        return sum(step.accepted for step in steps)

    assert accepted(wrong, right, budget=8) == 0  # the first fills the budget
    assert accepted(right, wrong, budget=8) > 0
    short = Short(wrong, 4)
    assert accepted(short, right, budget=8) > 0  # what it leaves goes to the second


def test_a_part_that_raises_costs_its_draft_never_the_answer():
    pair = (tiny_model(), tiny_tokenizer())
    options = {"model": pair, "max_tokens": 24, "dtype": "float32"}
    plain, _ = parts(pair, options)
    llm = MetaSDLLM(drafters=[(Fused([create({}), RaisingDrafter()], "mixed"), 8)], **options)
    assert [token for step in llm.steps(PROMPT) for token in step.tokens] == plain


def test_wrong_parts_are_named():
    with pytest.raises(BadOption, match="at least two"):
        create({"path": "suffix"})
    with pytest.raises(UnknownName, match="oracle"):
        create({"path": "suffix+oracle"})
    with pytest.raises(BadOption, match="path"):
        create({"path": 3})
