"""MetaSDLLM as LangChain code calls it, on a tiny model: one answer, however it is asked for."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import (
    BadOption,
    DeadlineExceeded,
    RequestError,
    TargetError,
    UnknownName,
    UnsupportedParameter,
)
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer

PROMPT = "the cat sat on the mat and then the cat sat on the"
MODEL, TOKENIZER = tiny_model(), tiny_tokenizer()


def make(**options: Any) -> MetaSDLLM:
    return MetaSDLLM(**{"model": (MODEL, TOKENIZER), "max_tokens": 24, **options})


@pytest.fixture(scope="module")
def llm() -> MetaSDLLM:
    return make()


@pytest.fixture(scope="module")
def truth() -> str:
    ids = reference_tokens(MODEL, TOKENIZER(PROMPT)["input_ids"], 24, frozenset({1}))
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


class Tokens(BaseCallbackHandler):
    """What the callbacks of a call hear."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.starts, self.ends, self.errors = 0, 0, 0
        self.responses: list[Any] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts += 1

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        assert chunk is not None
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends += 1
        self.responses.append(response)

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.errors += 1


async def test_every_way_of_calling_gives_the_reference_text(llm: MetaSDLLM, truth: str) -> None:
    assert llm.invoke(PROMPT) == truth
    assert "".join(llm.stream(PROMPT)) == truth
    assert llm.batch([PROMPT, PROMPT]) == [truth, truth]
    assert await llm.ainvoke(PROMPT) == truth
    assert "".join([text async for text in llm.astream(PROMPT)]) == truth
    assert await llm.abatch([PROMPT, PROMPT], {"max_concurrency": 1}) == [truth, truth]
    assert (PromptTemplate.from_template("{x}") | llm).invoke({"x": PROMPT}) == truth


async def test_usage_and_finish_reason_are_the_same_in_every_mode(llm: MetaSDLLM) -> None:
    seen = []
    for call in ("invoke", "stream", "ainvoke", "astream"):
        tokens = Tokens()
        config: Any = {"callbacks": [tokens]}
        if call == "invoke":
            llm.invoke(PROMPT, config)
        elif call == "stream":
            text = "".join(llm.stream(PROMPT, config))
            assert "".join(tokens.tokens) == text
        elif call == "ainvoke":
            await llm.ainvoke(PROMPT, config)
        else:
            text = "".join([piece async for piece in llm.astream(PROMPT, config)])
            assert "".join(tokens.tokens) == text
        assert (tokens.starts, tokens.ends, tokens.errors) == (1, 1, 0)
        info = tokens.responses[0].generations[0][0].generation_info
        seen.append((info["usage"], info["finish_reason"], info["model_name"]))
    assert seen[0] == (
        {
            "prompt_tokens": len(TOKENIZER(PROMPT)["input_ids"]),
            "completion_tokens": 24,
            "total_tokens": 24 + len(TOKENIZER(PROMPT)["input_ids"]),
        },
        "length",
        "gemma3_text",
    )
    assert all(other == seen[0] for other in seen)


def test_stop_in_a_call_in_bind_in_the_field_and_in_batch(llm: MetaSDLLM, truth: str) -> None:
    stop = truth[9:13]  # in the middle, across tokens
    want = truth[: truth.index(stop)]
    assert llm.invoke(PROMPT, stop=[stop]) == want
    assert llm.bind(stop=[stop]).invoke(PROMPT) == want
    assert make(stop=[stop]).invoke(PROMPT) == want
    assert llm.batch([PROMPT], stop=[stop]) == [want]
    assert "".join(llm.stream(PROMPT, stop=[stop])) == want
    assert make(stop=[stop]).invoke(PROMPT, stop=["no such"]) == truth  # a call's stop replaces the field's


def test_options_of_a_call_and_what_the_cache_keys_on(truth: str) -> None:
    llm = make(cache=InMemoryCache())
    short = llm.invoke(PROMPT, max_tokens=3)
    assert llm.invoke(PROMPT, max_tokens=24) == truth != short
    assert llm.invoke(PROMPT, max_new_tokens=3) == short  # an alias, from the cache
    assert llm.invoke(PROMPT) == truth
    hot = llm.invoke(PROMPT, temperature=1.0, seed=5)
    assert hot == make(temperature=1.0, seed=5).invoke(PROMPT)
    with pytest.raises(UnsupportedParameter, match=r"tempature.*temperature"):
        llm.invoke(PROMPT, tempature=1.0)


