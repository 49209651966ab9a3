"""The small model as a drafter: what it reads, what it proposes, whom it serves."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.drafters.small_lm import SINKS, SmallLM, create, window_start
from metasd_langchain.engine.draws import Draws
from metasd_langchain.errors import (
    BadCheckpoint,
    BadOption,
    DrafterError,
    IncompatibleVocabulary,
    LoadError,
    UnsupportedModel,
)
from metasd_langchain.models.draft_lm import DraftLM, DraftLMConfig
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.models.proposals import Proposer
from metasd_langchain.models.vocabulary import DraftVocabulary, fingerprint
from metasd_langchain.testing.drafter_contract import DrafterContract
from metasd_langchain.testing.drafters import NoDraws
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Sampling

DRAWS = NoDraws()
SMALL = tiny_model("llama", seed=5)
TOKENIZER = tiny_tokenizer()
RNG = random.Random(4)
TEXT = [RNG.randrange(4, 500) for _ in range(70)]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model("gemma3"), TOKENIZER))


def bound(target: Target, **options: Any) -> Any:
    return SmallLM((SMALL, TOKENIZER), **{"confidence": 0.0, **options}).bind(target)


def session(target: Target, prompt: Sequence[int] = (), sampling: Sampling | None = None, **options: Any) -> Any:
    request = Request(prompt=tuple(prompt or TEXT[:1]), sampling=sampling or Sampling())
    return bound(target, **options).open(request)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [1, 2, 7, 8, 100])
def test_the_window_keeps_at_most_what_is_asked_and_three_quarters_of_it(recent: int) -> None:
    starts = [window_start(length, recent) for length in range(500)]
    assert starts == sorted(starts)
    for length, start in enumerate(starts):
        if start:
            assert start > SINKS
            assert recent - max(1, recent // 4) < length - start <= recent
        else:
            assert length <= SINKS + recent
    assert len(set(starts)) <= 2 + 500 / max(1, recent // 4)


def kept(length: int, recent: int) -> list[int]:
    start = window_start(length, recent)
    return [*TEXT[:SINKS], *TEXT[start:length]] if start else TEXT[:length]


@pytest.mark.parametrize("recent", [8, 13, 30])
def test_a_window_reads_like_a_forward_from_scratch_over_the_kept_tokens(target: Target, recent: int) -> None:
    opened = session(target, kv=f"window:{recent}")
    for length in range(1, len(TEXT), 2):
        assert opened.propose(TEXT[:length], 3, DRAWS) == Draft.chain(reference_tokens(SMALL, kept(length, recent), 3))


def test_everything_is_read_like_a_forward_from_scratch(target: Target) -> None:
    opened = session(target)
    for length in (1, 2, 3, 5, 9, 10, 40, 41, 70):
        assert opened.propose(TEXT[:length], 4, DRAWS) == Draft.chain(reference_tokens(SMALL, TEXT[:length], 4))


@pytest.mark.parametrize("kv", ["full", "window:12"])
def test_who_catches_up_proposes_what_who_played_on_proposes(target: Target, kv: str) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
        playing = session(target, TEXT[:3], sampling, kv=kv)
        for length in range(3, 40):
            proposed = playing.propose(TEXT[:length], 2, Draws(1))
            if length % 8 == 0:  # another arm played all the rounds before
                late = session(target, TEXT[:3], sampling, kv=kv)
                assert late.propose(TEXT[:length], 2, Draws(1)) == proposed


def test_a_long_prompt_is_read_in_pieces(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = session(target).propose(TEXT, 4, DRAWS)
    monkeypatch.setattr("metasd_langchain.drafters.small_lm._PIECE", 7)
    assert session(target).propose(TEXT, 4, DRAWS) == whole


def test_its_own_accepted_draft_is_not_read_again(target: Target) -> None:
    opened = session(target)
    fed: list[int] = []
    score = opened._reader.lm.score
    opened._reader.lm.score = lambda feeds: fed.append(len(feeds[0].pending)) or score(feeds)
    text = TEXT[:10]
    draft = opened.propose(text, 4, DRAWS)
    assert fed == [10, 1, 1, 1]
    fed.clear()
    opened.propose([*text, *draft.tokens[:2], 7], 1, DRAWS)
    assert fed == [1]  # only the correction
    fed.clear()
    opened.propose([*text, *draft.tokens, 8], 1, DRAWS)
    assert fed == [3]  # behind the second: rejected then, committed now


@pytest.mark.parametrize("length", [31, 32, 33, 60])
def test_a_text_longer_than_its_own_window_is_read_in_part(target: Target, length: int) -> None:
    short = tiny_model("llama", seed=5, max_position_embeddings=32)
    opened = SmallLM((short, TOKENIZER), confidence=0.0).bind(target).open(Request(prompt=(5,)))
    draft = opened.propose(TEXT[:length], 16, DRAWS)
    recent = 27 - 27 // 4
    assert draft.tokens[:3] == tuple(reference_tokens(short, kept(length, recent), 3))
    assert len(draft) >= 6  # there is room behind the kept tokens


# -- what is proposed --------------------------------------------------------------------------------------------------


def test_it_draws_with_the_noise_of_the_request(target: Target) -> None:
    draws = Draws(11)
    proposed = session(target, TEXT[:9], Sampling(temperature=0.7)).propose(TEXT[:12], 1, draws)
    with torch.inference_mode():
        logits = SMALL(torch.tensor([TEXT[:12]]), use_cache=False).logits[0, -1].double().numpy()
    likely = np.argsort(-logits)[:64]
    assert proposed.tokens == (likely[np.argmax(logits[likely] / 0.7 + draws.gumbel(3, likely))],)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.3), Sampling(1.0, min_p=0.4), Sampling(1e-9)]
)
def test_filters_bound_what_is_proposed(target: Target, sampling: Sampling) -> None:
    with torch.inference_mode():
        p = SMALL(torch.tensor([TEXT[:12]]), use_cache=False).logits[0, -1].double().softmax(-1).numpy()
    order = np.argsort(-p)
    allowed = set(order[:1].tolist())
    if sampling.top_k:
        allowed = set(order[:5].tolist())
    if sampling.top_p:
        allowed = set(order[: 1 + int((np.cumsum(p[order]) < 0.3).sum())].tolist())
    if sampling.min_p:
        allowed = set(np.flatnonzero(p >= 0.4 * p.max()).tolist())
    opened = session(target, TEXT[:9], sampling)
    seen = {opened.propose(TEXT[:12], 1, Draws(seed)).tokens[0] for seed in range(60)}
    assert seen <= allowed
    assert len(seen) > 1 or len(allowed) == 1


def test_confidence_ends_a_draft(target: Target) -> None:
    chances, text, proposer = [], TEXT[:20], Proposer(Sampling(), None, 512)
    for token in reference_tokens(SMALL, TEXT[:20], 8):
        with torch.inference_mode():
            logits = SMALL(torch.tensor([text]), use_cache=False).logits[0, -1]
        chances.append(proposer.guess(logits, DRAWS, 0, 1).confidence)
        text = [*text, token]
    products = np.cumprod(chances)
    clear = [stop for stop in range(2, 8) if chances[stop - 1] < 0.99]
    assert len(clear) > 1
    for stop in clear:
        bound_at = float(products[stop - 1]) * 1.0001
        assert len(session(target, confidence=bound_at).propose(TEXT[:20], 8, DRAWS)) == stop
    assert len(session(target, confidence=1.0).propose(TEXT[:20], 8, DRAWS)) == 1


def test_nothing_is_drafted_behind_a_stop(target: Target) -> None:
    answer = reference_tokens(SMALL, TEXT[:20], 8)
    request = Request(prompt=tuple(TEXT[:20]), stop_ids=frozenset({answer[3]}))
    draft = bound(target).open(request).propose(TEXT[:20], 8, DRAWS)
    assert list(draft.tokens) == answer[: answer.index(answer[3]) + 1]


def test_rejection_sampling_gets_the_distribution_it_was_drawn_from(target: Target) -> None:
    sampling = Sampling(temperature=0.8, top_k=50, seed=1)
    request = Request(prompt=tuple(TEXT[:9]), sampling=sampling, verify="rejection")
    draft = bound(target).open(request).propose(TEXT[:9], 3, Draws(1))
    assert draft.q is not None
    assert draft.q.shape == (3, 512)
    for node, token in enumerate(draft.tokens):
        with torch.inference_mode():
            logits = SMALL(torch.tensor([[*TEXT[:9], *draft.tokens[:node]]]), use_cache=False).logits[0, -1]
        top = logits.topk(50)
        expected = torch.zeros(512).scatter(0, top.indices, (top.values / 0.8).softmax(-1))
        assert torch.allclose(draft.q[node], expected, atol=1e-5)
        assert draft.q[node, token] > 0
    greedy = Request(prompt=tuple(TEXT[:9]), verify="rejection")
    assert bound(target).open(greedy).propose(TEXT[:9], 3, Draws(1)).q is None


# -- a part of the vocabulary ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DraftLM]:
    folder = tmp_path_factory.mktemp("trained") / "domain"
    vocabulary = DraftVocabulary(range(3, 300, 2), 512, fingerprint(TOKENIZER))
    config = DraftLMConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, window=128)
    model = DraftLM.fresh(vocabulary, config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # opinions
    model.save(folder)
    return folder, model


def test_a_part_of_the_vocabulary_proposes_target_ids(target: Target, trained: tuple[Path, DraftLM]) -> None:
    folder, model = trained
    drafter = SmallLM(folder, confidence=0.0).bind(target)
    draft = drafter.open(Request(prompt=(5,))).propose(TEXT[:30], 4, DRAWS)
    text = TEXT[:30]
    for token in draft.tokens:
        with torch.inference_mode():
            assert token == int(model.d2t[model(torch.tensor([text]))[0, -1].argmax()])
        text = [*text, token]
    assert all(token % 2 for token in draft.tokens)
    sampled = drafter.open(Request(prompt=(5,), sampling=Sampling(1.0), verify="rejection"))
    q = sampled.propose(TEXT[:30], 2, Draws(3)).q
    assert q is not None
    assert q[:, ::2].sum() == 0
    assert torch.allclose(q.sum(-1), torch.ones(2), atol=1e-5)


def test_made_for_another_target_is_refused(target: Target, trained: tuple[Path, DraftLM]) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["xyzzy"])
    with pytest.raises(IncompatibleVocabulary, match="another tokenizer"):
        SmallLM(trained[0]).bind(load_target((tiny_model("llama"), other)))
    with pytest.raises(IncompatibleVocabulary, match="vocabulary of 512 tokens, the target has 576"):
        SmallLM(trained[0]).bind(load_target((tiny_model("llama", vocab_size=576), TOKENIZER)))


# -- binding -----------------------------------------------------------------------------------------------------------


def test_not_before_it_is_bound() -> None:
    with pytest.raises(DrafterError, match="small_lm is not bound"):
        SmallLM("nowhere").open(Request(prompt=(1,)))


def test_a_folder_of_transformers_serves(target: Target, tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    with pytest.raises(IncompatibleVocabulary, match="no tokenizer"):
        SmallLM(tmp_path).bind(target)
    TOKENIZER.save_pretrained(tmp_path)
    drafter = create({"path": str(tmp_path), "confidence": 0.0, "name": "tiny"}).bind(target)
    assert drafter.name == "tiny"
    count = sum(parameter.numel() for parameter in SMALL.parameters())
    assert 2 * count <= drafter.memory_bytes <= 4 * count + 1000  # float32, or bfloat16 where that is native
    found = drafter.open(Request(prompt=(5,))).propose(TEXT[:9], 2, DRAWS)
    assert found.tokens[0] == reference_tokens(SMALL, TEXT[:9], 1)[0]


def test_what_is_not_there_or_damaged_is_named(target: Target, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file or folder"):
        SmallLM(tmp_path / "none").bind(target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadCheckpoint, match=r"empty, config\.json"):
        SmallLM(tmp_path / "empty").bind(target)
    with pytest.raises(UnsupportedModel):
        SmallLM((tiny_model("gemma3", use_bidirectional_attention=True), TOKENIZER)).bind(target)


def test_a_window_that_the_model_does_not_have_is_refused(target: Target) -> None:
    with pytest.raises(BadOption, match="at most 507"):
        bound(target, kv="window:508")
    bound(target, kv="window:507")


@pytest.mark.parametrize(
    "options",
    [{}, {"path": ""}, {"path": 3}, {"path": "x", "kv": "some"}, {"path": "x", "kv": "window:0"},
     {"path": "x", "kv": "window:-3"}, {"path": "x", "confidence": 2}, {"path": "x", "nonsense": 1}],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadOption):
        create(options)


def test_a_closed_session_drafts_nothing(target: Target) -> None:
    opened = session(target)
    opened.propose(TEXT[:5], 2, DRAWS)
    opened.close()
    assert opened.propose(TEXT[:5], 2, DRAWS) == EMPTY_DRAFT


class TestContract(DrafterContract):
    vocab = 512
    from_text = False

    @pytest.fixture(autouse=True, params=["full", "window:12"])
    def _target(self, target: Target, request: pytest.FixtureRequest) -> None:
        self._made = lambda: bound(target, kv=request.param)

    def texts(self, seed: int, prompt: int = 30, answer: int = 60) -> tuple[list[int], list[int]]:
        told, answered = super().texts(seed, prompt, answer)
        return told[:9], answered[:14]  # a forward a token is much, for a test

    def make(self) -> Any:
        return self._made()


# -- scoring -----------------------------------------------------------------------------------------------------------


def by_hand(place: int, temperature: float) -> float:
    """A token's probability by a cache-free forward."""
    with torch.inference_mode():
        logits = SMALL(torch.tensor([TEXT[:place]]), use_cache=False).logits[0, -1].double()
    return float((logits / temperature).softmax(-1)[TEXT[place]])


