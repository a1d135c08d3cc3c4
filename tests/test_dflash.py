"""DFlash: training, replay and serving see the same; nothing sees what it will not have."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, tensor
from torch.nn import functional as F

from data.capture import capture
from drafters import block
from drafters.block import evenly_spaced
from drafters.dflash import DFlashConfig
from drafters.losses import LossWeights
from drafters.method import Drafter, build
from drafters.objective import weighted_labels
from drafters.ops import document_spans
from drafters.target import Target
from drafters.types import Example, States
from eval import replay
from serve.engine import Engine
from serve.types import Request
from tests import tiny
from tests.tiny import changed, difference, documents, packed

KINDS = {
    "slots_predict_their_own": {},
    "anchor_predicts": {"anchor_predicts": True},
    "sliding_window": {"sliding_window": 3},
    "sliding_anchor_predicts": {"sliding_window": 6, "anchor_predicts": True},
    "reduced_vocabulary": {"draft_vocab": 60},
    "three_layers_two_states": {"num_layers": 3, "layer_ids": [0, 2]},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = pytest.mark.parametrize("anchor_predicts", [False, True])
MASK, END, PAD = 3, 1, 2


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=4)


loud = partial(tiny.loud, method="dflash")


@torch.inference_mode()
def served(drafter: Drafter, example: Example, anchor: int, n: int, chunks: int = 4) -> Tensor:
    """The logits of serving, ``[K, N]``: states come chunk by chunk into a used slot beside another."""
    seen = []
    plain_logits = drafter.logits
    drafter.logits = lambda hidden: seen.append(plain_logits(hidden)) or seen[-1]
    state = drafter.begin(2, 40)
    row = range(1, 2)
    states = capture(drafter.target, [example], drafter.layer_ids, False)[0]
    garbage = States(torch.randn_like(states.layers_BTLD) * 9)
    tokens_BT = tensor([example.ids])
    drafter.advance(state, row, garbage, tokens_BT, [len(example.ids)])
    state.drop([1])
    for start in range(0, anchor, chunks):
        end = min(start + chunks, anchor)
        part = states[:, start : start + chunks]  # also states of tokens that were not accepted
        drafter.advance(state, row, part, tokens_BT[:, start : start + chunks], [end - start])
    proposal = drafter.propose(state, row, tokens_BT[0, anchor : anchor + 1], n)
    del drafter.logits
    assert torch.equal(proposal.tokens_BK, drafter.to_target_ids(seen[-1].argmax(-1)))
    return seen[-1][0]


# Training is serving -------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_training_and_serving_draw_the_same_logits_at_first_middle_and_last_anchors(target, kind):
    drafter, examples = loud(target, **KINDS[kind]), documents()
    batch, start = packed(drafter, examples), 0
    for n in (1, drafter.max_drafts):
        start = 0
        for example in examples:
            last = len(example.ids) - 1
            inside = [0, example.mask.index(True), last // 2, last]
            trained = drafter.draft_logits(batch, tensor([start + a for a in inside]), n)
            for at, anchor in enumerate(inside):
                assert difference(served(drafter, example, anchor, n), trained[at]) <= 1e-5
            start += len(example.ids)


@EVERY_KIND
@torch.no_grad()
def test_cutting_a_document_into_spans_changes_no_logit(target, kind, monkeypatch):
    drafter = loud(target, **KINDS[kind])
    batch, anchors_A = packed(drafter, documents()), torch.arange(50)
    whole = drafter.draft_logits(batch, anchors_A, drafter.max_drafts)
    monkeypatch.setattr(block, "document_spans", lambda *given: document_spans(*given, most=3))
    assert difference(drafter.draft_logits(batch, anchors_A, drafter.max_drafts), whole) <= 1e-6


def test_soft_terms_are_learned_from_a_bfloat16_target():
    target = Target(tiny.llama(layers=4).bfloat16(), tiny.tokenizer(), "tiny")
    drafter = loud(target, loss=LossWeights(ce=0, kl=1)).train()
    batch = drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))
    loss = drafter(batch.to("cpu", torch.float32))  # as the loop hands it over
    loss.sum.backward()
    assert 0 < float(loss.sum.detach()) < float("inf")
    assert float(drafter.fc.weight.grad.abs().max()) > 0


@pytest.mark.parametrize("softcap", [None, 3.0])
@EVERY_KIND
def test_the_loss_is_that_of_the_logits_of_serving_and_the_laws_of_the_target(kind, softcap):
    """Every term, summed by hand over the anchors that training drew."""
    terms = {"ce": 0.5, "kl": 0.25, "l1": 2.0, "nla": 1.0, "hybrid": 0.5}
    target = tiny.target(layers=4)
    target.softcap = softcap
    drafter, examples = loud(target, **KINDS[kind], loss=LossWeights(**terms)), documents()
    batch = drafter.place(packed(drafter, examples), torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = drafter(batch)
    kept_N = torch.arange(target.vocab_size) if drafter.vocab is None else drafter.vocab.kept_N
    sums, count = dict.fromkeys(terms, 0.0), 0.0
    for anchor in batch.anchors_A.tolist():
        document, inside = int(batch.doc_BT[0, anchor]), int(batch.position_BT[0, anchor])
        example = examples[document]
        logq_KN = served(drafter, example, inside, drafter.max_drafts).log_softmax(-1)
        logits_TV = target.model(input_ids=tensor([example.ids])).logits[0]
        p_TV = (logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)).softmax(-1)
        for k, at in enumerate(range(inside + 1, min(inside + 1 + drafter.max_drafts, len(example.ids)))):
            where = (kept_N == example.ids[at]).nonzero().flatten().tolist()
            if not where:
                continue
            weight, q, p = 2.718281828 ** (-k / 4), logq_KN[k].exp(), p_TV[at - 1][kept_N]
            sums["ce"] += weight * float(-logq_KN[k, where[0]])
            kl = float(F.kl_div(logq_KN[k], p / p.sum(), reduction="sum"))
            alpha = float(torch.minimum(p, q).sum())
            share = math.exp(-3 * alpha)
            sums["kl"] += weight * kl
            sums["l1"] += weight * float((p - q).abs().sum())
            sums["nla"] += weight * -math.log(alpha)
            sums["hybrid"] += weight * (share * kl + (1 - share) * (1 - alpha))
            count += weight
    assert found.count == batch.count == pytest.approx(count, rel=1e-5)
    assert {name: float(value) for name, value in found.sums.items()} == pytest.approx(sums, rel=1e-4)
    assert float(found.sum) == pytest.approx(sum(terms[name] * sums[name] for name in terms), rel=1e-4)


@EVERY_KIND
@torch.no_grad()
def test_requests_that_share_a_batch_change_nothing_for_each_other(target, kind):
    drafter, examples = loud(target, **KINDS[kind]), documents()
    anchors, n = [5, 0, 20], drafter.max_drafts
    alone = [
        drafter.to_target_ids(served(drafter, e, a, n).argmax(-1)).tolist()
        for e, a in zip(examples, anchors, strict=True)
    ]
    state = drafter.begin(4, 40)
    # Fill slots 1 to 3 one by one, then move the last one into slot 0.
    for slot, (example, anchor) in enumerate(zip(examples, anchors, strict=True), 1):
        states = capture(target, [example], drafter.layer_ids, False)[0]
        drafter.advance(state, range(slot, slot + 1), states, tensor([example.ids]), [anchor])
    state.move(3, 0)
    assert state.lengths == [20, 5, 0, 0]
    roots = tensor([examples[i].ids[anchors[i]] for i in (2, 0, 1)])
    assert drafter.propose(state, range(3), roots, n).tokens_BK.tolist() == [alone[2], alone[0], alone[1]]


@torch.no_grad()
def test_rows_that_advance_together_hold_what_each_holds_alone(target):
    together, alone = tiny.advanced(loud(target), target)
    for name in ("keys", "values"):
        one, other = (torch.stack([*vars(state)[name]]) for state in (together, alone))
        assert difference(one, other) <= 1e-6
    assert float(together.keys[0].abs().max()) > 0.1


# Who sees what -------------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_a_token_or_state_after_t_changes_no_logit_that_predicts_up_to_t_plus_1(target, kind):
    drafter = loud(target, **KINDS[kind])
    batch = packed(drafter, documents()[2:])
    everyone = torch.arange(26)
    before = drafter.draft_logits(batch, everyone, drafter.max_drafts)
    for later in (1, 2, 3, 8, 15, 16, 25):
        for what in ("token", "state"):
            after = drafter.draft_logits(changed(batch, later, what), everyone, drafter.max_drafts)
            # Draft k, from 0, of anchor a predicts token a + k + 1: all logits of these anchors are meant.
            assert torch.equal(after[:later], before[:later]), (what, later)
            assert not torch.equal(after, before) or (what, later) == ("state", 25)


@EVERY_KIND
@torch.no_grad()
def test_a_token_or_state_before_it_does_change_the_logits(target, kind):
    drafter = loud(target, **KINDS[kind])
    batch, anchor = packed(drafter, documents()[2:]), 12
    before = drafter.draft_logits(batch, tensor([anchor]), drafter.max_drafts)[0]
    window = drafter.config.sliding_window or 99

    def moved(at: int, what: str) -> list[bool]:
        after = drafter.draft_logits(changed(batch, at, what), tensor([anchor]), drafter.max_drafts)[0]
        return (after != before).any(-1).tolist()

    assert all(moved(anchor, "token"))
    assert not any(moved(anchor - 1, "token"))  # tokens before the anchor act through their states alone
    assert not any(moved(anchor, "state"))  # which does not exist yet when the round starts
    if drafter.config.sliding_window is None:
        assert all(all(moved(at, "state")) for at in range(anchor))
    else:
        # The anchor's own slot sees furthest back; what it saw reaches later slots by the next layer.
        assert any(moved(anchor - window + 1, "state"))
        assert not any(moved(anchor - window, "state"))


@torch.no_grad()
def test_a_change_of_a_later_word_of_the_conversation_leaves_earlier_logits_alone(target):
    """The same through the target: ids are changed, and states captured again."""
    drafter, example = loud(target), documents()[2]
    other = replace(example, ids=[*example.ids[:13], *[(i - 8) % 200 + 9 for i in example.ids[13:]]])
    one, two = (
        drafter.draft_logits(packed(drafter, [e]), torch.arange(26), drafter.max_drafts)
        for e in (example, other)
    )
    assert difference(two[:13], one[:13]) < 1e-5
    assert bool(((two[13:] - one[13:]).abs().amax(-1) > 1e-2).all())


@EVERY_KIND
@torch.no_grad()
def test_blocks_never_cross_documents(target, kind):
    drafter, examples = loud(target, **KINDS[kind]), documents()
    batch, borders = packed(drafter, examples), [0, 17, 26, 52]
    everyone = torch.arange(52)
    together = drafter.draft_logits(batch, everyone, drafter.max_drafts)
    for at, example in enumerate(examples):
        own = slice(borders[at], borders[at + 1])
        one = packed(drafter, [example])
        alone = drafter.draft_logits(one, torch.arange(len(example.ids)), drafter.max_drafts)
        assert difference(together[own], alone) <= 1e-5
    spoilt = changed(changed(batch, 16, "state"), 26, "state")  # the neighbours of the middle one
    spoilt = changed(changed(spoilt, 16, "token"), 26, "token")
    again = drafter.draft_logits(spoilt, everyone, drafter.max_drafts)
    assert torch.equal(again[17:26], together[17:26])
    assert not torch.equal(again[26:], together[26:])


def test_anchors_and_labels_stay_in_the_supervised_part_of_a_document(target):
    drafter, examples = loud(target, anchor_share=1.0), documents()
    batch = drafter.place(packed(drafter, examples), torch.Generator().manual_seed(0))
    assert batch.anchors_A.tolist() == [*range(4, 16), *range(19, 25), *range(34, 51)]
    labels_AK, weights_AK = weighted_labels(drafter, batch, drafter.weights_K)
    for anchor, labels, weights in zip(
        batch.anchors_A.tolist(), labels_AK.tolist(), weights_AK.tolist(), strict=True
    ):
        left = next(end for end in (17, 26, 52) if anchor < end) - anchor - 1
        assert [weight > 0 for weight in weights] == [k < left for k in range(4)]
        assert labels[:left] == batch.tokens_BT[0, anchor + 1 : anchor + 1 + min(left, 4)].tolist()


def test_a_pack_without_anchors_adds_nothing_and_still_gives_every_parameter_a_gradient(target):
    drafter = loud(target)
    batch = drafter.place(packed(drafter, [tiny.example(9, 8)]), torch.Generator().manual_seed(0))
    loss = drafter(batch)
    assert (len(batch.anchors_A), batch.count, loss.sum.item(), loss.sums["ce"].item()) == (0, 0, 0, 0)
    loss.sum.backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


def test_gradients_reach_every_parameter_and_none_of_the_target(target):
    drafter = loud(target, loss=LossWeights(ce=1.0, nla=1.0))
    drafter(drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))).sum.backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in drafter.parameters())
    assert not any("embed" in name or "head" in name for name in drafter.state_dict())
    assert all(p.grad is None for p in target.model.parameters())


# Learning ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(target) -> Example:
    return tiny.answered(target, num=30, prompt=10, seed=4)


@LAYOUTS
def test_a_drafter_that_overfits_one_conversation_gets_every_draft_accepted(target, known, anchor_predicts):
    drafter = tiny.trained(
        target, [known], steps=80, anchor_predicts=anchor_predicts, anchor_share=1.0, decay=None
    )
    n = drafter.max_drafts
    request = Request(known.ids[:10], 30)
    (answer,) = Engine(target, drafter, n, capacity=64).run([request])
    assert answer.tokens == known.ids[10:]
    *whole, last = answer.rounds
    assert len(answer.tokens) > 3 * n  # rounds enough to mean something
    assert all((r.accepted, r.emitted) == (n, n + 1) for r in whole)
    assert last.accepted >= min(n, last.emitted - 1)
    (counts,) = replay.score(drafter, list(replay.paths(target, [known], drafter.layer_ids)), [n])
    assert (counts[n].rounds, counts[n].tokens) == (len(answer.rounds), sum(r.emitted for r in answer.rounds))


def test_a_drafter_trained_on_a_mix_of_lengths_drafts_well_at_each_of_them(target, known):
    mixed = tiny.trained(target, [known], steps=110, anchor_share=1.0, decay=None, lengths=[1, 2, 4])
    paths = list(replay.paths(target, [known], mixed.layer_ids))
    (counts,) = replay.score(mixed, paths, [1, 2, 4])
    answer = paths[0].length
    for n in (1, 2, 4):
        assert counts[n].rounds == -(-(answer - 1) // (n + 1))  # no round but full ones, and the last


def test_lengths_are_drawn_by_their_weight_and_shorter_blocks_leave_room_for_more_anchors(target):
    drafter = loud(target, lengths=[1, 1, 4, 1], anchor_share=0.4)
    batch, generator = packed(drafter, documents()), torch.Generator().manual_seed(0)
    drawn = [drafter.place(batch, generator) for _ in range(200)]
    short = [placed for placed in drawn if placed.num_drafts == 1]
    full = [placed for placed in drawn if placed.num_drafts == 4]
    assert len(short) + len(full) == 200
    assert 130 < len(short) < 170
    assert {len(placed.anchors_A) for placed in short} == {12 + 6 + 17}  # 2 slots, not 5: a share of 1.0
    assert {len(placed.anchors_A) for placed in full} == {5 + 2 + 7}
    assert short[0].count == len(short[0].anchors_A)


def test_without_a_mix_every_block_has_its_full_length(target):
    drafter = loud(target)
    placed = drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))
    assert placed.num_drafts == drafter.max_drafts == 4


def test_a_reduced_vocabulary_drafts_kept_ids_and_learns_nothing_from_others(target):
    drafter = loud(target, draft_vocab=60)  # the ids 0 to 59
    batch = drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))
    labels_AK, weights_AK = weighted_labels(drafter, batch, drafter.weights_K)
    after_AK = batch.anchors_A[:, None] + torch.arange(1, 5)
    tokens_AK = batch.tokens_BT[0][after_AK.clamp(max=51)]
    assert bool((tokens_AK[weights_AK > 0] < 60).all())
    assert bool((labels_AK[(tokens_AK >= 60) & (labels_AK != 0)] == -1).all())
    assert 0 < int((weights_AK > 0).sum()) < weights_AK.numel() / 2
    assert drafter.draft_logits(batch, batch.anchors_A, 2).shape[-1] == 60
    assert int(drafter.drafts(batch, batch.anchors_A, 4).tokens_BK.max()) < 60


# Starting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "init_layers", "copied"),
    [([0, 2], None, [2, 3]), ([0, 1, 2], [0, 3], [0, 3]), ([0, 3], [1, 2], [1, 2])],
)
def test_a_drafter_starts_as_copies_of_the_target(target, kept, init_layers, copied):
    drafter = build(DFlashConfig(layer_ids=kept, init_layers=init_layers), target)
    for ours, k in zip(drafter.layers, copied, strict=True):
        theirs = dict(target.layers[k].named_parameters())
        assert {name for name, _ in ours.named_parameters()} - theirs.keys() == {
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        }
        for name, parameter in ours.named_parameters():
            if name in theirs:
                assert torch.equal(parameter, theirs[name]), name
                assert parameter.data_ptr() != theirs[name].data_ptr()  # training must not move the target
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)
    states = capture(target, [documents()[0]], drafter.layer_ids, False)[0].layers_BTLD
    fused = drafter.fc(states.flatten(-2))
    read = [k for at, k in enumerate(drafter.layer_ids) if torch.equal(fused, states[:, :, at])]
    assert len(read) == 1  # the context starts as one kept state, of a layer below the last copied one
    assert read[0] < copied[-1]


def test_training_moves_the_drafter_and_leaves_the_target(target, known):
    weights = target.fingerprint["weights"]
    drafter = tiny.trained(target, [known], steps=2, init="target")
    assert not torch.equal(drafter.layers[1].mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight)
    del target.__dict__["fingerprint"]
    assert target.fingerprint["weights"] == weights


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_bias": True}, "has self_attn.k_proj.bias"),
        ({"hidden_act": "gelu"}, "silu, that of tiny gelu"),
    ],
)
def test_layers_that_compute_something_else_are_no_start(change, words):
    of = tiny.target(layers=4, **change)
    with pytest.raises(ValueError, match=f"{words}.*method.init=random"):
        build(DFlashConfig(num_states=2), of)
    build(DFlashConfig(num_states=2, init="random"), of)


@pytest.mark.parametrize("layers", [[0], [1, 0], [2, 4]])
def test_layers_to_start_from_are_checked(target, layers):
    with pytest.raises(ValueError, match=r"init_layers=\[0\]: give 2|ascending ids between 0 and 3"):
        build(DFlashConfig(num_states=2, init_layers=layers), target)


@pytest.mark.parametrize(
    ("num", "layers", "ids"),
    [
        (5, 36, [1, 9, 17, 25, 33]), (5, 40, [1, 10, 19, 28, 37]), (1, 36, [18]), (2, 4, [0, 2]),
        (3, 4, [0, 1, 2]),
    ],
)  # fmt: skip
def test_kept_layers_are_spaced_as_z_lab_spaces_them(num, layers, ids):
    assert evenly_spaced(num, layers) == ids


def test_more_kept_layers_than_there_are_is_an_error():
    with pytest.raises(ValueError, match=r"method\.num_states=5: the target has only 4 layers"):
        evenly_spaced(5, 4)


def test_far_positions_are_as_exact_in_bfloat16_as_in_fp32(target):
    """A drafter that is cast keeps its rotary frequencies: rounded, position 3000 would turn by radians."""
    drafter = loud(target)
    position_P = tensor([0, 30, 3000])
    want = drafter.rotary(position_P)
    cast = drafter.to(torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(cast.rotary(position_P), want, strict=True))
    assert cast.fc.weight.dtype == torch.bfloat16
    cast.to("meta")
    assert {buffer.device.type for buffer in cast.buffers()} == {"meta"}


@LAYOUTS
@torch.no_grad()
def test_a_block_is_the_anchor_and_mask_tokens_as_many_as_the_drafts_need(
    target, anchor_predicts, monkeypatch
):
    drafter, seen = loud(target, anchor_predicts=anchor_predicts, mask_token=MASK), []
    embed = target.embed
    monkeypatch.setattr(target, "embed", lambda tokens: seen.append(tokens.tolist()) or embed(tokens))
    example = documents()[0]
    drafter.draft_logits(packed(drafter, [example]), tensor([6, 9]), 3)
    masks = [MASK] * (2 if anchor_predicts else 3)
    assert seen == [[example.ids[6], *masks, example.ids[9], *masks]]


# Settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "match"),
    [
        (PAD, r"method\.mask_token=2: this token starts, ends or pads"),
        (END, r"method\.mask_token=1: this token starts, ends or pads"),
        (0, r"method\.mask_token=0: this token starts, ends or pads"),
        (-1, r"method\.mask_token=-1: the target has ids 0 to 264"),
        (265, r"method\.mask_token=265: the target has ids 0 to 264"),
    ],
)
def test_a_mask_token_that_text_holds_or_that_does_not_exist_is_refused(target, token, match):
    with pytest.raises(ValueError, match=match):
        tiny.dflash(target, mask_token=token)


def test_every_end_of_turn_token_of_the_generation_config_is_refused_as_mask():
    of = tiny.target(layers=3)
    of.model.generation_config.eos_token_id = [END, MASK]
    with pytest.raises(ValueError, match=r"method\.mask_token=3"):
        tiny.dflash(of, mask_token=MASK)


def test_a_mask_token_is_found_among_spare_special_tokens_or_behind_the_tokenizer():
    of = tiny.target(layers=3)
    assert tiny.dflash(of, mask_token=MASK).mask_token == MASK
    chosen = tiny.dflash(of).mask_token
    assert tiny.MARKERS[chosen] not in ("<s>", "<|end|>", "<pad>")
    bare = Target(tiny.llama(layers=3, vocab=270), None, "bare")
    assert tiny.dflash(bare).mask_token == 269
    bare.model.generation_config.eos_token_id = 269
    assert tiny.dflash(Target(bare.model, None, "bare")).mask_token == 268


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 1}, {"block_size": 0, "anchor_predicts": True}, {"anchor_share": 0.0},
        {"anchor_share": 1.5},
        {"init": "copy"}, {"num_layers": 0}, {"num_states": 0}, {"sliding_window": 0}, {"decay": 0.0},
        {"decay": -1.0}, {"draft_vocab": 1}, {"lengths": [1, 8]}, {"lengths": [0]},
        {"lengths": []},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))}="):
        DFlashConfig(**wrong)


def test_the_feature_term_draws_slots_to_the_targets_state_before_their_label():
    target = tiny.target(layers=4)
    terms = LossWeights(ce=0, feature=2)
    drafter, examples = loud(target, loss=terms, decay=None), documents()
    batch = drafter.place(packed(drafter, examples), torch.Generator().manual_seed(0))
    anchors_A, num = batch.placed()
    with torch.no_grad():
        found = drafter(batch)
        hidden_AKD = drafter.hidden_of(batch, anchors_A, num)
    last_PD, mask_P = batch.states.last()[0], batch.mask_BT[0]
    where_AK = (anchors_A[:, None] + torch.arange(num)).clamp(max=len(last_PD) - 1)
    variance, total = last_PD[where_AK.flatten()].var(), 0.0
    for row, anchor in enumerate(anchors_A.tolist()):
        for k in range(num):
            label = anchor + 1 + k
            if label >= len(mask_P) or batch.doc_BT[0, label] != batch.doc_BT[0, anchor] or not mask_P[label]:
                break
            total += float((hidden_AKD[row, k] - last_PD[label - 1]).pow(2).mean() / variance)
    assert float(found.sums["feature"]) == pytest.approx(total, rel=1e-4)
    assert float(found.sum) == pytest.approx(2 * total, rel=1e-4)


@torch.no_grad()
def test_slot_s_is_read_at_slot_s_though_the_last_layer_skips_the_anchors():
    """The reference runs every slot through every layer and cuts afterwards."""
    drafter = loud(tiny.target(layers=4))
    batch = packed(drafter, documents())
    anchors_A = batch.mask_BT[0].nonzero().flatten()[:3]
    quick_AKD = drafter.hidden_of(batch, anchors_A, 4)
    quick = drafter.layers[-1].forward

    def whole(x_PD, context, blocks, first=0):
        all_ASD = quick(x_PD, context, blocks).reshape(len(anchors_A), blocks.slots, -1)
        return all_ASD[:, first:].reshape(-1, all_ASD.shape[-1])

    drafter.layers[-1].forward = whole
    assert difference(quick_AKD, drafter.hidden_of(batch, anchors_A, 4)) <= 1e-5


def test_a_target_that_rotates_a_part_of_its_heads_is_not_copied():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    of = tiny.target(rope_parameters=rope)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5 .* use method\.init=random"):
        tiny.dflash(of, init="target")
    assert tiny.dflash(of, init="random").shape.rope_parameters["rope_type"] == "default"
