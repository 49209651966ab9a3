"""The command line on a tiny model: text, JSON, exit codes, and the whole demo with fake embeddings."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from rich.console import Console
from typer.testing import CliRunner

from metasd_langchain import MetaSDLLM
from metasd_langchain.cli import app
from metasd_langchain.cli import demo as demo_command
from metasd_langchain.cli.screen import Flow, shares, show_error
from metasd_langchain.errors import LoadError, MissingExtra
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import Piece, RoundRecord, Step

PROMPT = "the rain and the tea and the rain and the"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", max_position_embeddings=8192).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return str(made)


def metasd(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_prints_the_very_text(folder: str):
    llm = MetaSDLLM(model=folder, max_tokens=40)
    done = metasd("generate", PROMPT, "--model", folder, "--max-tokens", "40")
    assert done.exit_code == 0, done.output
    assert done.stdout == llm.invoke(PROMPT) + "\n"


def test_generate_takes_every_option(folder: str):
    given = {"max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 7, "dtype": "float32"}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    arms = ["--drafters", "suffix@4, plain", "--policy", "ucb", "--stop", "zz", "--stop", "qq"]
    done = metasd("generate", PROMPT, "--model", folder, "--json", *flags, *arms)
    answer = json.loads(done.stdout)
    assert answer["text"] == MetaSDLLM(model=folder, stop=["zz", "qq"], **given).invoke(PROMPT)
    assert answer["metasd"]["policy"] == "ucb"
    assert set(answer["metasd"]["arms"]) <= {"suffix@4", "plain"}


def test_json_is_all_there_is_on_stdout(folder: str):
    done = metasd("generate", PROMPT, "--model", folder, "--max-tokens", "24", "--json", "--stats")
    answer = json.loads(done.stdout)
    assert answer["text"] == MetaSDLLM(model=folder, max_tokens=24).invoke(PROMPT)
    assert answer["finish_reason"] in {"stop", "length"}
    assert len(answer["ids"]) == answer["usage"]["completion_tokens"] == sum(r["committed"] for r in answer["rounds"])
    assert answer["model_name"] == "tiny"
    assert answer["metasd"]["rounds"] == len(answer["rounds"])
    assert answer["values"]
    assert "proposed by" in done.stderr


def test_a_dash_reads_standard_input(folder: str):
    arguments = ("--model", folder, "--max-tokens", "12")
    prompt = f"{PROMPT}\n"  # the line's end belongs to the prompt
    assert metasd("generate", "-", *arguments, stdin=prompt).stdout == metasd("generate", prompt, *arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--drafters", "sufix@8"], 2, "did you mean 'suffix'?"),
        (["--policy", "nope"], 2, "hinted_ucb"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--max-tokens", "0"], 2, "max_tokens"),
        (["--dtype", "int8"], 2, "float32"),
        (["--max-tokens", "many"], 2, "max-tokens"),
    ],
)
def test_wrong_options_leave_with_2(folder: str, arguments: list[str], code: int, said: str):
    done = metasd("generate", PROMPT, "--model", folder, *arguments)
    assert done.exit_code == code
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_is_none(folder: str, prompt: str):
    done = metasd("generate", prompt, "--model", folder)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the prompt is")


def test_a_prompt_too_long_names_both_lengths(folder: str):
    done = metasd("generate", "z" * 9000, "--model", folder)
    assert done.exit_code == 2
    assert "8192" in done.stderr
    assert "hint: shorten" in done.stderr


def test_a_folder_without_a_model_leaves_with_1(tmp_path: Path):
    done = metasd("generate", PROMPT, "--model", str(tmp_path))
    assert done.exit_code == 1
    assert "tokenizer" in done.stderr
    missing = metasd("generate", PROMPT, "--model", str(tmp_path / "missing"))
    assert missing.exit_code == 1
    assert "missing" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_errors_are_a_line_and_a_hint(capsys: pytest.CaptureFixture[str]):
    show_error(MissingExtra("the embedded model", "demo"))
    assert capsys.readouterr().err == (
        "error: the embedded model is not installed\nhint: pip install 'metasd-langchain[demo]'\n"
    )
    show_error(LoadError("a\n  b " + "c" * 2000))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a b ccc")
    assert len(line) < 500


# -- demo --------------------------------------------------------------------------------------------------------------


def run_demo(monkeypatch: pytest.MonkeyPatch, *arguments: str):
    monkeypatch.setattr(demo_command, "MiniLM", lambda: DeterministicFakeEmbedding(size=16))
    return metasd("demo", *arguments)


def test_the_demo_plays_measures_and_exports(folder: str, monkeypatch: pytest.MonkeyPatch, spans, tmp_path: Path):
    picture = tmp_path / "demo.svg"
    arguments = ("--model", folder, "--dtype", "float32", "--max-tokens", "24", "--svg", str(picture))
    done = run_demo(monkeypatch, *arguments)
    assert done.exit_code == 0, done.output
    for name in ("suffix", "recycling_tree", "target", "rewrite", "answer", "summarise", "extract", "code"):
        assert name in done.stdout
    assert "5 of 5 answers token for token the same" in done.stdout.splitlines()[-1]
    assert done.stdout.count("speed-up") >= 6
    assert "metasd.drafters.names" in done.stdout
    assert "</svg>" in picture.read_text()

    steps = [span.attributes["metasd.step"] for span in spans.get_finished_spans()]
    assert steps.count("warm-up") == 2
    for name in ("rewrite", "answer", "summarise", "extract", "code"):
        assert steps.count(name) == 2  # ours and plain


def test_the_demo_reads_a_file(folder: str, monkeypatch: pytest.MonkeyPatch, spans, tmp_path: Path):
    page = tmp_path / "page.txt"
    page.write_text("The mill burned down in 1912. It was built anew in 1913.\n\nIt grinds rye.\n")
    arguments = ("--file", str(page), "--question", "When?", "--model", folder, "--max-tokens", "8")
    done = run_demo(monkeypatch, *arguments)
    assert done.exit_code == 0, done.output
    assert "page.txt: When?" in done.stdout
    assert 'retrieved "The mill burned down' in done.stdout


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"# only a heading\n"])
def test_the_demo_refuses_what_is_no_text(content: bytes, tmp_path: Path):
    page = tmp_path / "page.txt"
    page.write_bytes(content)
    done = metasd("demo", "--file", str(page))
    assert done.exit_code == 2
    assert "file=" in done.stderr


def test_the_demo_checks_before_it_loads(tmp_path: Path):
    assert metasd("demo", "--max-tokens", "0").exit_code == 2
    assert metasd("demo", "--svg", str(tmp_path / "no" / "demo.svg")).exit_code == 2
    assert metasd("demo", "--file", str(tmp_path / "none.txt")).exit_code == 2


def test_passages_follow_headings_and_stay_short():
    text = "# One\n\nA b c. D e.\n\n## Two\nF g.\n\n" + "Sentence of some words. " * 100
    found = demo_command.passages(text)
    assert [(p.metadata["title"], p.page_content) for p in found[:2]] == [("One", "A b c. D e."), ("Two", "F g.")]
    assert all(len(p.page_content) <= 900 for p in found)
    assert "".join(p.page_content for p in found).count("Sentence") == 100


# -- the screen --------------------------------------------------------------------------------------------------------


def painted(steps: list[Step], width: int) -> tuple[str, str]:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True, width=200, highlight=False
    )
    flow = Flow(console, "  " if width else "", width)
    for step in steps:
        flow.show(step)
    flow.end()
    return console.export_text(clear=False), console.export_text(styles=True)


def test_tokens_carry_the_colour_of_their_drafter():
    steps = [Step((1, 2), (Piece(" one", True), Piece(" two", False)), arm="suffix@8", accepted=1)]
    plain, styled = painted(steps, 40)
    assert plain == "  one two\n"
    assert "\x1b[38;2;86;180;233mone\x1b[0m two" in styled


def test_text_is_broken_between_words_and_keeps_its_indents():
    steps = [
        Step((1,), (Piece(" aaa bb", True),), arm="lookup@8"),
        Step((2,), (Piece("b cc\n    dd", True),), arm="x@1"),
    ]
    assert painted(steps, 6)[0] == "  aaa\n  bbb cc\n      dd\n"


def test_no_codes_reach_the_terminal():
    plain, _ = painted([Step((1,), (Piece("a\x1b[31mb\x07c\td", False),))], 0)
    assert "\x1b" not in plain
    assert "\x07" not in plain


def test_shares_are_of_tokens():
    def record(arm: str, accepted: int, committed: int) -> RoundRecord:
        return RoundRecord(arm, accepted, accepted, committed, 0.0, 0.0, 0.0)

    rounds = [record("suffix@16", 3, 4), record("suffix@8", 3, 4), record("lookup@8", 0, 1), record("plain", 0, 1)]
    assert shares(rounds) == [("suffix", 0.6), ("target", 0.4)]
    assert shares([]) == [("target", 0.0)]


# -- the process -------------------------------------------------------------------------------------------------------


def test_help_is_quick_and_light():
    code = (
        "import sys; from metasd_langchain.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'langchain_core', 'pydantic', 'numpy', 'opentelemetry'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "demo" in done.stdout
    assert "generate" in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def process(*arguments: str, home: Path, **options):
    environment = {**os.environ, "HOME": str(home), "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", "from metasd_langchain.cli import main; main()", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, **options
    )


def test_a_process_without_terminal_or_input(folder: str, tmp_path: Path):
    started = process(
        "generate", PROMPT, "--model", folder, "--max-tokens", "8", home=tmp_path, stdin=subprocess.DEVNULL
    )
    out, err = started.communicate(timeout=120)
    assert started.returncode == 0, err
    assert out == MetaSDLLM(model=folder, max_tokens=8).invoke(PROMPT) + "\n"
    assert err == "loading tiny\n"  # nobody's bars or warnings


def test_an_interrupt_leaves_quietly_with_130(folder: str, tmp_path: Path):
    long = ("--max-tokens", "8000", "--dtype", "float32")
    # where the tests run in a shell's background, interrupts are ignored, and a child would inherit that
    heeds = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    started = process("generate", PROMPT, "--model", folder, *long, home=tmp_path, preexec_fn=heeds)
    assert started.stdout is not None
    assert started.stdout.read(5)  # it streams
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in err


# -- the example -------------------------------------------------------------------------------------------------------


def test_the_example_runs(folder: str):
    example = ROOT / "examples" / "lcel_chain.py"
    assert len(example.read_text().splitlines()) <= 80
    done = subprocess.run(
        [sys.executable, str(example), folder], check=False, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("invoke: ")
    assert "\nstream:" in done.stdout
    assert "tokens a round" in done.stdout
