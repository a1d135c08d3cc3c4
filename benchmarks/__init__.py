"""Measurements: each module prints a table and, as its last line, one JSON object."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers


def environment() -> dict[str, str | int]:
    """What a figure depends on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def options(arguments: Sequence[str], **defaults: Any) -> dict[str, Any]:
    """``key=value`` arguments over their defaults, each in its default's type.

    Errors: ``ValueError`` for a key that is no option, or a value of another type.
    """
    found = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in defaults or not equals:
            raise ValueError(f"{argument}: write {' '.join(f'{name}=...' for name in defaults)}")
        kind = type(defaults[key])
        if kind is bool:
            if value not in ("true", "false"):
                raise ValueError(f"{argument}: write true or false")
            found[key] = value == "true"
        else:
            found[key] = kind(value)
    return found
