"""``python -m eval drafter=DIR``: acceptance per domain, position and N; ``task=compare``: runs."""

import hydra
from omegaconf import DictConfig

from eval.tasks import accept, calibrated, compare_runs
from recipes.cli import perform, start


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    perform(config, {"accept": accept, "calibrate": calibrated, "compare": compare_runs}, "accept")


if __name__ == "__main__":
    start(main)
