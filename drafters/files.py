"""Files appear whole: written under a temporary name, flushed, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def new_directory(directory: Path, replace: bool = False) -> Iterator[Path]:
    """A directory that appears whole: filled under a temporary name, flushed, renamed; or nothing at all.

    Errors: ``ValueError`` where something of that name exists, which is left as it is; with ``replace`` it
    goes when the new one is there.
    """
    if directory.exists() and not replace:
        raise ValueError(f"out={directory} exists already; name a new directory, or remove it first")
    scratch = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        flush(scratch)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(scratch, directory)
