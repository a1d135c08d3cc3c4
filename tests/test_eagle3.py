"""EAGLE-3: the unroll of training is the chain of serving, and equals a plain dense reference."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from data.capture import capture
from drafters import eagle3
from drafters.checkpoint import read, write
from drafters.eagle3 import Eagle3Config, sample
from drafters.losses import LossWeights
from drafters.method import Drafter, build
from drafters.objective import weighted_labels
from drafters.target import Target
from drafters.types import Batch, Example, States
from drafters.vocab import choose
from eval import replay
from eval.rollout import rollout
from serve.engine import Engine
from serve.law import Sampling
from serve.types import Request
from tests import runs, tiny
from tests.tiny import changed, difference, documents, packed
from train.job import run_training

CASES = Path(__file__).parent / "cases"
KINDS = {
    "paper": {},
    "llama": {"layer_type": "llama"},
    "normed_residual": {"norm_before_residual": True},
    "one_norm_before_fc": {"norm_before_fc": True},
    "norms_before_fc_and_output": {"fc_norm": True, "norm_output": True},
    "reduced_vocabulary": {"draft_vocab": 60},
    "two_states": {"layer_ids": [0, 2], "unroll": 3},
    "more_heads": {"kv_heads": 4},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
BORDERS = [0, 17, 26, 52]  # of the three documents of a pack


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=4)


def make(of: Target, loud: float = 0.3, **settings) -> Drafter:
    """A random drafter in which every input matters: weights of the usual size would whisper."""
    chosen = {"init": "random", **settings}
    counts = torch.arange(of.vocab_size, 0, -1)
    vocab = None if settings.get("draft_vocab") is None else choose(counts, settings["draft_vocab"])
    drafter = build(Eagle3Config(**chosen), of, vocab)
    with torch.no_grad():
        for parameter in drafter.parameters() if loud else []:
            if parameter.dim() == 2:
                parameter.normal_(std=loud)
            else:
                parameter.uniform_(0.5, 1.5)
    return drafter.eval()


def learn(of: Target, examples: list[Example], steps: int, **settings) -> Drafter:
    """From hard labels, which a random target's answers are quickest learned from; four drafts a round."""
    drafter = make(of, loud=0, unroll=4, loss=LossWeights(ce=1.0), **settings)
    return tiny.learn(drafter, examples, steps, lr=1e-2)


