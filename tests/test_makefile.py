"""The environment that ``make`` builds, from what it would do; the browser, from what it calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("stamp", "asked", "rebuilt"),
    [
        (".installed-torch--2.13.0", "TORCH=keep", True),
        (".installed-keep", "TORCH=torch==2.13.0", True),
        (".installed-keep", "TORCH=keep", False),
        (None, "TORCH=keep", False),
    ],
)
def test_an_environment_of_another_torch_is_made_anew(tmp_path, stamp, asked, rebuilt):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    if stamp is not None:
        (tmp_path / ".venv" / stamp).touch()
    told = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", "install", asked],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert ("rm -rf .venv\n" in told) == rebuilt
    assert ("--system-site-packages" in told) == (asked == "TORCH=keep")


def program(path: Path, *lines: str) -> None:
    """A script that says its name and arguments, and then does these lines."""
    path.write_text("\n".join(["#!/bin/sh", 'echo "ran ${0##*/} $*"', *lines]) + "\n")
    path.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("there", "called"),
    [
        ({"found"}, []),
        ({"apt-get"}, ["apt-get update", "apt-get install --yes --no-install-recommends chromium"]),
        (set(), ["playwright install chromium"]),
    ],
)
def test_a_browser_is_installed_where_there_is_none(tmp_path, there, called):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    commands, environment = tmp_path / "commands", tmp_path / ".venv" / "bin"
    commands.mkdir()
    environment.mkdir(parents=True)
    for name in ("id", "touch"):
        (commands / name).symlink_to(shutil.which(name))
    program(commands / "sudo", 'exec "$@"')
    if "apt-get" in there:
        program(commands / "apt-get", 'test "$1" = update || touch found')
    program(environment / "playwright", "touch found")
    program(environment / "python", "test -e found")
    if "found" in there:
        (tmp_path / "found").touch()
    (tmp_path / ".venv" / ".installed-keep").touch()
    told = subprocess.run(
        [shutil.which("make"), "browser", "TORCH=keep"],
        cwd=tmp_path, env={"PATH": str(commands)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    ran = [line.removeprefix("ran ") for line in told.splitlines() if line.startswith("ran ")]
    assert [line for line in ran if line.split()[0] not in ("python", "sudo")] == called
    assert ran[-1] == "python -m tests.browser"
