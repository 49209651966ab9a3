"""integrations/langgraph_agent: tools, the loop's wiring, state over a restart, the app."""

from __future__ import annotations

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

pytest.importorskip("langgraph.checkpoint.sqlite")

from langgraph.checkpoint.sqlite import SqliteSaver

from integrations.langgraph_agent import app
from integrations.langgraph_agent.graph import agent, calculate, look_up
from metasd_langchain.bandits.memory import SqliteMemory


class Scripted(GenericFakeChatModel):
    """Says what it is told to, and counts how often tools were on offer."""

    offered: list[int]

    def bind_tools(self, tools, **kwargs):
        self.offered.append(len(tools))
        return self


def call(name, **arguments):
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{name}", "type": "tool_call"}])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("400 + 900 * 2", "2200"),
        ("-(3 - 1) / 4", "-0.5"),
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('os')", "ValueError"),
        ("2 ** 9", "KeyError"),
        ("True + 1", "ValueError"),
        ("1 +", "SyntaxError"),
    ],
)
def test_calculate_is_arithmetic_and_nothing_else(expression, value):
    assert value in calculate.invoke({"expression": expression})


def test_look_up_says_what_there_is():
    assert "1200" in look_up.invoke({"topic": "the Tanks"})
    assert "Topics: tanks, library, bakery" in look_up.invoke({"topic": "mayor"})


def test_the_loop_ends_when_the_model_answers_in_text(tmp_path):
    llm = Scripted(messages=iter([call("look_up", topic="tanks"), AIMessage("Three tanks.")]), offered=[])
    with SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        config = {"configurable": {"thread_id": "t"}}
        told = agent(llm, saver).invoke({"messages": [HumanMessage("tanks?")]}, config)["messages"]
    assert [message.type for message in told] == ["human", "ai", "tool", "ai"]
    assert isinstance(told[2], ToolMessage)
    assert "1200" in told[2].content
    assert told[3].content == "Three tanks."


def test_a_thread_goes_on_after_a_restart(tmp_path):
    config = {"configurable": {"thread_id": "t"}}
    for question, answer in (("one?", "One."), ("two?", "Two.")):
        with SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
            llm = Scripted(messages=iter([AIMessage(answer)]), offered=[])
            told = agent(llm, saver).invoke({"messages": [HumanMessage(question)]}, config)["messages"]
    assert [message.content for message in told] == ["one?", "One.", "two?", "Two."]


def test_a_model_that_goes_round_in_circles_is_made_to_answer():
    script = iter([*(call("look_up", topic="tanks") for _ in range(4)), AIMessage("Enough.")])
    told = agent(Scripted(messages=script, offered=[])).invoke({"messages": [HumanMessage("tanks?")]})["messages"]
    assert [message.type for message in told].count("tool") == 4
    assert told[-1].content == "Enough."


def test_the_app_runs_on_a_tiny_model_and_each_node_has_its_bandit(tiny_folder, tmp_path, capsys):
    arguments = ["--state", str(tmp_path), "--model", tiny_folder]
    assert app.main([*arguments, "What is known?"]) == 0
    printed = capsys.readouterr().out
    assert "model:" in printed
    assert "tokens a round" in printed
    assert {row.key.step for row in SqliteMemory(tmp_path / "bandit.sqlite").rows()} == {None, "model"}
    assert (tmp_path / "threads.sqlite").exists()
    assert app.main([*arguments, "And now?"]) == 0


@pytest.mark.embedded
@pytest.mark.slow
def test_the_app_runs_on_the_embedded_model(tmp_path, capsys):
    assert app.main(["--state", str(tmp_path), "What do the records say about the tanks?"]) == 0
    assert "model:" in capsys.readouterr().out
