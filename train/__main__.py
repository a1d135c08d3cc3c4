"""``python -m train +recipe=dflash``: train and report; ``task=export``: another format."""

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, recipe_name, start
from train.job import run_training
from train.tasks import export_as


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    tasks = {"train": lambda run: run_training(run, recipe_name()), "export": export_as}
    perform(config, tasks, "train")


if __name__ == "__main__":
    start(main)
