"""Keys and values of the target, one slot a request; rolled back by length.

Every slot has its own length. New rows are written at the positions that follow it, whatever stood
there: rows of refused drafts are simply overwritten, since nothing at or past a slot's length is ever
visible.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


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
            else:
                store[owner.row_B1, :, owner.position_BJ] = new.transpose(1, 2)
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
        self.position_BJ = self.row_B1 = torch.empty(0)

    def stage(
        self, rows: range, num: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """The next pass feeds ``num`` tokens to each of ``rows``: their positions, and the mask(s).

        One mask ``[B, 1, num, visible]`` to add to the scores (eager attention, as of gpt-oss, adds a
        boolean one too), or one a layer type where the target mixes windows.
        """
        lengths_B = torch.tensor([self.lengths[row] for row in rows], device=device)
        longest = max(self.lengths[row] for row in rows) + num
        assert longest <= self.capacity, f"slot of {self.capacity} tokens asked to hold {longest}"
        self.rows, self.visible = rows, longest
        self.position_BJ = lengths_B[:, None] + torch.arange(num, device=device)
        self.row_B1 = torch.arange(rows.start, rows.stop, device=device)[:, None]
        self.contiguous = (rows.start, longest - num, longest) if len(rows) == 1 else None
        at_T = torch.arange(longest, device=device)
        query_BJ1 = self.position_BJ[..., None]
        causal_BJT = at_T <= query_BJ1
        hidden = torch.finfo(dtype).min
        masks = {}
        for kind, window in self.windows.items():
            visible_BJT = causal_BJT if window is None else causal_BJT & (at_T > query_BJ1 - window)
            scores_BJT = torch.zeros(visible_BJT.shape, dtype=dtype, device=device)
            masks[kind] = scores_BJT.masked_fill_(~visible_BJT, hidden)[:, None]
        return self.position_BJ, next(iter(masks.values())) if len(masks) == 1 else masks

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
