r"""Prompts for training, by domain, in the form in which evaluation asks them.

Questions read ``Question: ...\nAnswer:`` for a model without a chat template, and go into the template of one that has
it; code is a bare head with docstring, as in HumanEval. A small share is raw text. What a domain lacks on this machine
the target writes itself: an *opening* (``Question: Summarize: (CNN)``) leaves the question to the model, so question
and answer are its own; only for models without a chat template.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metasd_langchain.errors import CorpusError, UnknownName
from metasd_langchain.training import sources
from metasd_langchain.training.openings import OPENINGS
from metasd_langchain.training.places import DOMAINS, OFA
from metasd_langchain.training.sources import Item, Source

__all__ = ["Corpus", "Prompt", "corpus", "encode"]

_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "zh_CN": "Chinese"}
_CATEGORIES = {
    "code": {"humaneval", "coding"},
    "translation": {"translation"},
    "summarization": {"summarization"},
    "qa": {"qa", "rag", "stem", "humanities"},
    "math": {"math_reasoning", "math"},
}
_CHARACTERS = 1600  # of a text that is to be summarised: some 350 tokens; articles of CNN/DailyMail have 800


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: what a model without a chat template reads.
        question: what goes into a template, or None for text that every model reads as it is.
        opening: the model itself is to write on; makes no sense in a template.
    """

    text: str
    question: str | None = None
    opening: bool = False


@dataclass(frozen=True, slots=True)
class Corpus:
    """Prompts of a domain and where they come from.

    Attributes:
        domain: its name.
        prompts: in the order in which they are used; a budget takes the first ones.
        sources: what was found, empty sources too.
    """

    domain: str
    prompts: tuple[Prompt, ...]
    sources: tuple[Source, ...]


def corpus(domain: str, data: Path | None, *, seed: int = 0) -> Corpus:
    """Prompts of a domain.

    Args:
        domain: one of DOMAINS. ("ofa" has no prompts of its own: it is trained on the five domains' data.)
        data: folder with the development files, or None.
        seed: of the order.

    Raises:
        UnknownName: no such domain.
        CorpusError: the data folder is missing, or there is no text at all.
    """
    if domain not in DOMAINS:
        raise UnknownName("domain", domain, (*DOMAINS, OFA))
    if data is not None and not data.is_dir():
        raise CorpusError(f"the data folder {data.name!r} does not exist", hint="--data DIR or METASD_DATA")
    rng = random.Random(f"{seed} {domain}")
    rows, development = sources.training_rows(data)
    own = [item for item in development if item.kind in _CATEGORIES[domain]]
    parts, found = _TEXTS[domain](data, rng)
    parts.append((2 if domain in ("qa", "summarization") else 1, [_asked(item) for item in own]))
    openings = [Prompt(f"Question: {text}", opening=True) for text in OPENINGS[domain]]
    parts.append((_OPENING_SHARE[domain], openings))
    kept = [(weight, _shuffled(prompts, rng)) for weight, prompts in parts if prompts]
    if not kept:
        raise CorpusError(f"no text for the domain {domain!r} was found", hint="--data DIR or METASD_DATA")
    written = Source("openings written for this project", "Apache-2.0", len(openings), "")
    return Corpus(domain, tuple(_woven(kept)), (*found, rows, written))


def encode(target: Any, prompt: Prompt) -> tuple[int, ...]:
    """Ids of a prompt, as evaluation makes them."""
    tokenizer = target.tokenizer
    if prompt.question is None or not getattr(tokenizer, "chat_template", None):
        return tuple(target.encode(prompt.text))
    turn = [{"role": "user", "content": prompt.question}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _asked(item: Item) -> Prompt:
    if item.kind in ("humaneval", "function"):
        return Prompt(item.text)
    return _question(item.text)


def _question(text: str) -> Prompt:
    return Prompt(f"Question: {text}\nAnswer:", text)


def _shuffled(prompts: Iterable[Prompt], rng: random.Random) -> list[Prompt]:
    mixed = list(prompts)
    rng.shuffle(mixed)
    return mixed


def _woven(parts: Sequence[tuple[int, list[Prompt]]]) -> Iterable[Prompt]:
    """Prompts of all parts in turn, as many of each as it weighs; small parts begin again until the largest ends."""
    rounds = max(-(-len(prompts) // weight) for weight, prompts in parts)
    for turn in range(rounds):
        for weight, prompts in parts:
            for place in range(weight):
                yield prompts[(turn * weight + place) % len(prompts)]


# -- domains -----------------------------------------------------------------------------------------------------------

_Parts = tuple[list[tuple[int, list[Prompt]]], list[Source]]
_OPENING_SHARE = {"code": 1, "translation": 3, "summarization": 4, "qa": 5, "math": 1}


def _math(data: Path | None, _rng: random.Random) -> _Parts:
    source, items = sources.gsm8k(data)
    return [(8, [_question(item.text) for item in items])], [source]


def _code(_data: Path | None, _rng: random.Random) -> _Parts:
    source, items = sources.functions()
    return [(6, [Prompt(item.text) for item in items if len(item.text) > 120])], [source]


def _translation(_data: Path | None, _rng: random.Random) -> _Parts:
    source, items = sources.catalogue_sentences(_LANGUAGES)
    german = [_from(item) for item in items if item.kind == "de"]
    others = [_from(item) for item in items if item.kind != "de"]
    return [(4, german), (1, others)], [source]


def _from(item: Item) -> Prompt:
    return _question(f"Translate {_LANGUAGES[item.kind]} to English: {item.text}")


def _summarization(_data: Path | None, rng: random.Random) -> _Parts:
    pages, page_items = sources.manual_pages()
    notes, note_items = sources.notes()
    texts = [item.text for item in (*page_items, *note_items)]
    cut = [text[:_CHARACTERS].rsplit(" ", 1)[0] for text in texts]
    raw = [Prompt(text[: rng.randrange(80, 400)].rsplit(" ", 1)[0]) for text in texts]
    return [(2, [_question(f"Summarize: {text}") for text in cut]), (1, raw)], [pages, notes]


def _qa(_data: Path | None, _rng: random.Random) -> _Parts:
    return [], []


_TEXTS = {
    "math": _math,
    "code": _code,
    "translation": _translation,
    "summarization": _summarization,
    "qa": _qa,
}
