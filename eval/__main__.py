"""``python -m eval drafter=DIR``: acceptance per domain, position and N; ``task=plan``: what to deploy."""

import hydra
from omegaconf import DictConfig

from eval.tasks import accept, calibrated, compare_runs, planned
from recipes.cli import perform, start


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    tasks = {"accept": accept, "calibrate": calibrated, "compare": compare_runs, "plan": planned}
    perform(config, tasks, "accept")


if __name__ == "__main__":
    start(main)
