"""Trainers learn, and go on after a kill as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metasd_langchain.errors import BadCheckpoint, BadOption, CorpusError, MissingExtra, TrainingError, UnknownName
from metasd_langchain.models.draft_lm import DraftLM, DraftLMConfig
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import load_eagle, save_eagle
from metasd_langchain.models.eagle_step import HeadCache, load_step
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.training import loop, recipe, run
from metasd_langchain.training.batches import batches, padded
from metasd_langchain.training.loop import CHECKPOINT, FitOptions, Fitted, fit
from metasd_langchain.training.preset import train_preset
from metasd_langchain.training.prompts import Corpus, Prompt
from metasd_langchain.training.run import Settings, draft_vocabulary, train
from metasd_langchain.training.shards import Row
from metasd_langchain.training.start import head_digest, load_start, take_over
from metasd_langchain.training.students import AHEAD, EagleStudent, SmallLMStudent, Tally
from metasd_langchain.training.teacher import Data, TeacherOptions, make_data

WORDS = ("the", "tree", "is", "on", "a", "hill", "near", "that", "sea", "and", "it", "rains")
TEACHER = TeacherOptions(batch=8, new_tokens=16, candidates=0)
FIT = FitOptions(passes=4, batch_tokens=160, learning_rate=3e-3, measures=4, patience=0, save_s=1e9)
SMALL = DraftLMConfig(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1, window=64)


def texts(domain: str = "math", *_: Any, **__: Any) -> Corpus:
    made = tuple(Prompt(" ".join(WORDS[n * k % 12] for k in (1, 5, 7))) for n in range(1, 13))
    return Corpus(domain, made + tuple(Prompt(f"{domain} {word}") for word in WORDS), ())


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model("llama"), tiny_tokenizer()))


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(target, texts(), tmp_path_factory.mktemp("teacher"), 900, TEACHER)


def head(target: Target, data: Data, *, seed: int = 0, unroll: int = 2, size: int = 200) -> EagleStudent:
    parts = TargetParts.of(target.lm, "tiny")
    ids = draft_vocabulary(data, data.rows(), size, (1,))
    config = EagleConfig.of_target(parts, draft_vocab_size=size)
    return EagleStudent(config, parts, ids, layers=data.layers, unroll=unroll, seed=seed, half=False)


def small(target: Target, data: Data) -> SmallLMStudent:
    ids = draft_vocabulary(data, data.rows(), 200, (1,))
    return SmallLMStudent(SMALL, TargetParts.of(target.lm, "tiny"), ids, half=False)


def measured(student: Any, rows: list[Row]) -> dict[str, Any]:
    tally = Tally.empty()
    for group in batches(rows, 400, 0):
        tally = tally + student.tally(padded(group))
    return tally.figures()


def pairs(target: Target, temperature: float, count: int, seed: int) -> list[Row]:
    """Rows of a teacher to whom only the last token matters: something there is to learn."""
    rows = target.lm.head_rows()[:200].float()
    generator = torch.Generator().manual_seed(seed)
    after = torch.randperm(200, generator=torch.Generator().manual_seed(7))
    made = []
    for _ in range(count):
        tokens = [int(torch.randint(200, (1,), generator=generator))]
        for _ in range(19):
            logits = 12 * rows @ rows[after[tokens[-1]]]
            p = (logits / (temperature or 1.0)).softmax(-1)
            tokens.append(int(p.multinomial(1, generator=generator)) if temperature else int(p.argmax()))
        hidden = 12 * rows[after[torch.tensor(tokens)]]
        made.append(
            Row(torch.tensor(tokens), hidden, 1, temperature, (hidden @ rows.T / (temperature or 1)).logsumexp(-1))
        )
    return made


@pytest.mark.parametrize("kind", [head, small])
def test_training_lowers_the_loss_and_raises_acceptance(kind: Any, target: Target, data: Data, tmp_path: Path) -> None:
    flat = replace(data, mass=(torch.arange(512) < 200).double())  # the draft vocabulary is the first 200 tokens
    student = kind(target, replace(flat, shards=()))
    held = pairs(target, 0.8, 12, 1) + pairs(target, 0.0, 12, 2)
    options = replace(FIT, passes=6, learning_rate=1e-2)
    fitted = fit(student, pairs(target, 0.8, 100, 3), held, tmp_path, options)
    first, last = fitted.curve[0], fitted.curve[-1]
    assert first["loss"] is None
    assert last["loss"] < 0.6 * fitted.curve[1]["loss"]
    for figure in ("acceptance_t08", "acceptance_greedy"):
        assert last[figure][0] > first[figure][0] + 0.3
    assert last["acceptance_t08"][1] > first["acceptance_t08"][1] + 0.3  # a token further, too
    assert fitted.best[0] == max(point["tokens_per_round_t08"] for point in fitted.curve)
    again = measured(student, held)  # the module holds the best weights
    assert again["tokens_per_round_t08"] == pytest.approx(fitted.best[0], abs=1e-3)


@pytest.mark.parametrize("kind", [head, small])
def test_a_run_that_was_killed_ends_with_the_same_weights(
    kind: Any, target: Target, data: Data, tmp_path: Path
) -> None:
    assert torch.get_num_threads() == 1
    rows, held = data.rows(), data.rows(held_out=True)
    whole = kind(target, data)
    told = fit(whole, rows, held, tmp_path / "whole", FIT)

    class Killed(BaseException):
        pass

    def kill(fitted: Fitted) -> None:
        if fitted.step == told.steps // 2 + 1:
            raise Killed

    often = replace(FIT, save_s=0.0)  # a checkpoint a step
    with pytest.raises(Killed):
        fit(kind(target, data), rows, held, tmp_path / "cut", often, say=kill)
    resumed = kind(target, data)
    steps = []
    fitted = fit(resumed, rows, held, tmp_path / "cut", often, say=lambda fitted: steps.append(fitted.step))
    assert steps[0] > told.steps // 2
    assert fitted.curve[1:] == told.curve[1:]
    for one, other in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_acceptance_is_the_overlap_with_the_whole_vocabulary(target: Target, data: Data) -> None:
    """By hand: sum over draft ids of min(p, q), p normalised over all tokens."""
    student = head(target, data, size=120)
    row = next(row for row in data.rows(held_out=True) if row.temperature)
    tally = student.tally(padded([row]))
    with torch.inference_mode():
        logits = row.hidden.float() @ target.lm.head_rows().T
        features = student.module(row.tokens[None], row.hidden[None], AHEAD)
        for step in range(AHEAD):
            own = (student.module.logits(features[step])[0] / 0.8).softmax(-1)
            total = count = 0.0
            for place in range(max(row.prompt - 1, 1 + step), len(row.tokens)):
                p = (logits[place] / 0.8).softmax(-1)[student.draft_ids]
                total += float(torch.minimum(p, own[place - 1]).sum())
                count += 1
            assert float(tally.drawn[step]) == count
            assert float(tally.kept[step]) == pytest.approx(total, rel=1e-3)


def test_a_perfect_student_keeps_everything() -> None:
    tally = Tally(torch.full((4,), 10.0), torch.full((4,), 10.0), torch.zeros(4), torch.full((4,), 5.0))
    figures = tally.figures()
    assert figures["tokens_per_round_t08"] == 5.0  # four drafted and one of the target's own
    assert figures["tokens_per_round_greedy"] == 1.0
    half = Tally(torch.full((4,), 5.0), torch.full((4,), 10.0), *(torch.zeros(4) for _ in range(2)))
    assert half.figures()["tokens_per_round_t08"] == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625, abs=1e-3)


def test_padding_changes_no_loss(target: Target, data: Data) -> None:
    student = head(target, data)
    rows = sorted(data.rows(), key=lambda row: len(row.tokens))
    short, long = rows[0], rows[-1]
    assert len(short.tokens) < len(long.tokens)
    alone, both = padded([short]), padded([short, long])
    masked = replace(both, answer=both.answer & torch.tensor([[True], [False]]), real=both.real.clone())
    masked.real[1] = False
    assert float(student.loss(alone).detach()) == pytest.approx(float(student.loss(masked).detach()), rel=1e-4)


def test_every_row_is_in_one_batch_of_a_pass(data: Data) -> None:
    rows = data.rows()
    for seed in (0, 1):
        groups = batches(rows, 200, seed)
        assert sorted(id(row) for group in groups for row in group) == sorted(map(id, rows))
        assert all(len(group) * max(len(row.tokens) for row in group) <= 200 for group in groups)
    assert [len(group) for group in batches(rows, 200, 0)] != [len(group) for group in batches(rows, 200, 1)]


def test_it_stops_when_nothing_is_gained(target: Target, data: Data, tmp_path: Path) -> None:
    options = replace(FIT, passes=50, learning_rate=1e-12, measures=25, patience=3)
    fitted = fit(head(target, data), data.rows()[:8], data.rows(held_out=True), tmp_path, options)
    assert fitted.step < fitted.steps / 2


def test_minutes_bound_the_steps_and_stay_bound(target: Target, data: Data, tmp_path: Path) -> None:
    options = replace(FIT, passes=1000, minutes=1e-9)
    fitted = fit(head(target, data), data.rows(), data.rows(held_out=True), tmp_path, options)
    assert fitted.step == fitted.steps == 4  # those that were timed


def test_another_runs_checkpoint_is_refused_and_kept(target: Target, data: Data, tmp_path: Path) -> None:
    rows, held = data.rows(), data.rows(held_out=True)
    fit(head(target, data), rows, held, tmp_path, FIT, run="one")
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(TrainingError, match="other settings or data"):
        fit(head(target, data), rows, held, tmp_path, FIT, run="two")
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    (tmp_path / CHECKPOINT).write_bytes(before[: len(before) // 2])
    with pytest.raises(TrainingError, match=CHECKPOINT):
        fit(head(target, data), rows, held, tmp_path, FIT, run="one")
    with pytest.raises(CorpusError, match="no teacher data"):
        fit(head(target, data), [], held, tmp_path, FIT)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: Settings(kind="medusa"), "kind='medusa'"),
        (lambda: Settings(tokens=0), "tokens=0"),
        (lambda: Settings(vocabulary=0), "vocabulary=0"),
        (lambda: FitOptions(passes=0), "passes=0"),
        (lambda: FitOptions(minutes=-1), "minutes=-1"),
        (lambda: TeacherOptions(batch=0), "batch=0"),
        (lambda: TeacherOptions(temperature=0), "temperature=0"),
    ],
)
def test_settings_out_of_range_are_named(wrong: Any, named: str) -> None:
    with pytest.raises(BadOption, match=named):
        wrong()


# -- end to end --------------------------------------------------------------------------------------------------------


class Watching:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps = 0

    def data(self, domain: str, done: int, wanted: int) -> None:
        assert 0 <= done <= wanted

    def training(self, name: str, fitted: Fitted) -> None:
        self.steps += 1

    def say(self, message: str) -> None:
        self.lines.append(message)


SETTINGS = Settings(
    tokens=200,
    vocabulary=100,
    unroll=2,
    teacher=TEACHER,
    small=SMALL,
    head={"intermediate_size": 32},
    fit=replace(FIT, passes=1),
)


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "corpus", texts)


@pytest.mark.parametrize("kind", ["eagle", "small_lm"])
def test_a_drafter_is_written_with_all_that_belongs_to_it(
    kind: str, target: Target, tmp_path: Path, trained_on: None
) -> None:
    out, watcher = tmp_path / "out", Watching()
    settings = replace(SETTINGS, kind=kind)
    made = train(target, "math", out, None, settings, watcher=watcher, root=tmp_path / "teacher")
    assert watcher.steps == made["steps"]["done"]
    assert made == recipe.finished(out, made["run"])
    assert {"recipe.json", "curves.png", "LICENSE.md"} <= {path.name for path in out.iterdir()}
    assert CHECKPOINT not in {path.name for path in out.iterdir()}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert made["seconds"]["data"]["cpu_s"] > 0
    assert made["seconds"]["training"]["cpu_s"] > 0
    assert 0.5 < made["draft_vocabulary"]["covers"] <= 1.0
    if kind == "eagle":
        loaded = load_eagle(out, TargetParts.of(target.lm, target.name))
        assert 1 in loaded.draft_ids.tolist()  # an answer can end
        assert json.loads((out / "config.json").read_text())["metasd"]["domain"] == "math"
    else:
        assert len(DraftLM.load(out).vocabulary) == 100
    again = train(target, "math", out, None, settings, watcher=(second := Watching()), root=tmp_path / "teacher")
    assert again == made
    assert second.steps == 0


def test_a_head_drafts_what_it_learned(target: Target, tmp_path: Path, trained_on: None) -> None:
    """The module of the trainer and the step of the engine give the same features, true states and own ones read."""
    settings = replace(SETTINGS, head={})
    train(target, "math", tmp_path / "out", None, settings, watcher=Watching(), root=tmp_path / "teacher")
    head = load_eagle(tmp_path / "out", TargetParts.of(target.lm, target.name))
    assert head.config.join_residual
    step, cache = load_step(tmp_path / "out", target), HeadCache()
    tokens = torch.tensor([[2, 7, 300, 41, 19, 260]])
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first, second = head(tokens, hidden, 2)
        seen = step.read(cache, tokens[0, 1:5].tolist(), [hidden[0, :4]])
        further = step.guess(cache, tokens[0, 5:].tolist(), seen)
    assert torch.allclose(seen[0], first[0, 3], atol=1e-4)
    assert torch.allclose(further[0], second[0, 4], atol=1e-4)


def test_heads_read_the_layers_they_name(target: Target, tmp_path: Path, trained_on: None) -> None:
    settings = replace(SETTINGS, head={"intermediate_size": 32, "aux_layers": (1, 2)})
    made = train(target, "math", tmp_path / "out", None, settings, watcher=Watching(), root=tmp_path / "teacher")
    assert made["data"]["domains"][0]["layers"] == [1, 2, 3]
    loaded = load_eagle(tmp_path / "out", TargetParts.of(target.lm, target.name))
    assert loaded.config.aux_layers == (1, 2)


def test_an_older_drafter_stays_until_the_new_one_is_whole(
    target: Target, tmp_path: Path, trained_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, root = tmp_path / "out", tmp_path / "teacher"
    train(target, "math", out, None, SETTINGS, watcher=Watching(), root=root)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    later = replace(SETTINGS, fit=replace(SETTINGS.fit, seed=1))

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.torch, "save", full)
    with pytest.raises(TrainingError, match=r"training\.pt cannot be written.*No space"):
        train(target, "math", out, None, later, watcher=Watching(), root=root)
    monkeypatch.undo()
    monkeypatch.setattr(run, "corpus", texts)
    monkeypatch.setattr("metasd_langchain.models.eagle_format.save_file", full)
    with pytest.raises(BadCheckpoint, match="cannot be written"):
        train(target, "math", out, None, later, watcher=Watching(), root=root)
    assert {name: (out / name).read_bytes() for name in before} == before


def test_a_preset_trains_one_for_each_domain_and_one_for_all(target: Target, tmp_path: Path, trained_on: None) -> None:
    settings = replace(SETTINGS, tokens=60)
    out, root = tmp_path / "out", tmp_path / "teacher"
    made = train_preset(target, "five-domains", None, settings, watcher=Watching(), out=out, root=root)
    assert list(made) == ["ofa", "code", "translation", "summarization", "qa", "math"]
    assert sorted(path.name for path in out.iterdir()) == sorted(made)
    specialists = [made[domain]["data"]["answer_tokens"] for domain in list(made)[1:]]
    assert made["ofa"]["data"]["answer_tokens"] == sum(specialists)
    assert made["ofa"]["steps"]["planned"] >= 3 * made["math"]["steps"]["planned"]
    second = Watching()
    assert train_preset(target, "five-domains", None, settings, watcher=second, out=out, root=root) == made
    assert second.steps == 0
    begun = head_digest(out / "ofa")
    assert [made[domain]["start"] for domain in made] == [None] + [{"name": "ofa", "weights": begun}] * 5
    with pytest.raises(UnknownName, match="preset 'six'"):
        train_preset(target, "six", None, settings, watcher=second)


def test_a_head_goes_on_from_another_whatever_its_vocabulary(target: Target, tmp_path: Path) -> None:
    parts = TargetParts.of(target.lm, target.name)
    shape = {"intermediate_size": 48, "head_dim": 16}

    def fresh(ids: list[int], seed: int, **changes: Any) -> EagleHead:
        config = EagleConfig.of_target(parts, **{**shape, "draft_vocab_size": len(ids), **changes})
        return EagleHead.initialised(config, parts, torch.tensor(ids), seed=seed)

    other, own = fresh([1, 3, 5, 9], 1), fresh([0, 3, 4, 9, 12], 2)
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    before = own.lm_head.weight.detach().clone()
    take_over(own, other)
    assert torch.equal(own.lm_head.weight[[1, 3]], other.lm_head.weight[[1, 3]])
    assert torch.equal(own.lm_head.weight[[0, 2, 4]], before[[0, 2, 4]])
    given = dict(other.named_parameters())
    for name, parameter in own.named_parameters():
        assert name == "lm_head.weight" or torch.equal(parameter, given[name])
    assert own.draft_ids.tolist() == [0, 3, 4, 9, 12]
    with pytest.raises(BadCheckpoint, match=r"config\.json, intermediate_size: is 64, training needs 48"):
        load_start(save_eagle(fresh([1], 1, intermediate_size=64), tmp_path), own.config, parts)


def test_what_cannot_be_begun_with_is_refused_before_data_are_made(
    target: Target, tmp_path: Path, trained_on: None
) -> None:
    out, root, watching = tmp_path / "out", tmp_path / "teacher", Watching()
    for start in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(BadCheckpoint, match=r"config\.json"):
            train(target, "math", out, None, SETTINGS, watcher=watching, root=root, start=start)
    with pytest.raises(BadOption, match="start"):
        train(target, "math", out, None, replace(SETTINGS, kind="small_lm"), watcher=watching, root=root, start=out)
    assert not out.exists()
    assert not root.exists()


def test_missing_matplotlib_is_said_before_anything_is_computed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="train"):
        train(target, "math", tmp_path / "out", None, SETTINGS, watcher=Watching(), root=tmp_path)


def test_gemmas_terms_are_named(tmp_path: Path) -> None:
    sources = [{"name": "texts", "licence": "MIT", "count": 3}, {"name": "nothing", "licence": "GPL", "count": 0}]
    recipe.licence_note(tmp_path, "gemma3_text", sources)
    text = (tmp_path / "LICENSE.md").read_text()
    assert "Gemma Terms of Use" in text
    assert "- texts: MIT" in text
    assert "nothing" not in text
    recipe.licence_note(tmp_path, "llama", sources)
    assert "Gemma" not in (tmp_path / "LICENSE.md").read_text()
