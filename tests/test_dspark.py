"""DSpark: the sequential head sees the token before, the confidence never the draft it speaks of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, tensor

from data.capture import capture
from drafters.checkpoint import note, read, write
from drafters.dspark import DSparkConfig, MarkovHead, start_from_bigrams
from drafters.losses import LossWeights
from drafters.method import Drafter, build
from drafters.objective import weighted_labels
from drafters.target import Target
from drafters.types import Batch, Example
from drafters.vocab import choose
from eval import replay
from eval.rollout import rollout
from serve.engine import Engine
from serve.types import Request
from tests import runs, tiny
from tests.tiny import difference, documents, packed
from train.job import run_training

KINDS = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "no_head": {"markov": "none"},
    "no_confidence": {"confidence": 0.0},
    "reduced_vocabulary": {"draft_vocab": 60, "markov": "rnn"},
    "own_slots": {"anchor_predicts": False, "block_size": 6},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
HEADS = pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=4)


def loud(of: Target, **settings) -> Drafter:
    return tiny.loud(of, "dspark", **{"markov_rank": 6, **settings})


def placed(drafter: Drafter, examples: list[Example]) -> Batch:
    return drafter.place(packed(drafter, examples), torch.Generator().manual_seed(0))


@torch.inference_mode()
def served(drafter: Drafter, example: Example, anchor: int, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits ``[K, N]``, drafts and confidences of serving, the states arriving chunk by chunk."""
    seen, plain = [], drafter.read_out
    drafter.read_out = lambda *given: seen.append(plain(*given)) or seen[-1]
    state, row = drafter.begin(2, 40), range(1, 2)
    states = capture(drafter.target, [example], drafter.layer_ids, False)[0]
    tokens_BT = tensor([example.ids])
    for start in range(0, anchor, 4):
        part = slice(start, start + 4)  # also states of tokens that were not accepted
        drafter.advance(state, row, states[:, part], tokens_BT[:, part], [min(4, anchor - start)])
    proposal = drafter.propose(state, row, tokens_BT[0, anchor : anchor + 1], n)
    del drafter.read_out
    confidence = None if proposal.confidence_BK is None else proposal.confidence_BK[0]
    return seen[-1][0][0], proposal.tokens_BK[0], confidence


def sequential(drafter: Drafter, hidden_KD: Tensor, previous: list[int]) -> Tensor:
    """The logits of one block from the equations of the module's docstring, slot by slot."""
    base_KN, head = hidden_KD @ drafter.head_ND.T, drafter.markov_head
    if head is None:
        return base_KN
    w1, w2, sigmoid = head.markov_w1.weight, head.markov_w2.weight, torch.sigmoid
    s, out = torch.zeros(w1.shape[1]), []
    for h, token, base in zip(hidden_KD, previous, base_KN, strict=True):
        e = w1[token]
        if head.kind == "vanilla":
            m = e
        elif head.kind == "gated":
            m = sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias) * e
        else:
            joint = head.joint_proj.weight @ torch.cat([s, e, h]) + head.joint_proj.bias
            g, c, o = joint[: len(s)], joint[len(s) : 2 * len(s)], joint[2 * len(s) :]
            s = sigmoid(g) * s + (1 - sigmoid(g)) * torch.tanh(c)
            m = torch.tanh(o)
        out.append(base + w2 @ m)
    return torch.stack(out)


