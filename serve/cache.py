"""Keys and values of the target, one slot a request; rolled back by length.

Every slot has its own length. New rows are written at the positions that follow it, whatever stood
there: rows of refused drafts are simply overwritten, since nothing at or past a slot's length is ever
visible.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drafters.target import Target


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, and how their tokens stand one after another in P places.

    ``real_P`` picks them out of the rows filled up to one length, flattened; ``place_BJ`` is the way
    back, where what fills a row up is any real place.
    """

    real_P: Tensor
    place_BJ: Tensor

    @classmethod
    def of(cls, counts: list[int], longest: int, device: torch.device | str) -> Ragged:
        assert 0 < min(counts) <= max(counts) <= longest, (counts, longest)
        counts_B = torch.tensor(counts, device=device)
        at_J = torch.arange(longest, device=device)
        real_P = (at_J < counts_B[:, None]).flatten().nonzero().squeeze(1)
        start_B = counts_B.cumsum(0) - counts_B
        return cls(real_P, start_B[:, None] + torch.minimum(at_J, counts_B[:, None] - 1))


@contextmanager
def attend_ragged(cache: SlotCache, config: PreTrainedConfig) -> Iterator[None]:
    """The target's passes in here read one flat row of tokens as the rows that ``cache`` has staged.

    All layers but attention work on single tokens, so they see only real ones. Attention gets its rows
    back, filled up to one length, and is otherwise the target's own.
    """
    usual = config._attn_implementation
    token = _STAGED.set((cache, usual))
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _STAGED.reset(token)


_NAME = "foredraft_ragged"
_STAGED: ContextVar[tuple[SlotCache, str]] = ContextVar("staged")


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **settings):
    """``query`` is ``[1, H, P, E]``; keys and values are those of the staged slots."""
    cache, usual = _STAGED.get()
    ragged = cache.ragged
    assert ragged is not None, "a ragged pass over rows of one length"
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(usual, eager)
    rows, longest = ragged.place_BJ.shape
    query_BHJE = query[0, :, ragged.place_BJ.flatten()].unflatten(1, (rows, longest)).transpose(0, 1)
    found_BJHE, weights = attend(module, query_BHJE, key, value, attention_mask, **settings)
    return found_BJHE.flatten(0, 1)[ragged.real_P][None], weights


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)