def test_seeds(llm: MetaSDLLM) -> None:
    answers = [llm.invoke(PROMPT, temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    assert answers[0] == answers[1] != answers[2]
    assert llm.invoke(PROMPT, temperature=1.0) != llm.invoke(PROMPT, temperature=1.0)
    assert "".join(llm.stream(PROMPT, temperature=1.0, seed=7)) == answers[0]
    plain = make(drafters=["plain"], temperature=1.0, seed=7)
    assert plain.invoke(PROMPT) == answers[0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"drafters": ["sufix@4"]}, UnknownName, "did you mean 'suffix'"),
        ({"drafters": ["suffix@0"]}, BadOption, "budget"),
        ({"drafters": []}, BadOption, "at least one arm"),
        ({"policy": "ucbb"}, UnknownName, "hinted_ucb"),
        ({"reward": "speed"}, UnknownName, "throughput"),
        ({"memory": "disk"}, BadOption, "request"),
        ({"temperature": -1}, BadOption, "temperature=-1"),
        ({"top_p": 0}, BadOption, "top_p"),
        ({"max_tokens": 0}, BadOption, "max_tokens=0"),
        ({"dtyp": "float32"}, UnsupportedParameter, "dtype"),
        ({"verify": "maybe"}, ValueError, "rejection"),
        ({"settings": {"arms": []}}, UnsupportedParameter, "drafters"),
        ({"settings": "no/such/file.json"}, BadOption, "settings"),
    ],
)
def test_wrong_options_fail_at_construction(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**options)


def test_wrong_prompts_fail_before_any_compute(llm: MetaSDLLM) -> None:
    rounds = llm._load().rounds
    with pytest.raises(RequestError):
        llm.invoke("")
    with pytest.raises(ValueError, match="512"):
        llm.invoke("x" * 600)
    with pytest.raises(BadOption):
        llm.invoke(PROMPT, max_tokens=0)
    assert llm._load().rounds == rounds


async def test_one_bad_prompt_in_a_batch_fails_alone(llm: MetaSDLLM, truth: str) -> None:
    for answers in (
        llm.batch([PROMPT, "", PROMPT], return_exceptions=True),
        await llm.abatch([PROMPT, "", PROMPT], return_exceptions=True),
    ):
        assert answers[0] == answers[2] == truth
        assert isinstance(answers[1], RequestError)


def test_threads_get_their_own_answers(llm: MetaSDLLM) -> None:
    prompts = [PROMPT[i:] + str(i) for i in range(12)]
    single = [llm.invoke(prompt) for prompt in prompts]
    found: dict[int, list[str]] = {}

    def work(k: int) -> None:
        found[k] = [llm.invoke(prompt) for prompt in prompts]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[k] == single for k in range(4))


async def test_a_cancelled_task_stops_the_engine_and_the_loop_is_never_blocked(llm: MetaSDLLM, truth: str) -> None:
    engine = llm._load()
    task = asyncio.create_task(llm.ainvoke(PROMPT, max_tokens=400))
    before, late, last = engine.rounds, 0.0, time.perf_counter()
    while engine.rounds < before + 3:
        await asyncio.sleep(0.001)
        late, last = max(late, time.perf_counter() - last), time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rounds = engine.rounds
    await asyncio.sleep(0.1)
    assert engine.rounds <= rounds + 2
    assert engine.live == 0
    assert late < 0.1
    assert await llm.ainvoke(PROMPT) == truth


async def test_leaving_a_stream_stops_the_engine(llm: MetaSDLLM, truth: str) -> None:
    engine = llm._load()
    stream = llm.stream(PROMPT, max_tokens=400)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    later = llm.astream(PROMPT, max_tokens=400)
    await anext(later)
    await later.aclose()  # type: ignore[attr-defined]
    rounds = engine.rounds
    await asyncio.sleep(0.1)
    assert engine.rounds <= rounds + 2
    assert llm.invoke(PROMPT) == truth


def test_a_deadline_gives_the_text_so_far(llm: MetaSDLLM) -> None:
    pieces: list[str] = []
    with pytest.raises(DeadlineExceeded) as caught:  # noqa: PT012 - the stream yields first, then raises
        for piece in llm.stream(PROMPT, max_tokens=450, timeout=0.05):
            pieces.append(piece)
            time.sleep(0.02)
    assert caught.value.partial == "".join(pieces)


