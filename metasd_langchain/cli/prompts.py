"""The demo's calls: few-shot prompts that a small base model without a chat template can follow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALLS", "FIELDS", "QUESTION", "QUESTION_OF_A_FILE", "Call"]

QUESTION = "What did the duty engineer do after the landslip broke the main?"
QUESTION_OF_A_FILE = "What happened, and when?"
FIELDS = ("date", "place", "event", "person", "number")


@dataclass(frozen=True, slots=True)
class Call:
    """One step of the pipeline.

    Attributes:
        name: name of the run, under which the bandit remembers what it learned.
        title: what the step does, for people.
        template: an f-string template.
        stop: text that ends the answer.
        cap: most tokens it ever needs.
    """

    name: str
    title: str
    template: str
    stop: tuple[str, ...]
    cap: int = 1024


_BAKERY = (
    "The bakery in Mill Street opens at six o'clock. On Fridays it sells rye bread, which is baked in a wood oven that"
    " was built in 1921. On 3 May 1974 a fire destroyed the bakery. The baker, Anna Lind, saved the oven with the help"
    " of 12 neighbours."
)
_MARKET = (
    "The market of Alden is held every Tuesday. In June 2003 the river flooded the market, and 45 stalls were lost. The"
    " mayor, Peter Hale, opened the town hall for the traders until the water had gone."
)

_REWRITE = """\
Rewrite each question as a short search query.

Question: How can I stop the battery of my phone from running down so fast?
Query: stop phone battery running down so fast

Question: Do you happen to know in which year the old town library burned down?
Query: year the old town library burned down

Question: {question}
Query:"""

_ANSWER = f"""\
Answer each question by quoting the text.

Text: {_BAKERY}
Question: What happened to the bakery in 1974?
Answer: On 3 May 1974 a fire destroyed the bakery. The baker, Anna Lind, saved the oven with the help of 12 neighbours.

Text: {_MARKET}
Question: What did the mayor do when the river flooded the market?
Answer: The mayor, Peter Hale, opened the town hall for the traders until the water had gone.

Text: {{passages}}
Question: {{question}}
Answer:"""

_SUMMARISE = f"""\
Text: {_BAKERY}
Key points:
- The bakery in Mill Street opens at six o'clock.
- On Fridays it sells rye bread from a wood oven that was built in 1921.
- On 3 May 1974 a fire destroyed the bakery, but Anna Lind saved the oven.

Text: {_MARKET}
Key points:
- The market of Alden is held every Tuesday.
- In June 2003 the river flooded the market, and 45 stalls were lost.
- The mayor, Peter Hale, opened the town hall for the traders.

Text: {{passage}}
Key points:
-"""

_EXTRACT = f"""\
Text: {_BAKERY}
JSON:
{{{{
  "date": "3 May 1974",
  "place": "the bakery in Mill Street",
  "event": "a fire destroyed the bakery",
  "person": "Anna Lind",
  "number": "12 neighbours"
}}}}

Text: {_MARKET}
JSON:
{{{{
  "date": "June 2003",
  "place": "the market of Alden",
  "event": "the river flooded the market",
  "person": "Peter Hale",
  "number": "45 stalls"
}}}}

Text: {{passage}}
JSON:
{{{{
  "date":"""

_CODE = """\
class Event:
    def __init__(self, {arguments}):
{assignments}

    def to_dict(self):
        return {{
            "{first}": self.{first},
"""

CALLS = {
    call.name: call
    for call in (
        Call("rewrite", "rewrite the question as a search query", _REWRITE, ("\n",), 24),
        Call("answer", "answer from the retrieved passages", _ANSWER, ("\n",)),
        Call("summarise", "summarise the best passage", _SUMMARISE, ("\n\n",)),
        # the prompt has begun with the first field, so a second one means that the model goes round in circles
        Call("extract", "extract fields as JSON", _EXTRACT, ("\n}", '\n  "date"')),
        Call("code", "complete a class for these fields", _CODE, ("\n\n\n", "\nclass ")),
    )
}
