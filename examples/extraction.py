"""Structured output: sentences become objects of a pydantic class. The grammar makes every answer valid JSON.

Run it as ``python examples/extraction.py`` for the embedded model, or name a folder, a hub id or a .gguf file.
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel, Field

from metasd_langchain import ChatMetaSD


class Report(BaseModel):
    """A report of a fault."""

    place: str = Field(description="where it happened", max_length=40)
    kind: Literal["leak", "fire", "power cut", "other"]
    hour: int = Field(description="hour of the day", ge=0, le=23)
    injured: bool


SENTENCES = [
    "At 7 in the morning water ran out of a broken pipe in Mill Street; nobody was hurt.",
    "The lights went out in the whole school at 14 o'clock.",
]


def main(model: str | None = None) -> None:
    llm = ChatMetaSD(model=model, max_tokens=128)
    extract = llm.with_structured_output(Report)
    for report in extract.batch([f"Fill in the report: {sentence}" for sentence in SENTENCES]):
        print(report.model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:2])
