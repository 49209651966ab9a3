"""Teacher data: equal after a kill, never of evaluation rows, and bad input is named."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from metasd_langchain.errors import BadOption, CorpusError, TrainingError, UnknownName
from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.training import prompts as training_prompts
from metasd_langchain.training import shards, sources, teacher
from metasd_langchain.training.places import DOMAINS
from metasd_langchain.training.prompts import Corpus, Prompt, corpus
from metasd_langchain.training.split import held_out, in_training_third
from metasd_langchain.training.teacher import TeacherOptions, make_data, open_data

OPTIONS = TeacherOptions(batch=4, new_tokens=8, candidates=256, layers=(1,))
WORDS = ("apple", "bread", "chair", "dream", "eagle", "flame", "grape", "horse", "iron", "jelly", "knot", "lemon")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model(), tiny_tokenizer()))


def texts(count: int = 40) -> Corpus:
    made = tuple(Prompt(f"{WORDS[n % 12]} {WORDS[n * 5 % 12]} {n}") for n in range(count))
    return Corpus("math", made, ())


def files(folder: Path) -> dict[str, bytes]:
    """Contents, without the seconds in the metadata."""
    found = {}
    for path in sorted(folder.glob("[0-9]*.safetensors")):
        rows = shards.read_shard(path)
        found[path.name] = b"".join(
            row.tokens.numpy().tobytes() + row.hidden.float().numpy().tobytes() + bytes([row.prompt]) for row in rows
        )
    return found


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_rule_is_fixed() -> None:
    assert [n for n in range(81, 101) if in_training_third(n)] == [
        n for n in range(81, 101) if in_training_third(str(n))
    ]
    assert [in_training_third(f"HumanEval/{n}") for n in range(6)] == [False, False, False, True, False, False]
    share = sum(in_training_third(n) for n in range(3000)) / 3000
    assert 0.3 < share < 0.37
    assert all(held_out(n) != in_training_third(n) for n in range(100))


def data_folder(where: Path) -> Path:
    """Development files in which every row says its id."""
    where.mkdir(exist_ok=True)
    categories = ("qa", "rag", "math_reasoning", "translation", "summarization", "coding", "math", "stem")
    bench = [
        {"question_id": n, "category": categories[n % 8], "turns": [f"row {n} of the bench"], "reference": []}
        for n in range(160)
    ]
    code = [
        {"task_id": f"HumanEval/{n}", "prompt": f'def row_{n}():\n    """row {n} of the code"""\n', "test": "",
         "canonical_solution": "    return 1\n"}
        for n in range(60)
    ]  # fmt: skip
    gsm = [{"question": f"gsm {n}?", "answer": str(n)} for n in range(20)]
    for name, rows in (("spec_bench_dev", bench), ("humaneval_dev", code), ("gsm8k_train_1500", gsm)):
        (where / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return where


@pytest.fixture
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a few texts of each kind."""
    root = tmp_path / "machine"
    manual = root / "man" / "man1"
    manual.mkdir(parents=True)
    page = ".TH X\n.SH NAME\n" + "A program that \\fBsorts\\fP lines of text and prints them \\- in order.\n" * 9
    for name in ("sort.1.gz", "sort-a.1.gz", "sort-b.1.gz", "sort-c.1.gz"):
        (manual / name).write_bytes(gzip.compress(page.encode()))
    (manual / "broken.1.gz").write_bytes(b"no gzip")
    (root / "doc" / "tool").mkdir(parents=True)
    (root / "doc" / "tool" / "README").write_text(
        "This tool reads what you give it and writes what it thinks of it. " * 9
    )
    catalogue = root / "locale" / "de" / "LC_MESSAGES"
    catalogue.mkdir(parents=True)
    german = "Die Datei wurde nicht gefunden, bitte versuchen Sie es noch einmal."
    (catalogue / "a.mo").write_bytes(message_catalogue({"The file was not found, please try again.": german}))
    (catalogue / "b.mo").write_bytes(b"\xde\x12\x04\x95cut")
    library = root / "lib"
    library.mkdir()
    document = "Return twice the value, which is a number of any kind; see the other functions of this module, too."
    (library / "one.py").write_text(
        f'def double(value):\n    """{document}"""\n    return value * 2\n\n\n'
        'class A:\n    def method(self):\n        """Not a function."""\n        return 1\n'
    )
    (library / "two.py").write_text("def broken(:\n")
    for name, folder in (("_MANUALS", "man"), ("_NOTES", "doc"), ("_CATALOGUES", "locale")):
        monkeypatch.setattr(sources, name, root / folder)
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return root


