"""What a machine has left for one process."""

import psutil
import pytest

from drafters.machine import free_memory

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
