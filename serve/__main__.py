"""``python -m serve drafter=DIR``: answer losslessly by draft and verify, over HTTP or one prompt.

``port=8000`` serves OpenAI's API; ``prompt="..."``, ``prompt_file=FILE`` or text piped into the command is
answered once. With neither, the API is served on port 8000.
"""

import os
import stat
import sys

import hydra
from omegaconf import DictConfig

from recipes.cli import perform, start
from serve.tasks import answer, http


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    asks_once = config.prompt is not None or config.prompt_file is not None or is_piped(sys.stdin)
    default = "answer" if config.port is None and asks_once else "http"
    perform(config, {"answer": answer, "http": http}, default)


def is_piped(stream) -> bool:
    """Whether a stream is a pipe, a file or text in memory; a terminal and ``/dev/null`` are not."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:  # it has no file: text in memory
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


if __name__ == "__main__":
    start(main)