def message_catalogue(pairs: dict[str, str]) -> bytes:
    """A gettext .mo file."""
    pairs = {"": "Content-Type: text/plain; charset=UTF-8\n", **pairs}
    entries = [(key.encode(), value.encode()) for key, value in sorted(pairs.items())]
    start = 28 + 16 * len(entries)
    keys, values, blob = [], [], b""
    for key, _ in entries:
        keys += [len(key), start + len(blob)]
        blob += key + b"\0"
    for _, value in entries:
        values += [len(value), start + len(blob)]
        blob += value + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    return head + struct.pack(f"<{len(keys)}I", *keys) + struct.pack(f"<{len(values)}I", *values) + blob


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_prompt_is_of_a_row_kept_for_evaluation(domain: str, tmp_path: Path, small_machine: Path) -> None:
    found = corpus(domain, data_folder(tmp_path / "data"))
    joined = "\n".join(prompt.text for prompt in found.prompts)
    kept = [f"row {n} of the bench" for n in range(160) if held_out(n)]
    kept += [f"row {n} of the code" for n in range(60) if held_out(f"HumanEval/{n}")]
    assert len(kept) > 100
    assert not [text for text in kept if text in joined]
    assert any(f"row {n} of the" in joined for n in range(160) if in_training_third(n))
    assert all(source.licence for source in found.sources)


def test_every_kind_of_text_becomes_prompts_as_evaluation_asks_them(tmp_path: Path, small_machine: Path) -> None:
    data = data_folder(tmp_path / "data")
    said = {domain: [prompt.text for prompt in corpus(domain, data).prompts] for domain in DOMAINS}
    assert "Question: gsm 3?\nAnswer:" in said["math"]
    assert any(text.startswith("def double(value):\n") and text.endswith('"""\n') for text in said["code"])
    assert not any("method" in text for text in said["code"])
    german = "Question: Translate German to English: Die Datei wurde nicht gefunden"
    assert any(text.startswith(german) and text.endswith("\nAnswer:") for text in said["translation"])
    assert any(text.startswith("Question: Summarize: A program that sorts lines") for text in said["summarization"])
    assert any(text.startswith("This tool reads") for text in said["summarization"])  # raw text, too
    found = {source.name: source.count for source in corpus("summarization", data).sources}
    assert found["manual pages of installed packages"] == 3  # of four pages of one program, and one that is damaged


def test_the_order_of_prompts_depends_on_the_seed_alone(tmp_path: Path, small_machine: Path) -> None:
    data = data_folder(tmp_path / "data")
    assert corpus("math", data) == corpus("math", data)
    assert corpus("math", data).prompts != corpus("math", data, seed=1).prompts


def test_bad_corpora_are_named(
    tmp_path: Path, small_machine: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CorpusError, match="'gone' does not exist"):
        corpus("math", tmp_path / "gone")
    with pytest.raises(UnknownName, match=r"domain 'maths'.*math"):
        corpus("maths", None)
    data = data_folder(tmp_path / "data")
    (data / "gsm8k_train_1500.jsonl").write_text('{"answer": "x"}\n')
    with pytest.raises(CorpusError, match="'question'"):
        corpus("math", data)
    (data / "gsm8k_train_1500.jsonl").write_text('{"question":')
    with pytest.raises(CorpusError, match=r"gsm8k_train_1500\.jsonl, line 1"):
        corpus("math", data)
    (data / "spec_bench_dev.jsonl").write_text('{"turns": ["no id"], "category": "qa"}\n')
    with pytest.raises(CorpusError, match="'question_id'"):
        corpus("qa", data)
    monkeypatch.setattr(training_prompts, "OPENINGS", dict.fromkeys(DOMAINS, ()))
    with pytest.raises(CorpusError, match="no text for the domain 'qa'"):
        corpus("qa", None)
    with pytest.raises(CorpusError, match="fewer than 4 prompts"):
        make_data(target, texts(3), tmp_path, 10, OPTIONS)


# -- shards ------------------------------------------------------------------------------------------------------------


