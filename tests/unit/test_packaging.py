"""The package as others get it: one top-level name, one version, quick import, no dead links, no path of a machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

from metasd_langchain._version import __version__

ROOT = Path(__file__).parents[2]
SKIP = {".git", ".venv", "build", "dist", "out", "node_modules"}


def tracked() -> list[Path]:
    """Files that are in the repository or about to be."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        return [path for name in names if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not SKIP & set(path.relative_to(ROOT).parts)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(folder), str(ROOT)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_one_package(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"metasd_langchain", f"metasd_langchain-{__version__}.dist-info"}
    assert "metasd_langchain/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pyc", ".log")) or "/tests/" in name]


def test_the_wheel_says_what_it_needs(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    about = Parser().parsestr(archive.read(f"metasd_langchain-{__version__}.dist-info/METADATA").decode())
    assert about["Version"] == __version__
    assert about["License-Expression"] == "Apache-2.0"
    extras = set(about.get_all("Provides-Extra", []))
    assert extras == {"all", "chat", "demo", "gguf", "grammar", "otel", "page", "train"}
    required = " ".join(about.get_all("Requires-Dist", []))
    # neither loads beside the CPU builds of torch that `make install` takes
    assert "torchvision" not in required
    assert "torchaudio" not in required
    entry_points = archive.read(f"metasd_langchain-{__version__}.dist-info/entry_points.txt").decode()
    assert "metasd = metasd_langchain.cli:main" in entry_points


def test_all_extras_are_in_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert everything == f"metasd-langchain[{','.join(extras)}]"


def test_the_version_is_stated_once():
    assert version("metasd-langchain") == __version__
    stating = [
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if path.suffix in {".py", ".toml"}
        and re.search(rf"(?i)version\w*\s*[=:]\s*[\"']{re.escape(__version__)}[\"']", path.read_text())
    ]
    assert stating == ["metasd_langchain/_version.py"]
    assert f"[{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_importing_is_light():
    code = "import sys, metasd_langchain; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_relative_links_lead_somewhere():
    dead = []
    for page in (path for path in tracked() if path.suffix == ".md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        inline = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
        reference = re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
        html = re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
        for link in (*inline, *reference, *html):
            target = link.split("#")[0]
            if target and not re.match(r"[a-z][a-z0-9+.-]*:", target) and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead


def test_no_path_of_a_machine():
    # spelled in two parts, else this file would name them
    words = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/opt" + "/", "/Us" + "ers/", "C:" + "\\Users"]
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}: {word}" for word in words if re.search(rf"(?<![\w.]){re.escape(word)}", text)
        ]
    assert not found


def test_commands_need_no_hidden_state():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    makefile = (ROOT / "Makefile").read_text()
    for target in ("install", "demo", "check", "fix", "test", "eval", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
