"""``python -m serve drafter=DIR``: answer losslessly by draft and verify, over HTTP or one prompt.

``port=8000`` serves OpenAI's API; ``prompt="..."``, ``prompt_file=FILE`` or text piped into the command is
answered once. With neither, the API is served on port 8000. ``task=bench`` measures proposers side by side.
``engine=vllm`` starts vLLM with what the drafter needs; ``task=command`` only prints how.
"""

import os
import stat
import sys

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, start
from serve import vllm
from serve.bench import bench
from serve.tasks import answer, http


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    if config.engine == "vllm":
        perform(config, {"serve": vllm.start, "command": vllm.show}, "serve")
        return
    asks_once = config.prompt is not None or config.prompt_file is not None or is_piped(sys.stdin)
    default = "answer" if config.port is None and asks_once else "http"
    perform(config, {"answer": answer, "http": http, "bench": bench}, default)


def is_piped(stream) -> bool:
    """Whether a stream is a pipe, a file or text in memory; a terminal and ``/dev/null`` are not."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:  # it has no file: text in memory
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


if __name__ == "__main__":
    start(main)