class _SlotLayer(CacheLayerMixin):
    """One decoder layer's ``[B, H, room, E]``; the room grows with what is written, up to the capacity."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, heads = self.owner.slots, key_states.shape[1]
        self.keys = key_states.new_zeros(slots, heads, 0, key_states.shape[-1])
        self.values = value_states.new_zeros(slots, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def grow(self) -> None:
        """Room for what the next pass writes, and as much again."""
        room = min(self.owner.capacity, max(64, 2 * self.owner.visible))
        for name in ("keys", "values"):
            held = getattr(self, name)
            larger = held.new_zeros(*held.shape[:2], room, held.shape[3])
            larger[:, :, : held.shape[2]] = held
            setattr(self, name, larger)

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        if self.keys.shape[2] < owner.visible:
            self.grow()
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if owner.contiguous is not None:
                slot, start, end = owner.contiguous
                store[slot, :, start:end] = new[0]
            else:  # a row a request, or all requests in one row
                store[owner.row_P, :, owner.position_P] = new.transpose(1, 2).flatten(0, 1)
        rows = slice(owner.rows.start, owner.rows.stop)
        return self.keys[rows, :, : owner.visible], self.values[rows, :, : owner.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible, 0

    def get_seq_length(self) -> int:
        return self.owner.visible

    def get_max_length(self) -> int:
        return self.owner.capacity


class SlotCache(Cache):
    """``slots`` requests of up to ``capacity`` tokens. Active requests fill the slots from the front.

    ``stage`` says where the next forward pass writes and what it may see; ``lengths`` moves only when
    the caller commits rows.
    """

    def __init__(self, num_layers: int, slots: int, capacity: int, windows: dict[str, int | None]) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self.slots, self.capacity, self.windows = slots, capacity, windows
        self.lengths = [0] * slots
        self.rows = range(0)
        self.visible = 0
        self.contiguous: tuple[int, int, int] | None = None
        self.position_P = self.row_P = torch.empty(0)
        self.ragged: Ragged | None = None

    def stage(
        self,
        rows: range,
        num: int,
        device: torch.device | str,
        dtype: torch.dtype,
        counts: list[int] | None = None,
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """The next pass feeds ``num`` tokens to each of ``rows``: their positions, and the mask(s).

        Positions are ``[B, num]``. With ``counts`` row i has only its first ``counts[i]`` of them: then all
        tokens stand one after another in a single row, positions are ``[1, P]``, and the pass has to
        run within ``attend_ragged``. One mask ``[B, 1, num, visible]`` to add to the scores (eager
        attention, as of gpt-oss, adds a boolean one too), or one a layer type where the target mixes windows.
        """
        lengths_B = torch.tensor([self.lengths[row] for row in rows], device=device)
        longest = max(
            self.lengths[row] + count for row, count in zip(rows, counts or [num] * len(rows), strict=True)
        )
        assert longest <= self.capacity, f"slot of {self.capacity} tokens asked to hold {longest}"
        self.rows, self.visible = rows, longest
        position_BJ = lengths_B[:, None] + torch.arange(num, device=device)
        row_BJ = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(-1, num)
        self.ragged = None if counts is None else Ragged.of(counts, num, device)
        pick = slice(None) if self.ragged is None else self.ragged.real_P
        self.position_P, self.row_P = position_BJ.flatten()[pick], row_BJ.flatten()[pick]
        self.contiguous = (rows.start, longest - num, longest) if len(rows) == 1 and counts is None else None
        at_T = torch.arange(longest, device=device)
        query_BJ1 = position_BJ[..., None]
        causal_BJT = at_T <= query_BJ1
        hidden = torch.finfo(dtype).min
        masks = {}
        for kind, window in self.windows.items():
            visible_BJT = causal_BJT if window is None else causal_BJT & (at_T > query_BJ1 - window)
            scores_BJT = torch.zeros(visible_BJT.shape, dtype=dtype, device=device)
            masks[kind] = scores_BJT.masked_fill_(~visible_BJT, hidden)[:, None]
        positions = position_BJ if self.ragged is None else self.position_P[None]
        return positions, next(iter(masks.values())) if len(masks) == 1 else masks

    def commit(self, rows: range, kept: list[int]) -> None:
        """The first ``kept[i]`` staged tokens of each row are real; the rest never happened."""
        for row, num in zip(rows, kept, strict=True):
            self.lengths[row] += num

    def move(self, source: int, target: int) -> None:
        """Put a request into another slot (the last one into a hole)."""
        length = self.lengths[source]
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer), layer
            if not layer.is_initialized:  # a layer that reads another layer's keys (Gemma 4) writes none
                continue
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
        self.lengths[target], self.lengths[source] = length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.lengths[self.rows.start] if self.rows else 0


# Which targets -------------------------------------------------------------------------------------------

FAR = 0.2  # relative error of states: bfloat16 and other experts of a mixture stay below, other tokens do not


def check_ragged(target: Target) -> None:
    """``ValueError`` for a family that runs rows of different lengths wrongly, or not at all.

    Some have an attention of their own, which ``attend_ragged`` does not reach. Three short passes.
    """
    try:
        error = _ragged_error(target)
    except (
        Exception
    ) as reason:  # shapes that do not fit, masks that are not known: every family fails its own way
        raise _unfit(target, str(reason)) from reason
    if not error <= FAR:
        raise _unfit(target, f"relative error {error:.2g}")


def _unfit(target: Target, why: str) -> ValueError:
    return ValueError(
        f"target {target.name}: {target.config.model_type} cannot run rows of different lengths in one pass "
        f"with this attention ({why}); serve it with engine=vllm"
    )


@torch.inference_mode()
def _ragged_error(target: Target) -> float:
    """Two rows: a token each into the cache, then one and two as a flat row, beside a pass without cache."""
    rows, counts = range(2), [1, 2]
    cache = SlotCache(target.num_layers, 2, 4, target.attention_windows)
    tokens_BJ = torch.arange(6, device=target.device).view(2, 3) % target.vocab_size

    def run(tokens: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor]) -> Tensor:
        states = target.states(tokens, [], attention_mask=mask, position_BT=position, cache=cache)
        return states.last()

    run(tokens_BJ[:, :1], *cache.stage(rows, 1, target.device, target.dtype))
    cache.commit(rows, [1, 1])
    staged = cache.stage(rows, 2, target.device, target.dtype, counts)
    assert cache.ragged is not None, counts
    real_P = cache.ragged.real_P
    with attend_ragged(cache, target.config):
        have_PD = run(tokens_BJ[:, 1:].flatten()[real_P][None], *staged)[0].float()
    position_BT = torch.arange(3, device=target.device).expand(2, 3)
    plain_BTD = target.states(tokens_BJ, [], position_BT=position_BT).last().float()
    want_PD = plain_BTD[:, 1:].flatten(0, 1)[real_P]
    return float((have_PD - want_PD).norm() / want_PD.norm())
