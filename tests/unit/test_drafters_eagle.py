"""The EAGLE drafter: the contract, what it drafts, how it comes to its name, and errors that reach the caller."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters import Drafter
from metasd_langchain.drafters.eagle import Eagle, _Growing, _sees, create
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.errors import BadCheckpoint, BadOption, LoadError, MetaSDError, UnknownName
from metasd_langchain.models.eagle_step import HeadCache
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.drafter_contract import DrafterContract
from metasd_langchain.testing.drafters import NoDraws
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round, Sampling
from tests.eagles import random_head, saved

TARGET = load_target((tiny_model(), tiny_tokenizer()))
SMALL = load_target((tiny_model(vocab_size=40), tiny_tokenizer()))  # the contract speaks 40 ids
TEXT = [int(token) for token in np.random.default_rng(3).integers(4, 500, 40)]
DRAWS = Draws(7)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(random_head(TARGET), tmp_path_factory.mktemp("heads"), "math")


def bound(path: str, target: Target = TARGET, **options: Any) -> Any:
    return Eagle(path, **options).bind(target)


def states(start: int, stop: int) -> dict[int, torch.Tensor]:
    """The states after the text's tokens, the same for the same place."""
    rows = [torch.randn(32, generator=torch.Generator().manual_seed(place)) for place in range(start, stop)]
    return {layer: torch.stack(rows) * (1 + layer) for layer in (1, 2, 3)}


def round_of(start: int, stop: int) -> Round:
    """The target has read places start to stop and committed what follows."""
    committed = tuple(TEXT[start + 1 : stop + 1])
    return Round(committed, hidden=states(start, stop), hidden_start=start)


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(random_head(SMALL, draft_vocab_size=40), tmp_path_factory.mktemp("contract"))


class _Contract(DrafterContract):
    from_text = False
    options: dict[str, Any] = {}  # noqa: RUF012
    folder: str

    @pytest.fixture(autouse=True)
    def _checkpoint(self, small_path: str) -> None:
        self.folder = small_path

    def make(self) -> Drafter:
        return bound(self.folder, SMALL, **self.options)


class TestChain(_Contract):
    options = {"stop": 0.0}  # noqa: RUF012


class TestTree(_Contract):
    options = {"shape": "tree", "stop": 0.0, "window": 16}  # noqa: RUF012


# -- what it drafts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=30, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [1024, 12])
def test_after_any_rest_it_drafts_as_from_scratch(path: str, shape: str, sampling: Sampling, window: int) -> None:
    drafter = bound(path, shape=shape, window=window, stop=0.0)
    request = Request(tuple(TEXT[:5]), sampling)
    always, often, rested = (drafter.open(request) for _ in range(3))
    for stop in range(5, 36):
        for session in (always, often, rested):
            session.observe(round_of(0 if stop == 5 else stop - 1, stop))
        always.propose(TEXT[: stop + 1], 4, DRAWS)
        if stop % 3 == 0:
            often.propose(TEXT[: stop + 1], 2, DRAWS)
    fresh = drafter.open(request)
    fresh.observe(round_of(0, 35))
    drafts = [session.propose(TEXT[:36], 6, DRAWS) for session in (always, often, rested, fresh)]
    assert len(set(map(repr, drafts))) == 1
    assert len(drafts[0]) == 6
    assert drafts[0].is_chain == (shape == "chain")


def test_a_rest_keeps_no_more_states_than_the_window(path: str) -> None:
    session = bound(path, window=12).open(Request((1,)))
    for stop in range(1, 36):
        session.observe(round_of(stop - 1, stop))
    assert sum(len(chunk[0]) for _, chunk in session._unread) == 12
    session.close()
    assert session.propose(TEXT, 4, DRAWS) == EMPTY_DRAFT


def test_greedy_chain_is_the_heads_own_continuation(path: str) -> None:
    drafter = bound(path, shape="chain", stop=0.0)
    session = drafter.open(Request(tuple(TEXT[:5])))
    session.observe(round_of(0, 20))
    draft = session.propose(TEXT[:21], 4, NoDraws())
    from tests.eagles import random_head as made

    head = made(TARGET)
    tokens, hidden = TEXT[:21], torch.cat(list(states(0, 20).values()), -1)
    drafted: list[int] = []
    for ahead in range(4):  # everything anew for each token
        text = torch.tensor([[*tokens, *drafted]])
        padded = torch.cat([hidden, torch.zeros(1 + ahead, hidden.shape[1])])
        with torch.no_grad():
            feature = head(text, padded[None], ahead + 1)[ahead][0, 19 + ahead]
            drafted.append(int(head.draft_ids[head.logits(feature).argmax()]))
    assert draft == Draft.chain(drafted)


