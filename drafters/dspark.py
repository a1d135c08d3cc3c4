"""DSpark: DFlash's backbone, a sequential head that knows the previous draft, and a confidence a draft.

The block of drafters/block.py, in the layout whose anchor slot predicts: slot k (from 0) predicts
x[a+1+k] from the hidden state h_k after the drafter's norm. The backbone's slots know nothing of each
other's drafts; the Markov head tells each the token before it (rank r, W1 over the target's ids, W2 over
the draft vocabulary):

    x_a ──► slot 0 ──► h_0 ─ head ─► + W2 m(x_a, h_0)  ─► y_1        m = W1[x]                        vanilla
     M  ──► slot 1 ──► h_1 ─ head ─► + W2 m(y_1, h_1)  ─► y_2        m = sigmoid(G[h; W1[x]]) W1[x]   gated
     M  ──► slot 2 ──► h_2 ─ head ─► + W2 m(y_2, h_2)  ─► y_3        m from a state over the block    rnn

    rnn: (g, c, o) = R[s; W1[x]; h],  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  m = tanh(o),  s_0 = 0

The confidence c_k = sigmoid(w [h_k; W1[x_{a+k}]] + b) estimates the probability that draft k + 1 is accepted
given that those before it were; it never sees the draft it speaks of. In training the previous tokens are
those the target really produced: a draft only counts where its predecessors were accepted, so the two agree.

Loss: 0.1 CE + 0.9 L1 + 1.0 BCE(c, alpha), each weighted by exp(-k / 4), alpha = 1 - L1 / 2 detached
(the released settings of DeepSpec at afdfa7c; its paper, section 3.3). ``weighting`` changes the weights of
the vocabulary terms to ``dpace`` or ``expected`` (drafters/losses.py ``Lengths``); the BCE then has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters import checkpoint
from drafters.block import BlockConfig, BlockDrafter
from drafters.losses import Extra, Lengths, LossWeights
from drafters.method import method
from drafters.objective import objective
from drafters.ops import decay_weights, previous_tokens
from drafters.products import Linear
from drafters.target import Target
from drafters.types import Batch, Example, Loss, Proposal
from drafters.vocab import DraftVocab

HEADS = ("vanilla", "gated", "rnn", "none")
WEIGHTINGS = ("decay", "dpace", "expected")


@dataclass
class DSparkConfig(BlockConfig):
    """``method.*`` of DSpark."""

    name: str = "dspark"
    block_size: int = 7
    anchor_predicts: bool = True
    loss: LossWeights = field(default_factory=lambda: LossWeights(ce=0.1, l1=0.9))
    markov: str = "vanilla"  # vanilla | gated | rnn | none
    markov_rank: int = 256
    markov_init: str = "random"  # bigram: from the pairs of tokens in the training answers
    confidence: float = 1.0  # weight of the confidence head's loss; 0: no such head
    confidence_detach: bool = False  # whether that loss leaves the backbone alone
    weighting: str = "decay"  # decay | dpace | expected
    smooth: float = 0.5  # of dpace and expected
    start_from: str | None = None  # a DFlash or DSpark directory whose backbone to start from

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (
            ("markov", HEADS),
            ("weighting", WEIGHTINGS),
            ("markov_init", ("random", "bigram")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"method.{name}={getattr(self, name)}: write {' or '.join(allowed)}")
        if self.markov_rank < 1:
            raise ValueError(f"method.markov_rank={self.markov_rank}: give at least 1, or method.markov=none")
        if not self.confidence >= 0:
            raise ValueError(f"method.confidence={self.confidence}: a loss weight is a number of at least 0")
        if not 0 <= self.smooth <= 1:
            raise ValueError(f"method.smooth={self.smooth}: give a share from 0 to 1")

    @property
    def needs_last(self) -> bool:
        return super().needs_last or self.confidence > 0 or self.weighting == "expected"


class MarkovHead(nn.Module):
    """What the previous token says about the next: a low-rank second factor of the logits."""

    def __init__(self, kind: str, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def begin(self, hidden_AD: Tensor) -> Tensor:
        """The state before the first slot, ``[A, R]``."""
        return hidden_AD.new_zeros(len(hidden_AD), self.markov_w2.in_features)

    def step(self, hidden_AD: Tensor, previous_A: Tensor, state_AR: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of one slot, ``[A, R]``, and the next state."""
        e_AR = self.markov_w1(previous_A).to(hidden_AD.dtype)
        if self.kind == "vanilla":
            return e_AR, state_AR
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden_AD, e_AR], -1))) * e_AR, state_AR
        g_AR, c_AR, o_AR = self.joint_proj(torch.cat([state_AR, e_AR, hidden_AD], -1)).chunk(3, -1)
        keep_AR = torch.sigmoid(g_AR)
        return torch.tanh(o_AR), keep_AR * state_AR + (1 - keep_AR) * torch.tanh(c_AR)

    def forward(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        """The factors of whole blocks whose tokens are known, ``[A, K, R]``."""
        if self.kind == "vanilla":  # all at once: a look-up has a gradient as large as its table
            return self.markov_w1(previous_AK).to(hidden_AKD.dtype)
        state_AR, out = self.begin(hidden_AKD[:, 0]), []
        for k in range(hidden_AKD.shape[1]):
            factor_AR, state_AR = self.step(hidden_AKD[:, k], previous_AK[:, k], state_AR)
            out.append(factor_AR)
        return torch.stack(out, 1)


class ConfidenceHead(nn.Module):
    """The logit of a draft's acceptance, from its slot and the token before it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, *features: Tensor) -> Tensor:
        return self.proj(torch.cat(features, -1)).squeeze(-1)


@method(DSparkConfig)
class DSpark(BlockDrafter):
    """Block drafter with a Markov head and a confidence head."""

    config: DSparkConfig
    architecture = "Qwen3DSparkModel"
    fresh: list[str] | None = None  # tensors that method.start_from had nothing for

    def __init__(self, config: DSparkConfig, target: Target, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, target, vocab)
        size, std = self.shape.hidden_size, 0.02
        draft_vocab = target.vocab_size if vocab is None else len(vocab)
        self.markov_head = None
        if config.markov != "none":
            self.markov_head = MarkovHead(
                config.markov, target.vocab_size, draft_vocab, config.markov_rank, size
            )
        self.confidence_head = None
        if config.confidence > 0:
            self.confidence_head = ConfidenceHead(
                size + (0 if self.markov_head is None else config.markov_rank)
            )
        for head in (self.markov_head, self.confidence_head):
            for parameter in () if head is None else head.parameters():
                nn.init.normal_(parameter, std=std) if parameter.dim() == 2 else nn.init.zeros_(parameter)
        if config.start_from is not None:
            self.fresh = start_from_drafter(self, Path(config.start_from))

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    # The road from hidden states to drafts ------------------------------------------------------

    def read_out(self, hidden_AKD: Tensor, tokens_A: Tensor) -> tuple[Tensor, Proposal]:
        logits_AKN, proposal = super().read_out(hidden_AKD, tokens_A)
        previous_AK = torch.cat([tokens_A[:, None], proposal.tokens_BK[:, :-1]], 1)
        if self.markov_head is not None:
            state_AR, previous_A = self.markov_head.begin(hidden_AKD[:, 0]), tokens_A
            logits, drafts, before = [], [], []
            for k in range(hidden_AKD.shape[1]):
                factor_AR, state_AR = self.markov_head.step(hidden_AKD[:, k], previous_A, state_AR)
                logits.append(logits_AKN[:, k] + self.markov_head.markov_w2(factor_AR))
                before.append(previous_A)
                previous_A = self.to_target_ids(logits[-1].argmax(-1))
                drafts.append(previous_A)
            logits_AKN, previous_AK = torch.stack(logits, 1), torch.stack(before, 1)
            proposal = Proposal(torch.stack(drafts, 1))
        return logits_AKN, replace(proposal, confidence_BK=self.confidences(hidden_AKD, previous_AK))

    def confidences(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor | None:
        """Calibrated where temperatures are known, ``[A, K]``."""
        if self.confidence_head is None:
            return None
        logits_AK = self.confidence_logits(hidden_AKD, previous_AK)
        if self.temperatures is not None:
            known = torch.tensor(self.temperatures, device=logits_AK.device)
            logits_AK = logits_AK / known[: logits_AK.shape[1]]
        return torch.sigmoid(logits_AK)

    def confidence_logits(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        """Of a drafter that has the head."""
        assert self.confidence_head is not None
        if self.markov_head is None:
            return self.confidence_head(hidden_AKD).float()
        e_AKR = self.markov_head.markov_w1(previous_AK).to(hidden_AKD.dtype)
        return self.confidence_head(hidden_AKD, e_AKR).float()

    # Training -----------------------------------------------------------------------------------

    def weights_K(self, num: int) -> Tensor:
        decay = self.config.decay if self.config.weighting == "decay" else None
        return decay_weights(num, decay)

    def loss(self, batch: Batch) -> Loss:
        anchors_A, num = batch.placed()
        config = self.config
        hidden_AKD = self.hidden_of(batch, anchors_A, num)
        previous_AK = previous_tokens(batch.tokens_BT, anchors_A, num)
        extra = None
        if self.markov_head is not None:
            factor_AKR = self.markov_head(hidden_AKD, previous_AK)
            extra = Extra(factor_AKR.flatten(0, 1), self.markov_head.markov_w2.weight)
        lengths = None
        if config.weighting != "decay":
            lengths = Lengths(config.weighting, num, config.smooth)
        hears = self.confidence_head is not None
        loss, found, every_AK = objective(
            self, batch, hidden_AKD, self.weights_K, extra=extra, lengths=lengths, acceptance=hears
        )
        if self.confidence_head is None or found.alpha_P is None:
            return loss
        seen_AKD = hidden_AKD.detach() if config.confidence_detach else hidden_AKD
        logits_AK = self.confidence_logits(seen_AKD, previous_AK)
        alpha_AK = found.alpha_P.view_as(logits_AK).clamp(0, 1)
        bce_AK = F.binary_cross_entropy_with_logits(logits_AK, alpha_AK, reduction="none")
        bce = (bce_AK * every_AK).sum()
        heard = {"confidence": bce.detach(), "alpha": (alpha_AK * every_AK).sum().detach()}
        counts = {**loss.counts, **dict.fromkeys(heard, float(every_AK.sum()))}
        return Loss(loss.sum + config.confidence * bce, batch.count, {**loss.sums, **heard}, counts)

    def path_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        hidden_AKD = self.hidden_of(batch, anchors_A, n)
        logits_AKN = self.logits(hidden_AKD)
        if self.markov_head is None:
            return logits_AKN
        factor_AKR = self.markov_head(hidden_AKD, previous_tokens(batch.tokens_BT, anchors_A, n))
        return logits_AKN + self.markov_head.markov_w2(factor_AKR)

    def start(self, examples: Iterable[Example]) -> str | None:
        taken = self.fresh is not None and not any("markov_w" in name for name in self.fresh)
        if self.markov_head is not None and self.config.markov_init == "bigram" and not taken:
            start_from_bigrams(self.markov_head, self.vocab, examples)
        if self.fresh is None:
            return None
        rest = f"but for {', '.join(self.fresh)}" if self.fresh else "all of them"
        return f"method.start_from={self.config.start_from}: its tensors, {rest}"

    # The drafter directory ------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "markov_rank": 0 if self.markov_head is None else self.config.markov_rank,
            "markov_head_type": self.config.markov,
            "enable_confidence_head": self.confidence_head is not None,
            "confidence_head_with_markov": self.markov_head is not None,
        }

    @classmethod
    def read_description(cls, found: dict[str, Any]) -> DSparkConfig:
        config = super().read_description(found)
        assert isinstance(config, DSparkConfig)
        return replace(
            config,
            markov=found["markov_head_type"],
            markov_rank=found["markov_rank"] or config.markov_rank,
            confidence=1.0 if found["enable_confidence_head"] else 0.0,
        )

    def vllm_refusal(self) -> str | None:
        if self.config.markov != "vanilla":
            return f"vLLM serves vanilla Markov heads only, this one is method.markov={self.config.markov}"
        return None


@torch.no_grad()
def start_from_bigrams(head: MarkovHead, vocab: DraftVocab | None, examples: Iterable[Example]) -> None:
    """W1 and W2 from the truncated SVD of ``log p(next | previous) / p(next)`` over the answers' pairs.

    Pairs that never occur count as 0. Only a head whose factor is W1 itself starts as the bigram model.
    Errors: ``ValueError`` for fewer than two different pairs.
    """
    size, num = head.markov_w1.num_embeddings, head.markov_w2.out_features
    pairs = torch.cat(
        [
            torch.tensor([e.ids[:-1], e.ids[1:]]).T[torch.tensor(e.mask[1:], dtype=torch.bool)]
            for e in examples
        ]
    )
    before_P, after_P = pairs.unbind(1)
    if vocab is not None:
        after_P = vocab.draft_id_V[after_P]
        before_P, after_P = before_P[after_P >= 0], after_P[after_P >= 0]
    found_Q, counts_Q = torch.unique(before_P * num + after_P, return_counts=True)
    if len(found_Q) < 2:
        raise ValueError(
            "method.markov_init=bigram: the training answers hold no pairs of tokens; use random"
        )
    row_Q, column_Q, counts_Q = found_Q // num, found_Q % num, counts_Q.double()
    rows_V = torch.zeros(size).double().index_add_(0, row_Q, counts_Q)
    columns_N = torch.zeros(num).double().index_add_(0, column_Q, counts_Q)
    ratio_Q = (counts_Q * counts_Q.sum() / (rows_V[row_Q] * columns_N[column_Q])).log()
    sparse_VN = torch.sparse_coo_tensor(
        torch.stack([row_Q, column_Q]), ratio_Q.float(), (size, num), check_invariants=True
    )
    rank = min(head.markov_w2.in_features, size, num)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u_VR, s_R, v_NR = torch.svd_lowrank(sparse_VN, q=rank, niter=4)
    for weight, factor in ((head.markov_w1.weight, u_VR), (head.markov_w2.weight, v_NR)):
        weight.zero_()
        weight[:, :rank] = factor * s_R.sqrt()


@torch.no_grad()
def start_from_drafter(drafter: DSpark, directory: Path) -> list[str]:
    """Take over the tensors of a trained DFlash or DSpark of the same target, layers and layout.

    Returns the names of those it does not have, or has of another kind, rank or draft vocabulary: they start
    as usual. Errors: ``ValueError`` naming what differs in the backbone.
    """
    where = f"method.start_from={directory}"
    try:
        other = checkpoint.read(directory, drafter.target)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(other, BlockDrafter):
        raise ValueError(f"{where}: this is a {other.config.name} drafter; give one of DFlash or DSpark")
    for name in ("anchor_predicts", "num_layers", "sliding_window"):
        theirs, ours = getattr(other.config, name), getattr(drafter.config, name)
        if theirs != ours:
            raise ValueError(
                f"{where}: its {name} is {theirs}, of this run {ours}; set method.{name}={theirs}"
            )
    for name, theirs, ours in (
        ("layer_ids", other.layer_ids, drafter.layer_ids),
        ("mask_token", other.mask_token, drafter.mask_token),
    ):
        if theirs != ours:
            raise ValueError(
                f"{where}: its {name} is {theirs}, of this run {ours}; set method.{name}={theirs}"
            )
    held = other.state_dict()
    same_vocab = (other.vocab is None) == (drafter.vocab is None) and (
        other.vocab is None or drafter.vocab is None or torch.equal(other.vocab.kept_N, drafter.vocab.kept_N)
    )
    fresh = []
    for name, value in drafter.state_dict().items():
        if name in held and held[name].shape == value.shape and (same_vocab or "markov_w2" not in name):
            value.copy_(held[name])
        else:
            fresh.append(name)
    return fresh
