"""Texts on this machine that prompts for training are made of; nothing is fetched.

Each function returns items and a `Source` that says what they are, so that a recipe can name them. What is missing
gives no items. Files are read in the order of their names, so the same machine gives the same items.
"""

from __future__ import annotations

import ast
import gettext
import gzip
import hashlib
import json
import re
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metasd_langchain.errors import CorpusError
from metasd_langchain.training.split import in_training_third

__all__ = ["Item", "Source", "catalogue_sentences", "functions", "gsm8k", "manual_pages", "notes", "training_rows"]

_CATALOGUES = Path("/usr/share/locale")
_MANUALS = Path("/usr/share/man")
_NOTES = Path("/usr/share/doc")
_PAGES = 3  # manual pages of one program
_LARGE = 2_000_000  # bytes of a file that is not read
_ROFF = re.compile(r"\\f[BIRP]|\\f\(..|\\&|\\,|\\/")
_ESCAPES = (("\\-", "-"), ("\\(aq", "'"), ("\\(lq", '"'), ("\\(rq", '"'), ("\\(em", "-"), ("\\e", "\\"))


@dataclass(frozen=True, slots=True)
class Source:
    """Where items come from.

    Attributes:
        name: of the source.
        licence: of its texts.
        count: items.
        digest: SHA-256 over all items, so that two machines can be compared.
    """

    name: str
    licence: str
    count: int
    digest: str


@dataclass(frozen=True, slots=True)
class Item:
    """A text that the target is to answer or to go on from.

    Attributes:
        text: the text.
        kind: of a row of the development prompts its category; of a sentence its language.
    """

    text: str
    kind: str = ""


def _source(name: str, licence: str, items: Iterable[Item]) -> tuple[Source, list[Item]]:
    found = list(items)
    digest = hashlib.sha256()
    for item in found:
        digest.update(json.dumps([item.text, item.kind]).encode())
    return Source(name, licence, len(found), digest.hexdigest()), found


def gsm8k(data: Path | None) -> tuple[Source, list[Item]]:
    """Questions of ``gsm8k_train_1500.jsonl`` in the data folder."""
    rows = _rows(data, "gsm8k_train_1500.jsonl")
    items = (Item(_said(row, "question"), "math_reasoning") for row in rows)
    return _source("gsm8k_train_1500 (openai/grade-school-math, training part)", "MIT", items)


def training_rows(data: Path | None) -> tuple[Source, list[Item]]:
    """Those rows of ``spec_bench_dev`` and ``humaneval_dev`` that are for training; the others are never returned."""
    items = [
        Item(_first_turn(row), str(row.get("category")))
        for row in _rows(data, "spec_bench_dev.jsonl")
        if in_training_third(_named(row, "question_id"))
    ]
    items += [
        Item(_said(row, "prompt"), "humaneval")
        for row in _rows(data, "humaneval_dev.jsonl")
        if in_training_third(_named(row, "task_id"))
    ]
    return _source("training third of spec_bench_dev and humaneval_dev", "Apache-2.0 and MIT", items)


