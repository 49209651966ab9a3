"""The ``metasd`` command. Signatures live here and are light; what a command does is imported when it runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from metasd_langchain._version import __version__
from metasd_langchain.errors import ConfigError, MetaSDError, RequestError

__all__ = ["app", "main"]

app = typer.Typer(
    name="metasd",
    help="Lossless, adaptive speculative decoding for LangChain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(help="Folder, hub id or .gguf file. Default: METASD_MODEL, else the embedded gemma-3-270m."),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def main() -> None:
    """Entry point of the console script."""
    from metasd_langchain.cli.screen import quieten

    quieten()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of the libraries; our own messages do not go this way
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    app()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"metasd-langchain {__version__}")
        raise typer.Exit


@app.command("demo")
def _demo(
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Text or Markdown file to ask.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about the document.")] = None,
    svg: Annotated[Path | None, typer.Option(dir_okay=False, help="Save the screen as a picture.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 96,
    model: Model = None,
    dtype: Dtype = "auto",
) -> None:
    """Run a LangChain pipeline over a document: who drafted which token, and how much faster than plain decoding."""
    with _errors_shown():
        from metasd_langchain.cli.demo import run

        run(file=file, question=question, svg=svg, max_tokens=max_tokens, model=model, dtype=dtype)


@app.command("generate")
def _generate(
    prompt: Annotated[str, typer.Argument(help='Text to go on from; "-" reads it from standard input.')],
    *,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    drafters: Annotated[str | None, typer.Option(help="Arms, e.g. suffix@16,lookup,plain.")] = None,
    policy: Annotated[str | None, typer.Option(help="Bandit policy, e.g. ucb.")] = None,
    dtype: Dtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error who drafted what.")] = False,
) -> None:
    """Go on from a prompt; text appears as it becomes final, coloured by the drafter that proposed it."""
    options: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
        "dtype": dtype,
    }
    if drafters is not None:
        options["drafters"] = [name.strip() for name in drafters.split(",") if name.strip()]
    if policy is not None:
        options["policy"] = policy
    with _errors_shown():
        from metasd_langchain.cli.generate import run

        run(prompt, options, as_json=as_json, stats=stats)


@app.command("chat")
def _chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    memory: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File in which the bandit goes on learning.")
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the conversation here at the end.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Talk with a model; every token in the colour of the drafter that proposed it. /stats, /save FILE, /help."""
    options: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "dtype": dtype,
    }
    if memory is not None:
        options["memory"] = memory
    with _errors_shown():
        from metasd_langchain.cli.chat import run

        run(options, system=system, save=save)


@app.command("tune")
def _tune(
    prompts: Annotated[
        Path | None,
        typer.Option(help='Your prompts: .txt parted by blank lines, or .jsonl with "prompt" or "turns".'),
    ] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of each answer. Default: 128, with --quick 64.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Settings file to write, for MetaSDLLM(settings=...).")] = Path(
        "settings.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, once: a minute or two.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings as JSON and nothing else.")] = False,
) -> None:
    """Measure on your prompts whether drafting pays on this machine, say so, and write the best settings."""
    with _errors_shown():
        from metasd_langchain.cli.tune import run

        run(
            prompts=prompts,
            model=model,
            dtype=dtype,
            max_tokens=max_tokens,
            output_file=output,
            quick=quick,
            as_json=as_json,
        )


