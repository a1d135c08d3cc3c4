"""The environment that ``make`` builds, from what it would do."""

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