def test_a_tree_holds_the_nodes_worth_most_whatever_the_budget(path: str) -> None:
    drafter = bound(path, shape="tree", stop=0.0)

    def nodes(budget: int) -> set[tuple[int, ...]]:
        session = drafter.open(Request(tuple(TEXT[:5])))
        session.observe(round_of(0, 20))
        draft = session.propose(TEXT[:21], budget, NoDraws())
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return set(paths)

    sizes = [nodes(budget) for budget in (1, 3, 6, 12)]
    assert [len(each) for each in sizes] == [1, 3, 6, 12]
    assert all(small <= large for small, large in itertools.pairwise(sizes))


def test_a_node_sees_forced_tokens_its_ancestors_and_itself() -> None:
    grown = _Growing()
    for parent in (-1, -1, 0, 0, 1):
        grown.add(7, parent, 0.5)
    place: dict[int, int] = {}
    first = _sees(grown, [0, 1], place, 1)
    second = _sees(grown, [4, 2], place, 1)  # expanded in the order of their worth
    assert first.astype(int).tolist() == [[1, 1, 0], [1, 0, 1]]
    assert second.astype(int).tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]


def test_every_path_of_a_tree_is_what_the_head_says_along_it(path: str) -> None:
    drafter = bound(path, shape="tree", stop=0.0)
    session = drafter.open(Request(tuple(TEXT[:5])))
    session.observe(round_of(0, 20))
    draft = session.propose(TEXT[:21], 24, NoDraws())
    assert max(draft.depths) >= 3
    step = drafter._step
    for node in range(len(draft)):
        above: list[int] = []
        parent = draft.parents[node]
        while parent >= 0:
            above.insert(0, draft.tokens[parent])
            parent = draft.parents[parent]
        cache = HeadCache()
        feature = step.read(cache, TEXT[1:21], list(states(0, 20).values()))
        for depth, token in enumerate(above, 1):  # its ancestors alone
            feature = step.guess(cache, [token], feature, depth)
        likely = step.draft_ids[step.logits(feature)[0].topk(4).indices.numpy()]
        assert draft.tokens[node] in likely


def test_it_stops_when_it_is_not_sure(path: str) -> None:
    lengths = []
    for stop in (0.0, 0.3, 1.0):
        session = bound(path, stop=stop).open(Request(tuple(TEXT[:5])))
        session.observe(round_of(0, 20))
        lengths.append(len(session.propose(TEXT[:21], 8, NoDraws())))
    assert lengths[0] == 8
    assert lengths[0] >= lengths[1] >= lengths[2] == 0


def test_tokens_the_target_has_not_read_are_guessed_across_but_not_many(path: str) -> None:
    session = bound(path, stop=0.0).open(Request(tuple(TEXT[:5])))
    session.observe(round_of(0, 20))
    assert len(session.propose(TEXT[:24], 3, NoDraws())) == 3
    assert session.propose(TEXT[:40], 3, NoDraws()) == EMPTY_DRAFT
    assert len(session.propose(TEXT[:21], 3, NoDraws())) == 3


def test_a_hint_is_of_the_round_before(path: str) -> None:
    session = bound(path, stop=0.0).open(Request(tuple(TEXT[:5])))
    assert math.isnan(session.hint())
    session.observe(round_of(0, 20))
    draft = session.propose(TEXT[:21], 3, NoDraws())
    session.observe(round_of(20, 21))
    assert 0 < session.hint() <= len(draft)
    session.observe(round_of(21, 22))  # another arm played
    assert math.isnan(session.hint())


def test_in_rejection_mode_it_says_what_it_drew_from(path: str) -> None:
    sampling = Sampling(0.7, top_k=9, seed=1)
    session = bound(path, shape="tree", stop=0.0).open(Request(tuple(TEXT[:5]), sampling, verify="rejection"))
    session.observe(round_of(0, 20))
    drafts = [session.propose(TEXT[:21], 3, DRAWS) for _ in range(30)]
    for draft in drafts:
        assert draft.is_chain
        assert draft.q is not None
        assert draft.q.shape == (3, 512)
        assert torch.allclose(draft.q.sum(-1), torch.ones(3, dtype=draft.q.dtype), atol=1e-5)
        assert all(draft.q[node, token] > 0 for node, token in enumerate(draft.tokens))
        assert int((draft.q[0] > 0).sum()) == 9
    assert len({draft.tokens for draft in drafts}) > 5  # drawn anew each time


# -- names and errors ------------------------------------------------------------------------------------------------


def arm_names(arms: Sequence[Any]) -> list[str]:
    return [arm.name for arm in make_pool(arms).selector.arms]


