"""What a machine has left for one process."""

from pathlib import Path

import psutil
import pytest

from drafters.machine import cache_directory, free_memory, kept
from drafters.target import _dequantise

GIB = 2**30


def groups(tmp_path, **limits: tuple[str, int, int]):
    """Control groups under a root: their limit, what is used, and how much of that is a cache of files."""
    own = tmp_path / "own"
    own.write_text("0::/" + "/".join(limits) + "\n")
    directory = tmp_path / "groups"
    for name, (most, used, files) in limits.items():
        directory /= name
        directory.mkdir(parents=True)
        (directory / "memory.max").write_text(most + "\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\n")
    return tmp_path / "groups", own


def test_it_is_some_of_what_the_machine_has():
    assert 0 < free_memory() <= psutil.virtual_memory().total


def test_a_control_group_leaves_less_than_the_machine_has(tmp_path, monkeypatch):
    """The files it holds in its cache it can give back; groups above it count as well."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 500 * GIB}))
    found = groups(
        tmp_path, slurm=("max", 90 * GIB, 0), job=(str(10 * GIB), 4 * GIB, GIB), step=("max", GIB, 0)
    )
    assert free_memory(*found) == 7 * GIB


@pytest.mark.parametrize("most", ["max", "", "²", "-1", "9" * 5000])
def test_what_is_no_limit_bounds_nothing(tmp_path, monkeypatch, most):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 8 * GIB}))
    found = groups(tmp_path, job=(most, GIB, 0))
    (tmp_path / "groups" / "job" / "memory.stat").write_bytes(b"\xff one two three\n\ninactive_file abc\n")
    assert free_memory(*found) == 8 * GIB
    (tmp_path / "groups" / "job" / "memory.max").write_text(str(4 * GIB))
    assert free_memory(*found) == 3 * GIB


def test_processes_of_one_machine_share_it(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 8 * GIB}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(tmp_path / "none", tmp_path / "nothing") == 2 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=0: torchrun sets it"):
        free_memory()


def test_an_empty_setting_is_the_default_directory(monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert cache_directory() == Path.home() / ".cache" / "foredraft"


def test_where_the_targets_of_wheels_cannot_be_unpacked_the_setting_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"target=smollm2-embedded is unpacked .* FOREDRAFT_CACHE names"):
        _dequantise(tmp_path / "some.gguf", cache_directory() / "targets" / "some")


def test_what_was_measured_is_read_again_and_damage_measured_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    once = iter([{"a": 1}, {"a": 2}, {"a": 3}])
    read = lambda: kept("things", {"machine": "this"}, lambda: next(once), lambda found: found["a"])  # noqa: E731
    assert [read(), read()] == [1, 1]
    (file,) = (tmp_path / "things").iterdir()
    file.write_text("[" * 100_000)
    assert [read(), read()] == [2, 2]
    file.unlink()
    (tmp_path / "things").rmdir()
    (tmp_path / "things").write_text("")
    assert read() == 3
    assert "things are not kept" in caplog.text
    assert "FOREDRAFT_CACHE" in caplog.text
