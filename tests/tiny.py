"""Tiny random targets and tokenizers, made in memory: nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.capture import capture
from data.pack import pack
from drafters.method import Drafter, all_methods, build
from drafters.target import Target, tokenizer_hash
from drafters.types import Batch, Example, States
from drafters.vocab import DraftVocab, choose

MARKERS = (
    "<s>",
    "<|end|>",
    "<pad>",
    "<mask>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
    "<think>",
)
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*MARKERS, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"."), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=list(MARKERS[3:]),
        chat_template=template,
    )


def llama(
    layers: int = 5, hidden: int = 32, vocab: int | None = None, seed: int = 0, **extra
) -> LlamaForCausalLM:
    """A random Llama whose argmax is decided: the head is scaled so that margins are wide."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab or len(tokenizer()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **extra,
    )
    return LlamaForCausalLM(config)


def target(**settings) -> Target:
    """A tiny target with its tokenizer."""
    return Target(llama(**settings), tokenizer(), "tiny")


def example(length: int = 40, prompt: int = 8, seed: int = 0, domain: str = "chat", low: int = 9) -> Example:
    """Random ids with a supervised tail."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, len(tokenizer()), (length,), generator=generator).tolist()
    return Example(ids, [False] * prompt + [True] * (length - prompt), domain, f"row {seed}")


@torch.inference_mode()
def greedy(of: Target, prompt: list[int], num: int) -> list[int]:
    """The target's own greedy answer, by the plainest loop there is."""
    ids = list(prompt)
    for _ in range(num):
        logits = of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in of.stop_ids:
            break
    return ids[len(prompt) :]


def answered(of: Target, num: int = 24, prompt: int = 8, seed: int = 0, domain: str = "chat") -> Example:
    """A random prompt with the target's greedy answer."""
    question = example(prompt, prompt, seed).ids
    answer = greedy(of, question, num)
    return Example(question + answer, [False] * prompt + [True] * len(answer), domain, f"row {seed}")


def save(of: Target, directory: Path) -> Path:
    """The target as a directory that ``target=DIR`` loads."""
    of.model.save_pretrained(directory)
    of.tokenizer.save_pretrained(directory)
    return directory


def answered_rows(of: Target, number: int, num: int = 24) -> list[dict]:
    """Rows as ``task=regenerate`` writes them: short questions with the target's greedy answers, ids kept."""
    rows = []
    for at in range(number):
        messages = [{"role": "user", "content": f"question {at}"}]
        prompt = of.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = greedy(of, of.tokenizer(prompt, add_special_tokens=False)["input_ids"], num)
        answer = {"role": "assistant", "content": of.tokenizer.decode(ids, skip_special_tokens=True)}
        rows.append(
            {
                "id": f"row-{at}",
                "domain": ("chat", "code")[at % 2],
                "messages": [*messages, answer],
                "answers": [[1, ids]],
                "finish_reason": "stop" if ids[-1] in of.stop_ids else "length",
                "tokenizer": tokenizer_hash(of.tokenizer),
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents() -> list[Example]:
    sizes = ((17, 4), (9, 2), (26, 8))
    return [example(length, prompt, seed) for seed, (length, prompt) in enumerate(sizes)]


def packed(drafter: Drafter, examples: list[Example]) -> Batch:
    return pack(examples, [capture(drafter.target, [e], drafter.layer_ids, True)[0] for e in examples])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def changed(batch: Batch, at: int, what: str) -> Batch:
    """The batch with another token, or other states, at one position."""
    if what == "token":
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[0, at] = 9 + (tokens_BT[0, at] - 8) % 200
        return replace(batch, tokens_BT=tokens_BT)
    layers = batch.states.layers_BTLD.clone()
    layers[0, at] = torch.randn_like(layers[0, at])
    return replace(batch, states=States(layers, batch.states.last_BTD))


def dflash(of: Target, vocab: DraftVocab | None = None, **settings) -> Drafter:
    """An untrained DFlash, four drafts a round in z-lab's layout."""
    return untrained(of, "dflash", vocab, **settings)


def untrained(of: Target, method: str, vocab: DraftVocab | None = None, **settings) -> Drafter:
    """An untrained block drafter of five slots."""
    chosen = {"init": "random", "num_states": 2, "block_size": 5, **settings}
    return build(all_methods()[method].config_class(**chosen), of, vocab).eval()


def loud(of: Target, method: str, **settings) -> Drafter:
    """A random block drafter in which every input matters: weights of the usual size would whisper."""
    num = settings.get("draft_vocab")
    vocab = None if num is None else choose(torch.arange(of.vocab_size, 0, -1), num)
    drafter = untrained(of, method, vocab, **settings)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return drafter


def trained(
    of: Target, examples: list[Example], steps: int = 60, method: str = "dflash", **settings
) -> Drafter:
    """A block drafter that knows some of the examples' answers: rounds accept all, some and none."""
    return learn(untrained(of, method, **settings), examples, steps)


def learn(drafter: Drafter, examples: list[Example], steps: int, lr: float = 3e-3) -> Drafter:
    """That many updates on the examples, all in one pack."""
    of, drafter = drafter.target, drafter.train()
    batch = pack(examples, capture(of, examples, drafter.layer_ids, with_last=True))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = drafter(drafter.place(batch, generator))
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
    return drafter.eval()


@torch.no_grad()
def advanced(drafter: Drafter, of: Target) -> tuple:
    """Two serving states that heard the same, rows together and row by row; lengths differ, one is empty."""
    num, slots = 5, range(1, 4)
    together, alone = drafter.begin(5, 40), drafter.begin(5, 40)
    generator = torch.Generator().manual_seed(0)
    for kept in ([0, 4, 2], [5, 1, 0], [1, 3, 5]):
        tokens_BJ = torch.randint(9, 200, (3, num), generator=generator)
        states = States(torch.randn(3, num, len(drafter.layer_ids), of.hidden_size, generator=generator))
        drafter.advance(together, slots, states, tokens_BJ, kept)
        for i, slot in enumerate(slots):
            one = slice(i, i + 1)
            drafter.advance(alone, range(slot, slot + 1), states[one], tokens_BJ[one], kept[one])
    assert together.lengths == alone.lengths == [0, 6, 8, 7, 0]
    return together, alone
