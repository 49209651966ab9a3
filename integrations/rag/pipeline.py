"""Retrieval-augmented answers: a folder of texts, MiniLM embeddings, Chroma on disk, questions in a conversation.

    condense (only with a history) -> search -> answer, with the passages it was given

Every model call is a named step, so each learns its own best drafter: a condensed question copies from the history, an
answer copies from the passages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from langchain_chroma import Chroma
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter

__all__ = ["Answered", "Folder", "Question", "conversation", "index", "remembered"]

_SUFFIXES = (".md", ".rst", ".txt")
_PASSAGE, _OVERLAP = 500, 60  # characters: about 120 tokens
_PASSAGES = 2
_BATCH = 64  # passages embedded at a time

_CONDENSE = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Rewrite the last question so that it can be understood without the conversation. Only the question.",
        ),
        MessagesPlaceholder("history"),
        ("human", "{question}"),
    ]
)
_ANSWER = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question in one or two sentences, from these passages only.\n\n{passages}"),
        ("human", "{question}"),
    ]
)


class Question(TypedDict):
    """What goes in: a question and the messages before it, oldest first."""

    question: str
    history: list[BaseMessage]


class Answered(TypedDict):
    """What comes out.

    Attributes:
        question: as asked.
        standalone: as searched for.
        passages: what was found, best first.
        answer: text.
        sources: names of the files the passages came from, each once, best first.
    """

    question: str
    standalone: str
    passages: list[Document]
    answer: str
    sources: list[str]


class Folder(BaseLoader):
    """Text files of a folder and those below, as documents with their relative path as ``source``.

    Raises:
        FileNotFoundError: no such folder, or no text file in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def lazy_load(self) -> Iterator[Document]:
        """One document a file, in the order of names."""
        files = [file for file in sorted(self._path.rglob("*")) if file.suffix in _SUFFIXES and file.is_file()]
        if not files:
            raise FileNotFoundError(f"no {', '.join(_SUFFIXES)} file in {self._path}")
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            yield Document(text, metadata={"source": file.relative_to(self._path).as_posix()})


def index(folder: Path, store: Path, embeddings: Embeddings) -> BaseRetriever:
    """Search in a folder's passages; they are embedded once and kept in `store`.

    A passage is stored under a hash of its text and place, so that a second start embeds only what is new; what is no
    longer in the folder is deleted.
    """
    splitter = RecursiveCharacterTextSplitter(chunk_size=_PASSAGE, chunk_overlap=_OVERLAP)
    found = {_name(one): one for one in splitter.split_documents(Folder(folder).load())}
    chroma = Chroma("passages", embeddings, persist_directory=str(store))
    known = set(chroma.get(include=[])["ids"])
    gone, fresh = sorted(known - found.keys()), [name for name in found if name not in known]
    if gone:
        chroma.delete(gone)
    for start in range(0, len(fresh), _BATCH):
        names = fresh[start : start + _BATCH]
        chroma.add_documents([found[name] for name in names], ids=names)
    return chroma.as_retriever(search_kwargs={"k": _PASSAGES})


def conversation(llm: BaseChatModel, search: BaseRetriever) -> Runnable[Question, Answered]:
    """The chain."""
    condense = _CONDENSE | llm.bind(max_tokens=48, stop=["\n"]).with_config(run_name="condense") | StrOutputParser()
    answer = _ANSWER | llm.bind(max_tokens=96).with_config(run_name="answer") | StrOutputParser()
    standalone = RunnableBranch(
        (lambda asked: bool(asked["history"]), condense | RunnableLambda(str.strip)),
        RunnableLambda(lambda asked: asked["question"]),
    )
    chain: Runnable[Any, Any] = (
        RunnablePassthrough.assign(standalone=standalone)
        | RunnableLambda(_asking_something)
        | RunnablePassthrough.assign(passages=RunnableLambda(lambda asked: asked["standalone"]) | search)
        | RunnablePassthrough.assign(answer=RunnableLambda(_asked) | answer)
        | RunnableLambda(_told)
    )
    return chain.with_config(run_name="rag")


def remembered(history: Sequence[BaseMessage], told: Answered) -> list[BaseMessage]:
    """The history with one more question and its answer."""
    return [*history, HumanMessage(told["question"]), AIMessage(told["answer"])]


def _asking_something(state: dict[str, Any]) -> dict[str, Any]:
    """A model may condense a question to nothing; then it is searched for as it was asked."""
    return {**state, "standalone": state["standalone"] or state["question"]}


def _asked(state: dict[str, Any]) -> dict[str, str]:
    passages = "\n\n".join(f"[{one.metadata['source']}]\n{one.page_content}" for one in state["passages"])
    return {"passages": passages, "question": state["standalone"]}


def _told(state: dict[str, Any]) -> Answered:
    sources = list(dict.fromkeys(one.metadata["source"] for one in state["passages"]))
    return Answered(
        question=state["question"],
        standalone=state["standalone"],
        passages=state["passages"],
        answer=state["answer"].strip(),
        sources=sources,
    )


def _name(passage: Document) -> str:
    return hashlib.blake2s(f"{passage.metadata['source']}\0{passage.page_content}".encode(), digest_size=16).hexdigest()
