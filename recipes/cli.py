"""From the command line to a typed ``Run``, and errors that say what to write instead.

Hydra parses and composes; this module turns its errors, and ours, into one message without a
traceback that names the nearest known recipe, key or task.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.schema import Run, register

Task = Callable[[Run], None]


def start(main: Callable[[], None]) -> None:
    """Run a Hydra main function; a user's mistake ends in one message and exit code 1.

    ``FOREDRAFT_TRACEBACK=1`` shows where an error came from.
    """
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if os.environ.get("FOREDRAFT_TRACEBACK"):
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def perform(config: DictConfig, tasks: Mapping[str, Task], default: str) -> None:
    """Do the task that ``config`` names, with its settings as objects."""
    run: Run = OmegaConf.to_object(config)
    name = run.task or default
    if name not in tasks:
        raise ValueError(f"task={name}: write one of {', '.join(sorted(tasks))}.{_nearest(name, tasks)}")
    tasks[name](run)


def recipe_name() -> str | None:
    """The recipe that was asked for, where Hydra composed this run."""
    return HydraConfig.get().runtime.choices.get("recipe") if HydraConfig.initialized() else None


def explain(error: BaseException) -> str:
    """One message for an error of Hydra, OmegaConf or ours."""
    parts = []
    inner: BaseException | None = error
    while inner is not None:
        parts.append(str(inner).strip())
        inner = inner.__cause__
    text = next((part for part in parts if part), type(error).__name__)
    text = text.split("Config search path:")[0].strip()
    detail = next((part for part in parts[1:] if part and part not in text), "")
    return "\n".join(
        line for line in (text, detail.splitlines()[0] if detail else "", _advice(" ".join(parts))) if line
    )


def _advice(text: str) -> str:
    """The nearest known name to what Hydra did not know."""
    if found := re.search(r"Could not find '(?:recipe|method)/([^']+)'", text):
        return _nearest(found[1], _recipes()).strip() or f"known recipes: {', '.join(_recipes())}"
    if found := re.search(r"Could not override '([^']+)'", text):
        return _nearest(found[1], known_keys()).strip()
    if found := re.search(r"Key '([^']+)' (?:is )?not in", text):
        full = re.search(r"full_key: (\S+)", text)
        return _nearest(full[1] if full else found[1], known_keys()).strip()
    return ""


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lstrip("+~"), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _recipes() -> list[str]:
    from pathlib import Path

    return sorted(path.stem for path in (Path(__file__).parent / "recipe").glob("*.yaml"))


def known_keys() -> list[str]:
    """Every dotted key of the tree, those of all methods included."""
    from drafters.method import all_methods

    tree = OmegaConf.structured(Run(method=None))
    methods = [OmegaConf.structured(drafter.config_class) for drafter in all_methods().values()]
    return sorted({*_dotted(tree), *(f"method.{key}" for some in methods for key in _dotted(some))})


def _dotted(node: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in node:
        keys.append(prefix + str(key))
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            keys += _dotted(node[key], f"{prefix}{key}.")
    return keys
