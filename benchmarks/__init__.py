"""Measurements: each module prints a table and, as its last line, one JSON object."""

from __future__ import annotations

import os
import platform

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
