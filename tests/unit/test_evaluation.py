"""Evaluators: by hand, on real outputs of every shape, and inside ``langsmith.evaluate``."""

from __future__ import annotations

import copy
import datetime as dt
import uuid

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from metasd_langchain.evaluation import accepted_length, lossless, speedup
from metasd_langchain.runtime import finish_info
from metasd_langchain.telemetry.attributes import plain_pace, speedup_estimate
from metasd_langchain.values import Step
from tests.bugs.kit import PROMPT, make, perfect, ref, scripted
from tests.unit.calls import record, summary


def metadata(rounds=10, accepted=15, **more):
    return {"metasd": {"rounds": rounds, "accepted": accepted, **more}}


class Fake:
    """A model that answers as it was told, differently without drafting."""

    temperature, seed = 0.0, None

    def __init__(self, drafted=(1, 2, 3), plain=(1, 2, 3)):
        self._drafted, self._plain = drafted, plain
        self.asked = []

    def steps(self, prompt, *, stop=None, **options):
        self.asked.append((prompt, options))
        tokens = self._drafted if options.get("speculative", True) else self._plain
        yield Step(tuple(tokens))


# -- accepted length ---------------------------------------------------------------------------------------------------


def test_accepted_length_is_of_all_rounds_of_all_calls():
    outputs = {"a": AIMessage("x", response_metadata=metadata(10, 15)), "b": [metadata(30, 0)]}
    found = accepted_length(outputs=outputs)
    assert found["key"] == "accepted_length"
    assert found["score"] == pytest.approx(1 + 15 / 40)
    assert "15 accepted tokens in 40 rounds of 2 calls" in found["comment"]


def test_accepted_length_of_a_real_call_is_its_metadatas():
    result = scripted(perfect(), 4).generate([PROMPT])
    told = result.generations[0][0].generation_info["metasd"]
    for place in (result, result.generations[0][0], dumpd(result.generations[0][0]), [result], {"output": result}):
        assert accepted_length(outputs=place)["score"] == pytest.approx(told["accepted_length"])
    assert told["accepted_length"] > 2


def test_a_run_and_its_outputs_count_a_call_once():
    collector = RunCollectorCallbackHandler()
    llm = scripted(perfect(), 4)
    llm.with_config(run_name="chain").invoke(PROMPT, {"callbacks": [collector]})
    (run,) = collector.traced_runs
    found = accepted_length(run, None)
    assert "of 1 call" in found["comment"]
    assert accepted_length(run, outputs=copy.deepcopy(run.outputs)) == found
    assert found["score"] > 2


@pytest.mark.parametrize("outputs", [None, {}, "text", {"metasd": 3}, {"metasd": {"rounds": "many"}}, [metadata(0, 0)]])
def test_nothing_known_is_no_score(outputs):
    assert accepted_length(outputs=outputs)["score"] is None
    assert speedup(outputs=outputs)["score"] is None


def test_what_holds_itself_is_walked_once():
    outputs = {"inner": [metadata()]}
    outputs["inner"].append(outputs)
    assert accepted_length(outputs=outputs)["score"] == 2.5


# -- speed-up ----------------------------------------------------------------------------------------------------------


def test_speedup_is_the_formula_of_its_docstring():
    one = metadata(plain_round_s=0.05, decode_tokens=40, decode_s=1.0)
    two = metadata(11, plain_round_s=0.1, decode_tokens=10, decode_s=0.5)
    silent = metadata(12)
    found = speedup(outputs=[one, two, silent])
    assert found["score"] == pytest.approx((0.05 * 40 + 0.1 * 10) / 1.5)
    assert "2 of 3 calls" in found["comment"]
    assert speedup(outputs=[silent])["score"] is None


def test_the_metadata_of_a_call_says_what_a_speedup_needs():
    told = finish_info("m", summary())["metasd"]
    assert (told["plain_round_s"], told["decode_tokens"]) == (0.05, 15)
    assert told["decode_s"] == pytest.approx(0.3)
    assert speedup(outputs={"metasd": told})["score"] == pytest.approx(speedup_estimate(summary().rounds))
    short = finish_info("m", summary(summary().rounds[:3]))["metasd"]
    assert "plain_round_s" not in short


