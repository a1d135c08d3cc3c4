"""The lossless rule (Leviathan et al. 2023, Chen et al. 2023): laws and uniforms in, counts and a law out.

Row j of ``p`` is the target's law after the anchor and the first j drafts; draft j + 1 was drawn from
``q[j]``. A draft is accepted with probability min(1, p/q); the first refusal ends the round, and the
next token then comes from what is left of p where q asked for too much. Nothing is sampled in here, so
the law of the output can be enumerated.
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify(
    p_BJV: Tensor, q_BKV: Tensor | None, x_BK: Tensor, u_BK: Tensor, lengths_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many drafts each row accepts, and the law its next token is to be drawn from.

    ``q_BKV`` is ``None`` for drafts that are point masses (greedy drafts, n-grams). ``u_BK`` are
    uniforms in [0, 1). ``lengths_B`` says how many of the K drafts a row really has. Returns
    ``accepted_B`` and ``next_BV``.
    """
    rows, num = x_BK.shape
    assert p_BJV.shape[:2] == (rows, num + 1), (p_BJV.shape, x_BK.shape)
    if lengths_B is None:
        lengths_B = torch.full((rows,), num, device=x_BK.device)
    p_x_BK = p_BJV[:, :num].gather(2, x_BK[..., None]).squeeze(2)
    q_x_BK = torch.ones_like(p_x_BK) if q_BKV is None else q_BKV.gather(2, x_BK[..., None]).squeeze(2)
    # u < p / q without dividing: a draft of probability 0 under q cannot have been drawn.
    accept_BK = u_BK * q_x_BK < p_x_BK
    accept_BK &= torch.arange(num, device=x_BK.device) < lengths_B[:, None]
    accepted_B = accept_BK.long().cumprod(1).sum(1)

    every = torch.arange(rows, device=x_BK.device)
    p_BV = p_BJV[every, accepted_B]
    refused_B = accepted_B < lengths_B
    if num == 0 or not bool(refused_B.any()):
        return accepted_B, p_BV
    at_B = accepted_B.clamp(max=num - 1)
    if q_BKV is None:
        left_BV = p_BV.scatter(1, x_BK[every, at_B][:, None], 0.0)
    else:
        left_BV = (p_BV - q_BKV[every, at_B]).clamp(min=0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    residual_BV = torch.where(mass_B1 > 0, left_BV / mass_B1.clamp(min=1e-38), p_BV)
    return accepted_B, torch.where(refused_B[:, None], residual_BV, p_BV)


def verify_matching(
    chosen_BJ: Tensor, x_BK: Tensor, lengths_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``verify`` for point masses where the target has chosen first: accepted counts and next tokens.

    ``chosen_BJ`` holds the target's own token of every row of ``p``: its best one, or one drawn from that
    row with the position's own uniform. A draft is accepted while it equals that token, so with probability
    p of the draft as in ``verify``, and what is emitted is the target's choice in any case: the law is the
    target's at every temperature, and the text of a seed does not depend on the drafts. ``lengths_B`` says
    how many of the K drafts a row really has.
    """
    assert chosen_BJ.shape == (x_BK.shape[0], x_BK.shape[1] + 1), (chosen_BJ.shape, x_BK.shape)
    match_BK = chosen_BJ[:, :-1] == x_BK
    if lengths_B is not None:
        match_BK &= torch.arange(x_BK.shape[1], device=x_BK.device) < lengths_B[:, None]
    accepted_B = match_BK.long().cumprod(1).sum(1)
    return accepted_B, chosen_BJ.gather(1, accepted_B[:, None]).squeeze(1)
