"""``python -m eval drafter=DIR``: acceptance per domain, position and N; ``task=plan``: what to deploy;
``task=compare``: runs side by side; ``task=diagnose``: why a drafter accepts little."""

import hydra
from omegaconf import DictConfig

from eval.tasks import accept, calibrated, compare_runs, diagnose, planned
from recipes.cli import perform, start


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    tasks = {
        "accept": accept,
        "calibrate": calibrated,
        "compare": compare_runs,
        "diagnose": diagnose,
        "plan": planned,
    }
    perform(config, tasks, "accept")


if __name__ == "__main__":
    start(main)
