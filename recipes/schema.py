"""The one typed tree of settings, built from each owner's dataclass.

A knob belongs to the component that reads it; this file only puts them together and registers them
with Hydra. Methods register themselves (drafters/method.py), so a new one appears here by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from data.capture import StatesConfig
from data.regenerate import RegenerateConfig
from data.sources import DataConfig
from drafters.method import MethodConfig, all_methods
from drafters.target import EMBEDDED, HardwareConfig
from eval.evaluate import EvalConfig
from eval.plan import PlanConfig
from serve.answer import ServeConfig
from serve.bench import BenchConfig
from serve.settings import HttpConfig
from serve.vllm import VllmConfig
from train.log import LogConfig
from train.loop import TrainConfig
from train.optim import OptimConfig


@dataclass
class Run:
    """Everything a command reads. ``python -m train --cfg job +recipe=dflash`` prints it filled in."""

    task: str | None = None  # what the command does; see its README section
    run: str | None = None  # name under runs/; None: <recipe>-<target>
    overwrite: bool = False  # start a run of this name again, deleting the one that is there
    target: str = EMBEDDED  # a directory, a hub name, or smollm2-embedded
    drafter: str | None = None  # a drafter directory
    format: str | None = None  # how train task=export lays a directory out: vllm, zlab, deepspec or sglang
    runs: list[str] | None = None  # names under runs/, or directories, to compare
    observed: str | None = None  # a file of sweeps of N, partly measured, to plan from
    out: str | None = None  # a file or directory to write
    engine: str = "own"  # of python -m serve: own, or vllm
    proposer: str | None = None  # none, ngram, suffix or a method; None: the drafter, where there is one
    port: int | None = None  # of python -m serve; None: 8000, unless there is a prompt to answer
    prompt: str | None = None
    prompt_file: str | None = None  # long prompts: commas and quotes mean something to Hydra
    seed: int = 0

    method: Any = MISSING
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: give a number from 0 to {2**32 - 1}")
        if self.engine not in ("own", "vllm"):
            raise ValueError(f"engine={self.engine}: write own or vllm")


def register() -> None:
    """Put the tree and every method into Hydra's store."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=_with_open_dictionaries(Run))
    store.store(group="method", name="none", node=MethodConfig(name="none"))
    for name, drafter in all_methods().items():
        store.store(group="method", name=name, node=drafter.config_class)


def _with_open_dictionaries(schema: type) -> DictConfig:
    """The tree with dictionaries that take any key (``eval.traffic={math: 1}``) though the rest is closed."""
    tree = OmegaConf.structured(schema)

    def visit(node: DictConfig) -> None:
        if not is_dataclass(OmegaConf.get_type(node)):
            OmegaConf.set_struct(node, False)
            return
        for key in node:
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                visit(node[key])

    visit(tree)
    return tree
