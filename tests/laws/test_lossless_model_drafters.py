"""The promise, with drafters that have weights, a file, or the target's own layers: the ids are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.corpus import CorpusWriter
from metasd_langchain.drafters.datastore import DatastoreDrafter
from metasd_langchain.drafters.layer_skip import LayerSkipDrafter
from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.engine.verify import verify_rejection
from metasd_langchain.models.draft_lm import DraftLM, DraftLMConfig
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.models.proposals import Proposer
from metasd_langchain.models.vocabulary import DraftVocabulary, fingerprint
from metasd_langchain.testing.drafters import HostileDrafter, PerfectDrafter
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import Draft, Request, Sampling
from tests.laws.exact import chi_square, processed
from tests.laws.test_lossless import COUNT, SAMPLINGS, answer, prompts, reference

TOKENIZER = tiny_tokenizer()
MODES = ("greedy", "t0.7")
_rng = np.random.default_rng(8)
TABLE = _rng.normal(0.0, 1.3, (7, 6)).astype(np.float32)  # logits by the last token; the last row: at the start
IDEA = (TABLE + _rng.normal(0.0, 0.8, TABLE.shape)).astype(np.float32)  # a drafter's


def alike(noise: float) -> Any:
    """The target with its weights shaken: often right."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    return {mode: {prompt: reference(prompt, SAMPLINGS[mode]) for prompt in prompts()} for mode in MODES}


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory, truths: dict[str, Any]) -> Path:
    file = tmp_path_factory.mktemp("store") / "answers.ds"
    with CorpusWriter(file, fingerprint(TOKENIZER)) as writer:
        for truth in truths.values():
            for prompt, told in truth.items():
                writer.add([*prompt, *told[:12], 7, *told[12:]])
    return file


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "domain"
    config = DraftLMConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, window=64)
    DraftLM.fresh(DraftVocabulary(range(0, 512, 2), 512, fingerprint(TOKENIZER)), config).save(folder)
    return folder


Make = Callable[[Path, Path], Any]
DRAFTERS: dict[str, Make] = {
    "small_lm": lambda store, part: SmallLM((alike(0.004), TOKENIZER), confidence=0.0),
    "small_lm window": lambda store, part: SmallLM((alike(0.004), TOKENIZER), kv="window:9", confidence=0.0),
    "small_lm part": lambda store, part: SmallLM(part),
    "datastore": lambda store, part: DatastoreDrafter(store),
    "layer_skip": lambda store, part: LayerSkipDrafter(ratio=0.34, confidence=0.0),
}
OFTEN_RIGHT = {"small_lm", "datastore"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_alone_and_packed_it_gives_the_reference_ids(
    engine: Engine, truths: dict[str, Any], datastore: Path, reduced: Path, kind: str, mode: str
) -> None:
    pool = make_pool([(DRAFTERS[kind](datastore, reduced), 5)], "fixed")
    requests = [Request(prompt, SAMPLINGS[mode], max_tokens=COUNT) for prompt in prompts()]
    accepted = drafted = 0
    for request in requests:
        steps = list(engine.generate(request, pool))
        assert answer(steps) == truths[mode][request.prompt]
        accepted += sum(step.accepted for step in steps)
        drafted += sum(record.drafted for record in steps[-1].summary.rounds)  # type: ignore[union-attr]
    runs = [engine.generate(request, pool) for request in requests]  # packed with the others
    assert [answer(run) for run in runs] == [truths[mode][request.prompt] for request in requests]
    assert drafted > 0
    assert accepted > 0 or kind not in OFTEN_RIGHT


@pytest.mark.parametrize("mode", MODES)
def test_taking_turns_they_give_the_reference_ids(
    engine: Engine, truths: dict[str, Any], datastore: Path, reduced: Path, mode: str
) -> None:
    truth = truths[mode]
    arms = [(make(datastore, reduced), 3) for make in DRAFTERS.values()]
    for number, (drafter, _) in enumerate(arms):
        drafter.name = f"{drafter.name}-{number}"
    arms += [(PerfectDrafter(truth, name="good"), 2), (HostileDrafter(512, truth, shape="tree", name="bad"), 4)]
    pool = make_pool([*arms, "plain"], "random")
    runs = [engine.generate(Request(prompt, SAMPLINGS[mode], max_tokens=COUNT), pool) for prompt in prompts()]
    assert [answer(run) for run in runs] == [truth[prompt] for prompt in prompts()]


@pytest.fixture(scope="module")
def deep() -> Iterator[tuple[Target, Engine]]:
    """Layers enough for some to be left out, and a search that ends within two answers."""
    types = ["sliding_attention"] * 5 + ["full_attention"]
    target = load_target((tiny_model("gemma3", num_hidden_layers=6, layer_types=types), TOKENIZER))
    engine = Engine(target)
    yield target, engine
    engine.close()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "t0.8"])
def test_searching_for_layers_to_skip_leaves_the_answer_alone(
    deep: tuple[Target, Engine], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, engine = deep
    monkeypatch.setattr("metasd_langchain.drafters.layer_skip._Shared._judge", lambda *_: None)  # on and on
    pool = make_pool([(LayerSkipDrafter(ratio=0.3, confidence=0.0), 4)], "fixed")
    plain = make_pool(["plain"], "fixed")
    shared = pool.bound(target).drafters["layer_skip"]._shared  # type: ignore[attr-defined]
    for prompt in (prompts()[2], prompts()[5], prompts()[6]):
        request = Request(prompt, sampling, max_tokens=80)
        assert answer(engine.generate(request, pool)) == answer(engine.generate(request, plain))
    assert shared.search.frozen
    assert shared.search.trials == 48


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.3, top_k=5, top_p=0.9, min_p=0.12)])
def test_rejection_sampling_of_what_is_proposed_gives_the_targets_distribution(sampling: Sampling) -> None:
    count = 1500
    proposer = Proposer(sampling, None, 6, exact=True)
    firsts, joint = np.zeros(6), np.zeros((6, 6))
    logits, idea = torch.from_numpy(TABLE), torch.from_numpy(IDEA)
    for seed in range(count):
        draws = Draws(seed)
        proposal = proposer.draw(idea[6], draws, 0)
        assert proposal.q is not None
        firsts[proposal.token] += 1
        draft = Draft.chain([proposal.token], proposal.q[None])
        tokens = verify_rejection(draft, TargetRows(logits[[6, proposal.token]], sampling), draws, 0).tokens
        if len(tokens) == 1:
            tokens += verify_rejection(Draft(), TargetRows(logits[[tokens[0]]], sampling), draws, 1).tokens
        joint[tokens[0], tokens[1]] += 1
    p = np.stack([processed(row, sampling) for row in TABLE])
    assert chi_square(firsts, count * processed(IDEA[6], sampling)) > 1e-4  # drawn from the q that it tells
    assert chi_square(joint, count * p[6][:, None] * p[:6]) > 1e-4
