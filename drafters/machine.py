"""What this machine is, what memory it has left, and what was measured on it once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from drafters.files import replace_file

logger = logging.getLogger(__name__)
Kept = TypeVar("Kept")
NUMBER = re.compile("[0-9]{1,19}")  # of bytes; anything else in its place is no limit that we know


def cache_directory() -> Path:
    """Where derived files are kept: ``FOREDRAFT_CACHE``, else ``~/.cache/foredraft``."""
    return Path(os.environ.get("FOREDRAFT_CACHE") or "~/.cache/foredraft").expanduser()


def machine_name(device: torch.device) -> str:
    """The model of the processor or of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def of_speed(device: torch.device) -> dict[str, Any]:
    """What seconds on this device depend on, of machine and torch: for the keys of what is kept."""
    return {
        "machine": machine_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


# Memory ------------------------------------------------------------------------------------------


def free_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process can have: of the machine, within its control groups, shared by its siblings.

    A container or a batch system allows less than the machine has free, in files of Linux' control groups
    (version 2); the cache of files counts as free. ``LOCAL_WORLD_SIZE`` processes of ``torchrun`` share it.
    """
    free = [psutil.virtual_memory().available]
    name = next((line[3:] for line in _text(own).splitlines() if line.startswith("0::/")), "/")
    group = groups / name.strip("/")
    for directory in (group, *group.parents):
        most, used = _text(directory / "memory.max").strip(), _text(directory / "memory.current").strip()
        if NUMBER.fullmatch(most) and NUMBER.fullmatch(used):
            files = re.search(
                r"^inactive_file ([0-9]{1,19})$", _text(directory / "memory.stat"), re.MULTILINE
            )
            free.append(max(0, int(most) - int(used) + (int(files[1]) if files else 0)))
        if directory == groups:
            break
    siblings = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not siblings.isdecimal() or int(siblings) < 1:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={siblings}: torchrun sets it to a number from 1; leave it to torchrun"
        )
    return min(free) // int(siblings)


def _text(path: Path) -> str:
    """Of a file, or nothing where it is not there or not ours to read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# Measured once -----------------------------------------------------------------------------------


def kept(
    kind: str, key: Mapping[str, Any], measured: Callable[[], dict[str, Any]], read: Callable[[Any], Kept]
) -> Kept:
    """What was measured of this key, from the cache directory; else measured now and written there.

    A file that is damaged, or that was written for another key, is measured again; where none can be
    written, a warning says so. ``kind`` names the folder, and what it holds in that warning.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_directory() / kind / f"{name}.json"
    try:
        found = json.loads(path.read_bytes())
        if found["key"] == key:
            return read(found[kind])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, AssertionError, RecursionError):
        pass
    content = measured()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps({"key": key, kind: content}, indent=2) + "\n").encode())
    except OSError as error:
        logger.warning(
            "%s are not kept, the next start measures them again (%s); FOREDRAFT_CACHE names a "
            "directory that can be written",
            kind,
            error,
        )
    return read(json.loads(json.dumps(content)))
