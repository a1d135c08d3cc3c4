"""``python -m data task=inspect|regenerate|capture``: look at rows, answer prompts, store states."""

import hydra
from omegaconf import DictConfig

from data.tasks import capture_states, inspect, regenerate_answers
from recipes.cli import perform, start


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    tasks = {"inspect": inspect, "regenerate": regenerate_answers, "capture": capture_states}
    perform(config, tasks, "inspect")


if __name__ == "__main__":
    start(main)