@pytest.mark.parametrize("drafting", [False, True])
def test_scores_are_the_models_probabilities(target: Target, drafting: bool) -> None:
    own = session(target, TEXT[:20], Sampling(0.7, seed=1))
    assert own.score(TEXT[:20], 20) == []
    scores: list[float] = []
    for start, end in ((20, 23), (23, 24), (24, 40)):
        if drafting:
            own.propose(TEXT[:start], 4, DRAWS)
        scores += own.score(TEXT[:end], start)
    assert scores == pytest.approx([by_hand(place, 0.7) for place in range(20, 40)], rel=1e-3)


def test_a_greedy_score_says_whether_the_token_is_the_most_likely(target: Target) -> None:
    said = [*TEXT[:9], *reference_tokens(SMALL, TEXT[:9], 6)]
    said[12] = 7 if said[12] != 7 else 8
    own = session(target, said[:9])
    scores = own.score(said, 9)
    assert scores[:4] == [1.0, 1.0, 1.0, 0.0]
    assert len(scores) == 6


def test_tokens_that_left_the_window_have_no_score(target: Target) -> None:
    own = session(target, TEXT[:5], Sampling(1.0), kv="window:8")
    scores = own.score(TEXT[:40], 5)
    known = [not math.isnan(score) for score in scores]
    assert known == sorted(known)
    assert 6 < sum(known) <= 8
    assert own.propose(TEXT[:40], 3, DRAWS) == session(target, TEXT[:5], Sampling(1.0), kv="window:8").propose(
        TEXT[:40], 3, DRAWS
    )


def test_scores_of_a_small_vocabulary_are_zero_where_it_has_no_word(target: Target, tmp_path: Path) -> None:
    part = DraftVocabulary(range(0, 512, 2), 512, fingerprint(TOKENIZER))
    config = DraftLMConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, window=64)
    DraftLM.fresh(part, config).save(tmp_path / "part")
    own = SmallLM(tmp_path / "part").bind(target).open(Request(prompt=tuple(TEXT[:9]), sampling=Sampling(1.0)))
    scores = own.score(TEXT[:30], 9)
    assert [score > 0.0 for score in scores] == [token % 2 == 0 for token in TEXT[9:30]]
