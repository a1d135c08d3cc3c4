"""``python -m train +recipe=dflash``: train a drafter, export it, report; ``task=export``, ``task=check``."""

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, recipe_name, start
from train.check import check
from train.job import run_training
from train.tasks import export_as


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    tasks = {
        "train": lambda run: run_training(run, recipe_name()),
        "check": check,
        "export": export_as,
    }
    perform(config, tasks, "train")


if __name__ == "__main__":
    start(main)
