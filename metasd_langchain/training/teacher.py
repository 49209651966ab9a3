"""Teacher data: the target's own answers to a domain's prompts, with its hidden states, made once for all trainers.

A plan is a list of batches, each a shard with its own seed, so a run that was killed goes on with the first shard that
is missing and ends with the same files. The first two batches compute the whole vocabulary: they say which columns are
likely (`CandidateHead` computes only those in the others) and are held out from training, with exact normalisers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from metasd_langchain.errors import BadOption, CorpusError, TrainingError
from metasd_langchain.models.load import Target
from metasd_langchain.training.decode import CandidateHead, decode
from metasd_langchain.training.prompts import Corpus, encode
from metasd_langchain.training.shards import Row, check_space, read_shard, replace_file, write_shard

__all__ = ["HELD_OUT", "Data", "TeacherOptions", "make_data", "open_data"]

HELD_OUT = 2  # batches with the whole vocabulary, never trained on: one drawn, one greedy
_MANIFEST, _CANDIDATES = "teacher.json", "candidates.safetensors"
_SORTED = 8  # batches whose prompts are sorted by length together
_MOST = 1 << 14  # prompts of a corpus that are looked at


@dataclass(frozen=True, slots=True)
class TeacherOptions:
    """What is generated.

    Attributes:
        layers: hidden states to keep beside the last, as transformers numbers them.
        batch: rows decoded together.
        new_tokens: most tokens of an answer.
        longest: tokens of a prompt, longer ones are left out.
        temperature: of drawn answers.
        greedy_share: every how-manieth batch is greedy; 0 = none.
        candidates: columns computed after the first two batches; 0 = all.
        seed: of prompts' order and draws.
    """

    layers: tuple[int, ...] = ()
    batch: int = 32
    new_tokens: int = 128
    longest: int = 896
    temperature: float = 0.8
    greedy_share: int = 4
    candidates: int = 32768
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "new_tokens", "longest"):
            if getattr(self, name) < 1:
                raise BadOption(name, getattr(self, name), "at least 1")
        if self.temperature <= 0:
            raise BadOption("temperature", self.temperature, "above 0")


@dataclass(frozen=True, slots=True)
class Data:
    """Teacher data of a domain, possibly of several joined.

    Attributes:
        folders: where the shards are.
        layers: hidden states kept, the last one last.
        shards: for training.
        held_out: not for training.
        mass: float64 ``[vocab]``, expected count of every token in the first two batches; sums over domains.
        about: the manifests, for the recipe.
    """

    folders: tuple[Path, ...]
    layers: tuple[int, ...]
    shards: tuple[Path, ...]
    held_out: tuple[Path, ...]
    mass: torch.Tensor
    about: tuple[dict[str, Any], ...]

    def rows(self, *, held_out: bool = False) -> list[Row]:
        """All rows, in order."""
        return [row for shard in (self.held_out if held_out else self.shards) for row in read_shard(shard)]

    @staticmethod
    def joined(parts: Sequence[Data]) -> Data:
        """Several domains' data as one."""
        return Data(
            tuple(folder for part in parts for folder in part.folders),
            parts[0].layers,
            tuple(shard for part in parts for shard in part.shards),
            tuple(shard for part in parts for shard in part.held_out),
            torch.stack([part.mass / part.mass.sum() for part in parts]).sum(0),
            tuple(about for part in parts for about in part.about),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    prompts: tuple[tuple[int, ...], ...]
    temperature: float


class _Plan:
    """Batches without end: prompts in order, then again with other seeds; greedy answers never twice."""

    def __init__(self, target: Target, corpus: Corpus, options: TeacherOptions) -> None:
        self._options = options
        templated = bool(getattr(target.tokenizer, "chat_template", None))
        prompts = [prompt for prompt in corpus.prompts[:_MOST] if not (templated and prompt.opening)]
        room = min(options.longest, target.lm.window - options.new_tokens)
        ids = {prompt: encode(target, prompt) for prompt in dict.fromkeys(prompts)}
        woven = [ids[prompt] for prompt in prompts if 0 < len(ids[prompt]) <= room]
        different = list(dict.fromkeys(woven))
        if len(different) < 4:
            raise CorpusError(f"fewer than 4 prompts for {corpus.domain!r} fit into {room} tokens", hint="--data DIR")
        self.digest = hashlib.sha256(json.dumps(woven).encode()).hexdigest()
        size = min(options.batch, len(different) // 4)
        self._held = different[:size], different[size : 2 * size]
        held = {*self._held[0], *self._held[1]}
        self._drawn = [one for one in woven if one not in held]
        self._greedy = [one for one in reversed(different) if one not in held]

    def batches(self) -> Iterator[_Batch]:
        """The held-out ones, then drawn and greedy ones in turn."""
        every, temperature = self._options.greedy_share, self._options.temperature
        yield _Batch(_by_length(self._held[0]), temperature)
        yield _Batch(_by_length(self._held[1]), 0.0)
        drawn = self._chunks(itertools.cycle(self._drawn), temperature)
        greedy = self._chunks(iter(self._greedy), 0.0)
        for number in itertools.count(1):
            batch = next(greedy, None) if every and number % every == 0 else None
            yield batch or next(drawn)

    def _chunks(self, prompts: Iterator[tuple[int, ...]], temperature: float) -> Iterator[_Batch]:
        """Batches of prompts of like length: several are sorted together."""
        size = self._options.batch
        while chosen := _by_length(itertools.islice(prompts, size * _SORTED)):
            parts = [_Batch(chosen[place : place + size], temperature) for place in range(0, len(chosen), size)]
            random.Random(len(chosen[0]) + self._options.seed).shuffle(parts)
            yield from parts


def _by_length(prompts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(prompts, key=len))


def make_data(
    target: Target,
    corpus: Corpus,
    root: Path,
    tokens: int,
    options: TeacherOptions | None = None,
    *,
    say: Callable[[int, int], None] = lambda done, wanted: None,
) -> Data:
    """Generate what is missing of a domain's data.

    Args:
        target: the model.
        corpus: its prompts.
        root: folder of all teacher data; each plan has its own folder in it.
        tokens: of answers to train on, at least; more than that stays where it is.
        options: see TeacherOptions.
        say: told tokens done and wanted, after every shard.

    Raises:
        CorpusError: too few prompts.
        TrainingError: disk full, or a folder that another plan wrote.
    """
    options = options or TeacherOptions()
    if tokens < 1:
        raise BadOption("tokens", tokens, "at least 1")
    plan = _Plan(target, corpus, options)
    layers = tuple(sorted({*options.layers, int(target.lm.config.num_hidden_layers)}))
    about = _about(target, corpus, plan, layers, options)
    folder = root / f"{corpus.domain}-{_key(about)}"
    width = int(target.lm.config.hidden_size) * len(layers) * (4 if target.lm.dtype == torch.float32 else 2)
    if not (folder / _MANIFEST).is_file():
        check_space(folder, int(tokens * 1.8 * width))  # prompts are kept, too
        replace_file(folder / _MANIFEST, lambda path: path.write_text(json.dumps(about, indent=1), encoding="utf-8"))
    maker = _Maker(target, folder, layers, options)
    done, number, begun = 0, 0, False
    for number, batch in enumerate(plan.batches()):
        if not begun and not maker.has(number):
            begun = True
            say(min(done, tokens), tokens)  # what was there costs nothing, so the clock starts here
        answered = maker.shard(number, batch)
        if number >= HELD_OUT:
            done += answered
            if begun or done >= tokens:
                say(min(done, tokens), tokens)
            if done >= tokens:
                break
    return open_data(folder, number + 1)


def open_data(folder: Path, shards: int | None = None) -> Data:
    """Data that is there.

    Args:
        folder: of one domain's data.
        shards: how many, from the first; None = all.

    Raises:
        TrainingError: no manifest, or one that cannot be read.
    """
    try:
        about = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        layers = tuple(int(layer) for layer in about["layers"])
        mass = load_file(folder / _CANDIDATES)["mass"]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise TrainingError(f"{folder.name}: no teacher data, or damaged", hint="delete the folder") from cause
    files = sorted(folder.glob("[0-9]*.safetensors"))[:shards]
    about["shards"] = len(files)
    return Data((folder,), layers, tuple(files[HELD_OUT:]), tuple(files[:HELD_OUT]), mass, (about,))


def _about(
    target: Target, corpus: Corpus, plan: _Plan, layers: tuple[int, ...], options: TeacherOptions
) -> dict[str, Any]:
    return {
        "format": 1,
        "target": target.name,
        "dtype": str(target.lm.dtype).removeprefix("torch."),
        "domain": corpus.domain,
        "layers": list(layers),
        "prompts": plan.digest,
        "sources": [asdict(source) for source in corpus.sources],
        "options": asdict(options),
    }


def _key(about: dict[str, Any]) -> str:
    named = {name: value for name, value in about.items() if name != "sources"}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]


class _Maker:
    """Makes the shards of one folder."""

    def __init__(self, target: Target, folder: Path, layers: tuple[int, ...], options: TeacherOptions) -> None:
        self._target, self._folder, self._layers, self._options = target, folder, layers, options
        self._mass: torch.Tensor | None = None
        self._head: CandidateHead | None = None

    def has(self, number: int) -> bool:
        """Whether a shard is there."""
        return self._file(number).is_file()

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:05d}.safetensors"

    def shard(self, number: int, batch: _Batch) -> int:
        """Make a shard unless it is there; tokens of its answers."""
        file, calibration = self._file(number), number < HELD_OUT
        if file.is_file():
            return sum(len(row.tokens) - row.prompt for row in read_shard(file))
        if not calibration and self._head is None:
            self._head = self._likely()
        wall, cpu = time.perf_counter(), time.process_time()
        if calibration:
            self._before(number)
        rows = decode(
            self._target.lm,
            batch.prompts,
            new_tokens=self._options.new_tokens,
            temperature=batch.temperature,
            generator=torch.Generator().manual_seed(self._options.seed * 1_000_003 + number),
            layers=self._layers,
            stop_ids=self._target.stop_ids,
            head=self._head,
            mass=self._mass if calibration else None,
        )
        if calibration:
            self._after(number)
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        write_shard(file, rows, self._layers, batch.temperature, **seconds)
        return sum(len(row.tokens) - 1 - row.prompt for row in rows)

    def _before(self, number: int) -> None:
        """The mass that earlier calibration batches saw."""
        vocabulary = int(self._target.lm.vocab_size)
        self._mass = torch.zeros(vocabulary, dtype=torch.float64)
        if number:
            self._mass += load_file(self._folder / "mass-0.safetensors")["mass"]

    def _after(self, number: int) -> None:
        name = _CANDIDATES if number == HELD_OUT - 1 else f"mass-{number}.safetensors"
        state = {"mass": self._mass if self._mass is not None else torch.zeros(0)}
        replace_file(self._folder / name, lambda path: save_file(state, path))

    def _likely(self) -> CandidateHead | None:
        """The output layer's likely columns; None where all are few."""
        count = self._options.candidates
        mass = load_file(self._folder / _CANDIDATES)["mass"]
        if not 0 < count < len(mass):
            return None
        lm = self._target.lm
        mass[list(self._target.stop_ids)] += 1.0  # an answer must be able to end
        ids = mass.topk(count).indices.sort().values
        softcap = getattr(lm.config, "final_logit_softcapping", None)
        return CandidateHead(lm.head_rows(), ids, softcap)
