"""What ``python -m train`` does beside training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters import checkpoint, formats
from drafters.method import Drafter
from drafters.target import load
from eval import evidence

if TYPE_CHECKING:
    from recipes.schema import Run

DERIVED = (  # notes that each writer makes itself
    "version", "target", "dtype", "own_head", "vllm", "max_drafts", "layer_ids", "evidence",
)  # fmt: skip


def export_as(run: Run) -> None:
    """Write ``drafter=``, a directory of ours or of others, in the format ``format=`` to ``out=``.

    Errors: ``ValueError`` naming the setting that is missing, or the field that the format cannot hold.
    """
    known = sorted({formats.OURS, *formats.FORMATS})
    source = Path(_given("drafter", run.drafter, "a drafter directory, for example runs/demo/drafter"))
    out = Path(_given("out", run.out, "a new directory"))
    format = _given("format", run.format, f"one of {', '.join(known)}")
    if format not in known:
        raise ValueError(f"format={format}: write one of {', '.join(known)}")
    if out.exists():
        raise ValueError(f"out={out} exists already; name a new directory, or remove it first")
    hardware = checkpoint.hardware_for(source, run.hardware)  # refused before the target is loaded
    drafter = checkpoint.read(source, load(run.target, hardware))
    stored = checkpoint.read_config(source).get("foredraft", {})
    notes = {key: value for key, value in stored.items() if key not in DERIVED}
    if format == formats.OURS:
        write_for_vllm(drafter, out, notes)
    else:
        formats.write_as(drafter, out, format, notes)
    print(f"{out}: {drafter.config.name} drafter, format={format}, read back and the same")


def write_for_vllm(drafter: Drafter, out: Path, notes: dict[str, Any]) -> None:
    """Our own directory, read back and compared. Errors: ``ValueError`` for what vLLM would misread."""
    if reason := drafter.vllm_refusal():
        raise ValueError(f"format={formats.OURS}: {reason}")

    def check(written: Path) -> None:
        again = checkpoint.read(written, drafter.target)
        formats.check_same(drafter, again, formats.OURS)
        evidence.record(written, again)

    checkpoint.write(drafter, out, notes, check)


def _given(key: str, value: str | None, what: str) -> str:
    if value is None:
        raise ValueError(f"{key}: task=export needs {what}")
    return value
