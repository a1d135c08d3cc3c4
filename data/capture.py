"""The frozen target's states over examples: live, in memory, or on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from data.store import BadStates, Spec, Store, check_states, document_key
from drafters.machine import cache_directory, free_memory
from drafters.target import Target
from drafters.types import Example, States


@dataclass
class StatesConfig:
    """``states.*``: where training takes the target's states from."""

    keep: str = "memory"  # memory | disk | online (the target runs in the loop)
    directory: str | None = None  # of the disk store; None: the cache folder
    batch_tokens: int = 2048  # tokens in one pass of the target while capturing
    max_bad: float = 0.01  # above this share of refused states the run stops

    def __post_init__(self) -> None:
        if self.keep not in ("memory", "disk", "online"):
            raise ValueError(f"states.keep={self.keep}: write memory, disk or online")


Source = Callable[[Sequence[Example]], list[States]]


def capture(
    target: Target, examples: Sequence[Example], layer_ids: Sequence[int], with_last: bool
) -> list[States]:
    """One padded pass of the target; ``[1, T, L, D]`` for each example, on the CPU in the target's dtype."""
    longest = max(len(example.ids) for example in examples)
    tokens_BT = torch.zeros(len(examples), longest, dtype=torch.long)
    real_BT = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens_BT[row, : len(example.ids)] = torch.tensor(example.ids)
        real_BT[row, : len(example.ids)] = True
    padded = not bool(real_BT.all())
    states = target.states(
        tokens_BT.to(target.device),
        layer_ids,
        attention_mask=real_BT.to(target.device) if padded else None,
    ).to("cpu")
    out = []
    for row, example in enumerate(examples):
        own = states[row : row + 1, : len(example.ids)]
        out.append(States(own.layers_BTLD.clone(), own.last().clone() if with_last else None))
    return out


def check_ids(examples: Sequence[Example], vocab_size: int) -> None:
    """``ValueError`` naming the row whose ids the target's embedding does not have."""
    for example in examples:
        if example.ids and not (min(example.ids) >= 0 and max(example.ids) < vocab_size):
            bad = next(i for i in example.ids if not 0 <= i < vocab_size)
            raise ValueError(
                f"{example.name}: token id {bad} is outside the target's vocabulary of {vocab_size}; "
                "the row was tokenised for another target, remove its answers or regenerate it"
            )


