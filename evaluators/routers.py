"""Routers by themselves: how often each names a prompt's domain, and what is left of that when it is asked otherwise.

Routers are fitted on the training third and the prompts that teach the heads, and asked about held-out prompts of the
five domains, as the development files word them and in ten other wordings (``paraphrases``). The literature's claims:
cosine to centroids is weak, a trained classifier is good on prompts like those it was trained on and loses where
wording changes (MetaSD, arXiv 2604.05417: 25% and 75 to 86% of five tasks; HedgeSpec, arXiv 2510.20064: 98% and 90% of
two tasks misrouted under a variant).

``minilm``: sentence embedding of the prompt's text; ``hidden-mean`` and ``hidden-last``: the target's own last hidden
state. ``centroids`` is cosine, ``softmax`` logistic regression. With trained heads in the cache, also tokens a round of
the routed head against the default policy over all six (``routed_heads``). Intervals: 95%, bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.errors import EvaluatorError
from evaluators.heads import domain_prompts, load_heads, missing_heads
from evaluators.machine import machine
from evaluators.paraphrases import PARAPHRASES
from evaluators.prompts import Prompt, encode
from evaluators.report import say, table, write
from evaluators.routed_heads import routed_heads
from metasd_langchain import Engine, shared_engine
from metasd_langchain.bandits.routers import ENCODERS, Router, fit_centroids, fit_softmax, save_router
from metasd_langchain.engine.text import Detokenizer
from metasd_langchain.errors import MissingExtra
from metasd_langchain.models.encoders import hidden_vectors, sentence_encoder
from metasd_langchain.training.places import DOMAINS, FIVE_DOMAINS
from metasd_langchain.training.prompts import corpus

__all__ = ["Vectors", "accuracy", "add_arguments", "run"]

_FITS = {"centroids": fit_centroids, "softmax": fit_softmax}
_QUICK_TRAIN, _QUICK_PROMPTS, _QUICK_HEADS, _QUICK_TOKENS = 12, 4, 1, 64
_DRAWS = 1000
_AS_IT_IS = "as it is"
_Vector = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="spec_bench_dev.jsonl", limit=None)
    parser.add_argument("--code", metavar="FILE", default="humaneval_dev.jsonl", help="prompts of the code domain")
    parser.add_argument("--train", type=at_least(2), default=40, metavar="N", help="prompts of a domain to fit on")
    parser.add_argument("--domain-prompts", type=at_least(1), default=16, metavar="N", help="held out, of each domain")
    parser.add_argument("--longest", type=at_least(8), default=1024, help="tokens; longer prompts are left out")
    parser.add_argument("--save", metavar="DIR", help="write the fitted routers there, for the policy `routed`")
    parser.add_argument("--heads", metavar="DIR", help=f"folder of the six heads (default: the preset {FIVE_DOMAINS})")
    parser.add_argument("--head-prompts", type=at_least(1), default=6, metavar="N", help="of each domain, for heads")
    parser.add_argument("--budget", type=at_least(1), default=5, help="most tokens a head drafts")
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers that heads are played through")
    add_common(parser, repetitions=1)


def run(args: argparse.Namespace) -> None:
    """Fit, ask, print, write."""
    facts = machine(args.dtype)
    if args.quick:
        args.train, args.domain_prompts = min(args.train, _QUICK_TRAIN), min(args.domain_prompts, _QUICK_PROMPTS)
        args.head_prompts, args.max_tokens = min(args.head_prompts, _QUICK_HEADS), min(args.max_tokens, _QUICK_TOKENS)
    asked = domain_prompts(args)
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    vectors = Vectors(engine, args.longest)
    taught = _taught(args)
    say(f"fitting on {', '.join(f'{len(own)} {domain}' for domain, own in taught.items())}")
    routers = _fitted(vectors, taught)
    if args.save:
        _save(routers, args.save)
    figures = {name: _figures(router, vectors, asked, args.seed) for name, router in routers.items()}
    _print(figures)
    told: dict[str, Any] = {
        "model": engine.target.name,
        "encoders": list(vectors.encoders),
        "taught": {domain: len(own) for domain, own in taught.items()},
        "asked": {domain: len(own) for domain, own in asked.items()},
        "paraphrases": [other.name for other in PARAPHRASES],
        "routers": figures,
    }
    lacking = missing_heads(args)
    if lacking:
        say(f"no trained heads for {', '.join(lacking)}: routed heads are not compared (metasd train preset)")
        told["heads"] = None
    else:
        told["heads"] = routed_heads(load_heads(args), asked, routers, vectors.of, args)
    write(args, facts, told)


class Vectors:
    """Vectors of prompts by every encoder that is installed.

    Args:
        engine: whose target and tokenizer.
        longest: tokens of a prompt.
    """

    def __init__(self, engine: Engine, longest: int) -> None:
        self._engine, self._longest = engine, longest
        self._text = Detokenizer(engine.target.tokenizer, engine.target.lock)
        self._known: dict[tuple[int, ...], dict[str, _Vector]] = {}
        self._hidden = [name for name in ENCODERS if name.startswith("hidden")]
        self._sentence: Any = None
        try:
            self._sentence = sentence_encoder()
        except MissingExtra as error:
            say(f"without minilm: {error}")
        self.encoders = (*(["minilm"] if self._sentence is not None else []), *self._hidden)

    def of(self, prompt: Prompt) -> dict[str, _Vector] | None:
        """By encoder; None of a prompt that is too long."""
        ids = encode(self._engine, prompt)
        if len(ids) > self._longest:
            return None
        if ids not in self._known:
            found = hidden_vectors(self._engine.target, ids, self._hidden)
            if self._sentence is not None:
                found["minilm"] = self._sentence.encode([self._text.decode(ids)])[0]
            self._known[ids] = found
        return self._known[ids]


def _taught(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    """Prompts to fit on, as the heads' teacher asks them; none is held out."""
    folder = Path(args.data or os.environ.get("METASD_DATA") or "../shared/data")
    found: dict[str, list[Prompt]] = {}
    for domain in DOMAINS:
        known = corpus(domain, folder if folder.is_dir() else None, seed=args.seed)
        whole = dict.fromkeys((one.text, one.question) for one in known.prompts if not one.opening)
        chosen = list(whole)
        random.Random(f"{args.seed} {domain}").shuffle(chosen)
        found[domain] = [Prompt("", domain, text, question) for text, question in chosen[: args.train]]
    return found