def test_data_are_the_same_after_a_kill(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_data(target, texts(), tmp_path / "whole", 150, OPTIONS)
    assert len(whole.shards) > 3

    class Killed(BaseException):
        pass

    written = 0
    write = shards.save_file

    def dying(state: Any, path: Path, about: Any) -> None:
        nonlocal written
        written += 1
        if written == 4:
            path.write_bytes(b"half a shard")
            raise Killed
        write(state, path, about)

    monkeypatch.setattr(shards, "save_file", dying)
    with pytest.raises(Killed):
        make_data(target, texts(), tmp_path / "cut", 150, OPTIONS)
    monkeypatch.setattr(shards, "save_file", write)
    again = make_data(target, texts(), tmp_path / "cut", 150, OPTIONS)
    assert files(again.folders[0]) == files(whole.folders[0])
    assert torch.equal(again.mass, whole.mass)


def test_what_is_there_is_not_made_again(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_data(target, texts(), tmp_path, 100, OPTIONS)

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("decoded again")

    monkeypatch.setattr(teacher, "decode", never)
    assert make_data(target, texts(), tmp_path, 100, OPTIONS).shards == first.shards
    fewer = make_data(target, texts(), tmp_path, 20, OPTIONS)
    assert 0 < len(fewer.shards) < len(first.shards)
    with pytest.raises(AssertionError, match="decoded again"):
        make_data(target, texts(), tmp_path, 1000, OPTIONS)


def test_other_options_or_prompts_have_a_folder_of_their_own(target: Target, tmp_path: Path) -> None:
    plans = [
        make_data(target, texts(), tmp_path, 20, OPTIONS),
        make_data(target, texts(30), tmp_path, 20, OPTIONS),
        make_data(target, texts(), tmp_path, 20, TeacherOptions(batch=4, new_tokens=9, candidates=256, layers=(1,))),
    ]
    assert len({plan.folders for plan in plans}) == 3


def test_rows_hold_what_the_target_thought(target: Target, tmp_path: Path) -> None:
    data = make_data(target, texts(), tmp_path, 60, OPTIONS)
    rows, held = data.rows(), data.rows(held_out=True)
    assert data.layers == (1, 3)
    assert {row.temperature for row in held} == {0.0, 0.8}
    assert all(row.normalisers is not None for row in held)
    assert all(row.normalisers is None for row in rows)
    row = rows[0]
    hidden = target.lm.score([Feed(Slot(), tuple(row.tokens.tolist()))], (1, 3)).hidden  # the engine's own forward
    assert torch.allclose(torch.cat([hidden[1], hidden[3]], 1), row.hidden.float(), atol=1e-3)
    prompts = {tuple(row.tokens[: row.prompt].tolist()) for row in held}
    assert not prompts & {tuple(row.tokens[: row.prompt].tolist()) for row in rows}


def test_greedy_answers_are_not_repeated(target: Target, tmp_path: Path) -> None:
    data = make_data(target, texts(16), tmp_path, 400, OPTIONS)
    greedy = [tuple(row.tokens.tolist()) for row in data.rows() if row.temperature == 0.0]
    assert len(greedy) == len(set(greedy)) == 8  # the prompts that are not held out, once each
    drawn = [tuple(row.tokens.tolist()) for row in data.rows() if row.temperature]
    assert len(set(drawn)) > 8  # prompts come again, answers differ


def test_a_damaged_shard_or_folder_is_named(target: Target, tmp_path: Path) -> None:
    data = make_data(target, texts(), tmp_path, 20, OPTIONS)
    shard = data.shards[0]
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(TrainingError, match=shard.name):
        data.rows()
    (data.folders[0] / "teacher.json").write_text("{")
    with pytest.raises(TrainingError, match=data.folders[0].name):
        open_data(data.folders[0])
    with pytest.raises(BadOption, match="tokens"):
        make_data(target, texts(), tmp_path, 0, OPTIONS)


def test_a_full_disk_is_seen_before_anything_is_computed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**8))
    with pytest.raises(TrainingError, match=r"0\.1 GB free"):
        make_data(target, texts(), tmp_path, 100, OPTIONS)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_fills_up_leaves_whole_shards(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shards.save_file

    def full(state: Any, path: Path, about: Any) -> None:
        if "00003" in path.name:
            path.write_bytes(b"some")
            raise OSError(28, "No space left on device")
        write(state, path, about)

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(TrainingError, match=r"00003\.safetensors cannot be written.*No space") as caught:
        make_data(target, texts(), tmp_path, 200, OPTIONS)
    assert caught.value.hint
    monkeypatch.setattr(shards, "save_file", write)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name.startswith(".")]
    assert not left
    assert make_data(target, texts(), tmp_path, 200, OPTIONS).rows()
