"""EAGLE-3: one decoder layer that runs on from its own hidden states (arXiv 2503.01840).

With g_t the kept layers' outputs at position t and E the target's embedding, a round at anchor a (position
of the last committed token) is a chain of N steps:

    h_0 = fc(g[a-1])                                       the fused states of the newest true position
    r_k = h_k + attention([input_layernorm(E(x[a+k])), hidden_norm(h_k)])
    h_k+1 = r_k + mlp(post_attention_layernorm(r_k))       also what the next step reads
    q(x[a+k+1]) = softmax(head(norm(h_k+1)))

Queries, keys and values read both halves. A step sees the true *pairs* j = (fc(g[j]), x[j+1]) before the
anchor's own, and the steps of its own chain. It stands one position after the step before it:

                                pair 0  ...  pair a-2 | step 0  step 1  step 2
    step 0  (h_0, x[a])            v    ...     v     |   v                      position a - 1
    step 1  (h_1, x[a+1])          v    ...     v     |   v       v              position a
    step 2  (h_2, x[a+2])          v    ...     v     |   v       v       v      position a + 1

In training x[a+k] is the token of the data and the hidden states are the drafter's own ("training-time
test"); replay and serving feed its own drafts back. All of them run ``Chain`` below. The loss of step k is
that of the label x[a+k+1], weighted by step_weight ** k. Compared with SafeAILab/EAGLE at cb7e084,
speculators at c05b95b and DeepSpec at afdfa7c, which mask by the token of the step and not by its label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config

from drafters.layers import MLP, Attention, ContextLayer, RMSNorm, Rotary
from drafters.losses import LossWeights
from drafters.method import Drafter, MethodConfig, check_lengths, method
from drafters.objective import counted, objective
from drafters.ops import (
    Span,
    block_labels,
    document_spans,
    draw_length,
    first_places,
    previous_tokens,
    sample_anchors,
    valid_anchors,
)
from drafters.products import Linear
from drafters.shape import copy_layer, draft_shape, layer_config, randomise
from drafters.target import Target
from drafters.types import Batch, Loss, Proposal, States
from drafters.vocab import DraftVocab

USUAL_VOCAB = 32_000
SPAN = 256  # anchors of one attention: bounds its scores, [H, 256, T]


@dataclass
class Eagle3Config(MethodConfig):
    """``method.*`` of EAGLE-3."""

    name: str = "eagle3"
    draft_vocab: int | None = 0  # 0: 32,000, or a sixth of a vocabulary below 65,536; null: the target's own
    unroll: int = 7  # steps of a chain in training: the largest N
    step_weight: float = 0.8  # step k counts step_weight ** k
    anchor_share: float = 1.0  # share of a document's possible anchors that a full unroll looks at
    lengths: list[int] | None = None  # steps a chain is trained for, drawn alike; None: always all
    kv_heads: int | None = None  # key and value heads; None: as many as the target has
    layer_type: str = "qwen3"  # qwen3: norms on queries and keys; llama: none, and for vLLM three states
    norm_before_residual: bool = False  # the residual of a step is hidden_norm(h), not h
    norm_before_fc: bool = False  # one norm over all kept states before fc
    fc_norm: bool = False  # a norm of each kept state before fc
    norm_output: bool = False  # the next step reads the hidden state after the final norm
    init: str = "target"  # target: start from its last decoder layer; random
    loss: LossWeights = field(default_factory=lambda: LossWeights(ce=0.0, kl=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unroll < 1:
            raise ValueError(f"method.unroll={self.unroll}: give at least 1 step")
        if not 0 < self.step_weight <= 1:
            raise ValueError(
                f"method.step_weight={self.step_weight}: give a number above 0, at most 1 (all steps alike)"
            )
        if not 0 < self.anchor_share <= 1:
            raise ValueError(f"method.anchor_share={self.anchor_share}: give a share above 0, at most 1")
        check_lengths(self.lengths, self.unroll)
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(
                f"method.kv_heads={self.kv_heads}: give at least 1, or null for the target's number"
            )
        for name, choices in (("layer_type", ("qwen3", "llama")), ("init", ("target", "random"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"method.{name}={getattr(self, name)}: write {' or '.join(choices)}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "method.fc_norm=true, method.norm_before_fc=true: kept states are normed one by one or all "
                "together; set one of the two to false"
            )

    def kept_tokens(self, vocab_size: int) -> int | None:
        if self.draft_vocab == 0:
            kept = USUAL_VOCAB if vocab_size >= 2**16 else vocab_size // 6
            return kept if vocab_size > USUAL_VOCAB else None
        return super().kept_tokens(vocab_size)


class ChainLayer(nn.Module):
    """The decoder layer: its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: Qwen3Config, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = Attention(shape, 2 * size, normed=config.layer_type == "qwen3")
        self.mlp = MLP(size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, embedded_PD: Tensor, hidden_PD: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values read, ``[P, 2D]``, and the residual ``[P, D]``."""
        normed_PD = self.hidden_norm(hidden_PD)
        both = torch.cat([self.input_layernorm(embedded_PD), normed_PD], dim=-1)
        return both, normed_PD if self.norm_before_residual else hidden_PD

    def finish(self, residual_PD: Tensor, found_PC: Tensor) -> Tensor:
        """The rest of the layer, after what attention found (heads side by side)."""
        residual_PD = residual_PD + self.self_attn.o_proj(found_PC)
        return residual_PD + self.mlp(self.post_attention_layernorm(residual_PD))


def attend(
    query_AHE: Tensor,
    context: tuple[Tensor, Tensor],
    steps: list[tuple[Tensor, Tensor]],
    pair_A: Tensor,
) -> Tensor:
    """One softmax, in fp32, over the true pairs before each anchor's own and the steps of its chain.

    ``context`` holds keys and values ``[T, H, E]`` of one document, anchor i sees the first ``pair_A[i]``
    rows of it; ``steps`` those of each step so far, ``[A, H, E]``: row i is seen by anchor i alone. Returns
    the heads side by side, ``[A, H*E]``.
    """
    with torch.autocast(query_AHE.device.type, enabled=False):
        (key_THE, value_THE), kv_heads = (rows.float() for rows in context), context[0].shape[1]
        key_AKHE, value_AKHE = (torch.stack(rows, 1).float() for rows in zip(*steps, strict=True))
        query_AHGE = query_AHE.float().unflatten(1, (kv_heads, -1)) * query_AHE.shape[-1] ** -0.5
        unseen_AT = torch.arange(len(key_THE), device=pair_A.device) >= pair_A[:, None]
        context_AHGT = torch.einsum("ahge,the->ahgt", query_AHGE, key_THE)
        context_AHGT = context_AHGT.masked_fill(unseen_AT[:, None, None], float("-inf"))
        chain_AHGK = torch.einsum("ahge,akhe->ahgk", query_AHGE, key_AKHE)
        weights = torch.cat([context_AHGT, chain_AHGK], dim=-1).softmax(-1)
        seen_AHGT, own_AHGK = weights.split([len(key_THE), len(steps)], dim=-1)
        found_AHGE = torch.einsum("ahgt,the->ahge", seen_AHGT, value_THE)
        found_AHGE = found_AHGE + torch.einsum("ahgk,akhe->ahge", own_AHGK, value_AKHE)
    return found_AHGE.flatten(1).to(query_AHE.dtype)


class Chain:
    """The steps of many anchors at once. Keys and values of its steps live here and nowhere else."""

    def __init__(
        self,
        drafter: Eagle3,
        fused_AD: Tensor,
        pair_A: Tensor,
        context: tuple[Tensor, Tensor],
        spans: list[Span],
    ) -> None:
        """``pair_A``: position a - 1 of each anchor's own pair; ``context``: ``[T, H, E]`` over all spans."""
        assert bool((pair_A >= 0).all()), "an anchor without a state before it"
        self.drafter, self.hidden_AD, self.pair_A = drafter, fused_AD, pair_A
        self.context, self.spans = context, spans
        self.steps: list[tuple[Tensor, Tensor]] = []

    def step(self, tokens_A: Tensor) -> Tensor:
        """Read the next token of every chain; the hidden states that predict the one after, ``[A, D]``."""
        drafter, layer = self.drafter, self.drafter.layers[0]
        rotary = drafter.rotary(self.pair_A + len(self.steps))
        both, residual_AD = layer.inputs(drafter.embed(tokens_A), self.hidden_AD)
        self.steps.append(layer.self_attn.keys_values(both, rotary))
        out_AD = layer.finish(residual_AD, self._attend(layer.self_attn.queries(both, rotary)))
        normed_AD = drafter.norm(out_AD)
        self.hidden_AD = normed_AD if drafter.config.norm_output else out_AD
        return normed_AD

    def _attend(self, query_AHE: Tensor) -> Tensor:
        """Span by span. Training computes scores again in the backward pass: none are kept."""
        found = []
        for span in self.spans:
            rows, seen = slice(span.first, span.last), slice(span.start, span.end)
            key_THE, value_THE = self.context
            context = key_THE[seen], value_THE[seen]
            steps = [(key_AHE[rows], value_AHE[rows]) for key_AHE, value_AHE in self.steps]
            given = query_AHE[rows], context, steps, self.pair_A[rows]
            if query_AHE.requires_grad:
                found.append(checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=False))
            else:
                found.append(attend(*given))
        return torch.cat(found)


