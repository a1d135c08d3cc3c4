"""Five verbs (wrap, backward, step, save, load) over plain torch or DeepSpeed, imported only here.

DeepSpeed runs under any launcher that sets RANK, WORLD_SIZE and LOCAL_RANK (torchrun, srun, deepspeed).
Losses arrive already divided by the count of the whole step over all ranks, so gradients are summed
over ranks and micro-batches and never averaged again.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drafters.target import bfloat16_pays, pick_device
from train.optim import OptimConfig, make


def world_size() -> int:
    """Processes of this run, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number, from 0."""
    return int(os.environ.get("RANK", "0"))


class PlainEngine:
    """One process."""

    name = "plain"

    def __init__(self, config: OptimConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype

    def wrap(self, module: nn.Module) -> nn.Module:
        """Place a module and its optimizer; returns what to call in the loop."""
        self.module = module.to(self.device)
        self.optimizer = make(self.module, self.config)
        return self.module

    def precision(self) -> AbstractContextManager:
        """Parameters stay fp32; with bfloat16 products run under autocast.

        But not where a CPU only emulates bfloat16: its fp32 products are as exact and many times faster.
        """
        if self.dtype == torch.float32 or (self.device.type == "cpu" and not bfloat16_pays()):
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch."""
        loss.backward()

    def step(self, rate: float) -> float:
        """One update at the given learning rate; returns the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        _check_norm(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def total(self, numbers: dict[str, float]) -> dict[str, float]:
        """The sum of each over all ranks; 0 counts where a rank has none of that name."""
        return numbers

    def barrier(self) -> None:
        pass

    def save(self, directory: Path) -> None:
        torch.save(
            {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()},
            directory / "engine.pt",
        )

    def load(self, directory: Path) -> None:
        held = torch.load(directory / "engine.pt", map_location=self.device, weights_only=True)
        self.module.load_state_dict(held["module"])
        self.optimizer.load_state_dict(held["optimizer"])


class DeepSpeedEngine:
    """ZeRO over ranks. Every key whose default changed between releases is written out."""

    name = "deepspeed"

    def __init__(
        self,
        config: OptimConfig,
        device: torch.device,
        dtype: torch.dtype,
        accumulation: int,
        stage: int,
    ) -> None:
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        self.deepspeed = deepspeed
        self.config, self.device, self.dtype = config, device, dtype
        self.settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": config.clip,
            "zero_optimization": {"stage": stage, "reduce_scatter": True},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": 10**9,
        }
        self.unstepped = False  # the last micro-batch has not been counted by DeepSpeed's own step()
        deepspeed.init_distributed(
            dist_backend="gloo" if device.type == "cpu" else "nccl",
            timeout=timedelta(days=1),  # the other ranks wait while rank 0 measures acceptance
            verbose=False,
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        optimizer = make(module, self.config)
        self.module, *_ = self.deepspeed.initialize(model=module, optimizer=optimizer, config=self.settings)
        return self.module

    def precision(self) -> AbstractContextManager:
        return nullcontext()  # DeepSpeed keeps bf16 parameters with an fp32 master copy

    def backward(self, loss: Tensor) -> None:
        if self.unstepped:
            self.module.step()  # DeepSpeed counts micro-batches here, and updates at the last of them
        # DeepSpeed averages over ranks; the loss is already divided by the count of all of them.
        self.module.backward(loss * world_size(), scale_wrt_gas=False)
        self.unstepped = True

    def step(self, rate: float) -> float:
        for group in self.module.optimizer.param_groups:
            group["lr"] = rate
        self.module.step()
        self.unstepped = False
        norm = self.module.get_global_grad_norm()
        _check_norm(norm)
        return float(norm)

    def total(self, numbers: dict[str, float]) -> dict[str, float]:
        ranks: list[dict[str, float]] = [{}] * world_size()
        dist.all_gather_object(ranks, numbers)
        return {name: sum(one.get(name, 0.0) for one in ranks) for name in sorted(set().union(*ranks))}

    def barrier(self) -> None:
        dist.barrier()

    def save(self, directory: Path) -> None:
        self.module.save_checkpoint(str(directory), tag="engine", save_latest=False)

    def load(self, directory: Path) -> None:
        found, _ = self.module.load_checkpoint(str(directory), tag="engine")
        assert found is not None, directory


Engine = PlainEngine | DeepSpeedEngine


def check_launch(kind: str, packs: int) -> None:
    """Refuse what cannot run on the processes that were started, before anything is loaded."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if int(tasks) > 1 and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"SLURM_NTASKS={tasks}, but WORLD_SIZE is not set: each task would train a run of its own; start "
            "`torchrun -m train ...`, on several nodes `srun --ntasks-per-node=1 torchrun ... -m train ...`"
        )
    if kind == "plain" and world_size() > 1:
        raise ValueError(
            f"train.engine=plain runs one process, but {world_size()} were started; write deepspeed or auto"
        )
    if packs % world_size():
        near = packs + world_size() - packs % world_size()
        raise ValueError(
            f"train.packs={packs}: must be a multiple of the {world_size()} ranks that share them, "
            f"for example {near}"
        )


def make_engine(
    kind: str, config: OptimConfig, device: torch.device, dtype: torch.dtype, packs: int, stage: int
) -> Engine:
    """``kind``: plain, deepspeed, or auto (deepspeed where there are several ranks)."""
    if kind == "plain" or (kind == "auto" and world_size() == 1):
        return PlainEngine(config, device, dtype)
    return DeepSpeedEngine(config, device, dtype, packs // world_size(), stage)


def local_device(device: str) -> torch.device:
    """This rank's device, from now on the current one: ``cuda`` is the GPU of LOCAL_RANK."""
    found = pick_device(device)
    if found.type == "cuda":
        if found.index is None:
            found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        elif world_size() > 1:
            raise ValueError(
                f"hardware.device={device}: {world_size()} ranks would share one GPU; write cuda, and "
                "each takes its own"
            )
        torch.cuda.set_device(found)
    return found


def _check_norm(norm: Any) -> None:
    if not bool(torch.isfinite(torch.as_tensor(norm))):
        raise ValueError(
            f"the gradient norm is {float(norm)}: stop here, the last checkpoint is good. Lower optim.lr, "
            "and run `python -m data task=inspect` on the rows; in bfloat16 also try hardware.dtype=float32"
        )
