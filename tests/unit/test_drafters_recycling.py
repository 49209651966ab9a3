"""Token recycling by hand: what is learned from rows is what is drafted."""

from __future__ import annotations

import numpy as np
import pytest

from metasd_langchain.drafters import DraftSession
from metasd_langchain.drafters.recycling import RecyclingDrafter, create
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.drafter_contract import DRAWS
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round


def rows(*best: list[int]) -> object:
    return np.array(best, dtype=np.int64)


def opened(drafter: RecyclingDrafter, *prompt: int, scope: str = "") -> DraftSession:
    return drafter.open(Request(prompt=prompt, scope=scope))


def test_follows_the_first_candidates_until_a_token_is_unknown() -> None:
    session = opened(create({"context": 1}), 1)
    assert session.hint() == 0
    told = Round((2,), fed=(1, 5, 6), parents=(-1, 0, 1), candidates=rows([2, 5], [6, 7], [8, 9]))
    session.observe(told)  # 5 and 6 were rejected, their rows count all the same
    assert session.propose([1, 2], 4, DRAWS) == EMPTY_DRAFT  # nothing known of 2
    assert session.propose([1, 2, 5], 4, DRAWS) == Draft.chain([6, 8])
    assert session.propose([1, 2, 5], 1, DRAWS) == Draft.chain([6])


def test_the_last_two_tokens_are_asked_first() -> None:
    told = Round((9,), fed=(1, 5, 6, 5), parents=(-1, 0, 1, 2), candidates=rows([9], [6], [5], [7]))
    pairs, paper = opened(create({}), 1), opened(create({"context": 1}), 1)
    for session in (pairs, paper):
        session.observe(told)
    assert pairs.propose([1, 9, 1, 5], 1, DRAWS) == Draft.chain([6])  # after "1 5"
    assert pairs.propose([1, 9, 6, 5], 1, DRAWS) == Draft.chain([7])  # after "6 5"
    assert pairs.propose([1, 9, 8, 5], 1, DRAWS) == Draft.chain([7])  # no such pair: after "5", the latest
    assert paper.propose([1, 9, 1, 5], 1, DRAWS) == Draft.chain([7])


def test_the_first_row_makes_a_pair_with_the_token_before_it() -> None:
    session = opened(create({}), 3, 4)
    session.observe(Round((6,), fed=(4,), parents=(-1,), candidates=rows([5, 6])))
    session.observe(Round((4,), fed=(6,), parents=(-1,), candidates=rows([4, 0])))
    session.observe(Round((7,), fed=(4,), parents=(-1,), candidates=rows([7, 8])))
    tree = session.propose([3, 4, 6, 4, 7, 3, 4], 2, DRAWS)
    assert tree == Draft.chain([6, 4])  # said after "3 4"; then the pair "4 6" was followed by 4


def test_what_the_text_said_after_a_pair_comes_before_the_candidates() -> None:
    prompt = (1, 2, 3, 9, 1, 2)
    session = opened(create({}), *prompt)
    assert session.hint() == 4
    assert session.propose(prompt, 3, DRAWS) == Draft.chain([3, 9, 1])
    session.observe(Round((), fed=(2,), parents=(-1,), candidates=rows([7, 3])))
    assert session.propose(prompt, 1, DRAWS) == Draft.chain([3])


def test_hints() -> None:
    session = opened(create({}), 1, 2, 3)
    assert session.hint() == 0
    session.observe(Round((1,)))
    assert session.hint() == 1  # 2 followed 1 in the prompt
    session.observe(Round((), fed=(1,), parents=(-1,), candidates=rows([5])))
    assert session.hint() == 3  # the pair "3 1"
    session.observe(Round((4, 1)))
    assert session.hint() == 2  # the pair "4 1" is unknown, 1 is not
    session.observe(Round((3, 1)))
    assert session.hint() == 4  # "3 1" was followed by 4 in the text


def test_without_candidates_it_learns_from_the_text() -> None:
    session = opened(create({}), 1)
    session.observe(Round((2, 3, 1)))
    assert session.hint() == 1
    assert session.propose([1, 2, 3, 1], 5, DRAWS) == Draft.chain([2, 3, 1, 2, 3])


def test_tree_by_hand() -> None:
    session = opened(create({"shape": "tree", "context": 1}), 1)
    told = Round((), fed=(1, 5, 6), parents=(-1, 0, 0), candidates=rows([5, 6, 7], [8, 9, 0], [3, 4, 0]))
    session.observe(told)
    # Chances by rank .6, .08, .04: 5 (.6), 8 below it (.36), 6 (.08), 9 below 5 and 3 below 6 (.048), 7 (.04).
    tree = session.propose([1], 5, DRAWS)
    assert (tree.tokens, tree.parents) == ((5, 8, 6, 9, 3), (-1, 0, -1, 0, 2))
    assert session.propose([1], 3, DRAWS) == tree.cut(3, 99)


def test_a_sure_tree_is_a_chain() -> None:
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)
    session = opened(create({"shape": "tree"}), *prompt)
    assert session.propose(prompt, 4, DRAWS) == Draft.chain([3, 4, 5, 6])


def test_k_limits_the_candidates_kept() -> None:
    session = opened(create({"shape": "tree", "k": 2}), 1)
    session.observe(Round((), fed=(1,), parents=(-1,), candidates=rows([5, 6, 7, 8])))
    assert session.propose([1], 9, DRAWS).tokens == (5, 6)


def test_shared_within_the_scope() -> None:
    for shared, expected in ((True, Draft.chain([5])), (False, EMPTY_DRAFT)):
        drafter = create({"shared": shared})
        opened(drafter, 1, scope="a").observe(Round((), fed=(1,), parents=(-1,), candidates=rows([5])))
        assert opened(drafter, 1, scope="a").propose([1], 1, DRAWS) == expected
        assert opened(drafter, 1, scope="b").propose([1], 1, DRAWS) == EMPTY_DRAFT


def test_text_is_never_shared() -> None:
    drafter = create({})
    session = opened(drafter, 1, 2, 3)
    session.observe(Round((4, 1)))
    assert session.hint() == 1
    session.close()
    assert opened(drafter, 2, 3).propose([2, 3], 4, DRAWS) == EMPTY_DRAFT


def test_bound_drops_scopes_then_entries() -> None:
    drafter = create({"max_bytes": 50_000, "context": 1})
    for start in range(0, 200, 10):
        session = opened(drafter, 1, scope=str(start // 100))
        fed = tuple(range(start, start + 10))
        session.observe(Round((), fed, tuple(range(-1, 9)), rows(*[[token + 1] for token in fed])))
        assert drafter.nbytes <= 50_000
    assert opened(drafter, 199, scope="1").hint() == 2
    assert opened(drafter, 100, scope="1").hint() == 0
    assert opened(drafter, 99, scope="0").hint() == 0


def test_names_and_needs() -> None:
    assert (create({}).name, create({"shape": "tree"}).name) == ("recycling", "recycling_tree")
    assert create({"name": "mine"}).name == "mine"
    assert create({"k": 4}).candidates == 4
    assert create({"prompt_rows": 5}).prompt_rows == 5


@pytest.mark.parametrize(
    "options", [{"shape": "bush"}, {"k": 0}, {"context": 3}, {"prompt_rows": -1}, {"shared": "yes"}, {"max_bytes": "1"}]
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(BadOption, match=next(iter(options))):
        create(options)