def _fitted(vectors: Vectors, taught: Mapping[str, Sequence[Prompt]]) -> dict[str, Router]:
    rows: list[tuple[str, dict[str, _Vector]]] = []
    for domain, prompts in taught.items():
        known = [vector for vector in map(vectors.of, prompts) if vector is not None]
        if not known:
            raise EvaluatorError(f"no prompt of {domain} to fit on is short enough (--longest)")
        rows += [(domain, vector) for vector in known]
    labels = [domain for domain, _ in rows]
    return {
        f"{encoder} {kind}": fit([vector[encoder] for _, vector in rows], labels, encoder)
        for encoder in vectors.encoders
        for kind, fit in _FITS.items()
    }


def _save(routers: Mapping[str, Router], folder: str) -> None:
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise EvaluatorError(f"cannot write to {place.name}: {cause.strerror}") from cause
    for name, router in routers.items():
        save_router(router, place / f"{name.replace(' ', '-')}.npz")
    say(f"{len(routers)} routers written to {place.name}")


# -- figures -----------------------------------------------------------------------------------------------------------


def _figures(router: Router, vectors: Vectors, asked: Mapping[str, Sequence[Prompt]], seed: int) -> dict[str, Any]:
    """Accuracy on prompts as they are and asked otherwise."""
    hits: list[list[bool]] = []
    domains: list[str] = []
    for domain, prompts in asked.items():
        for prompt in prompts:
            versions = [vectors.of(version) for version in (prompt, *(other(prompt) for other in PARAPHRASES))]
            known = [version for version in versions if version is not None]
            if len(known) == len(versions):  # else a wording made it too long: left out of all
                hits.append([router.label(version[router.encoder]) == domain for version in known])
                domains.append(domain)
    if not hits:
        raise EvaluatorError("every held-out prompt is too long (--longest)")
    return accuracy(np.array(hits, dtype=float), domains, seed)


def accuracy(hits: NDArray[np.float64], domains: Sequence[str], seed: int) -> dict[str, Any]:
    """Shares of prompts whose domain was named, every domain counting alike.

    Args:
        hits: 1 or 0, ``[prompts, 1 + paraphrases]``, the first column as the prompt is.
        domains: of the prompts.
        seed: of the bootstrap.
    """
    places = {domain: np.flatnonzero([own == domain for own in domains]) for domain in dict.fromkeys(domains)}

    def mean(values: NDArray[np.float64], of: Mapping[str, NDArray[np.int64]]) -> float:
        return float(np.mean([values[own].mean() for own in of.values()]))

    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        take = {domain: rng.choice(own, len(own)) for domain, own in places.items()}
        drawn.append((mean(hits[:, 0], take), mean(hits[:, 1:], take)))
    spans = np.quantile(drawn, [0.025, 0.975], axis=0)
    by_paraphrase = {other.name: mean(hits[:, 1 + at], places) for at, other in enumerate(PARAPHRASES)}
    own, other = mean(hits[:, 0], places), mean(hits[:, 1:], places)
    return {
        "accuracy": own,
        "interval": spans[:, 0].tolist(),
        "paraphrased": other,
        "paraphrased_interval": spans[:, 1].tolist(),
        "lost": own - other,
        "worst": min(by_paraphrase, key=lambda name: by_paraphrase[name]),
        "by_paraphrase": by_paraphrase,
        "by_domain": {
            domain: {"accuracy": float(hits[at, 0].mean()), "paraphrased": float(hits[at, 1:].mean())}
            for domain, at in places.items()
        },
        "prompts": len(hits),
    }


def _print(figures: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        [name, _share(f["accuracy"], f["interval"]), _share(f["paraphrased"], f["paraphrased_interval"]),
         f"{f['worst']} {f['by_paraphrase'][f['worst']]:.0%}"]
        for name, f in figures.items()
    ]  # fmt: skip
    table("prompts whose domain was named", ["router", _AS_IT_IS, "asked otherwise", "worst wording"], rows)
    rows = [
        [name, *(f"{own['accuracy']:.0%} / {own['paraphrased']:.0%}" for own in f["by_domain"].values())]
        for name, f in figures.items()
    ]
    domains = list(next(iter(figures.values()))["by_domain"])
    table("by domain: as it is / asked otherwise", ["router", *domains], rows)
    prompts = next(iter(figures.values()))["prompts"]
    say(f"{prompts} held-out prompts, {len(PARAPHRASES)} other wordings each")


def _share(value: float, interval: Sequence[float]) -> str:
    return f"{value:.0%} ({interval[0]:.0%}-{interval[1]:.0%})"
