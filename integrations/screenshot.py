"""A picture of a page by headless Chromium: ``python -m integrations.screenshot URL FILE.png --size 1400x900``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

_COLOURS = 128  # a palette: a quarter of the bytes, and pages have few colours
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def take(url: str, file: Path, width: int, height: int, wait_ms: int = 60_000) -> None:
    """Load `url`, let `wait_ms` of the page's own clock go by, and save what is seen.

    Raises:
        FileNotFoundError: Chromium is not installed.
        subprocess.SubprocessError: it failed, or took more than three minutes.
    """
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="metasd-chromium.") as profile:
        shot = Path(profile, "page.png")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={shot}"]
        command += [f"--virtual-time-budget={wait_ms}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=180)  # noqa: S603
        with Image.open(shot) as picture:
            picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    """Take it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("url")
    options.add_argument("file", type=Path)
    options.add_argument("--size", default="1400x900", metavar="WIDTHxHEIGHT")
    args = options.parse_args()
    width, height = map(int, args.size.split("x"))
    try:
        take(args.url, args.file, width, height)
    except (FileNotFoundError, subprocess.SubprocessError) as failure:
        sys.exit(f"no picture: {failure}")
    print(f"{args.file}: {args.file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
