"""A file is the old one or the new one, also when the disk is full or the process dies while writing."""

import os

import pytest

from drafters import files
from drafters.files import flush, replace_file


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    replace_file(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_every_file_of_a_directory_is_flushed(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_text(name)
    seen = []
    monkeypatch.setattr(files.os, "fsync", lambda at: seen.append(os.fstat(at).st_ino))
    flush(tmp_path)
    assert sorted(seen) == sorted((tmp_path / name).stat().st_ino for name in ("a", "inner/b"))
