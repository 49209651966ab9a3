"""integrations/rag: loading, indexing on disk, the conversation's wiring, the app."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

pytest.importorskip("langchain_chroma")

from integrations.rag import app
from integrations.rag.pipeline import Folder, conversation, index, remembered
from metasd_langchain.bandits.memory import SqliteMemory

DOCUMENTS = Path(app.__file__).parent / "documents"


class Counting(DeterministicFakeEmbedding):
    """Counts what is embedded."""

    seen: list[str]

    def embed_documents(self, texts):
        self.seen.extend(texts)
        return super().embed_documents(texts)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "texts"
    (made / "deep").mkdir(parents=True)
    (made / "a.md").write_text("The covered tank holds 1,200 cubic metres.")
    (made / "deep" / "b.txt").write_text("The library closes at six.")
    (made / "c.bin").write_bytes(b"\x00")
    return made


def embeddings():
    return Counting(size=16, seen=[])


def test_a_folder_becomes_documents_with_relative_sources(folder):
    assert [one.metadata["source"] for one in Folder(folder).load()] == ["a.md", "deep/b.txt"]
    with pytest.raises(FileNotFoundError, match=r"no \.md, \.rst, \.txt file"):
        Folder(folder / "nowhere").load()


def test_a_second_start_embeds_only_what_is_new_and_forgets_what_is_gone(folder, tmp_path):
    first = embeddings()
    index(folder, tmp_path / "store", first)
    assert len(first.seen) == 2
    (folder / "a.md").write_text("The covered tank holds 1,300 cubic metres.")
    again = embeddings()
    search = index(folder, tmp_path / "store", again)
    assert again.seen == ["The covered tank holds 1,300 cubic metres."]
    found = search.invoke("tank", k=10)
    assert sorted(one.page_content for one in found) == [
        "The covered tank holds 1,300 cubic metres.",
        "The library closes at six.",
    ]


def test_without_a_history_nothing_is_condensed(folder, tmp_path):
    llm = GenericFakeChatModel(messages=iter([AIMessage(" 1,200 m3. ")]))
    told = conversation(llm, index(folder, tmp_path / "store", embeddings())).invoke(
        {"question": "How much?", "history": []}
    )
    assert told["standalone"] == "How much?"
    assert told["answer"] == "1,200 m3."
    assert sorted(told["sources"]) == ["a.md", "deep/b.txt"]
    assert len(told["passages"]) == 2


@pytest.mark.parametrize(
    ("condensed", "searched"), [(" How much does the tank hold? ", "How much does the tank hold?"), ("  ", "And it?")]
)
def test_with_a_history_the_question_is_condensed_first(folder, tmp_path, condensed, searched):
    llm = GenericFakeChatModel(messages=iter([AIMessage(condensed), AIMessage("1,200.")]))
    chain = conversation(llm, index(folder, tmp_path / "store", embeddings()))
    history = [HumanMessage("What of the tank?"), AIMessage("It is full.")]
    told = chain.invoke({"question": "And it?", "history": history})
    assert told["standalone"] == searched
    after = remembered(history, told)
    assert [message.content for message in after[2:]] == ["And it?", "1,200."]


def test_the_app_runs_on_a_tiny_model(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(app, "MiniLM", embeddings)
    store = tmp_path / "store"
    arguments = ["--store", str(store), "--model", tiny_folder, "How much?", "And when?"]
    assert app.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("from ") >= 2
    assert "How much?" in printed
    learned = SqliteMemory(store / "bandit.sqlite").rows()  # what was learned stays, by step
    assert {row.key.step for row in learned} == {None, "condense", "answer"}


def test_the_app_names_a_folder_without_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(app, "MiniLM", embeddings)
    assert app.main(["--documents", str(tmp_path / "nowhere"), "--store", str(tmp_path / "store")]) == 2
    assert "nowhere" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.embedded
@pytest.mark.slow
def test_the_app_answers_from_the_documents_on_the_embedded_model(tmp_path, capsys):
    assert app.main(["--store", str(tmp_path / "store"), "How much water does the covered tank hold?"]) == 0
    assert "waterworks.md" in capsys.readouterr().out