@app.command("trace")
def _trace(
    file: Annotated[Path | None, typer.Argument(help="Trace file, as METASD_TRACE_FILE or record() writes it.")] = None,
    *,
    last: Annotated[bool, typer.Option("--last", help="The newest trace in the user's cache folder.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="HTML file to write. Default: the trace's name with .html.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show recorded calls: a summary here, and a page in which every token has the colour of its drafter."""
    with _errors_shown():
        from metasd_langchain.cli.trace import run

        run(file, last=last, out=out, show=show)


memory_app = typer.Typer(help="What bandits remember in a file (MetaSDLLM(memory=FILE)).", no_args_is_help=True)
app.add_typer(memory_app, name="memory")
MemoryFile = Annotated[Path, typer.Argument(help="The file.", show_default=False)]


@memory_app.command("show")
def _memory_show(file: MemoryFile) -> None:
    """Print a table: rounds learned from, and the best arms with what they are worth, by model and pipeline step."""
    with _errors_shown():
        from metasd_langchain.cli.memory import show

        show(file)


@memory_app.command("export")
def _memory_export(file: MemoryFile) -> None:
    """Print everything as one JSON object."""
    with _errors_shown():
        from metasd_langchain.cli.memory import export

        export(file)


@memory_app.command("reset")
def _memory_reset(
    file: MemoryFile,
    scope: Annotated[str | None, typer.Option(help='Of this scope only; "" is what no scope learned.')] = None,
    step: Annotated[str | None, typer.Option(help="Of the pipeline step of this name only.")] = None,
) -> None:
    """Delete what was learned: all of it, or of one scope or step. The file stays."""
    with _errors_shown():
        from metasd_langchain.cli.memory import reset

        reset(file, scope=scope, step=step)


datastore_app = typer.Typer(help='Text or code to draft from (drafters=["datastore:FILE@16"]).', no_args_is_help=True)
app.add_typer(datastore_app, name="datastore")


@datastore_app.command("build")
def _datastore_build(
    paths: Annotated[
        list[Path], typer.Argument(help="Files or folders; what is no UTF-8 text is left out.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write.")],
    *,
    model: Model = None,
    licence: Annotated[str, typer.Option(help="Licence of the text, kept in the file.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the description as JSON and nothing else.")] = False,
) -> None:
    """Index text or code by the model's tokens, so that the datastore drafter can quote it."""
    with _errors_shown():
        from metasd_langchain.cli.datastore import build

        build(paths, out, model=model, licence=licence, as_json=as_json)


@datastore_app.command("show")
def _datastore_show(
    file: Annotated[Path, typer.Argument(help="The file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON and nothing else.")] = False,
) -> None:
    """Say what a datastore holds: tokens, sources, licence, whose token ids."""
    with _errors_shown():
        from metasd_langchain.cli.datastore import show

        show(file, as_json=as_json)


train_app = typer.Typer(
    help="Train drafters from the target itself (drafters=['eagle:FOLDER@5']).", no_args_is_help=True
)
app.add_typer(train_app, name="train")
Data = Annotated[
    Path | None, typer.Option(help="Folder with the development files. Default: METASD_DATA, else ../shared/data.")
]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens the target generates for each domain. Default: 100,000.")
]
PresetTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens the target generates for each domain. Default: 60,000.")
]
Minutes = Annotated[float, typer.Option(min=0.0, help="Most minutes of training each drafter; 0 = no bound.")]
Seed = Annotated[int, typer.Option(help="Of prompts' order, draws and weights.")]
Domain = Annotated[str, typer.Option(help="code, translation, summarization, qa, math, or ofa for all of them.")]
OutFolder = Annotated[Path, typer.Option(file_okay=False, help="Folder of the drafter; one that is there goes on.")]


@train_app.command("eagle")
def _train_eagle(
    domain: Domain,
    out: OutFolder,
    *,
    data: Data = None,
    model: Model = None,
    dtype: Dtype = "auto",
    tokens: Tokens = None,
    minutes: Minutes = 0.0,
    seed: Seed = 0,
    start: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a trained head whose weights it begins with."),
    ] = None,
) -> None:
    """Train an EAGLE head for a domain. Interrupted, the same command goes on."""
    with _errors_shown():
        from metasd_langchain.cli.train import Asked, run

        run("eagle", domain, out, Asked(data, model, dtype, tokens, minutes, seed), start)


@train_app.command("small_lm")
def _train_small_lm(
    domain: Domain,
    out: OutFolder,
    *,
    data: Data = None,
    model: Model = None,
    dtype: Dtype = "auto",
    tokens: Tokens = None,
    minutes: Minutes = 0.0,
    seed: Seed = 0,
) -> None:
    """Train a small language model for a domain. Interrupted, the same command goes on."""
    with _errors_shown():
        from metasd_langchain.cli.train import Asked, run

        run("small_lm", domain, out, Asked(data, model, dtype, tokens, minutes, seed))


@train_app.command("preset")
def _train_preset(
    name: Annotated[str, typer.Argument(help="five-domains: a head for each domain, and one for all.")],
    *,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the drafters. Default: the user's cache.")
    ] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    tokens: PresetTokens = None,
    minutes: Minutes = 0.0,
    seed: Seed = 0,
) -> None:
    """Train several drafters into the user's cache. What is finished stays; interrupted, the same command goes on."""
    with _errors_shown():
        from metasd_langchain.cli.train import Asked, run_preset

        run_preset(name, out, Asked(data, model, dtype, tokens, minutes, seed))


@contextmanager
def _errors_shown() -> Iterator[None]:
    """An error of ours is a line and a hint on stderr, not a traceback: exit code 2 for what the user gave, else 1."""
    try:
        yield
    except MetaSDError as error:
        from metasd_langchain.cli.screen import show_error

        show_error(error)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None