def test_arms_have_short_names_of_their_own() -> None:
    assert arm_names(["eagle:five-domains/math@3", "eagle:five-domains/math", "eagle:five-domains/qa@4", "plain"]) == [
        "eagle-math@3", "eagle-math@8", "eagle-qa@4", "plain",
    ]  # fmt: skip
    assert arm_names(["eagle:/a/math@2", "eagle:/b/math@2"]) == ["eagle-math@2", "eagle-math-2@2"]
    assert arm_names(["eagle:/with@sign/math"]) == ["eagle-math@8"]
    assert arm_names(["eagle:/with@sign/ma@th@7"]) == ["eagle-ma-th@7"]
    assert arm_names([(Eagle("x/y", name="mine"), 6), "eagle:x/y@6"]) == ["mine@6", "eagle-y@6"]


def test_one_checkpoint_is_one_drafter() -> None:
    assert len(make_pool(["eagle:a/b@3", "eagle:a/b@5"]).drafters) == 1


WRONG: list[dict[str, object]] = [{"shape": "star"}, {"stop": 2}, {"window": 1}, {"nonsense": 1}]


@pytest.mark.parametrize("options", [{}, {"path": ""}, {"path": 3}, *({"path": "x", **more} for more in WRONG)])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(BadOption) as caught:
        create(options)
    assert caught.value.option == (list(options)[-1] if options else "path")


def test_a_name_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(UnknownName, match="eagle"):
        make_pool(["eagel@4"])
    with pytest.raises(BadOption, match="path"):
        make_pool(["eagle@4"])


def test_importing_and_naming_it_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from metasd_langchain.assemble import make_pool; make_pool(['eagle:x/y@3']); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def broken(path: str, folder: Path) -> str:
    import shutil

    copy = Path(shutil.copytree(path, folder / "broken"))
    (copy / "model.safetensors").write_bytes(b"\x00" * 100)
    return str(copy)


def test_a_wrong_checkpoint_reaches_the_caller_and_the_next_call_works(path: str, tmp_path: Path) -> None:
    model = (tiny_model(), tiny_tokenizer())
    llm = MetaSDLLM(model=model, max_tokens=6, drafters=[f"eagle:{broken(path, tmp_path)}@3", "plain"])
    for call in (lambda: llm.invoke("the cat"), lambda: list(llm.stream("the cat")), lambda: llm.batch(["a", "b"])):
        with pytest.raises(BadCheckpoint) as caught:
            call()
        assert caught.value.file.endswith("broken/model.safetensors")
    plain = MetaSDLLM(model=model, max_tokens=6, drafters=["plain"])
    assert llm.invoke("the cat", drafters=[f"eagle:{path}@3"]) == plain.invoke("the cat")


async def test_a_wrong_checkpoint_reaches_an_asynchronous_caller(tmp_path: Path) -> None:
    llm = MetaSDLLM(model=(tiny_model(), tiny_tokenizer()), max_tokens=6, drafters=[f"eagle:{tmp_path}/none@3"])
    with pytest.raises(LoadError, match="no such file or folder"):
        await llm.ainvoke("the cat")


class _Bound:
    """Counts its bindings."""

    name, candidates, prompt_rows, hidden_layers = "bound", 0, 0, ()

    def __init__(self, error: Exception | None = None, gives: Any = None) -> None:
        self.error, self.gives = error, gives
        self.targets: list[Any] = []

    def bind(self, target: Target) -> Any:
        self.targets.append(target)
        if self.error is not None:
            raise self.error
        return self.gives or self

    def open(self, request: Request) -> Any:
        from metasd_langchain.drafters.lookup import create as lookup

        return lookup({}).open(request)

    def forget(self, scope: str | None = None) -> None: ...


def test_a_drafter_is_bound_once_for_each_pool_and_target() -> None:
    drafter = _Bound()
    pool = make_pool([(drafter, 3), "plain"], "fixed")
    engines = [Engine(TARGET), Engine(SMALL)]
    try:
        for engine in (*engines, *engines):
            list(engine.generate(Request((5, 6), max_tokens=3), pool))
        assert drafter.targets == [TARGET, SMALL]
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        (_Bound(ValueError("secret")), LoadError),
        (_Bound(BadCheckpoint("f", "x", "wrong")), BadCheckpoint),
        (_Bound(gives=3), LoadError),
    ],
)
def test_what_goes_wrong_while_binding_is_typed(drafter: Any, kind: type[MetaSDError]) -> None:
    engine = Engine(TARGET)
    try:
        with pytest.raises(kind) as caught:
            engine.generate(Request((5, 6), max_tokens=3), make_pool([(drafter, 3)], "fixed"))
        assert "secret" not in str(caught.value)
    finally:
        engine.close()


