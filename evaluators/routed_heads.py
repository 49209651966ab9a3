"""Trained heads by a router against heads by the bandit: tokens a round, played through recorded answers.

An answer is recorded once for each prompt as it is and once in another wording (in turn), and every method is played
through it (``playback``), so differences are no differences between texts. All heads draft alike, so tokens a round
rank them. ``routed ROUTER``: the head of the router's label, for the whole answer. ``bandit``: the default policy over
all six heads, reward `length`, memory kept through the shuffled stream; ``bandit from ROUTER``: `routed` with it for a
prior. ``ofa``: the head for all; ``own``: the head of the prompt's true domain; ``best single``: the best of the six,
known in hindsight. Every domain counts alike.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.heads import HEADS, Heads
from evaluators.methods import Limits
from evaluators.paraphrases import PARAPHRASES
from evaluators.playback import Played, Record, record, replay, replay_pool
from evaluators.prompts import Prompt, encode
from evaluators.report import number, say, table
from metasd_langchain import Sampling
from metasd_langchain.assemble import DEFAULT_POLICY
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.bandits.rewards import LENGTH
from metasd_langchain.bandits.routers import Router
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.training.places import OFA
from metasd_langchain.values import Arm

__all__ = ["routed_heads"]

_QUICK_SECONDS = 150.0
_PLAIN, _OTHER = "as_it_is", "otherwise"
_Vectors = Callable[[Prompt], Mapping[str, NDArray[np.float64]] | None]
_Scores = dict[str, dict[str, list[Played]]]  # method -> domain -> answers


def routed_heads(
    heads: Heads,
    asked: Mapping[str, Sequence[Prompt]],
    routers: Mapping[str, Router],
    vectors: _Vectors,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Tokens a round by method, for prompts as they are and asked otherwise."""
    arms = [Arm(f"eagle-{head}@{args.budget}", head, args.budget) for head in HEADS]
    played: dict[str, _Scores] = {}
    for wording in (_PLAIN, _OTHER):
        scores: _Scores = defaultdict(lambda: defaultdict(list))
        pools = _pools(arms, routers)
        for domain, taken, known in _records(heads, asked, vectors, wording, args):
            alone = {head: replay(drafter, taken, args.budget) for head, drafter in heads.bound.items()}
            for head, own in alone.items():
                scores[head][domain].append(own)
            scores["own"][domain].append(alone[domain])
            for name, router in routers.items():
                scores[f"routed {name}"][domain].append(alone[router.label(known[router.encoder])])
            for name, (selector, encoder) in pools.items():
                seat = selector.open("evaluation/heads", np.random.default_rng(args.seed))
                vector = known[encoder] if encoder else None
                scores[name][domain].append(replay_pool(heads.bound, taken, arms, seat, vector))
        played[wording] = scores
    figures = {wording: {method: _tokens(own) for method, own in scores.items()} for wording, scores in played.items()}
    for by_method in figures.values():
        by_method["best single"] = max((by_method[head] for head in HEADS), key=lambda f: float(f["tokens_per_round"]))
    _print(figures)
    return figures


def _pools(arms: Sequence[Arm], routers: Mapping[str, Router]) -> dict[str, tuple[Selector, str]]:
    """Selectors by method, with the encoder whose vectors they want."""
    pools = {"bandit": (Selector(arms, policy_factory(DEFAULT_POLICY), LENGTH), "")}
    for name, router in routers.items():
        make = policy_factory("routed", {"router": router, "prior": DEFAULT_POLICY})
        pools[f"bandit from {name}"] = (Selector(arms, make, LENGTH), router.encoder)
    return pools


def _records(
    heads: Heads, asked: Mapping[str, Sequence[Prompt]], vectors: _Vectors, wording: str, args: argparse.Namespace
) -> Iterator[tuple[str, Record, Mapping[str, NDArray[np.float64]]]]:
    """The stream: prompts of all domains, shuffled."""
    stream = [
        (domain, at, prompt) for domain, own in asked.items() for at, prompt in enumerate(own[: args.head_prompts])
    ]
    random.Random(args.seed).shuffle(stream)
    limits = Limits(args.max_tokens, args.temperature, stop_ids=heads.engine.target.stop_ids)
    sampling = Sampling(args.temperature, seed=args.seed)
    started, seen = time.perf_counter(), set[str]()
    for place, (domain, at, prompt) in enumerate(stream, 1):
        if args.quick and domain in seen and time.perf_counter() - started > _QUICK_SECONDS:
            continue
        version = prompt if wording == _PLAIN else PARAPHRASES[at % len(PARAPHRASES)](prompt)
        known = vectors(version)
        if known is None:
            continue
        seen.add(domain)
        say(f"[{place}/{len(stream)}] {wording}: {domain} {prompt.name}")
        taken = record(heads.engine, encode(heads.engine, version), sampling, limits, heads.layers)
        if len(taken.answer) > 1:  # of one token nothing is drafted
            yield domain, taken, known


def _tokens(by_domain: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    own = {
        domain: sum(sum(one.committed) for one in answers) / sum(len(one.committed) for one in answers)
        for domain, answers in by_domain.items()
    }
    return {"tokens_per_round": float(np.mean(list(own.values()))), "by_domain": own}


def _print(figures: Mapping[str, Mapping[str, Any]]) -> None:
    plain, other = figures[_PLAIN], figures[_OTHER]
    order = sorted(plain, key=lambda method: -plain[method]["tokens_per_round"])
    rows = [
        [method, number(plain[method]["tokens_per_round"]),
         number(other[method]["tokens_per_round"]) if method in other else "-"]
        for method in order
    ]  # fmt: skip
    title = f"tokens a round over heads ({OFA}: the head for all; own: of the true domain)"
    table(title, ["who chooses", "as it is", "asked otherwise"], rows)