def source(
    config: StatesConfig,
    target: Target,
    examples: Sequence[Example],
    layer_ids: Sequence[int],
    *,
    with_last: bool,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> tuple[Source, list[Example]]:
    """A function from examples to their states, and the examples whose states can be used.

    With ``memory`` and ``disk`` everything is captured now, with a progress bar; to the disk each rank
    writes its share. Errors: ``ValueError`` naming rows and reasons when more than ``max_bad`` of the
    states are refused, and for more states than memory holds.
    """
    check_ids(examples, target.vocab_size)
    if config.keep == "online":
        return lambda some: _live(config, target, some, layer_ids, with_last), list(examples)
    if config.keep == "memory":
        _check_memory(target, examples, len(layer_ids) + with_last)
        held: dict[str, States] = {}
        bad = _fill(config, target, examples, layer_ids, with_last, held.update)
        return lambda some: [held[document_key(e.ids)] for e in some], _without(examples, bad, config.max_bad)
    if world > 1:
        _store(config, target, examples[rank::world], layer_ids, with_last)
        barrier()
    store, bad = _store(config, target, examples, layer_ids, with_last)  # of several ranks: what was refused
    return lambda some: [_read(store, example) for example in some], _without(examples, bad, config.max_bad)


def _store(config, target, examples, layer_ids, with_last) -> tuple[Store, dict[str, str]]:
    """The store with all that it missed of these examples, and why any of them were refused."""
    store = open_store(config, target, layer_ids, with_last)
    missing = {document_key(e.ids): e for e in examples if document_key(e.ids) not in store}

    def keep(captured: dict[str, States]) -> None:
        if captured:
            store.write([missing[key] for key in captured], list(captured.values()))

    return store, _fill(config, target, list(missing.values()), layer_ids, with_last, keep)


def _check_memory(target: Target, examples: Sequence[Example], num_states: int) -> None:
    """``ValueError`` before hours of capture that end without memory."""
    lengths = {document_key(example.ids): len(example.ids) for example in examples}
    needed = sum(lengths.values()) * num_states * target.hidden_size * target.dtype.itemsize
    if needed > (free := free_memory()):
        raise ValueError(
            f"states.keep=memory: the states of {len(lengths)} documents take {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB of memory are free; write states.keep=disk or states.keep=online"
        )


def _read(store: Store, example: Example) -> States:
    try:
        return store.read(example)
    except BadStates as reason:
        raise ValueError(
            f"{example.name}: stored states cannot be used: {reason}; delete that file in {store.directory} "
            "and run again, what it held is captured anew"
        ) from reason


def store_root(config: StatesConfig) -> Path:
    """The folder that holds the disk stores."""
    return Path(config.directory).expanduser() if config.directory else cache_directory() / "states"


def open_store(config: StatesConfig, target: Target, layer_ids: Sequence[int], with_last: bool) -> Store:
    """The disk store of this target and these layers."""
    dtype = str(target.dtype).removeprefix("torch.")
    return Store(store_root(config), Spec(target.fingerprint, tuple(layer_ids), dtype, with_last))


def _live(config, target, examples: Sequence[Example], layer_ids, with_last: bool) -> list[States]:
    found: dict[str, States] = {}
    for group in _by_length(examples, config.batch_tokens):
        for example, states in zip(group, capture(target, group, layer_ids, with_last), strict=True):
            refuse_bad(example, states)
            found[document_key(example.ids)] = states
    return [found[document_key(example.ids)] for example in examples]


def refuse_bad(example: Example, states: States) -> None:
    """``ValueError`` naming the row whose states are NaN, infinite or zero."""
    try:
        check_states(example.ids, states)
    except BadStates as reason:
        raise ValueError(
            f"{example.name}: the target's states cannot be used: {reason}. Check its dtype (float16 "
            "overflows) and its attention implementation, or remove the row"
        ) from reason


def _fill(
    config, target, examples, layer_ids, with_last, keep: Callable[[dict[str, States]], None]
) -> dict[str, str]:
    """Capture all examples in batches of similar length; returns why any of them were refused."""
    bad: dict[str, str] = {}
    total = sum(len(example.ids) for example in examples)
    with tqdm(total=total, unit="tok", desc="states", disable=not examples, mininterval=1) as bar:
        for group in _by_length(examples, config.batch_tokens):
            good = {}
            for example, states in zip(group, capture(target, group, layer_ids, with_last), strict=True):
                try:
                    check_states(example.ids, states)
                    good[document_key(example.ids)] = states
                except BadStates as reason:
                    bad[document_key(example.ids)] = f"{example.name}: {reason}"
            keep(good)
            bar.update(sum(len(example.ids) for example in group))
    return bad


def _by_length(examples: Sequence[Example], budget: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    seen: set[str] = set()
    for example in sorted(examples, key=lambda e: len(e.ids)):
        key = document_key(example.ids)
        if key in seen:
            continue
        seen.add(key)
        if group and (len(group) + 1) * len(example.ids) > budget:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def _without(examples: Sequence[Example], bad: dict[str, str], max_bad: float) -> list[Example]:
    left = [example for example in examples if document_key(example.ids) not in bad]
    if bad and (not left or len(examples) - len(left) > max_bad * len(examples)):
        reasons = Counter(text.split(": ", 1)[1] for text in bad.values())
        raise ValueError(
            f"states of {len(examples) - len(left)} of {len(examples)} rows were refused, more than "
            f"states.max_bad={max_bad} allows; {dict(reasons)}; first: {next(iter(bad.values()))}. "
            "Check the target's dtype (float16 overflows) and its attention implementation."
        )
    for text in bad.values():
        tqdm.write(f"left out, {text}")
    return left