@dataclass
class ChainState:
    """Serving: keys and values of the true pairs, and the fused state that waits for its token.

    ``keys`` and ``values`` are ``[slots, capacity, H, E]``. A slot that has received ``lengths`` states has
    one pair less: the newest position's next token is not known before the next call.
    """

    keys: Tensor
    values: Tensor
    pending: Tensor  # [slots, D]
    lengths: list[int]

    def drop(self, slots: list[int]) -> None:
        """Forget what the slots hold; they start again from length 0."""
        for slot in slots:
            self.lengths[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Put one slot's request into another slot."""
        length = self.lengths[source]
        for store in (self.keys, self.values):
            store[target, :length] = store[source, :length]
        self.pending[target] = self.pending[source]
        self.lengths[target], self.lengths[source] = length, 0


@method(Eagle3Config)
class Eagle3(Drafter):
    """One layer over pairs of a hidden state and the token after it, unrolled on its own outputs."""

    config: Eagle3Config
    architecture = "Eagle3DraftModel"
    layer_ids_key = "eagle_aux_hidden_state_layer_ids"
    saves_shared = True  # without, speculators 0.9.0 drafts from an embedding of zeros, and says nothing
    layers: Sequence[ChainLayer]  # an nn.ModuleList of one

    def __init__(self, config: Eagle3Config, target: Target, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, target, vocab)
        self.shape = draft_shape(target, num_layers=1, kv_heads=check_kv_heads(config.kv_heads, target))
        size, eps, num = self.shape.hidden_size, self.shape.rms_norm_eps, len(self.layer_ids)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num * target.hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps) for _ in range(num))
        self.fc = Linear(num * target.hidden_size, size, bias=False)
        self.layers = cast(Sequence[ChainLayer], nn.ModuleList([ChainLayer(self.shape, config)]))
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(self.shape)
        self.reset_parameters()

    @classmethod
    def choose_layers(cls, config: Eagle3Config, num_layers: int) -> list[int]:
        """A low, a middle and a high layer, as vLLM chooses them; of a small target, spread over all but
        the last, two or one where there are no three."""
        if config.layer_ids:
            return config.layer_ids
        if num_layers >= 7:
            return [1, num_layers // 2 - 1, num_layers - 4]
        return sorted({round(i * max(num_layers - 2, 0) / 2) for i in range(3)})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random (standard deviation 0.02), then a copy of the target's last layer where asked for."""
        randomise(self)
        if self.config.init == "target":
            start_from_target(self)

    # The forward that training, replay and serving share --------------------------------------

    def fuse(self, states: States) -> Tensor:
        """The kept states of a position as one, ``[..., D]``."""
        layers = states.layers_BTLD.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            layers = torch.stack([norm(layers[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        wide = layers.flatten(-2)
        return self.fc(self.input_norm(wide) if self.config.norm_before_fc else wide)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding, in the drafter's dtype."""
        return self.target.embed(tokens).to(self.fc.weight.dtype)

    def pairs(self, fused_PD: Tensor, tokens_P: Tensor, position_P: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[P, H, E]`` of true pairs: the fused state at a position, the token after it."""
        layer = self.layers[0]
        both, _ = layer.inputs(self.embed(tokens_P), fused_PD)
        return layer.self_attn.keys_values(both, self.rotary(position_P))

    def chain(self, batch: Batch, anchors_A: Tensor) -> Chain:
        """The chains of a packed batch's anchors (flat indices, ascending; none first in its document)."""
        fused_PD = self.fuse(batch.states).flatten(0, 1)
        position_P = batch.position_BT.flatten()
        # The last position of a document has no token after it; its pair is before no anchor.
        context = self.pairs(fused_PD, batch.tokens_BT.flatten().roll(-1), position_P)
        spans = document_spans(batch.doc_BT, anchors_A, SPAN)
        return Chain(self, fused_PD[anchors_A - 1], position_P[anchors_A] - 1, context, spans)

    def drawn(
        self, chain: Chain, tokens_A: Tensor, num: int, uniforms_AK: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step, the drafts ``[A]`` as target ids and their logits ``[A, N]``.

        Each draft is read next: the likeliest token, or with uniforms one drawn from the logits' law.
        """
        for k in range(num):
            logits_AN = self.logits(chain.step(tokens_A))
            ids_A = logits_AN.argmax(-1) if uniforms_AK is None else sample(logits_AN, uniforms_AK[:, k])
            tokens_A = self.to_target_ids(ids_A)
            yield tokens_A, logits_AN

    # Training and replay ----------------------------------------------------------------------

    def place(self, batch: Batch, generator: torch.Generator) -> Batch:
        valid_BT = valid_anchors(batch.mask_BT, batch.doc_BT) & (batch.position_BT > 0)
        most = self.config.unroll
        num = draw_length(self.config.lengths or [most], generator)
        share = min(1.0, self.config.anchor_share * most / num)  # as many steps for shorter chains
        anchors_A = sample_anchors(valid_BT, batch.doc_BT, share, generator)
        batch = replace(batch, anchors_A=anchors_A, num_drafts=num)
        return counted(self, batch, self.weights_K)

    def weights_K(self, num: int) -> Tensor:
        """How much each of ``num`` steps counts."""
        return self.config.step_weight ** torch.arange(num)

    def loss(self, batch: Batch) -> Loss:
        anchors_A, num = batch.placed()
        # What a step reads is the label of the step before it, where that one counts.
        labels_AK, _ = block_labels(batch.tokens_BT, batch.mask_BT, batch.doc_BT, anchors_A, num)
        tokens_AK = torch.cat([batch.tokens_BT.flatten()[anchors_A, None], labels_AK[:, :-1]], dim=1)
        return objective(self, batch, self.forced(batch, anchors_A, tokens_AK), self.weights_K)[0]

    def forced(self, batch: Batch, anchors_A: Tensor, tokens_AK: Tensor) -> Tensor:
        """Normed hidden states ``[A, K, D]`` of chains that read the given tokens."""
        chain = self.chain(batch, anchors_A)
        return torch.stack([chain.step(tokens_A) for tokens_A in tokens_AK.unbind(1)], dim=1)

    def draft_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        roots_A = batch.tokens_BT.flatten()[anchors_A]
        return torch.stack([logits for _, logits in self.drawn(self.chain(batch, anchors_A), roots_A, n)], 1)

    def path_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        return self.logits(self.forced(batch, anchors_A, previous_tokens(batch.tokens_BT, anchors_A, n)))

    def drafts(self, batch: Batch, anchors_A: Tensor, n: int) -> Proposal:
        roots_A = batch.tokens_BT.flatten()[anchors_A]
        return Proposal(
            torch.stack([ids for ids, _ in self.drawn(self.chain(batch, anchors_A), roots_A, n)], 1)
        )

    # Serving ----------------------------------------------------------------------------------

    def begin(self, slots: int, capacity: int) -> ChainState:
        weight, attention = self.fc.weight, self.layers[0].self_attn
        shape = (slots, capacity, attention.kv_heads, attention.size)
        pending_BD = weight.new_zeros(slots, self.shape.hidden_size)
        return ChainState(weight.new_zeros(shape), weight.new_zeros(shape), pending_BD, [0] * slots)

    def advance(
        self, state: ChainState, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]
    ) -> None:
        pending_BD = state.pending[rows.start : rows.stop]  # a view
        # The pending state finds its token first; the newest new one waits for its own in turn.
        waiting_BJD = torch.cat([pending_BD[:, None], self.fuse(states)], dim=1)
        row_P, at_P = first_places(kept, tokens_BJ.device)
        start_B = torch.tensor([state.lengths[row] for row in rows], device=tokens_BJ.device)
        position_P = start_B[row_P] + at_P - 1
        paired_P = position_P >= 0  # the first token of a text has no state before it
        row_P, at_P, position_P = row_P[paired_P], at_P[paired_P], position_P[paired_P]
        where = row_P + rows.start, position_P
        pairs = self.pairs(waiting_BJD[row_P, at_P], tokens_BJ[row_P, at_P], position_P)
        state.keys[where], state.values[where] = pairs
        pending_BD[:] = waiting_BJD[range(len(rows)), kept]
        for row, num in zip(rows, kept, strict=True):
            state.lengths[row] += num

    def propose(
        self,
        state: ChainState,
        rows: range,
        anchors_B: Tensor,
        n: int,
        uniforms_BK: Tensor | None = None,
    ) -> Proposal:
        capacity = state.keys.shape[1]
        pairs = [state.lengths[row] - 1 for row in rows]
        spans = [
            Span(row * capacity, row * capacity + num, at, at + 1)
            for at, (row, num) in enumerate(zip(rows, pairs, strict=True))
        ]
        context = state.keys.flatten(0, 1), state.values.flatten(0, 1)
        pair_B = torch.tensor(pairs, device=anchors_B.device)
        chain = Chain(self, state.pending[rows.start : rows.stop], pair_B, context, spans)
        drawn = list(self.drawn(chain, anchors_B, n, uniforms_BK))
        tokens_BK = torch.stack([ids_B for ids_B, _ in drawn], 1)
        if uniforms_BK is None:
            return Proposal(tokens_BK)
        return Proposal(tokens_BK, self._whole_laws(torch.stack([logits_BN for _, logits_BN in drawn], 1)))

    def _whole_laws(self, logits_BKN: Tensor) -> Tensor:
        """The laws of the drafts over the target's whole vocabulary, ``[B, K, V]``."""
        laws_BKN = logits_BKN.float().softmax(-1)
        if self.vocab is None:
            return laws_BKN
        laws_BKV = laws_BKN.new_zeros(*laws_BKN.shape[:2], self.target.vocab_size)
        laws_BKV[..., self.vocab.kept_N.to(laws_BKV.device)] = laws_BKN
        return laws_BKV

    # The drafter directory --------------------------------------------------------------------

    @property
    def max_drafts(self) -> int:
        return self.config.unroll

    @property
    def nested(self) -> bool:
        return True

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in FLAGS} | {"embed_requires_grad": False}

    @classmethod
    def read_description(cls, found: dict[str, Any]) -> Eagle3Config:
        (proposal,) = found["speculators_config"]["proposal_methods"]
        return Eagle3Config(
            unroll=proposal["speculative_tokens"],
            layer_type=found["transformer_layer_config"]["model_type"],
            kv_heads=found["transformer_layer_config"]["num_key_value_heads"],
            init="random",
            **{name: found[name] for name in FLAGS},
        )

    def layer_config(self) -> dict[str, Any]:
        return layer_config(self.shape, self.config.layer_type)

    def vllm_refusal(self) -> str | None:
        if self.config.layer_type == "llama" and len(self.layer_ids) != 3:
            return (
                f"vLLM sizes fc of a llama drafter for 3 kept layers, this one has {len(self.layer_ids)} "
                "(method.layer_type=qwen3 takes any number)"
            )
        return None


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def check_kv_heads(kv_heads: int | None, target: Target) -> int | None:
    """``ValueError`` for a number of key and value heads that the target's heads cannot share."""
    if kv_heads is None:
        return None
    heads, theirs = target.config.num_attention_heads, target.config.num_key_value_heads
    if heads % kv_heads or kv_heads % theirs:
        fitting = [n for n in range(theirs, heads + 1) if heads % n == 0 and n % theirs == 0]
        raise ValueError(f"method.kv_heads={kv_heads}: give one of {fitting} for a target of {heads} heads")
    return kv_heads


def sample(logits_AN: Tensor, uniforms_A: Tensor) -> Tensor:
    """A draw of each row's law by its uniform in [0, 1)."""
    cumulative_AN = logits_AN.float().softmax(-1).double().cumsum(-1)
    at_A1 = uniforms_A[:, None].double() * cumulative_AN[:, -1:]
    return torch.searchsorted(cumulative_AN, at_A1, right=True)[:, 0].clamp(max=logits_AN.shape[-1] - 1)


def start_from_target(drafter: Eagle3) -> None:
    """Copy the target's last layer and final norm into a fresh drafter.

    Attention reads the hidden half as the target's does and nothing of the embedding half; the fused state
    starts as the highest kept layer. The first step then is nearly the target's own last layer.
    Errors: ``ValueError`` for a layer that computes something else: ``init=random``.
    """
    target, size = drafter.target, drafter.target.hidden_size
    source = target.layers[-1]
    if drafter.config.layer_type == "llama" and "self_attn.q_norm.weight" in dict(source.named_parameters()):
        raise ValueError(
            f"method.init=target: {type(source).__name__} has self_attn.q_norm, which a layer of "
            "method.layer_type=llama has not; use method.layer_type=qwen3 or method.init=random"
        )
    ordinary = ContextLayer(draft_shape(target, num_layers=1))
    copy_layer(ordinary, target, target.num_layers - 1)
    theirs: dict[str, Tensor] = dict(ordinary.named_parameters())
    heads = ordinary.self_attn.kv_heads
    copies = drafter.layers[0].self_attn.kv_heads // heads
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):  # more heads start as copies
        by_head = theirs[name].unflatten(0, (heads, -1))
        theirs[name] = by_head.repeat_interleave(copies, 0).flatten(0, 1)
    theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight")
    for name, ours in drafter.layers[0].named_parameters():
        if name == "input_layernorm.weight":  # of the embedding: nothing of the target's
            continue
        if ours.shape == theirs[name].shape:
            ours.copy_(theirs[name])
        else:  # queries, keys, values: the first half reads the embedding, the second the hidden state
            ours.copy_(torch.cat([torch.zeros_like(theirs[name]), theirs[name]], dim=1))
    drafter.norm.weight.copy_(target.decoder.norm.weight)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:].copy_(torch.eye(size))