def functions(root: Path | None = None) -> tuple[Source, list[Item]]:
    """Functions of Python's standard library: head and docstring."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"test", "tests", "site-packages"} & set(path.parts))
    items = (item for path in files for item in _functions_of(path))
    return _source("functions with docstrings of Python's standard library", "PSF-2.0", items)


def catalogue_sentences(languages: Iterable[str], root: Path | None = None) -> tuple[Source, list[Item]]:
    """Sentences of gettext catalogues in these languages; the kind is the language."""
    root = root or _CATALOGUES
    items: list[Item] = []
    seen: set[str] = set()
    for language in languages:
        for path in sorted((root / language / "LC_MESSAGES").glob("*.mo")):
            for english, foreign in _catalogue(path):
                if foreign not in seen and _sentence(foreign, 40, 300) and _sentence(english, 30, 300):
                    seen.add(foreign)
                    items.append(Item(foreign, language))
    licence = "that of each Debian package (see /usr/share/doc/*/copyright); sentences serve as prompts only"
    return _source("gettext catalogues of installed packages", licence, items)


def manual_pages(root: Path | None = None) -> tuple[Source, list[Item]]:
    """Paragraphs of English manual pages, as plain text."""
    root = root or _MANUALS
    files = _few_of_each(sorted(path for section in root.glob("man[1-8]") for path in section.glob("*.gz")))
    items = (Item(text, "manual") for path in files for text in [_plain(_read(path))] if len(text) > 400)
    licence = "that of each Debian package (see /usr/share/doc/*/copyright); texts serve as prompts only"
    return _source("manual pages of installed packages", licence, items)


def notes(root: Path | None = None) -> tuple[Source, list[Item]]:
    """Prose of README, NEWS and the like of installed packages."""
    root = root or _NOTES
    names = ("README*", "NEWS*", "*.txt", "*.txt.gz", "FAQ*")
    files = sorted({path for name in names for path in root.glob(f"*/{name}") if path.is_file()})
    items = (Item(text, "notes") for path in files for text in [_prose(_read(path))] if len(text) > 400)
    licence = "that of each Debian package (see /usr/share/doc/*/copyright); texts serve as prompts only"
    return _source("documents of installed packages", licence, items)


def _rows(data: Path | None, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a file of the data folder; none when it is not there."""
    path = None if data is None else data / name
    if path is None or not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as cause:
                raise CorpusError(f"{name}, line {number}: no JSON", hint="is the file whole?") from cause
            if not isinstance(row, dict):
                raise CorpusError(f"{name}, line {number}: no JSON object")
            yield row


def _said(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"a row of the data folder has no {field!r}", hint="see the data folder's README")
    return value


def _named(row: dict[str, Any], field: str) -> str:
    """A row's id. Without one nobody could tell whether it is for training."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise CorpusError(f"a row of the data folder has no {field!r}", hint="see the data folder's README")
    return str(value)


def _first_turn(row: dict[str, Any]) -> str:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise CorpusError("a row of the data folder has no 'turns'", hint="see the data folder's README")
    return turns[0]


def _functions_of(path: Path) -> Iterator[Item]:
    text = _read(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or not ast.get_docstring(node):
            continue
        document = node.body[0]
        end = document.end_lineno or node.lineno
        head = lines[node.lineno - 1 : end]
        margin = len(head[0]) - len(head[0].lstrip())
        first = node.args.posonlyargs + node.args.args
        if len(head) <= 40 and not (first and first[0].arg in ("self", "cls")):  # HumanEval asks for functions
            yield Item(_cut(head, margin), "function")


def _few_of_each(pages: list[Path]) -> list[Path]:
    """A few pages of each program: some have thousands, which are all alike."""
    counts: dict[str, int] = {}
    kept = []
    for page in pages:
        program = re.split(r"[-_.:]", page.name, maxsplit=1)[0]
        counts[program] = counts.get(program, 0) + 1
        if counts[program] <= _PAGES:
            kept.append(page)
    return kept


def _cut(lines: list[str], margin: int) -> str:
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines) + "\n"


def _catalogue(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            catalogue: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]  # noqa: SLF001
    except (OSError, ValueError, EOFError, AttributeError, struct.error):
        return  # a damaged catalogue is somebody else's
    for english, foreign in catalogue.items():
        if isinstance(english, str) and "\x04" not in english:
            yield " ".join(english.split()), " ".join(foreign.split())


def _sentence(text: str, least: int, most: int) -> bool:
    """Whether it reads like a sentence, not like a format or a list of options."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return least <= len(text) <= most and not set(text) & set("%<>{}\\|=") and letters > 0.9 * len(text)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGE:
            return ""
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.BadGzipFile):
        return ""
    return raw.decode("utf-8", "replace")


def _plain(page: str) -> str:
    """The prose of a manual page: macros away, escapes undone."""
    lines = []
    for line in page.splitlines():
        if line.startswith((".", "'")):
            if line.startswith((".PP", ".P", ".LP", ".SH", ".TP")):
                lines.append("")
            continue
        text = _ROFF.sub("", line)
        for escape, character in _ESCAPES:
            text = text.replace(escape, character)
        lines.append(text)
    return _prose("\n".join(lines))


def _prose(text: str) -> str:
    """Paragraphs that read like sentences, each in one line."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n".join(part for part in paragraphs if _sentence(part, 80, 3000))
