"""``metasd chat`` on a tiny model: answers, commands, what goes wrong."""

from __future__ import annotations

import json

import pytest
from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict
from typer.testing import CliRunner

from metasd_langchain import ChatMetaSD
from metasd_langchain.cli import app


def chat(folder, said, *options):
    arguments = ["chat", "--model", folder, "--max-tokens", "12", "--dtype", "float32", *map(str, options)]
    return CliRunner().invoke(app, arguments, input=said)


def test_a_conversation_is_what_chat_metasd_says(tiny_folder, tmp_path):
    saved = tmp_path / "talk.json"
    done = chat(tiny_folder, "the cat and the hat\nand then?\n/quit\n", "--save", saved)
    assert done.exit_code == 0, done.output
    messages = messages_from_dict(json.loads(saved.read_text()))
    assert [message.type for message in messages] == ["human", "ai", "human", "ai"]
    llm = ChatMetaSD(model=tiny_folder, max_tokens=12, dtype="float32")
    first = llm.invoke([HumanMessage("the cat and the hat")]).text.strip()
    history = [HumanMessage("the cat and the hat"), AIMessage(first), HumanMessage("and then?")]
    assert [messages[1].content, messages[3].content] == [first, llm.invoke(history).text.strip()]
    assert done.output.count("tokens/s") == 2


def test_the_system_message_is_told_and_saved(tiny_folder, tmp_path):
    saved = tmp_path / "talk.txt"
    done = chat(tiny_folder, f"hello\n/save {saved}\n", "--system", "Be brief.")
    assert done.exit_code == 0, done.output
    assert saved.read_text().startswith("system: Be brief.\n\nyou: hello\n\nmodel:")


def test_stats_count_every_token_once(tiny_folder):
    done = chat(tiny_folder, "one two one two one two\n/stats\n")
    shares = [int(line.split("%")[0].split()[-1]) for line in done.output.splitlines() if "│" in line and "%" in line]
    assert sum(shares) == pytest.approx(100, abs=len(shares))
    assert "12 tokens in" in done.output


def test_clear_starts_afresh(tiny_folder, tmp_path):
    saved = tmp_path / "talk.json"
    chat(tiny_folder, "hello\n/clear\nagain\n", "--save", saved)
    assert json.loads(saved.read_text())[0]["data"]["content"] == "again"


@pytest.mark.parametrize(
    ("said", "told"),
    [("/stats\n", "nothing has been answered"), ("/fly\n", "no command /fly"), ("/save\n", "/save"),
     ("/save nowhere/at/all.txt\n", "can be written"), ("/help\n", "/stats")],
)  # fmt: skip
def test_what_goes_wrong_is_said_and_the_talk_goes_on(tiny_folder, said, told):
    done = chat(tiny_folder, said + "hello\n")
    assert done.exit_code == 0
    assert told in done.output
    assert "tokens/s" in done.output  # hello was answered


def test_a_wrong_option_ends_with_a_message():
    done = CliRunner().invoke(app, ["chat", "--model", "no/such/folder", "--temperature", "-1"], input="hi\n")
    assert done.exit_code == 2
    assert "temperature" in done.output