def test_copies_share_the_engine_and_pickles_load_their_own(truth: str) -> None:
    llm = MetaSDLLM(model=(MODEL, TOKENIZER), max_tokens=24)
    engine = llm._load()
    assert copy.deepcopy(llm)._load() is engine
    assert llm.model_copy(update={"max_tokens": 3})._load() is engine
    assert make()._load() is engine  # another object over the same model
    revived = pickle.loads(pickle.dumps(llm))  # noqa: S301 - our own bytes
    assert revived.invoke(PROMPT) == truth


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_constructing_loads_nothing_and_serialises() -> None:
    from langchain_core.load import dumpd, load

    llm = MetaSDLLM(model="no/such-model", temperature=0.5, stop=["\n"])
    dumped = dumpd(llm)
    revived = load(dumped, valid_namespaces=["metasd_langchain"], allowed_objects=[MetaSDLLM])
    assert revived._identifying_params == llm._identifying_params
    assert llm._get_ls_params()["ls_provider"] == "metasd"
    assert llm._get_ls_params()["ls_model_name"] == "no/such-model"


def test_tokens_are_counted_with_the_models_own_tokenizer(llm: MetaSDLLM) -> None:
    assert llm.get_num_tokens(PROMPT) == len(TOKENIZER(PROMPT)["input_ids"])
    assert llm._load().target.encode("<bos>hi")[:2] != [2, 2]


async def test_each_call_leaves_one_span_under_the_callers(llm: MetaSDLLM, spans: Any) -> None:
    from opentelemetry import trace

    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("app") as app:
        llm.invoke(PROMPT)
        list(llm.stream(PROMPT))
        await llm.ainvoke(PROMPT)
        llm.batch([PROMPT, PROMPT])
        stream = llm.stream(PROMPT, max_tokens=300)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        with pytest.raises(RequestError):
            llm.invoke("")
    while llm._load().live:  # noqa: ASYNC110 - the engine knows no event loop
        await asyncio.sleep(0.01)
    calls = [span for span in spans.get_finished_spans() if span.name == "text_completion gemma3_text"]
    assert len(calls) == 7
    assert {span.parent.span_id for span in calls} == {app.get_span_context().span_id}
    assert [span.attributes.get("metasd.cancelled", False) for span in calls].count(True) == 1
    assert [span.attributes.get("error.type") for span in calls].count("RequestError") == 1
    assert all("cat sat" not in span.to_json() for span in calls)
    done = calls[0].attributes
    assert done["gen_ai.usage.output_tokens"] == 24
    assert sum(done["metasd.drafters.rounds"]) == done["metasd.round_count"]


def test_each_pipeline_step_has_its_own_memory(llm: MetaSDLLM) -> None:
    class Step(Tokens):
        def names(self) -> list[str]:
            return [r.generations[0][0].generation_info["metasd"]["step"] for r in self.responses]

    seen = Step()
    llm.invoke(PROMPT, {"run_name": "rewrite", "callbacks": [seen]})
    llm.invoke(PROMPT, {"metadata": {"langgraph_node": "agent"}, "callbacks": [seen]})
    llm.invoke(PROMPT, {"callbacks": [seen]}, memory_key="mine")
    llm.invoke(PROMPT, {"callbacks": [seen]})
    llm.invoke("something else", {"callbacks": [seen]})
    names = seen.names()
    assert names[:3] == ["rewrite", "agent", "mine"]
    assert len(set(names)) == 5


def test_what_tells_one_cached_answer_from_another(truth: str) -> None:
    cache = InMemoryCache()
    stop = truth[5:8]
    cut = make(cache=cache, stop=[stop]).invoke(PROMPT)
    assert make(cache=cache).invoke(PROMPT) == truth != cut
    other = MetaSDLLM(model=(tiny_model(seed=1), TOKENIZER), max_tokens=24, cache=cache)  # same name, other weights
    assert other.invoke(PROMPT) != truth


async def test_a_cold_batch_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from metasd_langchain.models import lm as load

    slow = load.CausalLM

    def loading(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return slow(*args, **options)

    monkeypatch.setattr(load, "CausalLM", loading)
    llm = MetaSDLLM(model=(tiny_model(seed=2), TOKENIZER), max_tokens=4)
    task = asyncio.ensure_future(llm.abatch([PROMPT, PROMPT, PROMPT]))
    late, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.002)
        late, last = max(late, time.perf_counter() - last), time.perf_counter()
    answers = await task
    assert len(set(answers)) == 1
    assert late < 0.2