# Training is serving -------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_training_and_serving_draw_the_same_logits_at_first_middle_and_last_anchors(target, kind):
    drafter, examples = loud(target, **KINDS[kind]), documents()
    batch = packed(drafter, examples)
    for n in (1, drafter.max_drafts):
        start = 0
        for example in examples:
            last = len(example.ids) - 1
            inside = [1, example.mask.index(True), last // 2, last]
            anchors_A = tensor([start + a for a in inside])
            logits_AKN, proposal = (
                drafter.draft_logits(batch, anchors_A, n),
                drafter.drafts(batch, anchors_A, n),
            )
            for at, anchor in enumerate(inside):
                logits_KN, drafts_K, confidence_K = served(drafter, example, anchor, n)
                assert difference(logits_KN, logits_AKN[at]) <= 1e-5
                assert torch.equal(drafts_K, proposal.tokens_BK[at])
                assert (confidence_K is None) == (KINDS[kind].get("confidence") == 0.0)
                if confidence_K is not None:
                    assert torch.allclose(confidence_K, proposal.confidence_BK[at], atol=1e-5)
            start += len(example.ids)


@EVERY_KIND
@torch.no_grad()
def test_the_head_is_its_equations_on_drafts_and_on_the_path(target, kind):
    """On the path the previous tokens are the text's, in a draft the drafter's own."""
    drafter, examples = loud(target, **KINDS[kind]), documents()
    batch, anchors_A = packed(drafter, examples), tensor([5, 11, 30])
    n = drafter.max_drafts
    hidden_AKD = drafter.hidden_of(batch, anchors_A, n)
    drafts_AK = drafter.drafts(batch, anchors_A, n).tokens_BK
    for at, anchor in enumerate(anchors_A.tolist()):
        text = batch.tokens_BT[0, anchor : anchor + n].tolist()
        own = [text[0], *drafts_AK[at, :-1].tolist()]
        for found, previous in (
            (drafter.path_logits(batch, anchors_A, n), text),
            (drafter.draft_logits(batch, anchors_A, n), own),
        ):
            assert difference(found[at], sequential(drafter, hidden_AKD[at], previous)) <= 1e-5


def test_drafts_on_the_drafters_own_text_are_what_the_path_says(target):
    """Where the text is the drafter's own draft, logits given the path and those of drafting are the same."""
    drafter = loud(target, markov="rnn")
    example, n = tiny.example(20, 6), drafter.max_drafts
    with torch.no_grad():
        drafts = drafter.drafts(packed(drafter, [example]), tensor([10]), n).tokens_BK[0].tolist()
        told = replace(example, ids=[*example.ids[:11], *drafts, *example.ids[11 + n :]])
        batch = packed(drafter, [told])
        one, other = (f(batch, tensor([10]), n) for f in (drafter.path_logits, drafter.draft_logits))
    assert difference(one, other) <= 1e-5


# What sees what ------------------------------------------------------------------------------------


@HEADS
@torch.no_grad()
def test_a_draft_sees_the_tokens_before_it_and_no_confidence_sees_its_draft(target, markov):
    """Change the token at a + j: logits of x[a+1+k] and c_k move for k >= j, and for no k < j."""
    drafter, anchor = loud(target, markov=markov), 9
    n, example = drafter.max_drafts, tiny.example(24, 6)
    batch = packed(drafter, [example])

    def look(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        seen = replace(batch, tokens_BT=tokens_BT)
        hidden_AKD = drafter.hidden_of(seen, tensor([anchor]), n)
        previous_AK = tokens_BT[:, anchor : anchor + n]
        logits = drafter.path_logits(seen, tensor([anchor]), n)[0]
        return logits, drafter.confidence_logits(hidden_AKD, previous_AK)[0]

    before = look(batch.tokens_BT)
    for j in range(1, n):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[0, anchor + j] += 1
        for now, then in zip(look(tokens_BT), before, strict=True):
            assert torch.equal(now[:j], then[:j])
            assert not torch.equal(now[j], then[j])
            assert (
                markov != "rnn"
                or j + 1 == n
                or now is None
                or now.dim() == 1
                or not torch.equal(now[-1], then[-1])
            )


# The loss ------------------------------------------------------------------------------------------


@EVERY_KIND
def test_the_loss_is_that_of_the_path_the_laws_of_the_target_and_a_confidence(target, kind):
    drafter, examples = loud(target, **KINDS[kind]), documents()
    batch = placed(drafter, examples)
    anchors_A, n = batch.placed()
    kept_N = torch.arange(target.vocab_size) if drafter.vocab is None else drafter.vocab.kept_N
    want = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "alpha": 0.0}
    count = heard = 0.0
    with torch.no_grad():
        found, logits_AKN = drafter(batch), drafter.path_logits(batch, anchors_A, n)
        hidden_AKD = drafter.hidden_of(batch, anchors_A, n)
        for at, anchor in enumerate(anchors_A.tolist()):
            example = examples[int(batch.doc_BT[0, anchor])]
            inside = int(batch.position_BT[0, anchor])
            p_TV = target.model(input_ids=tensor([example.ids])).logits[0].softmax(-1)
            for k in range(min(n, len(example.ids) - 1 - inside)):
                label = (kept_N == example.ids[inside + 1 + k]).nonzero().flatten().tolist()
                weight = 2.718281828 ** (-k / 4)
                q, p = logits_AKN[at, k].softmax(-1), p_TV[inside + k][kept_N]
                alpha = torch.minimum(p, q).sum()
                if label:
                    count += weight
                    want["ce"] += weight * float(-q[label[0]].log())
                    want["l1"] += weight * float((p - q).abs().sum())
                heard += weight  # a label that cannot be drafted ends a round, and a confidence says so
                want["alpha"] += weight * float(alpha)
                if drafter.confidence_head is not None:
                    features = [hidden_AKD[at, k]]
                    if drafter.markov_head is not None:
                        features.append(drafter.markov_head.markov_w1.weight[example.ids[inside + k]])
                    c = torch.sigmoid(drafter.confidence_head.proj(torch.cat(features)))[0]
                    want["confidence"] -= weight * float(alpha * c.log() + (1 - alpha) * (1 - c).log())
    assert found.count == pytest.approx(count, rel=1e-5)
    if drafter.confidence_head is not None:
        assert found.counts["alpha"] == found.counts["confidence"] == pytest.approx(heard, rel=1e-5)
    named = want if drafter.confidence_head is not None else {"ce": want["ce"], "l1": want["l1"]}
    for name, value in named.items():
        assert float(found.sums[name]) == pytest.approx(value, rel=1e-4), name
    total = 0.1 * want["ce"] + 0.9 * want["l1"] + want["confidence"]
    assert float(found.sum) == pytest.approx(total, rel=1e-4)


@EVERY_KIND
def test_gradients_reach_every_parameter_and_none_of_the_target(target, kind):
    drafter = loud(target, **KINDS[kind])
    drafter(placed(drafter, documents())).sum.backward()
    still = {name for name, p in drafter.named_parameters() if float(p.grad.abs().sum()) == 0}
    assert not still
    assert all(p.grad is None for p in target.model.parameters())


@HEADS
def test_gradients_are_those_of_the_equations(target, markov):
    """Hard labels: autograd through the head written slot by slot, for head and backbone alike."""
    drafter = loud(target, markov=markov, loss=LossWeights(), confidence=0.0)
    batch = placed(drafter, documents())
    anchors_A, n = batch.placed()
    wanted = dict(drafter.named_parameters())
    found = torch.autograd.grad(drafter(batch).sum, list(wanted.values()))
    labels_AK, weights_AK = weighted_labels(drafter, batch, drafter.weights_K)
    hidden_AKD, total = drafter.hidden_of(batch, anchors_A, n), tensor(0.0)
    for at, anchor in enumerate(anchors_A.tolist()):
        previous = [int(batch.tokens_BT[0, min(anchor + k, batch.tokens_BT.shape[1] - 1)]) for k in range(n)]
        logq_KN = sequential(drafter, hidden_AKD[at], previous).log_softmax(-1)
        total = total - (logq_KN.gather(1, labels_AK[at][:, None])[:, 0] * weights_AK[at]).sum()
    for ours, theirs in zip(found, torch.autograd.grad(total, list(wanted.values())), strict=True):
        assert difference(ours, theirs) <= 1e-4


def test_a_confidence_that_is_detached_leaves_the_backbone_alone(target):
    heard = loud(target)
    grads = []
    for settings in ({"confidence": 0.0}, {"confidence_detach": True}, {}):
        drafter = loud(target, **settings)
        drafter.load_state_dict(heard.state_dict(), strict=False)
        drafter(placed(drafter, documents())).sum.backward()
        grads.append(drafter.fc.weight.grad)
    silent, detached, both = grads
    assert difference(detached, silent) <= 1e-5
    assert difference(both, silent) > 1e-3


@pytest.mark.parametrize("weighting", ["dpace", "expected"])
def test_weights_by_length_count_every_label_once(target, weighting):
    drafter = loud(target, weighting=weighting, loss=LossWeights(ce=0, nla=1.0))
    batch = placed(drafter, documents())
    loss = drafter(batch)
    assert batch.count == loss.count == int(batch.count)  # whole labels, no decay
    loss.sum.backward()
    assert 0 < float(loss.sums["nla"]) < float("inf")


def test_hard_labels_alone_still_need_the_targets_states_for_the_confidence(target):
    assert DSparkConfig(loss=LossWeights()).needs_last
    assert not DSparkConfig(loss=LossWeights(), confidence=0.0).needs_last
    assert DSparkConfig(loss=LossWeights(), confidence=0.0, weighting="expected").needs_last


# Learning ------------------------------------------------------------------------------------------


@HEADS
def test_a_drafter_that_overfits_one_conversation_gets_every_draft_accepted_and_knows_it(target, markov):
    known = tiny.answered(target, num=30, prompt=10, seed=4)
    drafter = tiny.trained(
        target,
        [known],
        steps=90,
        method="dspark",
        markov=markov,
        markov_rank=16,
        anchor_share=1.0,
        decay=None,
        loss=LossWeights(ce=1.0),
    )
    n = drafter.max_drafts
    (answer,) = Engine(target, drafter, n, capacity=64).run([Request(known.ids[:10], 30)])
    assert answer.tokens == known.ids[10:]
    *whole, last = answer.rounds
    assert all((r.accepted, r.emitted) == (n, n + 1) for r in whole)
    assert last.accepted >= min(n, last.emitted - 1)
    paths = list(replay.paths(target, [known], drafter.layer_ids))
    (counts,) = replay.score(drafter, paths, [n])
    assert (counts[n].rounds, counts[n].tokens) == (len(answer.rounds), sum(r.emitted for r in answer.rounds))


def test_replay_and_rollout_count_alike(target):
    known = [tiny.answered(target, num=24, prompt=8, seed=seed) for seed in range(3)]
    drafter = tiny.trained(target, known[:1], steps=30, method="dspark", markov="rnn", markov_rank=8)
    n = drafter.max_drafts
    replayed = replay.score(drafter, list(replay.paths(target, known, drafter.layer_ids)), [n])
    decoded = [counts for _, _, counts in rollout(target, drafter, known, n)]
    assert [counts[n] for counts in replayed] == decoded
    assert sum(counts.survived[0] for counts in decoded) > 0


# Starts --------------------------------------------------------------------------------------------


def test_the_bigram_start_is_the_log_ratio_of_the_pairs(target):
    ids = [9, 4, 5, 4, 5, 6, 4, 6, 5, 4]
    example = Example(ids, [False] + [True] * 9, "chat", "row")
    head = MarkovHead("vanilla", 12, 12, 12, 8)
    start_from_bigrams(head, None, [example])
    table = (head.markov_w1.weight @ head.markov_w2.weight.T).detach()
    pairs = list(zip(ids, ids[1:], strict=False))
    for before, after in pairs:
        seen = sum(pair == (before, after) for pair in pairs)
        each = sum(pair[0] == before for pair in pairs), sum(pair[1] == after for pair in pairs)
        assert float(table[before, after]) == pytest.approx(
            torch.log(torch.tensor(seen * len(pairs) / (each[0] * each[1]))).item(), abs=1e-4
        )
    assert float(table[9, 6]) == pytest.approx(0, abs=1e-4)  # never seen


def test_the_bigram_start_counts_supervised_tokens_of_the_draft_vocabulary_only(target):
    example = Example([4, 5, 6, 4, 7, 5], [False, False, True, True, True, True], "chat", "row")
    vocab = choose(torch.tensor([0, 0, 0, 0, 9, 9, 9, 0]), 3)  # 4, 5, 6: 7 cannot be drafted
    head = MarkovHead("vanilla", 8, 3, 3, 8)
    start_from_bigrams(head, vocab, [example])
    table = head.markov_w1.weight @ head.markov_w2.weight.T
    assert set(map(tuple, (table.abs() > 1e-4).nonzero().tolist())) == {(5, 2), (6, 0), (7, 1)}


def test_a_corpus_without_pairs_is_no_bigram_start(target):
    drafter = loud(target, markov_init="bigram")
    with pytest.raises(ValueError, match="markov_init=bigram: the training answers hold no pairs"):
        drafter.start([Example([4, 5], [False, True], "chat", "row")])


def test_training_can_start_from_a_trained_dflash(target, tmp_path):
    dflash = tiny.dflash(target, block_size=5, anchor_predicts=True, init="random")
    write(dflash, tmp_path / "dflash")
    started = loud_from(target, tmp_path / "dflash")
    for name, value in dflash.state_dict().items():
        assert torch.equal(started.state_dict()[name], value), name
    assert "but for markov_head.markov_w1.weight, markov_head.markov_w2.weight, conf" in started.start([])


def test_a_start_from_a_dspark_says_which_heads_start_anew(target, tmp_path):
    first = loud(target)
    assert first.start([]) is None
    write(first, tmp_path / "first")
    again = loud_from(target, tmp_path / "first")
    assert again.start([]).endswith("first: its tensors, all of them")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in first.state_dict().items())
    told = loud_from(target, tmp_path / "first", markov_rank=3).start([])
    assert "but for markov_head.markov_w1.weight, markov_head.markov_w2.weight, conf" in told
    assert "fc.weight" not in told