@torch.inference_mode()
def served(drafter: Drafter, example: Example, anchor: int, n: int, chunks: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens ``[K]`` and logits ``[K, N]`` of serving: states come in parts, into a slot used before."""
    seen = []
    plain_logits = drafter.logits
    drafter.logits = lambda hidden: seen.append(plain_logits(hidden)) or seen[-1]
    state, row = drafter.begin(2, 40), range(1, 2)
    states = capture(drafter.target, [example], drafter.layer_ids, False)[0]
    tokens_BT = tensor([example.ids])
    garbage = States(torch.randn_like(states.layers_BTLD) * 9)
    drafter.advance(state, row, garbage, tokens_BT, [len(example.ids)])
    state.drop([1])
    for start in range(0, anchor, chunks):
        new = slice(start, start + chunks)  # also states of tokens that were not accepted
        drafter.advance(state, row, states[:, new], tokens_BT[:, new], [min(chunks, anchor - start)])
        drafter.propose(state, row, tokens_BT[0, [min(start + chunks, anchor)]], n)  # must leave nothing
    seen.clear()
    proposal = drafter.propose(state, row, tokens_BT[0, [anchor]], n)
    del drafter.logits
    return proposal.tokens_BK[0], torch.cat(seen)


def data_tokens(batch: Batch, anchors_A: Tensor, num: int) -> Tensor:
    """The tokens that teacher forcing reads: ``x[a+k]``, of the last one again beyond the end."""
    where_AK = anchors_A[:, None] + torch.arange(num)
    return batch.tokens_BT[0][where_AK.clamp(max=batch.tokens_BT.shape[1] - 1)]


def inner_anchors() -> Tensor:
    """Every anchor of the pack but the first positions of documents."""
    return tensor([at for at in range(52) if at not in BORDERS])


# The reference: all keys side by side, a dense mask, shifted tokens (algorithms 1.2 of EAGLE-3) -------


def naive(drafter: Drafter, batch: Batch, num: int) -> Tensor:
    """Logits ``[T, K, N]`` of the teacher-forced unroll; row i is the chain of pair i, of anchor i + 1."""
    w, flags, eps = dict(drafter.named_parameters()), drafter.config, 1e-6
    of, (tokens_T,), (doc_T,) = drafter.target.config, batch.tokens_BT, batch.doc_BT
    size, heads, length = of.head_dim, of.num_attention_heads, len(tokens_T)
    kv = flags.kv_heads or of.num_key_value_heads

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name] if name in w else x

    def turned(x_THE, position_T):
        rates = of.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angle = (position_T[:, None] * rates)[:, None]
        one, two = x_THE[..., : size // 2], x_THE[..., size // 2 :]
        return torch.cat(
            [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1
        )

    layers = batch.states.layers_BTLD[0]
    if flags.fc_norm:
        layers = torch.stack([norm(layers[:, i], f"fc_norm.{i}.weight") for i in range(layers.shape[1])], 1)
    h = norm(layers.flatten(1), "input_norm.weight") @ w["fc.weight"].T
    layer, keys, values, logits = "layers.0.", [], [], []
    for k in range(num):
        e = norm(drafter.target.embed(tokens_T.roll(-1 - k)), layer + "input_layernorm.weight")
        hn = norm(h, layer + "hidden_norm.weight")
        x = torch.cat([e, hn], dim=-1)
        q, key, value = (x @ w[f"{layer}self_attn.{n}_proj.weight"].T for n in "qkv")
        position_T = batch.position_BT[0] + k
        q = turned(norm(q.view(length, heads, size), layer + "self_attn.q_norm.weight"), position_T)
        keys.append(turned(norm(key.view(length, kv, size), layer + "self_attn.k_norm.weight"), position_T))
        values.append(value.view(length, kv, size))
        all_keys, all_values = (torch.cat(s).repeat_interleave(heads // kv, 1) for s in (keys, values))
        i, j = torch.arange(length)[:, None], torch.arange(len(all_keys))[None]
        allowed = torch.where(j < length, j <= i, j % length == i) & (doc_T[i] == doc_T[j % length])
        scores = torch.einsum("ihe,jhe->hij", q, all_keys) / size**0.5
        found = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        found = torch.einsum("hij,jhe->ihe", found, all_values).flatten(1)
        h = (hn if flags.norm_before_residual else h) + found @ w[layer + "self_attn.o_proj.weight"].T
        m = norm(h, layer + "post_attention_layernorm.weight")
        gate, up = (m @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
        normed = norm(h, "norm.weight")
        logits.append(normed @ drafter.head_ND.T)
        h = normed if flags.norm_output else h
    return torch.stack(logits, 1)


@EVERY_KIND
def test_the_unroll_its_loss_and_its_gradients_are_those_of_a_dense_reference(target, kind):
    drafter = make(target, **KINDS[kind])
    num = drafter.config.unroll
    batch = drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))
    anchors_A, logits_TKN = inner_anchors(), naive(drafter, batch, num)
    with torch.no_grad():
        forced = drafter.logits(drafter.forced(batch, anchors_A, data_tokens(batch, anchors_A, num)))
    # A chain that reads on past the end of its document has nothing to predict there.
    end_A = tensor([next(end for end in BORDERS if a < end) for a in anchors_A.tolist()])
    inside_AK = anchors_A[:, None] + torch.arange(num) < end_A[:, None]
    assert difference(forced[inside_AK], logits_TKN[anchors_A - 1][inside_AK].detach()) <= 1e-5

    law_TV = target.head(batch.states.last_BTD[0])
    kept_N = torch.arange(target.vocab_size) if drafter.vocab is None else drafter.vocab.kept_N
    total, count = torch.zeros(()), 0.0
    for a in batch.anchors_A.tolist():
        for k in range(num):
            label = a + 1 + k
            if label >= 52 or batch.doc_BT[0, label] != batch.doc_BT[0, a]:
                break
            if int(batch.tokens_BT[0, label]) in kept_N.tolist():
                logq_N, p_N = logits_TKN[a - 1, k].log_softmax(-1), law_TV[label - 1, kept_N].softmax(-1)
                total = total + 0.8**k * F.kl_div(logq_N, p_N, reduction="sum")
                count += 0.8**k
    total.backward()
    want = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    found = drafter.train()(batch)
    found.sum.backward()
    assert found.count == batch.count == pytest.approx(count, rel=1e-5)
    assert float(found.sum.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    for name, p in drafter.named_parameters():
        assert float(want[name].abs().max()) > 0, name
        assert difference(p.grad, want[name]) <= 1e-4, name


# Training is serving -------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_training_and_serving_draw_the_same_logits_at_first_middle_and_last_anchors(target, kind):
    drafter, examples = make(target, **KINDS[kind]), documents()
    batch = packed(drafter, examples)
    for n in (1, drafter.max_drafts):
        for start, example in zip(BORDERS, examples, strict=False):
            last = len(example.ids) - 1
            inside = [1, example.mask.index(True), last // 2, last]
            anchors_A = start + tensor(inside)
            replayed, tokens_AK = (
                drafter.draft_logits(batch, anchors_A, n),
                drafter.drafts(batch, anchors_A, n).tokens_BK,
            )
            roots_A1 = batch.tokens_BT[0, anchors_A, None]
            forced = drafter.forced(batch, anchors_A, torch.cat([roots_A1, tokens_AK[:, :-1]], 1))
            for at, anchor in enumerate(inside):
                tokens_K, logits_KN = served(drafter, example, anchor, n)
                assert tokens_K.tolist() == tokens_AK[at].tolist()
                assert difference(logits_KN, drafter.logits(forced)[at]) <= 1e-5
                assert difference(logits_KN, replayed[at]) <= 1e-5


@torch.no_grad()
def test_logits_given_the_path_are_those_of_the_unroll_over_its_tokens(target):
    drafter = make(target)
    batch, anchors_A = packed(drafter, documents()), inner_anchors()
    num = drafter.max_drafts
    forced = drafter.forced(batch, anchors_A, data_tokens(batch, anchors_A, num))
    assert torch.equal(drafter.path_logits(batch, anchors_A, num), drafter.logits(forced))


@torch.no_grad()
def test_attending_in_parts_changes_no_logit(target, monkeypatch):
    drafter = make(target)
    batch = packed(drafter, documents())
    whole = drafter.draft_logits(batch, inner_anchors(), 7)
    monkeypatch.setattr(eagle3, "SPAN", 3)
    assert difference(drafter.draft_logits(batch, inner_anchors(), 7), whole) <= 1e-6


@torch.no_grad()
def test_requests_that_share_a_batch_change_nothing_for_each_other(target):
    drafter, examples, anchors = make(target), documents(), [5, 1, 20]
    alone = [served(drafter, e, a, 7)[0].tolist() for e, a in zip(examples, anchors, strict=True)]
    state = drafter.begin(4, 40)
    for slot, (example, anchor) in enumerate(zip(examples, anchors, strict=True), 1):
        states = capture(target, [example], drafter.layer_ids, False)[0]
        drafter.advance(state, range(slot, slot + 1), states, tensor([example.ids]), [anchor])
    state.move(3, 0)
    assert state.lengths == [20, 5, 1, 0]
    roots = tensor([examples[i].ids[anchors[i]] for i in (2, 0, 1)])
    assert drafter.propose(state, range(3), roots, 7).tokens_BK.tolist() == [alone[2], alone[0], alone[1]]


@torch.no_grad()
def test_rows_that_advance_together_hold_what_each_holds_alone(target):
    together, alone = tiny.advanced(make(target), target)
    for name in ("keys", "values", "pending"):
        one, other = (torch.stack([*vars(state)[name]]) for state in (together, alone))
        assert difference(one, other) <= 1e-6
    assert float(together.keys[1].abs().max()) > 0.1


def test_visible_keys_and_rotary_positions_are_those_of_the_case(target, monkeypatch):
    case = json.loads((CASES / "t02_attention_masks.json").read_text())["eagle3_unroll"]
    num, steps = case["seq_len"], len(case["visible_key_count"])
    drafter, counts, positions = make(target, unroll=steps), [], []
    example = tiny.example(num + 1, 1)  # four pairs are five positions
    batch, anchors_A = packed(drafter, [example]), torch.arange(1, num + 1)
    attend, rotary = eagle3.attend, drafter.rotary.forward

    def counting(query_AHE, context, steps, pair_A):
        """A key is seen where the answer hangs on its value."""
        values = [v.detach().clone().requires_grad_() for v in (context[1], *(v for _, v in steps))]
        keys = [k.detach() for k, _ in steps]
        with torch.enable_grad():
            found_AC = attend(
                query_AHE.detach(),
                (context[0].detach(), values[0]),
                list(zip(keys, values[1:], strict=True)),
                pair_A,
            )
            seen = []
            for row, out_C in enumerate(found_AC):
                grads = torch.autograd.grad(out_C.sum(), values, retain_graph=True)
                rows = [
                    grads[0].abs().amax((1, 2)) > 0,
                    *(g[row, None].abs().amax((1, 2)) > 0 for g in grads[1:]),
                ]
                assert sum(int((g.abs().amax((1, 2)) > 0).sum()) for g in grads[1:]) == len(steps)  # its own
                seen.append(int(torch.cat(rows).sum()))
        counts.append(seen)
        return found_AC.detach()

    monkeypatch.setattr(eagle3, "attend", counting)
    monkeypatch.setattr(drafter.rotary, "forward", lambda p: positions.append(p.tolist()) or rotary(p))
    with torch.no_grad():
        drafter.forced(batch, anchors_A, data_tokens(batch, anchors_A, steps))
    assert dict(zip(case["visible_key_count"], counts, strict=True)) == case["visible_key_count"]
    assert positions[0] == list(range(num + 1))  # the true pairs
    assert (
        dict(zip(case["rope_position_of_query"], positions[1:], strict=True))
        == case["rope_position_of_query"]
    )


def test_training_keeps_no_scores_of_any_step_for_the_backward_pass(target):
    drafter, example = make(target), tiny.example(300, 4)
    batch = drafter.place(packed(drafter, [example]), torch.Generator().manual_seed(0))
    kept: list[torch.Size] = []

    def note(held: Tensor) -> Tensor:
        kept.append(held.shape)
        return held

    with torch.autograd.graph.saved_tensors_hooks(note, lambda held: held):
        drafter.train()(batch)
    assert max(shape.numel() for shape in kept) < len(batch.anchors_A) ** 2


# Who sees what -------------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_a_token_or_state_after_t_changes_no_logit_that_predicts_up_to_t_plus_1(target, kind):
    drafter = make(target, **KINDS[kind])
    num, anchors_A = drafter.config.unroll, torch.arange(1, 26)
    batch = packed(drafter, documents()[2:])
    look = lambda b: drafter.forced(b, anchors_A, data_tokens(b, anchors_A, num))  # noqa: E731
    before = look(batch)
    reads_AK = anchors_A[:, None] + torch.arange(num)  # the newest token a step reads, before its label
    for later in (2, 3, 8, 15, 24, 25):
        moved_AK = (look(changed(batch, later, "token")) != before).any(-1)
        assert torch.equal(moved_AK, reads_AK >= later), later
        moved_AK = (look(changed(batch, later, "state")) != before).any(-1)
        assert torch.equal(moved_AK, (anchors_A > later)[:, None].expand_as(reads_AK)), later
    own = drafter.draft_logits(batch, anchors_A, num)
    for later, what in itertools.product((2, 8, 25), ("token", "state")):
        again = drafter.draft_logits(changed(batch, later, what), anchors_A, num)
        assert torch.equal(again[: later - 1], own[: later - 1]), (later, what)


@EVERY_KIND
@torch.no_grad()
def test_every_state_and_token_before_the_anchor_does_change_every_step(target, kind):
    drafter = make(target, **KINDS[kind])
    num, batch, anchor = drafter.config.unroll, packed(drafter, documents()[2:]), tensor([9])
    tokens_AK = data_tokens(batch, anchor, num)
    before = drafter.forced(batch, anchor, tokens_AK)[0]
    for at, what in itertools.product(range(9), ("token", "state")):
        after = drafter.forced(changed(batch, at, what), anchor, tokens_AK)[0]
        # The first token of a document is in no pair: it acts through the states.
        assert (after != before).any(-1).tolist() == [(at, what) != (0, "token")] * num, (at, what)


@EVERY_KIND
@torch.no_grad()
def test_chains_never_cross_documents(target, kind):
    drafter, examples = make(target, **KINDS[kind]), documents()
    batch, n = packed(drafter, examples), drafter.max_drafts
    together = drafter.draft_logits(batch, inner_anchors(), n)
    owner = tensor([sum(a >= border for border in BORDERS) - 1 for a in inner_anchors().tolist()])
    for at, example in enumerate(examples):
        anchors_A = torch.arange(1, len(example.ids))
        alone = drafter.draft_logits(packed(drafter, [example]), anchors_A, n)
        assert difference(together[owner == at], alone) <= 1e-5
    spoilt = batch
    for at, what in itertools.product((16, 26), ("state", "token")):  # the neighbours of the middle one
        spoilt = changed(spoilt, at, what)
    again = drafter.draft_logits(spoilt, inner_anchors(), n)
    assert torch.equal(again[owner == 1], together[owner == 1])
    assert not torch.equal(again[owner == 2], together[owner == 2])


def test_anchors_have_a_state_before_them_and_labels_stay_in_their_document(target):
    drafter = make(target)
    examples = [tiny.example(9, 0), *documents()[1:]]  # the first is supervised from its first token on
    batch = drafter.place(packed(drafter, examples), torch.Generator().manual_seed(0))
    assert batch.anchors_A.tolist() == [*range(1, 8), *range(11, 17), *range(26, 43)]
    _, weights_AK = weighted_labels(drafter, batch, drafter.weights_K)
    for anchor, weights in zip(batch.anchors_A.tolist(), weights_AK.tolist(), strict=True):
        left = next(end for end in (9, 18, 44) if anchor < end) - anchor - 1
        assert weights == pytest.approx([0.8**k * (k < left) for k in range(7)])


def test_a_step_looks_at_the_share_of_anchors_that_is_asked_for(target):
    drafter = make(target, anchor_share=0.25)
    batch, generator = packed(drafter, [tiny.example(49, 8)]), torch.Generator().manual_seed(0)
    placed = [drafter.place(batch, generator) for _ in range(2)]
    assert [len(p.anchors_A) for p in placed] == [10, 10]
    assert placed[0].anchors_A.tolist() != placed[1].anchors_A.tolist()


def test_a_pack_without_anchors_adds_nothing_and_still_gives_every_parameter_a_gradient(target):
    drafter = make(target)
    batch = drafter.place(packed(drafter, [tiny.example(9, 8)]), torch.Generator().manual_seed(0))
    loss = drafter(batch)
    assert (len(batch.anchors_A), batch.count, loss.sum.item()) == (0, 0, 0)
    loss.sum.backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


def test_bfloat16_states_and_autocast_train_every_parameter_and_none_of_the_target():
    of = Target(tiny.llama(layers=4).bfloat16(), tiny.tokenizer(), "tiny")
    drafter = make(of, loss=LossWeights(ce=0.1, kl=1)).train()
    batch = drafter.place(packed(drafter, documents()), torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = drafter(batch.to("cpu", torch.float32))  # as the loop hands it over
    loss.sum.backward()
    assert all(0 < float(p.grad.abs().sum()) < float("inf") for p in drafter.parameters())
    assert all(p.grad is None for p in of.model.parameters())


# Learning and serving ------------------------------------------------------------------------------


def test_a_drafter_that_overfits_one_conversation_gets_every_draft_accepted(target):
    known = tiny.answered(target, num=30, prompt=10, seed=4)
    drafter = learn(target, [known], steps=45)
    (answer,) = Engine(target, drafter, 4, capacity=64).run([Request(known.ids[:10], 30)])
    assert answer.tokens == known.ids[10:]
    *whole, last = answer.rounds
    assert len(answer.tokens) > 3 * 4  # rounds enough to mean something
    assert all((r.accepted, r.emitted) == (4, 5) for r in whole)
    assert last.accepted >= min(4, last.emitted - 1)
    (counts,) = replay.score(drafter, list(replay.paths(target, [known], drafter.layer_ids)), [4])
    assert (counts[4].rounds, counts[4].tokens) == (len(answer.rounds), sum(r.emitted for r in answer.rounds))


@pytest.mark.parametrize("kind", ["norms_before_fc_and_output", "reduced_vocabulary"])
def test_replay_and_decoding_step_by_step_make_the_same_rounds(kind):
    of = tiny.target(layers=3)
    answers = [tiny.answered(of, num=num, prompt=5, seed=num) for num in (24, 23, 2, 1, 7, 13)]
    settings = {**KINDS[kind], **({"draft_vocab": 200} if "draft_vocab" in KINDS[kind] else {})}
    drafter = learn(of, answers[:2], steps=25, **settings)
    found = list(replay.paths(of, answers, drafter.layer_ids))
    replayed = replay.score(drafter, found, range(1, 5))
    for n in range(1, 5):
        decoded = list(rollout(of, drafter, answers, n, slots=3))
        by_name = {example.name: counts for example, _, counts in decoded}
        assert [by_name[example.name] for example in answers] == [by_n[n] for by_n in replayed], n
        accepted = {r.accepted for _, answer, _ in decoded for r in answer.rounds}
        assert min(accepted) == 0
        assert max(accepted) >= min(n, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_drafter_changes_no_answer(target, temperature):
    """Greedy drafts at a temperature are point masses; requests differ in their seeds."""
    prompts = [tiny.example(6 + at, 6 + at, at).ids for at in range(4)]
    requests = [Request(p, 20, Sampling(temperature, seed=at), name=str(at)) for at, p in enumerate(prompts)]
    drafter = make(target)
    alone = [next(iter(Engine(target, drafter, 3, capacity=64).run([r]))).tokens for r in requests]
    together = {
        a.request.name: a.tokens for a in Engine(target, drafter, 3, slots=3, capacity=64).run(requests)
    }
    assert [together[str(at)] for at in range(4)] == alone
    if temperature == 0:
        assert alone == [tiny.greedy(target, p, 20) for p in prompts]


@pytest.mark.parametrize("kind", ["paper", "reduced_vocabulary"])
@torch.no_grad()
def test_sampled_drafts_come_with_the_laws_they_were_drawn_from(target, kind):
    drafter, example, anchor, n = make(target, **KINDS[kind]), documents()[2], 12, 4
    state = drafter.begin(3, 40)
    states = capture(target, [example], drafter.layer_ids, False)[0]
    for row in range(3):
        drafter.advance(state, range(row, row + 1), states, tensor([example.ids]), [anchor])
    roots_B, uniforms_BK = tensor([example.ids[anchor]] * 3), torch.rand(3, n)
    proposal = drafter.propose(state, range(3), roots_B, n, uniforms_BK)
    assert proposal.laws_BKV.shape == (3, n, target.vocab_size)
    batch, inputs_BK = (
        packed(drafter, [example]),
        torch.cat([roots_B[:, None], proposal.tokens_BK[:, :-1]], 1),
    )
    for row in range(3):
        hidden_1KD = drafter.forced(batch, tensor([anchor]), inputs_BK[row, None])
        law_KN, kept = drafter.logits(hidden_1KD)[0].softmax(-1), drafter.vocab
        want_KV = torch.zeros(n, target.vocab_size)
        want_KV[:, torch.arange(target.vocab_size) if kept is None else kept.kept_N] = law_KN
        assert torch.allclose(proposal.laws_BKV[row], want_KV, atol=1e-5)
        for k, token in enumerate(proposal.tokens_BK[row].tolist()):
            below, upto = want_KV[k, :token].sum(), want_KV[k, : token + 1].sum()
            assert below - 1e-5 <= uniforms_BK[row, k] <= upto + 1e-5
    assert len({tuple(tokens) for tokens in proposal.tokens_BK.tolist()}) > 1


def test_evenly_spaced_uniforms_draw_each_token_as_often_as_its_law_says():
    logits_N = tensor([0.3, -float("inf"), 2.0, -1.0, 0.0, -float("inf")])
    uniforms_P = (torch.arange(4000, dtype=torch.double) + 0.5) / 4000
    drawn = sample(logits_N.expand(4000, 6), uniforms_P).bincount(minlength=6) / 4000
    assert torch.allclose(drawn, logits_N.softmax(-1), atol=1 / 2000)
    assert sample(logits_N[None], tensor([0.0])).tolist() == [0]
    assert sample(logits_N.roll(1)[None], tensor([0.0])).tolist() == [1]  # never one of probability 0


# Starting ------------------------------------------------------------------------------------------


def random_qwen3() -> Target:
    """A target with norms on queries and keys."""
    llama = tiny.llama(layers=4).config
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    sizes = {key: getattr(llama, key) for key in keys.split()}
    config = Qwen3Config(**sizes, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False)
    return Target(Qwen3ForCausalLM(config), None, "qwen3")


@pytest.mark.parametrize("kv_heads", [None, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_fresh_drafter_computes_the_targets_last_layer(target, family, kv_heads):
    """It reads layer 2 of 4 alone, so its first step gives the law of the token it was given."""
    of = target if family == "llama" else random_qwen3()
    for parameter in of.model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    drafter = build(Eagle3Config(layer_type=family, layer_ids=[2], kv_heads=kv_heads), of)
    batch, anchors_A = packed(drafter, documents()), inner_anchors()
    want = of.head(batch.states.last_BTD[0, anchors_A - 1])
    assert difference(drafter.draft_logits(batch, anchors_A, 1)[:, 0], want) <= 1e-5
    mine = dict(drafter.layers[0].named_parameters())
    theirs = dict(of.layers[-1].named_parameters())
    assert all(mine[n].data_ptr() != theirs[n].data_ptr() for n in theirs if n in mine)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_heads_that_cannot_be_shared_are_refused_with_those_that_can(target, kv_heads):
    with pytest.raises(ValueError, match=rf"method.kv_heads={kv_heads}: give one of \[2, 4\]"):
        build(Eagle3Config(kv_heads=kv_heads), target)


def test_shorter_chains_leave_room_for_more_anchors(target):
    drafter = make(target, lengths=[1, 1, 7, 1], anchor_share=0.1)
    batch, generator = packed(drafter, [tiny.example(49, 8)]), torch.Generator().manual_seed(0)
    drawn = [drafter.place(batch, generator) for _ in range(200)]
    by_length = {num: [p for p in drawn if p.num_drafts == num] for num in (1, 7)}
    assert len(by_length[1]) + len(by_length[7]) == 200
    assert 130 < len(by_length[1]) < 170
    assert {len(p.anchors_A) for p in by_length[7]} == {4}
    assert {len(p.anchors_A) for p in by_length[1]} == {28}  # of 40, a share of 0.7
    assert by_length[1][0].count == 28


def test_a_qwen3_drafter_of_a_llama_target_starts_with_norms_at_the_scale_of_its_projections(target):
    drafter = build(Eagle3Config(), target)
    assert drafter.layer_ids == [0, 1, 2]
    scale = drafter.layers[0].self_attn.q_norm.weight
    assert float(scale.detach().std()) == 0
    assert 0.3 < float(scale[0].detach()) < 10
    fused = drafter.fuse(capture(target, [documents()[0]], drafter.layer_ids, False)[0])
    states = capture(target, [documents()[0]], [2], False)[0].layers_BTLD[:, :, 0]
    assert torch.equal(fused, states)


@pytest.mark.parametrize(
    ("of", "settings", "words"),
    [
        (lambda: tiny.target(layers=4, attention_bias=True), {}, "has self_attn.k_proj.bias"),
        (lambda: tiny.target(layers=4, hidden_act="gelu"), {}, "silu, that of tiny gelu"),
        (random_qwen3, {"layer_type": "llama"}, "has self_attn.q_norm"),
    ],
)
def test_layers_that_compute_something_else_are_no_start(of, settings, words):
    with pytest.raises(ValueError, match=f"{words}.*method.init=random"):
        build(Eagle3Config(**settings), of())
    build(Eagle3Config(**settings, init="random"), of())


@pytest.mark.parametrize(
    ("num", "ids"),
    [
        (32, [1, 15, 28]), (36, [1, 17, 32]), (30, [1, 14, 26]), (7, [1, 2, 3]), (6, [0, 2, 4]),
        (5, [0, 2, 3]), (4, [0, 1, 2]), (3, [0, 1]), (2, [0]), (1, [0]),
    ],
)  # fmt: skip
def test_kept_layers_are_those_of_vllm_or_spread_over_a_small_target(num, ids):
    assert eagle3.Eagle3.choose_layers(Eagle3Config(), num) == ids


@pytest.mark.parametrize("rope", ["theta", "llama3"])
def test_rotary_frequencies_are_the_targets(rope):
    case = json.loads((CASES / "t03_rope.json").read_text())[rope]
    kind = {"rope_type": "default" if rope == "theta" else rope, "rope_theta": case["theta"]}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    kind |= {name: case[name] for name in names if name in case}
    drafter = make(tiny.target(layers=3, hidden=4 * case["head_dim"], rope_parameters=kind))
    inv_freq = drafter.rotary.embedding.inv_freq
    if rope == "theta":
        assert inv_freq.tolist() == pytest.approx(case["inv_freq"])
    else:
        plain = case["theta"] ** (-torch.arange(0, 16, 2) / 16)
        assert (inv_freq / plain).tolist() == pytest.approx(case["ratio_to_unscaled"], abs=1e-4)


# The drafter directory -----------------------------------------------------------------------------

FLAG_SETS = [
    {"layer_type": family, "norm_before_residual": residual, "norm_output": output, **before}
    for family, residual, output, before in itertools.product(
        ("qwen3", "llama"), (True, False), (True, False), ({}, {"fc_norm": True}, {"norm_before_fc": True})
    )
]


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("reduced", [False, True])
@torch.no_grad()
def test_what_is_read_back_drafts_the_same_logits_to_the_bit_with_every_flag(target, tmp_path, reduced):
    anchors_A = tensor([1, 12, 16])
    for at, flags in enumerate(FLAG_SETS):
        drafter, directory = (
            make(target, unroll=3, **flags, **({"draft_vocab": 60} if reduced else {})),
            tmp_path / str(at),
        )
        write(drafter, directory)
        again = read(directory, target)
        batch = packed(drafter, documents()[:1])
        assert torch.equal(again.draft_logits(batch, anchors_A, 3), drafter.draft_logits(batch, anchors_A, 3))
        for key in (
            "layer_type",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "unroll",
        ):
            assert getattr(again.config, key) == getattr(drafter.config, key) == config_value(directory, key)
        write(again, tmp_path / "again")
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def config_value(directory: Path, key: str):
    found = config_of(directory)
    (proposal,) = found["speculators_config"]["proposal_methods"]
    elsewhere = {
        "layer_type": found["transformer_layer_config"]["model_type"],
        "unroll": proposal["speculative_tokens"],
    }
    return elsewhere[key] if key in elsewhere else found[key]


@EVERY_KIND
def test_tensors_and_keys_are_those_of_the_speculators_scheme(target, tmp_path, kind):
    drafter = make(target, **KINDS[kind])
    write(drafter, tmp_path / "drafter")
    hidden, inner, states, wide = 32, 64, len(drafter.layer_ids), 64
    want = {"fc.weight": (hidden, states * hidden), "norm.weight": (hidden,)}
    want |= {
        "layers.0.self_attn.q_proj.weight": (32, wide),
        "layers.0.self_attn.k_proj.weight": (16, wide),
        "layers.0.self_attn.v_proj.weight": (16, wide),
        "layers.0.self_attn.o_proj.weight": (hidden, 32),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if kind != "llama":
        want |= {f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"}
    if kind == "more_heads":
        want |= {f"layers.0.self_attn.{n}_proj.weight": (32, wide) for n in "kv"}
    if kind == "one_norm_before_fc":
        want["input_norm.weight"] = (states * hidden,)
    if kind == "norms_before_fc_and_output":
        want |= {f"fc_norm.{i}.weight": (hidden,) for i in range(states)}
    want |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (target.vocab_size, hidden))
    if kind == "reduced_vocabulary":
        want |= {"lm_head.weight": (60, hidden), "d2t": (60,), "t2d": (target.vocab_size,)}
    held = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in held.items()} == want
    assert torch.equal(held["embed_tokens.weight"], target.embedding.weight)
    found = config_of(tmp_path / "drafter")
    assert (found["architectures"], found["speculators_model_type"]) == (["Eagle3DraftModel"], "eagle3")
    assert "model_type" not in found  # with it vLLM would read another format
    assert found["eagle_aux_hidden_state_layer_ids"] == [k + 1 for k in drafter.layer_ids]
    assert "aux_hidden_state_layer_ids" not in found
    assert (found["embed_requires_grad"], found["target_hidden_size"]) == (False, None)
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    layers = kinds[found["transformer_layer_config"]["model_type"]](**found["transformer_layer_config"])
    assert (layers.num_hidden_layers, layers.head_dim, layers.num_key_value_heads) == (
        1,
        8,
        4 if kind == "more_heads" else 2,
    )
    assert layers.rope_parameters == target.config.rope_parameters


def test_a_target_whose_heads_are_not_its_hidden_size_exports_as_the_case_says(tmp_path):
    case = json.loads((CASES / "x01_export_in.json").read_text())
    settings = {k: v for k, v in case["target_config"].items() if k != "architectures"}
    model = Qwen3ForCausalLM(Qwen3Config(**settings, intermediate_size=20)).float()
    target, want = Target(model, None, "toy"), case["expect"]
    drafter = make(target, draft_vocab=case["draft"]["draft_vocab_size"])
    write(drafter, tmp_path / "drafter")
    found, held = config_of(tmp_path / "drafter"), load_file(tmp_path / "drafter" / "model.safetensors")
    names = {want["key_map"].get(name, name) for name in case["draft_keys"]}
    assert names <= held.keys()
    layers = found["transformer_layer_config"]
    assert held["layers.0.self_attn.q_proj.weight"].shape == (want["q_proj_rows"], 20)
    assert (layers["head_dim"], layers["vocab_size"]) == (
        want["head_dim_written"],
        want["vocab_size_written"],
    )
    assert found["draft_vocab_size"] == want["draft_vocab_size_written"]
    assert layers["tie_word_embeddings"] is want["tie_word_embeddings_written"]
    assert layers["max_position_embeddings"] == want["max_position_embeddings"]
    assert layers["rope_parameters"] == case["target_config"]["rope_parameters"]
    assert found["eagle_aux_hidden_state_layer_ids"] == want["aux_layer_ids_written"]
    read(tmp_path / "drafter", target)


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_directory_says_whether_vllm_can_serve_it(target, tmp_path, family, num):
    write(make(target, layer_type=family, layer_ids=list(range(num))), tmp_path / "drafter")
    vllm = config_of(tmp_path / "drafter")["foredraft"]["vllm"]
    assert vllm["servable"] is ((family, num) != ("llama", 2))
    assert ("layer_type=qwen3" in vllm["why"]) is not vllm["servable"]


@pytest.mark.parametrize(
    "key",
    [
        "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
        "eagle_aux_hidden_state_layer_ids", "speculators_config",
    ],
)  # fmt: skip
def test_a_key_that_is_missing_is_named(target, tmp_path, key):
    write(make(target), tmp_path / "drafter")
    found = config_of(tmp_path / "drafter")
    del found[key]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=f"config.json has no '{key}'"):
        read(tmp_path / "drafter", target)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"fc_norm": True}, r"missing tensors \[fc_norm\.0\.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, r"method\.fc_norm=true, method\.norm_before_fc=true"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "between 0 and 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc\.weight has shape"),
        ({"draft_vocab_size": 59}, "draft_vocab_size=59 but d2t maps 60"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(target, tmp_path, keys, match):
    write(make(target, draft_vocab=60), tmp_path / "drafter")
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({**config_of(tmp_path / "drafter"), **keys}))
    with pytest.raises(ValueError, match=match):
        read(tmp_path / "drafter", target)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_copy_of_embedding_or_head_that_is_not_the_targets_is_refused(target, tmp_path, name):
    write(make(target), tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    held = load_file(file)
    held[name][3] += 1
    save_file(held, file)
    with pytest.raises(ValueError, match=rf"{name} is not "):
        read(tmp_path / "drafter", target)


def test_a_drafter_with_the_vocabulary_maps_of_another_target_is_refused(target, tmp_path):
    other = tiny.target(layers=4, vocab=300)
    for of, name in ((target, "ours"), (other, "theirs")):
        counts = torch.arange(of.vocab_size)  # the highest ids: those of the other are not ours
        write(build(Eagle3Config(init="random"), of, choose(counts, 60)), tmp_path / name)
    maps = tmp_path / "theirs" / "model.safetensors"
    (tmp_path / "ours" / "model.safetensors").write_bytes(maps.read_bytes())
    with pytest.raises(ValueError, match="outside the target's 265 ids"):
        read(tmp_path / "ours", target)


# Settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": [8]}, {"lengths": []}, {"kv_heads": 0},
        {"unroll": 0}, {"step_weight": 0.0}, {"step_weight": 1.5}, {"anchor_share": 0.0},
        {"anchor_share": 1.5}, {"layer_type": "gemma"}, {"init": "copy"}, {"draft_vocab": 1},
        {"fc_norm": True, "norm_before_fc": True},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=rf"method\.{next(iter(wrong))}=.*(give|write|set) "):
        Eagle3Config(**wrong)


def test_layers_that_the_target_lacks_are_refused(target):
    with pytest.raises(ValueError, match=r"layer_ids=\[1, 4\].*between 0 and 3"):
        make(target, layer_ids=[1, 4])


def test_more_drafts_than_steps_were_trained_are_refused(target):
    drafter = make(target, unroll=3)
    with pytest.raises(ValueError, match="at most 3 drafts"):
        Engine(target, drafter, 4)
    with pytest.raises(ValueError, match="1 to 3 drafts"):
        replay.score(drafter, [], [4])


def test_the_recipe_trains_exports_and_takes_the_whole_of_a_small_vocabulary(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [text for text in runs.settings(workshop) if not text.startswith("method.")]
    run = runs.run_of(*settings, recipe="eagle3")
    assert (run.method.name, run.method.unroll) == ("eagle3", 7)
    directory = run_training(replace(run), "eagle3")
    found = config_of(directory / "drafter")
    assert (found["speculators_model_type"], found["draft_vocab_size"]) == ("eagle3", 265)


@pytest.mark.parametrize(
    ("size", "kept"), [(265, None), (32_000, None), (49_152, 8192), (128_256, 32_000), (262_144, 32_000)]
)
def test_the_draft_vocabulary_follows_the_size_of_the_targets(size, kept):
    assert Eagle3Config().kept_tokens(size) == kept
    assert Eagle3Config(draft_vocab=None).kept_tokens(size) is None
    assert Eagle3Config(draft_vocab=100).kept_tokens(size) == 100
