"""What keeps the first token of a fresh process early: nothing is imported, parsed or collected for nothing."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metasd_langchain.models.load import load_target, uncollected
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def outputs(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loader_can_be_imported_before_torch() -> None:
    assert outputs("import metasd_langchain.models.load, sys; print('torch' in sys.modules)") == "False\n"


def test_generate_needs_no_langchain(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from metasd_langchain.cli.generate import run;"
        "run('the cat', {'model': sys.argv[1], 'max_tokens': 4}, as_json=False, stats=False);"
        "print([name for name in sys.modules if name.startswith('lang')])"
    )
    assert outputs(code, str(tmp_path)).endswith("\n[]\n")


def test_wrong_options_are_told_before_torch_is_imported() -> None:
    code = (
        "import sys; from metasd_langchain.cli.generate import run; from metasd_langchain.errors import BadOption\n"
        "try: run('the cat', {'temperature': -1.0}, as_json=False, stats=False)\n"
        "except BadOption: print('torch' in sys.modules)"
    )
    assert outputs(code) == "False\n"


def test_collection_rests_inside_and_goes_on_outside() -> None:
    with uncollected:
        assert not gc.isenabled()
        with uncollected:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected:
        raise KeyError
    assert gc.isenabled()


def test_who_switched_collection_off_finds_it_off() -> None:
    gc.disable()
    with uncollected:
        pass
    assert not gc.isenabled()


def test_it_goes_on_when_the_last_thread_has_left() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with uncollected:
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    with uncollected:
        other.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    other.join(60)
    assert gc.isenabled()


class Node:
    """A member of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_made_inside_is_old_but_not_exempt() -> None:
    frozen = gc.get_freeze_count()
    with uncollected:
        kept = Node()
    assert any(one is kept for one in gc.get_objects(2))
    assert gc.get_freeze_count() == frozen


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with uncollected:
            kept = Node()
        assert gc.get_freeze_count() == pytest.approx(count, abs=100)
        assert kept.itself is kept
    finally:
        gc.unfreeze()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_meanwhile_collects() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with uncollected:
            inside.set()
            leave.wait(60)

    def check() -> None:
        assert gc.isenabled()
        with uncollected:
            assert not gc.isenabled()
        assert gc.isenabled()

    other = threading.Thread(target=stay)
    other.start()
    assert inside.wait(60)
    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    child.join(60)
    leave.set()
    other.join(60)
    assert child.exitcode == 0
    assert gc.isenabled()


def test_loading_is_done_without_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    real, seen = AutoModelForCausalLM.from_pretrained, []

    def watched(*arguments: object, **options: object) -> object:
        seen.append(gc.isenabled())
        return real(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    load_target(tmp_path, dtype="float32")
    assert seen == [False]
    assert gc.isenabled()
