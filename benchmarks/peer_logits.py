"""Draft logits of ``speculators`` for a drafter directory, run by the interpreter of its own environment.

``PYTHON benchmarks/peer_logits.py DRAFTER TARGET GIVEN FOUND STEPS``; benchmarks/peer_parity.py starts it. It
imports nothing of this project. The directory is read by the library's own ``from_pretrained`` and the logits
are those that its own forward hands to its metrics; eager attention, since the others need a compiler.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from safetensors.torch import load_file, save_file


def loaded(directory: str, target: str) -> torch.nn.Module:
    """Its drafter, in fp32; embedding and head are read from the target's directory."""
    from speculators import SpeculatorModel, SpeculatorModelConfig  # of the peer's environment alone

    config = SpeculatorModelConfig.from_pretrained(directory)
    config.speculators_config.verifier.name_or_path = target
    config.transformer_layer_config._attn_implementation = "eager"  # noqa: SLF001
    return SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()


@torch.inference_mode()
def main() -> None:
    """GIVEN has rows of states, tokens and anchors, numbered; FOUND their logits, one tensor a step."""
    directory, target, given, found, steps = sys.argv[1:]
    drafter = loaded(directory, target)
    heard: list[torch.Tensor] = []

    def hear(logits: torch.Tensor, *_rest: object, **_more: object) -> tuple[torch.Tensor, dict]:
        heard.append(logits[0])
        return torch.zeros(()), {}

    sys.modules[type(drafter).__module__].compute_metrics = hear
    rows, out = load_file(given), {}
    for row in range(len(rows) // 4):
        states_TC, last_TD, tokens_T, mask_T = (
            rows[f"{name}.{row}"][None] for name in ("states", "last", "tokens", "mask")
        )
        drafter(
            hidden_states=states_TC,
            input_ids=tokens_T,
            loss_mask=mask_T,
            verifier_last_hidden_states=last_TD,
            document_ids=torch.zeros_like(tokens_T),
            position_ids=torch.arange(tokens_T.shape[1])[None],
            max_anchors=int(mask_T.sum()),  # block methods
            ttt_steps=int(steps),  # chains
        )
        out[f"logits.{row}"] = torch.stack(heard)
        heard.clear()
    save_file(out, found, metadata={"speculators": version("speculators"), "torch": torch.__version__})


if __name__ == "__main__":
    main()
