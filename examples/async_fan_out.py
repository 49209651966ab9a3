"""Several questions at once on one event loop; the engine packs what runs at the same time into common forwards.

Run it as ``python examples/async_fan_out.py`` for the embedded model, or name a folder, a hub id or a .gguf file.
"""

from __future__ import annotations

import asyncio
import sys

from metasd_langchain import ChatMetaSD

QUESTIONS = [
    "Name three rivers.",
    "Count from one to ten.",
    "Write the months of the year, joined by commas.",
]


async def answer(llm: ChatMetaSD, question: str) -> str:
    parts = [chunk.text async for chunk in llm.astream(question)]
    return "".join(parts).strip()


async def fan_out(llm: ChatMetaSD) -> list[str]:
    return await asyncio.gather(*(answer(llm, question) for question in QUESTIONS))


def main(model: str | None = None) -> None:
    for question, text in zip(QUESTIONS, asyncio.run(fan_out(ChatMetaSD(model=model, max_tokens=40))), strict=True):
        print(f"{question} -> {text}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
