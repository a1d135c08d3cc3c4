"""From the command line to a typed ``Run``, and errors that say what to write instead.

Hydra parses and composes; this module turns its errors, and ours, into one message without a
traceback that names the nearest known recipe, key or task.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from recipes.schema import Run, register

Task = Callable[[Run], object]

MIX, NO_MIX = "data/mix", "natural"  # the group of mixes, and the one that takes rows as they are


def start(main: Callable[[], None]) -> None:
    """Run a Hydra main function; a user's mistake ends in one message and exit code 1.

    ``FOREDRAFT_TRACEBACK=1`` shows where an error came from.
    """
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with in_one_message():
        main()


def perform(config: DictConfig, tasks: Mapping[str, Task], default: str) -> None:
    """Do the task that ``config`` names, with its settings as objects."""
    with in_one_message():  # before Hydra, which would print all overrides above ours
        _refuse_additions(config)
        _refuse_two_mixes()
        run = cast(Run, OmegaConf.to_object(config))
        name = run.task or default
        if name not in tasks:
            raise ValueError(f"task={name}: write one of {', '.join(sorted(tasks))}.{_nearest(name, tasks)}")
        tasks[name](run)


@contextmanager
def in_one_message() -> Iterator[None]:
    """Turn a user's mistake, a path that cannot be written or read, or a full disk into a message and exit
    code 1, Ctrl-C into exit code 130."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if os.environ.get("FOREDRAFT_TRACEBACK"):
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    except (
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
        FileExistsError,
        FileNotFoundError,
    ) as error:
        if os.environ.get("FOREDRAFT_TRACEBACK") or error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; name another file or directory", file=sys.stderr)
        sys.exit(1)
    except (OSError, RuntimeError, SafetensorError) as error:
        if os.environ.get("FOREDRAFT_TRACEBACK") or not _disk_is_full(error):
            raise
        print(
            f"error: no space left on the disk ({str(error).splitlines()[0]}). Make room and give the same "
            "command again; training goes on from its last checkpoint.",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _disk_is_full(error: Exception) -> bool:
    """Also where a library reports a failed write as something else, as torch.save does."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left" in str(error) or shutil.disk_usage(".").free < 2**20


def _refuse_additions(node: DictConfig, prefix: str = "") -> None:
    """``+key=value`` opens a closed tree; a key that no component reads is a mistake all the same."""
    schema = OmegaConf.get_type(node)
    assert schema is not None
    known = {field.name for field in fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ValueError(f"+{prefix}{key}: there is no such key.{_nearest(prefix + key, known_keys())}")
        if not OmegaConf.is_missing(node, key) and is_dataclass(OmegaConf.get_type(node, key)):
            _refuse_additions(node[key], f"{prefix}{key}.")


def _refuse_two_mixes() -> None:
    """``data/mix=`` beside ``data.weights=``: Hydra would add the domains of one to those of the other."""
    if not HydraConfig.initialized():
        return
    given = [text for text in HydraConfig.get().overrides.task if text.lstrip("+").startswith(MIXES)]
    if len({text.lstrip("+").split("=")[0].split(".")[0] for text in given}) > 1:
        raise ValueError(f"{' '.join(given)}: both say what to train on; leave one out")


MIXES = ("data/mix=", "data.weights=")


def recipe_name() -> str | None:
    """What a run is named after: the recipe and the mix that were asked for, with the job's number in a
    multirun over more than mixes."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    name = hydra.runtime.choices.get("recipe") or hydra.runtime.choices["method"]
    if (mix := hydra.runtime.choices[MIX]) != NO_MIX:
        name = f"{name}-{mix}"
    return f"{name}-{hydra.job.num}" if hydra.mode == RunMode.MULTIRUN and _swept() != [MIX] else name


def _swept() -> list[str]:
    """The settings that the command line gives several values."""
    given = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(given)
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def explain(error: BaseException) -> str:
    """One message for an error of Hydra, OmegaConf or ours."""
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: this cannot be read as key=value. Quote a value that holds commas, quotes, "
            "brackets or =, for shell and Hydra: 'key=\"a, b\"'; long prompts come by prompt_file=FILE "
            "or standard input"
        )
    parts = []
    inner: BaseException | None = error
    while inner is not None:
        parts.append(str(inner).strip())
        inner = inner.__cause__
    text = next((part for part in parts if part), type(error).__name__)
    text = text.split("Config search path:")[0].strip()
    text = re.sub(r"\n\s*(reference|object)_type=.*", "", text)
    if "is not in struct" not in " ".join(parts):  # only trees that take any key can be appended to
        text = re.sub(r"\nTo append to your config use .*", "", text)
    detail = next((part for part in parts[1:] if part and part not in text), "")
    return "\n".join(
        line for line in (text, detail.splitlines()[0] if detail else "", _advice(" ".join(parts))) if line
    )


def _advice(text: str) -> str:
    """The nearest known name to what Hydra did not know."""
    if found := re.search(r"Could not find '\w+/([^']+)'", text):
        return _nearest(found[1], re.findall(r"^\t(\S+)$", text, re.MULTILINE)).strip()
    if "No match in the defaults list" in text or "is not in struct" in text:
        return ""
    if found := re.search(r"Could not override '([^']+)'", text):
        return _nearest(found[1], known_keys()).strip()
    if found := re.search(r"Key '([^']+)' (?:is )?not in", text):
        full = re.search(r"full_key: (\S+)", text)
        return _nearest(full[1] if full else found[1], known_keys()).strip()
    return ""


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known names that look like this one as a whole or, for dotted keys, in their last part."""

    def alike(key: str) -> float:
        return max(difflib.SequenceMatcher(None, name, k).ratio() for k in (key, key.rpartition(".")[2]))

    score = {key: alike(key) for key in known}
    best = max(score.values(), default=0)
    close = [key for key, value in score.items() if value >= max(0.6, best - 0.05)]
    return f" Did you mean {' or '.join(sorted(close)[:3])}?" if close else ""


def known_keys() -> list[str]:
    """Every dotted key of the tree, those of all methods included."""
    from drafters.method import all_methods

    tree = OmegaConf.structured(Run(method=None))
    methods = [OmegaConf.structured(drafter.config_class) for drafter in all_methods().values()]
    return sorted({*_dotted(tree), *(f"method.{key}" for some in methods for key in _dotted(some))})


def _dotted(node: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in node:
        name = prefix + str(key)
        keys.append(name)
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            keys += _dotted(node[key], f"{name}.")
    return keys
