"""``python -m serve drafter=DIR prompt="..."``: answer losslessly by draft and verify.

``task=bench`` measures proposers side by side. ``engine=vllm`` starts vLLM with what the drafter needs
instead; ``task=command`` only prints how.
"""

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, start
from serve import vllm
from serve.bench import bench
from serve.tasks import answer


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    if config.engine == "vllm":
        perform(config, {"serve": vllm.start, "command": vllm.show}, "serve")
    else:
        perform(config, {"answer": answer, "bench": bench}, "answer")


if __name__ == "__main__":
    start(main)