def test_a_failing_span_processor_does_not_keep_the_answer(
    llm: MetaSDLLM, truth: str, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("exporter broke")

    monkeypatch.setattr(type(spans), "export", fail)
    assert llm.invoke(PROMPT) == truth


def test_options_of_the_wrong_type_are_named() -> None:
    llm = make()
    for options in ({"max_tokens": "5"}, {"max_tokens": 2.5}, {"timeout": "5"}, {"temperature": "hot"}):
        with pytest.raises(BadOption, match=next(iter(options))):
            llm.invoke(PROMPT, **options)
    for options in ({"drafters": "suffix@16"}, {"device": "gpu"}, {"dtype": "int8"}):
        with pytest.raises(BadOption, match=next(iter(options))):
            make(**options)
    with pytest.raises(RequestError, match="surrogate"):
        llm.invoke("\ud800")


def test_stop_sequences_of_a_call(llm: MetaSDLLM, truth: str) -> None:
    stop = truth[9:13]
    want = truth[: truth.index(stop)]
    assert llm.invoke(PROMPT, stop_sequences=[stop]) == want
    assert "".join(llm.stream(PROMPT, stop_sequences=[stop])) == want
    assert make(stop=[stop]).invoke(PROMPT, stop=[]) == want  # nothing is no stop, so the field's stays


def test_loading_options_reach_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import transformers

    MODEL.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    seen: dict[str, Any] = {}
    real = transformers.AutoModelForCausalLM.from_pretrained

    def note(where: str, **options: Any) -> Any:
        seen.update(options)
        return real(where, **{k: v for k, v in options.items() if k in ("dtype", "local_files_only")})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", note)
    wanted = {"device_map": "auto", "quantization_config": object()}
    MetaSDLLM(model=str(tmp_path), dtype="float32", revision="v1", model_kwargs=wanted, max_tokens=2).invoke(PROMPT)
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["revision"] == "v1"


def test_the_models_variable_names_the_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    MODEL.save_pretrained(tmp_path / "mine")
    TOKENIZER.save_pretrained(tmp_path / "mine")
    monkeypatch.setenv("METASD_MODEL", str(tmp_path / "mine"))
    llm = MetaSDLLM(dtype="float32", max_tokens=3)
    assert llm._load().target.name == "mine"
    assert llm.generate([PROMPT]).llm_output["model_name"] == "mine"  # type: ignore[index]


def test_settings_are_overruled_by_what_is_given(tmp_path: Any) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"drafters": ["lookup@3", "plain"], "policy": "ucb"}')
    llm = make(settings=str(file), policy="random")
    assert (llm.drafters, llm.policy) == (["lookup@3", "plain"], "random")


def test_scopes_see_nothing_of_each_other(truth: str) -> None:
    llm = make(drafters=["suffix@16"], policy="fixed", max_tokens=60)

    def drafted(scope: str) -> int:
        steps = list(llm.steps(PROMPT, scope=scope))
        summary = steps[-1].summary
        assert summary is not None
        return sum(record.accepted for record in summary.rounds)

    first = drafted("a")
    assert drafted("a") > first  # its own past answer is in the index
    assert drafted("b") == first


def test_a_closed_engine_is_loaded_again_and_forgotten(truth: str) -> None:
    import gc
    import weakref

    llm = MetaSDLLM(model=(tiny_model(), TOKENIZER), max_tokens=24)
    assert llm.invoke(PROMPT) == truth
    engine = weakref.ref(llm._load())
    llm.close()
    gc.collect()
    assert engine() is None
    assert llm.invoke(PROMPT) == truth


def test_a_failed_call_is_an_error_and_no_cancellation(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = MetaSDLLM(model=(tiny_model(seed=3), TOKENIZER), max_tokens=24)
    lm = llm._load().target.lm
    score, calls = lm.score, iter(range(100))

    def fail(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("out of memory")
        return score(*args)

    monkeypatch.setattr(lm, "score", fail)
    with pytest.raises(TargetError, match="RuntimeError"):
        llm.invoke(PROMPT)
    found = spans.get_finished_spans()[-1].attributes
    assert found["error.type"] == "TargetError"
    assert found["gen_ai.response.finish_reasons"] == ("error",)
    assert "metasd.cancelled" not in found
    assert found["gen_ai.usage.output_tokens"] >= 3  # what was done until then


@pytest.mark.parametrize("order", [0, 1, 2])
def test_when_one_prompt_of_a_batch_fails_the_others_stop_and_its_own_error_is_raised(order: int) -> None:
    llm = make(max_tokens=400)
    prompts: list[Any] = [PROMPT, PROMPT]
    prompts.insert(order, "")
    before = llm._load().rounds
    with pytest.raises(RequestError, match="empty"):
        llm.batch(prompts, max_tokens=400, drafters=["plain"], logit_bias={1: -100.0})
    assert llm._load().rounds - before < 200  # alone, an answer takes 400
    texts = llm.batch(prompts, return_exceptions=True, max_tokens=5)
    assert [isinstance(text, RequestError) for text in texts] == [place == order for place in range(3)]
