"""``python -m serve drafter=DIR prompt="..."``: answer losslessly by draft and verify."""

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, start
from serve.tasks import answer


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    perform(config, {"answer": answer}, "answer")


if __name__ == "__main__":
    start(main)
