"""Files appear whole: written under a temporary name, flushed, renamed."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Give ``path`` this content; whoever reads it finds the old file or the new one, never a half."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(content)
    flush(scratch)
    os.replace(scratch, path)


def flush(path: Path) -> None:
    """Have the system write a file, or every file of a directory, before its name is changed."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
