"""The same prompts asked otherwise: a fixed list, written before any router was measured on it.

What is asked stays what it is; only what stands around it, its spelling or the words of the task change.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from evaluators.prompts import Prompt

__all__ = ["PARAPHRASES", "Paraphrase"]

_BEFORE, _AFTER = "Question: ", "\nAnswer:"
_WORDS = re.compile(r"[A-Za-z]{4,}")
_TYPO_EVERY = 4  # words
_WORDING = (
    (re.compile(r"^(Who|what|What|When|when|Where|where|who)\b"), r"I would like to know \1"),
    (re.compile(r"^Translate (\w+) to (\w+):", re.IGNORECASE), r"What is this piece of \1 writing in \2?"),
    (re.compile(r"^Summari[sz]e:?", re.IGNORECASE), "Give me the gist of this in a few sentences."),
    (re.compile(r"\bHow many\b"), "Tell me the number of"),
    (re.compile(r"\bhow many\b"), "the number of"),
    (re.compile(r"\bHow much\b"), "Tell me the amount"),
)


@dataclass(frozen=True, slots=True)
class Paraphrase:
    """One way of asking.

    Attributes:
        name: for reports.
        before, after: what stands around the question, instead of ``Question:`` and ``Answer:``; None leaves it.
        body: what becomes of the question itself.
    """

    name: str
    before: str | None = None
    after: str | None = None
    body: Callable[[str], str] = str

    def __call__(self, prompt: Prompt) -> Prompt:
        """The prompt asked this way; a bare prompt (code) gets what stands around it, too."""
        if prompt.question is None:
            return replace(prompt, text=f"{self.before or ''}{self.body(prompt.text)}{self.after or ''}")
        asked = self.body(prompt.question)
        before = _BEFORE if self.before is None else self.before
        after = _AFTER if self.after is None else self.after
        return replace(
            prompt, text=f"{before}{asked}{after}", question=f"{self.before or ''}{asked}{self.after or ''}".strip()
        )


def _typos(text: str) -> str:
    """Every fourth longer word, chosen by its letters, has two inner letters exchanged."""

    def exchanged(found: re.Match[str]) -> str:
        word = found[0]
        mark = zlib.crc32(word.encode())
        if mark % _TYPO_EVERY:
            return word
        at = 1 + mark // _TYPO_EVERY % (len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return _WORDS.sub(exchanged, text)


def _wording(text: str) -> str:
    for pattern, other in _WORDING:
        text = pattern.sub(other, text)
    return text


PARAPHRASES: tuple[Paraphrase, ...] = (
    Paraphrase("please", before="Please help me with this: "),
    Paraphrase("chat", before="User: ", after="\nAssistant:"),
    Paraphrase("instruction", before="### Instruction:\n", after="\n\n### Response:\n"),
    Paraphrase("greeting", before="Hello! I am new here and hope this is the right place. "),
    Paraphrase("thanks", after="\nThank you very much for your help, I need it by tomorrow!\n"),
    Paraphrase("setting", before="The following reached our office by e-mail on Monday. Deal with it.\n\n"),
    Paraphrase("field", before='{"user": "anna", "request": "', after='"}\n'),
    Paraphrase("lower case", before="question: ", after="\nanswer:", body=str.lower),
    Paraphrase("typos", body=_typos),
    Paraphrase("wording", body=_wording),
)
