"""Beginnings of questions, written for this project, that a target goes on from: see `prompts`."""

from __future__ import annotations

__all__ = ["OPENINGS"]

_WHO = (
    *("who played", "who sang", "who wrote", "who is the", "who was the first", "who won the", "who invented the"),
    *("who owns", "who directed", "who is the voice of", "who discovered", "who founded the", "who is the current"),
)
_WHEN = (
    *(
        "when did",
        "when was the",
        "when is the",
        "when does the new",
        "when did the united states",
        "when was the last",
    ),
    *("when did england", "when do", "when are the", "when was the first", "what year did", "what year was the"),
)
_WHERE = (
    *("where is the", "where did the", "where does the", "where was the movie", "where do", "where are the"),
    *("where is the name", "where was the first", "where does the water", "where in the bible", "where did they film"),
)
_WHAT = (
    *("what is the", "what does", "what is the meaning of", "what are the", "what was the name of the", "what kind of"),
    *("what is the name of the", "what type of", "what happened to", "what is the difference between", "what song"),
    *("which of the", "which country", "which state", "how many", "how many episodes of", "how long is the"),
    *("how much does", "how did the", "how do you", "how many people", "name of the", "the first", "is the", "why do"),
)
_GERMAN = (
    *("Die", "Der", "Das", "Ein", "Eine", "Im", "In", "Am", "Nach", "Seit", "Mit", "Bei", "Für", "Es", "Er", "Sie"),
    *("Wir", "Auch", "Aber", "Doch", "Wenn", "Zwar", "Vor", "Die Polizei", "Der Präsident", "Die Regierung", "Das ist"),
    *("In der", "Die Stadt", "Der Mann", "Am Montag", "Nach Angaben", "Laut", "Zwei", "Im Jahr", "Es gibt", "Viele"),
    *("Bisher", "Dabei", "Ein Sprecher", "Die Zahl der", "Die meisten", "Unter", "Trotz", "Damit", "Gegen", "Man"),
)
_NEWS = (
    *(
        "(CNN)",
        "(CNN) -- The",
        "(CNN) --",
        "LONDON, England (CNN) --",
        "WASHINGTON (CNN) --",
        "By . Daily Mail Reporter",
    ),
    *("A man", "A woman", "Police", "The family of", "The president", "A former", "Two men", "Manchester United"),
    *("The mother of", "Scientists", "A new study", "Britain's", "The world's", "It was", "Last week,", "When the"),
    *("Chelsea", "A court", "At least", "The government", "NEW YORK (AP) —", "The prime minister", "A teenager"),
    *("After years of", "More than", "Officials in", "The actress", "Researchers", "An American", "On Monday,"),
)
_SUMS = (
    *("A shop", "A train", "John has", "Mary bought", "Tom and", "There are", "In a class of", "A farmer", "Sarah"),
    *("If a", "Each", "James", "A baker", "The cost of", "Emily", "A company", "Half of the", "Mike", "A box", "Every"),
)
_PROGRAMS = (
    *("Write a Python function that", "Write a function to find", "Implement a", "Write a C++ program", "How do I"),
    *("Write a Python script to", "Write a program that reads", "Write an SQL query", "Develop a Python program that"),
    *("Write a regular expression", "Write a class", "Explain what this code does:", "Fix the bug in this function:"),
)

OPENINGS = {
    "code": _PROGRAMS,
    "translation": tuple(f"Translate German to English: {text}" for text in _GERMAN),
    "summarization": tuple(f"Summarize: {text}" for text in _NEWS),
    "qa": (*_WHO, *_WHEN, *_WHERE, *_WHAT),
    "math": _SUMS,
}
