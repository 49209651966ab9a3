"""The run that every backend here is sent: retrieval-augmented answers by a LangGraph loop with named nodes.

    rewrite -> search -> check -> (no: search again, wider, once) -> answer -> summarise

Four of the nodes call the model, `answer` as a stream and `summarise` as a batch. What the model itself says of each
call is kept by `Reported`, without any telemetry, so that what a backend shows can be compared with it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypedDict
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import END, START, StateGraph

from metasd_langchain.cli.demo import MiniLM, passages
from metasd_langchain.cli.prompts import CALLS

__all__ = ["NODES", "Reported", "State", "agent", "retriever"]

NODES = ("rewrite", "search", "check", "answer", "summarise")
_TURNS = 2  # searches before it answers with what it has
_PASSAGES = 2

_CHECK = PromptTemplate.from_template("""\
Does the text hold the answer to the question? Say yes or no.

Text: The bakery in Mill Street opens at six o'clock. On 3 May 1974 a fire destroyed it.
Question: When did the bakery burn down?
Yes or no: yes

Text: The market of Alden is held every Tuesday.
Question: Who is the mayor of Alden?
Yes or no: no

Text: {passages}
Question: {question}
Yes or no:""")


class State(TypedDict, total=False):
    """What the nodes hand on: `question` goes in, `answer` and `points` come out."""

    question: str
    query: str
    passages: list[str]
    verdict: str
    turns: int
    answer: str
    points: list[str]


def retriever(text: str, embeddings: Embeddings | None = None) -> BaseRetriever:
    """Search in a document.

    Args:
        text: the document; headings and blank lines part it.
        embeddings: None takes all-MiniLM-L6-v2 of the demo extra.
    """
    store = InMemoryVectorStore(embeddings or MiniLM())
    store.add_documents(passages(text))
    return store.as_retriever()


def agent(llm: BaseLanguageModel[Any], search: BaseRetriever) -> Runnable[State, State]:
    """The graph. `llm` may be any LangChain model, text or chat."""

    def chain(prompt: PromptTemplate, stop: tuple[str, ...], cap: int) -> Runnable[dict[str, str], str]:
        return prompt | llm.bind(stop=list(stop), max_tokens=cap) | StrOutputParser()

    def told(name: str, cap: int) -> Runnable[dict[str, str], str]:
        return chain(PromptTemplate.from_template(CALLS[name].template), CALLS[name].stop, cap)

    rewriting, answering, summarising = told("rewrite", 24), told("answer", 64), told("summarise", 48)
    checking = chain(_CHECK, ("\n",), 4)

    def rewrite(state: State) -> State:
        return {"query": rewriting.invoke({"question": state["question"]}).strip() or state["question"]}

    def look_up(state: State) -> State:
        turns = state.get("turns", 0) + 1
        found = search.invoke(state["query"], k=_PASSAGES * turns)
        return {"passages": [document.page_content for document in found], "turns": turns}

    def check(state: State) -> State:
        return {"verdict": checking.invoke(_asked(state)).strip().lower()}

    def answer(state: State) -> State:
        return {"answer": "".join(answering.stream(_asked(state))).strip()}

    def summarise(state: State) -> State:
        return {"points": summarising.batch([{"passage": passage} for passage in state["passages"][:_PASSAGES]])}

    graph = StateGraph(State)
    for name, node in zip(NODES, (rewrite, look_up, check, answer, summarise), strict=True):
        graph.add_node(name, node)
    graph.add_edge(START, "rewrite")
    graph.add_edge("rewrite", "search")
    graph.add_edge("search", "check")
    graph.add_conditional_edges("check", _enough, {True: "answer", False: "search"})
    graph.add_edge("answer", "summarise")
    graph.add_edge("summarise", END)
    return graph.compile(name="agent")


def _asked(state: State) -> dict[str, str]:
    return {"passages": " ".join(reversed(state["passages"])), "question": state["question"]}  # best next to question


def _enough(state: State) -> bool:
    return state["turns"] >= _TURNS or state["verdict"].startswith("yes")


class Reported(BaseCallbackHandler):
    """What the model says of each of its calls, through LangChain's callbacks alone.

    `calls` holds a mapping a call: ``step``, ``model``, ``usage``, ``rounds``, ``accepted``, ``accepted_length``,
    ``arms``; of a failed call ``step`` and ``error``, the exception's class name.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._steps: dict[UUID, str] = {}
        self._lock = threading.Lock()  # a batch's calls end on several threads

    def on_llm_start(
        self,
        serialized: Mapping[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember which node asks."""
        with self._lock:
            self._steps[run_id] = str((metadata or {}).get("langgraph_node", ""))

    def on_chat_model_start(self, serialized: Mapping[str, Any], messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The same for a chat model."""
        self.on_llm_start(serialized, [], run_id=run_id, **kwargs)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Keep the numbers of the answer."""
        generation = response.generations[0][0]
        message = getattr(generation, "message", None)  # a chat model's facts are on its message
        info = (message.response_metadata if message is not None else generation.generation_info) or {}
        facts = info["metasd"]
        call = {name: facts[name] for name in ("rounds", "accepted", "accepted_length", "arms")}
        self._keep(run_id, {"model": info["model_name"], "usage": info["usage"], **call})

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Keep the error's class; its message may hold text of the prompt."""
        self._keep(run_id, {"error": type(error).__qualname__})

    def _keep(self, run_id: UUID, facts: dict[str, Any]) -> None:
        with self._lock:
            self.calls.append({"step": self._steps.pop(run_id, ""), **facts})
