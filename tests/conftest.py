"""Tests run offline, on few threads, from an empty cache of their own."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if "FOREDRAFT_CACHE" not in os.environ:  # processes that run tests side by side share it
    _CACHE = tempfile.TemporaryDirectory(prefix="foredraft-cache-")
    os.environ["FOREDRAFT_CACHE"] = _CACHE.name

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: a second thread would only wait for the first


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Path:
    """Made once: ``target/``, a tiny random target on disk, and ``rows.jsonl``, rows that it answered."""
    from tests import tiny

    directory = tmp_path_factory.mktemp("workshop")
    of = tiny.target(layers=8)
    tiny.save(of, directory / "target")
    tiny.write_rows(directory / "rows.jsonl", tiny.answered_rows(of, 24))
    return directory
