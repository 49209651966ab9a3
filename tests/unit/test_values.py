"""Values check themselves: drafts are trees, options are in range, cutting keeps what can be kept."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metasd_langchain import values
from metasd_langchain.errors import BadOption
from metasd_langchain.values import EMPTY_DRAFT, Draft, Piece, Request, Sampling, Situation, Step

# a tree:  -1 -> 0 -> 2 -> 4
#             \-> 1 -> 3      5 hangs on the trunk too
TREE = Draft((10, 11, 12, 13, 14, 15), (-1, -1, 0, 1, 2, -1))


def test_a_chain_is_the_tree_where_each_node_hangs_on_the_one_before() -> None:
    assert Draft.chain([7, 8, 9]) == Draft((7, 8, 9), (-1, 0, 1))
    assert Draft.chain([7, 8, 9]).is_chain
    assert Draft.chain([]) == EMPTY_DRAFT == Draft()
    assert EMPTY_DRAFT.is_chain
    assert not TREE.is_chain
    assert len(TREE) == 6


def test_depths() -> None:
    assert TREE.depths == (1, 1, 2, 2, 3, 1)
    assert Draft.chain([1, 2, 3]).depths == (1, 2, 3)
    assert EMPTY_DRAFT.depths == ()


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((1,), ()), ((), (-1,)), ((1,), (0,)), ((1,), (-2,)), ((1, 2), (-1, 1)), ((1, 2), (1, -1)), ((1, 2), (-1, 5))],
)
def test_a_draft_that_is_no_tree_in_topological_order_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    with pytest.raises(BadOption, match="parents"):
        Draft(tokens, parents)


@pytest.mark.parametrize(
    ("nodes", "depth", "expected"),
    [
        (6, 3, TREE),
        (99, 99, TREE),
        (5, 3, Draft((10, 11, 12, 13, 14), (-1, -1, 0, 1, 2))),
        (3, 3, Draft((10, 11, 12), (-1, -1, 0))),
        (6, 2, Draft((10, 11, 12, 13, 15), (-1, -1, 0, 1, -1))),
        (6, 1, Draft((10, 11, 15), (-1, -1, -1))),
        (2, 1, Draft((10, 11), (-1, -1))),
        (0, 3, EMPTY_DRAFT),
        (6, 0, EMPTY_DRAFT),
    ],
)
def test_cut_by_hand(nodes: int, depth: int, expected: Draft) -> None:
    assert TREE.cut(nodes, depth) == expected


def test_cut_gives_the_draft_itself_when_it_fits() -> None:
    assert TREE.cut(6, 3) is TREE
    assert EMPTY_DRAFT.cut(0, 0) is EMPTY_DRAFT


def test_cut_keeps_the_rows_of_q_that_belong_to_the_nodes() -> None:
    q = torch.arange(12.0).view(6, 2)
    draft = Draft(TREE.tokens, TREE.parents, q)
    kept = draft.cut(6, 1).q
    assert kept is not None
    assert kept.tolist() == q[[0, 1, 5]].tolist()
    none = draft.cut(0, 3).q
    assert none is not None
    assert none.shape == (0, 2)
    assert draft.cut(6, 3).q is q


@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(0, 13), st.integers(0, 6))
def test_a_cut_draft_keeps_the_first_nodes_that_fit_with_their_paths(
    seed: int, size: int, nodes: int, depth: int
) -> None:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(-1, node) for node in range(size))
    draft = Draft(tuple(range(size)), parents)  # a token names its node
    cut = draft.cut(nodes, depth)
    kept = [node for node in range(size) if draft.depths[node] <= depth][:nodes]
    assert cut.tokens == tuple(kept)
    assert all(above <= depth for above in cut.depths)
    assert [cut.tokens[parent] if parent >= 0 else -1 for parent in cut.parents] == [parents[node] for node in kept]


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("temperature", [-1, -1e-9, math.nan, math.inf, "0.5", None, True, 1e5]),
        ("top_p", [0, 0.0, -0.1, 1.1, math.nan, "1", True]),
        ("top_k", [-1, 1.5, "5", True, math.nan]),
        ("min_p", [-0.1, 1.01, math.nan, "0", False]),
        ("seed", [1.0, "7", True]),
    ],
)
def test_sampling_options_out_of_range_are_refused_by_name(option: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(BadOption, match=option) as caught:
            Sampling(**{option: value})
        assert isinstance(caught.value, ValueError)
        assert (caught.value.option, repr(caught.value.value)) == (option, repr(value))


def test_sampling_options_at_the_borders_are_fine() -> None:
    for sampling in (
        Sampling(),
        Sampling(0, 1, 0, 0),
        Sampling(1e-6, 1e-9, 10**9, 1.0, -(2**80)),
        Sampling(1e4, None, None, None, 2**200),
    ):
        assert dataclasses.asdict(sampling)["temperature"] >= 0


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [(Sampling(), True), (Sampling(0.0, seed=3), True), (Sampling(0), True), (Sampling(0.7, top_k=1), True),
     (Sampling(1e-6), False), (Sampling(0.7, top_k=0), False), (Sampling(0.7, 0.1), False)],
)  # fmt: skip
def test_greedy(sampling: Sampling, greedy: bool) -> None:
    assert sampling.greedy is greedy


def test_a_hint_that_was_not_given_is_nan() -> None:
    situation = Situation(("a@1", "plain"), {"a@1": 2.0})
    assert situation.hint("a@1") == 2.0
    assert math.isnan(situation.hint("plain"))


def test_a_steps_text_is_that_of_its_pieces() -> None:
    assert Step((1, 2), (Piece("ab", True), Piece("c", False))).text == "abc"
    assert Step((1,)).text == ""


def test_values_are_frozen_and_have_no_room_for_strays() -> None:
    for value in (EMPTY_DRAFT, Sampling(), Request((1,)), Step(()), Situation(("plain",))):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            value.extra = 1  # type: ignore[union-attr]
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_requests_can_be_keys_and_defaults_are_greedy_with_a_documented_cap() -> None:
    assert {Request((1, 2)): 1}[Request((1, 2))] == 1
    request = Request((1,))
    assert (request.sampling.greedy, request.max_tokens, request.verify, request.stop_ids) == (
        True,
        256,
        "invariant",
        frozenset(),
    )


def test_the_module_says_all_it_has() -> None:
    public = {name for name, thing in vars(values).items() if getattr(thing, "__module__", "") == values.__name__}
    assert {name for name in public if not name.startswith("_")} <= set(values.__all__)
    assert values.__all__ == sorted(values.__all__, key=lambda name: (not name.isupper(), name))
