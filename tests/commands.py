"""The commands of the project, in this process."""

from __future__ import annotations

import importlib
import sys

from hydra.core.global_hydra import GlobalHydra

from recipes.cli import start

CPU = ("hardware.dtype=float32", "hardware.device=cpu")


def command(name: str, *arguments: str) -> int:
    """``python -m NAME ARGUMENTS``; returns its exit code."""
    main = importlib.import_module(f"{name}.__main__").main
    GlobalHydra.instance().clear()
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        start(main)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def refusal(capsys, name: str, *arguments: str) -> str:
    """The one message that a user's mistake ends a command with: exit code 1, and no traceback."""
    capsys.readouterr()
    assert command(name, *arguments) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    _bars, message = err.split("error: ")
    return message