def test_unbound_it_says_what_is_missing(path: str) -> None:
    with pytest.raises(BadOption, match="bind"):
        Eagle(path).open(Request((1, 2)))


def test_memory_is_reported(path: str) -> None:
    pool = make_pool([f"eagle:{path}@3", "suffix@4", "plain"])
    assert pool.memory_bytes["eagle-math"] == 0  # nothing is loaded yet
    numbers = sum(parameter.numel() for parameter in random_head(TARGET).parameters())
    pool.bound(TARGET)
    assert pool.memory_bytes["eagle-math"] == 4 * numbers


def test_a_device_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(BadOption) as caught:
        bound(path, device="cuda:99")
    assert caught.value.option == "device"


def test_a_presets_name_stands_for_all_of_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool = make_pool(["suffix@6", "eagle:five-domains@4", "plain"])
    names = ["code", "translation", "summarization", "qa", "math", "ofa"]
    assert [arm.name for arm in pool.selector.arms] == ["suffix@6", *(f"eagle-{name}@4" for name in names), "plain"]
    assert [arm.name for arm in make_pool(["eagle:five-domains"]).selector.arms] == [f"eagle-{n}@8" for n in names]
    (tmp_path / "five-domains").mkdir()  # a folder of the user's comes first
    assert [arm.name for arm in make_pool(["eagle:five-domains@4"]).selector.arms] == ["eagle-five-domains@4"]


# -- scoring -----------------------------------------------------------------------------------------------------------

PROMPT = 10  # tokens of TEXT that are the prompt


def by_hand(path: str, place: int, **options: Any) -> float:
    """A token's probability by a head that reads the whole text before it at once."""
    session = bound(path, **options).open(Request(tuple(TEXT[:PROMPT])))
    session.observe(round_of(0, place - 1))
    logits = session._step.logits(session._read(TEXT[:place]))[0]
    columns = session._step.draft_ids.tolist()
    return float(logits.softmax(-1)[columns.index(TEXT[place])]) if TEXT[place] in columns else 0.0


@pytest.mark.parametrize("played", [(), (0, 2, 3)], ids=["resting", "playing"])
@pytest.mark.parametrize("window", [1024, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_scores_are_the_heads_probabilities(path: str, every: int, window: int, played: Sequence[int]) -> None:
    session = bound(path, window=window).open(Request(tuple(TEXT[:PROMPT]), Sampling(1.0)))
    assert session.score(TEXT[:PROMPT], PROMPT) == []
    scores: list[float] = []
    ends = [PROMPT, 11, 14, 15, 17, 19, 20]  # tokens known after each round, the first of which reads the prompt
    for turn, end in enumerate(ends[1:]):
        if turn in played:
            session.propose(TEXT[: ends[turn]], 3, DRAWS)
        session.observe(round_of(0 if not turn else ends[turn] - 1, end - 1))
        if turn % every == every - 1:
            scores += session.score(TEXT[:end], PROMPT + len(scores))
    assert len(scores) == 10
    expected = [by_hand(path, place, window=window) for place in range(PROMPT, 20)]
    assert any(expected)
    assert not all(expected)  # a token that the head does not know
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_greedy_score_says_whether_the_token_would_be_drafted(path: str) -> None:
    for shape, width in (("chain", 4), ("tree", 4)):
        fresh = bound(path, shape=shape, width=width, stop=0.0).open(Request(tuple(TEXT[:PROMPT])))
        fresh.observe(round_of(0, PROMPT - 1))
        logits = fresh._step.logits(fresh._read(TEXT[:PROMPT]))[0]
        likely = fresh._step.draft_ids[logits.argsort(descending=True).numpy()].tolist()
        for rank in (0, 1, 3, 4):
            session = bound(path, shape=shape, width=width, stop=0.0).open(Request(tuple(TEXT[:PROMPT])))
            session.score(TEXT[:PROMPT], PROMPT)
            session.observe(Round((likely[rank],), hidden=states(0, PROMPT - 1), hidden_start=0))
            drafted = rank < (width if shape == "tree" else 1)
            assert session.score([*TEXT[:PROMPT], likely[rank]], PROMPT) == [float(drafted)], (shape, rank)


def test_what_it_never_read_it_does_not_score(path: str) -> None:
    session = bound(path, window=8).open(Request(tuple(TEXT[:PROMPT]), Sampling(1.0)))
    session.score(TEXT[:PROMPT], PROMPT)
    for start in range(PROMPT - 1, 30):
        session.observe(round_of(start, start + 1))
    scores = session.score(TEXT[:31], PROMPT)
    known = [not math.isnan(score) for score in scores]
    assert len(scores) == 21
    assert known == sorted(known)  # the last ones
    assert sum(known) == 7  # the first pair that is left foretells the token after the next