def test_a_drafter_that_found_nothing_does_not_make_plain_rounds_slower():
    empty = [record(total_s=0.05) for _ in range(3)]
    slow = [type(one)(one.arm, 0, 0, 1, 0.02, 0.04, 0.07) for one in empty]  # 0.02 s of drafting, and no draft
    assert plain_pace([record(), *slow])[0] == pytest.approx(plain_pace([record(), *empty])[0])


# -- lossless ----------------------------------------------------------------------------------------------------------


def test_a_real_model_is_lossless():
    found = lossless(scripted(perfect(), 4))(inputs={"question": PROMPT}, outputs={})
    assert found == {"key": "lossless", "score": 1.0, "comment": "1 answers token for token the same"}


def test_a_difference_is_found_and_named_without_text():
    found = lossless(Fake((1, 2, 9, 4), (1, 2, 3, 4)))(inputs="ask")
    assert (found["score"], found["comment"]) == (0.0, "prompt 1 of 1 differs from token 3 on")
    assert lossless(Fake((1, 2), (1, 2, 3)))(inputs="ask")["comment"].endswith("token 3 on")


def test_ids_that_the_outputs_hold_are_compared_with_plain_decoding_alone():
    llm = make(logprobs=True)
    outputs = llm.generate([PROMPT])
    honest = Fake(plain=ref())
    assert lossless(honest)(inputs=PROMPT, outputs=outputs)["score"] == 1.0
    assert [options for _, options in honest.asked] == [{"speculative": False}]
    assert lossless(Fake(plain=(*ref()[:-1], 5)))(inputs=PROMPT, outputs=outputs)["score"] == 0.0


def test_a_run_says_its_prompts_itself_and_options_go_with_them():
    collector, llm = RunCollectorCallbackHandler(), Fake()
    make().invoke(PROMPT, {"callbacks": [collector]})
    assert lossless(llm, stop=["x"])(collector.traced_runs[0], None)["score"] == 1.0
    assert [prompt for prompt, _ in llm.asked] == [PROMPT, PROMPT]


def test_what_cannot_be_compared_is_no_score():
    fake = Fake()
    fake.temperature = 0.7
    assert lossless(fake)(inputs="ask")["score"] is None
    assert lossless(fake, seed=3)(inputs="ask")["score"] == 1.0
    assert lossless(fake, temperature=0.0)(inputs="ask")["score"] == 1.0
    assert lossless(Fake())(inputs={"a": "two", "b": "texts"})["score"] is None


# -- in langsmith.evaluate ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:'upload_runs' parameter is in beta")
def test_in_langsmith_evaluate_without_a_server():
    langsmith = pytest.importorskip("langsmith")
    from langsmith.schemas import Example

    llm = scripted(perfect(), 4)

    def target(inputs: dict) -> dict:
        (generation,) = llm.generate([inputs["question"]]).generations[0]
        return {"answer": generation.text, "info": generation.generation_info}

    def keywords(outputs: dict, inputs: dict) -> dict:
        return {**accepted_length(outputs=outputs), "key": "by_keyword"}

    now = dt.datetime.now(dt.UTC)
    examples = [
        Example(id=uuid.uuid4(), inputs={"question": text}, outputs={}, dataset_id=uuid.uuid4(), created_at=now)
        for text in (PROMPT, "the cat")
    ]
    client = langsmith.Client(api_url="http://127.0.0.1:9", api_key="none", auto_batch_tracing=False)
    results = langsmith.evaluate(
        target,
        data=examples,
        evaluators=[accepted_length, speedup, lossless(llm), keywords],
        client=client,
        upload_results=False,
        disable_evaluator_tracing=True,
    )
    for row in results:
        found = {one.key: one for one in row["evaluation_results"]["results"]}
        assert set(found) == {"accepted_length", "speedup", "lossless", "by_keyword"}
        assert found["accepted_length"].score > 1.5
        assert found["by_keyword"].score == found["accepted_length"].score
        assert found["lossless"].score == 1.0
        assert found["speedup"].score is None