def loud_from(target: Target, directory, **settings) -> Drafter:
    chosen = {"init": "random", "num_states": 2, "block_size": 5, "markov_rank": 6, **settings}
    return build(DSparkConfig(**chosen, start_from=str(directory)), target)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_ids": [0, 1]}, "its layer_ids is .* set method.layer_ids="),
        ({"num_layers": 1}, "its num_layers is 2, of this run 1; set method.num_layers=2"),
        ({"mask_token": 4}, "its mask_token is"),
        ({"anchor_predicts": False}, "its anchor_predicts is True, of this run False"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(target, tmp_path, settings, words):
    write(tiny.dflash(target, block_size=5, anchor_predicts=True, init="random"), tmp_path / "dflash")
    with pytest.raises(ValueError, match=words):
        loud_from(target, tmp_path / "dflash", **settings)


def test_markov_factors_that_were_taken_over_are_not_started_again(target, tmp_path):
    first = loud(target)
    write(first, tmp_path / "first")
    again = loud_from(target, tmp_path / "first", markov_init="bigram")
    assert again.start([tiny.answered(target)]).endswith("all of them")
    assert torch.equal(again.markov_head.markov_w1.weight, first.markov_head.markov_w1.weight)


def test_a_start_from_nowhere_is_refused_by_its_key(target, tmp_path):
    with pytest.raises(ValueError, match=r"method\.start_from=.*nowhere: .*no config\.json"):
        loud_from(target, tmp_path / "nowhere")


# The directory -------------------------------------------------------------------------------------


@EVERY_KIND
@torch.no_grad()
def test_a_written_drafter_reads_back_the_same(target, tmp_path, kind):
    drafter = loud(target, **KINDS[kind])
    write(drafter, tmp_path / "d")
    again = read(tmp_path / "d", target)
    batch, anchors_A = packed(drafter, documents()), tensor([6, 13, 40])
    n = drafter.max_drafts
    assert torch.equal(again.draft_logits(batch, anchors_A, n), drafter.draft_logits(batch, anchors_A, n))
    one, other = (d.drafts(batch, anchors_A, n) for d in (again, drafter))
    assert torch.equal(one.tokens_BK, other.tokens_BK)
    if drafter.confidence_head is not None:
        assert torch.equal(one.confidence_BK, other.confidence_BK)


def test_tensors_and_keys_are_those_that_vllm_and_speculators_read(target, tmp_path):
    write(loud(target, draft_vocab=60), tmp_path / "d")
    found = json.loads((tmp_path / "d" / "config.json").read_text())
    assert found["speculators_model_type"] == "dspark"
    assert found["architectures"] == ["Qwen3DSparkModel"]
    assert (found["markov_rank"], found["markov_head_type"]) == (6, "vanilla")
    assert (found["enable_confidence_head"], found["confidence_head_with_markov"]) == (True, True)
    assert (found["block_size"], found["sample_from_anchor"]) == (5, True)
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert found["foredraft"]["vllm"]["servable"]
    held = load_file(tmp_path / "d" / "model.safetensors")
    size = target.hidden_size
    assert held["markov_head.markov_w1.weight"].shape == (target.vocab_size, 6)
    assert held["markov_head.markov_w2.weight"].shape == (60, 6)
    assert held["confidence_head.proj.weight"].shape == (1, size + 6)
    assert held["confidence_head.proj.bias"].shape == (1,)


@pytest.mark.parametrize("markov", ["gated", "rnn", "none"])
def test_heads_that_vllm_does_not_serve_say_so(target, markov):
    assert f"method.markov={markov}" in (loud(target, markov=markov).vllm_refusal() or "")


def test_calibrated_confidences_come_with_the_directory(target, tmp_path):
    drafter = loud(target)
    write(drafter, tmp_path / "d")
    note(tmp_path / "d", confidence_temperatures=[2.0, 1.0, 0.5, 1.0, 4.0])
    batch, anchors_A = packed(drafter, documents()), tensor([6, 13, 40])
    with torch.no_grad():
        plain = drafter.drafts(batch, anchors_A, 3).confidence_BK
        cooled = read(tmp_path / "d", target).drafts(batch, anchors_A, 3).confidence_BK
    assert torch.allclose(torch.logit(cooled) * tensor([2.0, 1.0, 0.5]), torch.logit(plain), atol=1e-4)


def test_the_recipe_trains_exports_and_calibrates(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = runs.settings(workshop, "train.report=true", "method.markov_init=bigram")
    run = runs.run_of(*settings, recipe="dspark")
    directory = run_training(run, "dspark")
    found = json.loads((directory / "drafter" / "config.json").read_text())
    assert (found["speculators_model_type"], found["markov_rank"]) == ("dspark", 256)
    quality = json.loads((directory / "report" / "calibration.json").read_text())
    assert found["foredraft"]["confidence_temperatures"] == quality["temperatures"]
    assert len(quality["temperatures"]) == 7
    logged = [line for line in runs.metrics(directory) if "loss/confidence" in line][-1]
    assert 0 < logged["loss/alpha"] < 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"markov": "lstm"}, "method.markov=lstm: write vanilla or gated or rnn or none"),
        ({"markov_rank": 0}, "method.markov_rank=0"),
        ({"confidence": -1.0}, "method.confidence=-1.0"),
        ({"weighting": "flat"}, "method.weighting=flat"),
        ({"smooth": 1.5}, "method.smooth=1.5"),
        ({"markov_init": "svd"}, "method.markov_init=svd"),
        ({"block_size": 0}, "method.block_size=0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        DSparkConfig(**wrong)


def test_a_block_beyond_the_trained_one_is_refused(target):
    drafter = loud(target)
    paths = list(replay.paths(target, [tiny.answered(target)], drafter.layer_ids))
    with pytest.raises(ValueError, match="trained for 1 to 5 drafts"):
        replay.score(drafter, paths, [6])
    assert isinstance(drafter.markov_head, nn.Module)
