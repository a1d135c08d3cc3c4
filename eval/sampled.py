"""The rounds behind an answer that was sampled from the target, as expectations over what cannot be seen.

An answer alone does not say which of its tokens were accepted drafts and which stood in for a refused one;
how likely each was, given the answer, is known exactly. Take a round that has reached token x of the path:
p and q are the laws there. ``serve/verify.py`` accepts a draft y, drawn from q, with probability
min(1, p(y)/q(y)), and draws the token that stands in for a refused one from max(p - q, 0):

    P(accepted, token is x) = q(x) min(1, p(x)/q(x))                                = min(p(x), q(x))
    P(refused,  token is x) = P(refused) max(p(x) - q(x), 0) / P(refused)           = p(x) - min(p(x), q(x))

The sum is p(x): text has the target's law whatever the drafter, so any drafter can be replayed on one
answer. And P(accepted | token is x) = min(1, q(x)/p(x)). A point mass (a greedy draft) is accepted if and
only if it is x: then the path settles every round, and ``eval.replay.walk`` counts whole ones.

A refused draft ends its round at the token that stands in for it, and N accepted drafts end theirs at the
bonus token; either is the next anchor. Draft k is conditioned on drafts before it, which are the path's own
as long as the round goes on, and a new round draws anew. Given the path, anchors are a Markov chain:

    s(a, 0) = 1,  s(a, k) = product over i <= k of min(1, q[a, i](x[a+i]) / p(x[a+i])),  s(a, N+1) = 0
    w(first) = 1, w(b) = sum over a < b of w(a) (s(a, b-a-1) - s(a, b-a))           visits of anchor b
    rounds = sum of w(a),  rounds that keep drafts 1..k = sum of w(a) s(a, k)

The mean of products of sum(min(p, q)) over the anchors of a path is another number: it weighs anchors alike,
and continues a round by the law of drafts where the path has the target's (algorithms.md 0.9).
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_law(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of ``ids`` under softmax(logits / temperature), over the last axis of ``logits``."""
    heated = logits.float() / temperature
    return heated.gather(-1, ids[..., None])[..., 0] - heated.logsumexp(-1)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """How likely a token of the path was an accepted draft, from its log-probabilities: min(1, q / p)."""
    return (log_q.double() - log_p.double()).clamp(max=0).exp()


def expected(accept_AK: Tensor) -> tuple[float, list[float]]:
    """Expected rounds over a path, and of those the ones whose drafts 1..k+1 were all accepted.

    ``accept_AK[a, k]`` is the probability that draft k + 1 of a round at anchor a is accepted, given the
    path and that those before it were; 0 for drafts beyond the path. The last anchor starts no round.
    """
    anchors, num = accept_AK.shape
    survive_AK = accept_AK.double().cumprod(1).cpu()
    one_A1, none_A1 = torch.ones(anchors, 1).double(), torch.zeros(anchors, 1).double()
    ends_AJ = torch.cat([one_A1, survive_AK], 1) - torch.cat([survive_AK, none_A1], 1)
    visits = torch.zeros(anchors + num + 1, dtype=torch.double)
    visits[0] = 1.0
    for at in range(anchors - 1):
        visits[at + 1 : at + num + 2] += visits[at] * ends_AJ[at]
    visits_A = visits[: anchors - 1]
    return float(visits_A.sum()), (visits_A @ survive_AK[: anchors - 1]).tolist()
