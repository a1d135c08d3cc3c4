"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975; vLLM's method ``suffix``): copy what is likeliest.

A suffix tree holds every stretch of up to ``depth`` tokens of its texts, with counts. The longest ending of
the context, anchor included, that stands in the tree is a place in it; drafts walk down from there, at each
branch to the child that was seen most often, which has a share of what was seen there:

    texts  a b c d, a b c e, a b c e             context  ... a b

           a b c ──┬── d   1                     drafts   c (3 of 3), e (2 of 3)
                   └── e   2

How many drafts there are adapts: ``factor`` times the length of the match at most, and none from where the
product of their shares falls below ``min_probability``. There are two trees: the request's own, prompt and
answer, and one of past answers that all requests share.

A share is no probability: what was seen once has a share of 1. So the proposer counts what becomes of its
drafts, by kind (``Acceptance``). That is their confidence, and it decides between the trees: drafts are those
of which more are expected to be accepted; while nothing is known, those of the longer match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

from serve.lookup import Lookup, LookupState


@dataclass
class SuffixConfig:
    """``serve.suffix.*``"""

    max_drafts: int = 16
    factor: float = 2.0  # drafts for each token of the match (vLLM: suffix_decoding_max_spec_factor)
    min_probability: float = 0.1  # of all drafts up to the last (suffix_decoding_min_token_prob)
    max_match: int = 32  # tokens of context that are looked for
    past: bool = True  # also look at past answers, to whomever: texts stay the same, the speed may tell
    memory: int = 100_000  # tokens of past answers; the oldest are forgotten

    def __post_init__(self) -> None:
        """``ValueError`` naming the key, the value and what to write."""
        checks = {
            "max_drafts": (self.max_drafts >= 1, "at least 1 draft"),
            "factor": (0 < self.factor < float("inf"), "a number above 0"),
            "min_probability": (0 <= self.min_probability <= 1, "a probability; 0 never stops early"),
            "max_match": (self.max_match >= 1, "at least 1 token"),
            "memory": (self.memory >= 1, "at least 1 token, or serve.suffix.past=false"),
        }
        for key, (fine, remedy) in checks.items():
            if not fine:
                raise ValueError(f"serve.suffix.{key}={getattr(self, key)}: give {remedy}")

    @property
    def depth(self) -> int:
        """Tokens of the longest stretch in a tree: the longest match and all drafts after it."""
        return self.max_match + self.max_drafts


# The tree ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """An edge of the tree and what follows it: ``text[start : start + length]``, then one of ``children``.

    ``count`` says how often the texts go from the node above into this edge. A leaf reads on in its text, up
    to the tree's depth, also in what is still to come.
    """

    text: list[int]
    start: int
    length: int
    count: int = 1
    children: dict[int, Node] = field(default_factory=lambda: NO_CHILDREN)


NO_CHILDREN: dict[int, Node] = {}  # of all leaves; most nodes are, and a garbage collector looks at them all


class SuffixTree:
    """All stretches of up to ``depth`` tokens of its texts. The last text is open: it grows token by token.

    An edge always points into the newest text that went all its way. So it never points into a text that
    was forgotten, as long as the oldest is forgotten first. There are at most two nodes a token.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node([], 0, 0)
        self.text: list[int] = []  # the open one
        self.ends = 0  # closed texts end in tokens of their own: -1, -2, ...
        # Endings of the open text that stand elsewhere too, longest first, each as a node and how far into
        # its edge. The longer ones are leaves of their own: they grow with the text.
        self.open: list[tuple[Node, int]] = []

    def append(self, token: int) -> None:
        """One token more of the open text. At most ``depth`` steps; as many as the match is long."""
        at = len(self.text)
        self.text.append(token)
        endings = [*self.open, (self.root, 0)]
        self.open = []
        for i, (node, offset) in enumerate(endings):
            length = len(endings) - 1 - i
            if offset < node.length and node.text[node.start + offset] != token:
                # Shorter endings that wait in this edge wait above the cut, like this one.
                self._split(node, offset, sum(other is node for other, _ in endings[i:]))
            if offset == node.length:
                child = node.children.get(token)
                if child is None:
                    if node.children is NO_CHILDREN:
                        node.children = {}
                    node.children[token] = Node(self.text, at, self.depth - length)
                    continue
                child.count += 1
                node, offset = child, 0
            offset += 1
            if offset == node.length:
                node.text, node.start = self.text, at + 1 - offset
            if length + 1 < self.depth:
                self.open.append((node, offset))

    def close(self) -> list[int]:
        """End the open text; the next token begins another. The text, as ``forget`` wants it."""
        self.ends -= 1
        self.append(self.ends)
        del self.root.children[self.ends]
        text, self.text, self.open = self.text, [], []
        return text

    def forget(self, text: list[int]) -> None:
        """Take the oldest closed text out again."""
        for start in range(len(text) - 1):
            node, at = self.root, start
            while at < start + self.depth:
                child = node.children[text[at]]
                child.count -= 1
                if not child.count:
                    del node.children[text[at]]
                    self._merge(node)
                    break
                node, at = child, at + child.length

    def match(self, context: list[int]) -> tuple[int, Node, int]:
        """The longest ending of the context in the tree: its length, the node, how far into its edge.

        Where an ending stands, all shorter ones do: a binary search.
        """
        found, longest = (0, self.root, 0), len(context)
        while found[0] < longest:
            length = (found[0] + longest + 1) // 2
            place = self._find(context[len(context) - length :])
            if place is None:
                longest = length - 1
            else:
                found = (length, *place)
        return found

    def follow(self, node: Node, offset: int, limit: int, least: float) -> tuple[list[int], list[float]]:
        """Up to ``limit`` likeliest tokens from a place on, and the share of each among what followed there.

        Ends before the product of the shares is below ``least``. Of children seen equally often, the first.
        """
        tokens: list[int] = []
        shares: list[float] = []
        product = 1.0
        while len(tokens) < limit:
            share = 1.0
            if offset == node.length:
                if not node.children:
                    break
                total = sum(child.count for child in node.children.values())
                node = max(node.children.values(), key=lambda child: child.count)
                offset, share = 0, node.count / total
            at = node.start + offset
            product *= share
            if at == len(node.text) or node.text[at] < 0 or product < least:
                break
            tokens.append(node.text[at])
            shares.append(share)
            offset += 1
        return tokens, shares

    def _find(self, tokens: list[int]) -> tuple[Node, int] | None:
        """The place of a stretch, if it stands in the tree."""
        node, offset, at = self.root, 0, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return None
            offset = min(child.length, len(tokens) - at)
            if child.text[child.start : child.start + offset] != tokens[at : at + offset]:
                return None
            node, at = child, at + offset
        return node, offset

    def _split(self, node: Node, offset: int, waiting: int) -> None:
        """Cut an edge in two; ``waiting`` of those that went into it have not come past the cut."""
        at = node.start + offset
        lower = Node(node.text, at, node.length - offset, node.count - waiting, node.children)
        node.children = {node.text[at]: lower}
        node.text, node.start, node.length = self.text, len(self.text) - 1 - offset, offset

    def _merge(self, node: Node) -> None:
        """Undo a cut that is no branch any more."""
        if node is self.root or len(node.children) != 1:
            return
        (child,) = node.children.values()
        assert child.count == node.count, (child.count, node.count)
        node.text, node.start = child.text, child.start - node.length
        node.length, node.children = node.length + child.length, child.children


# The proposer -----------------------------------------------------------------------------------------


class PastAnswers:
    """A tree of the newest answers, up to ``memory`` tokens of them."""

    def __init__(self, depth: int, memory: int) -> None:
        self.tree, self.memory = SuffixTree(depth), memory
        self.texts: deque[list[int]] = deque()
        self.num_tokens = 0

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer, of one that is longer than the memory its end; forget the oldest for it."""
        answer = answer[-self.memory :]
        self.num_tokens += len(answer)
        while self.num_tokens > self.memory:
            oldest = self.texts.popleft()
            self.num_tokens -= len(oldest) - 1
            self.tree.forget(oldest)
        for token in answer:
            self.tree.append(token)
        self.texts.append(self.tree.close())


Kind = tuple[bool, int, int]


def kind_of(own: bool, length: int, share: float) -> Kind:
    """Drafts are alike in whose text they are copied from, in how long a stretch before them stands there (1,
    2 to 3, 4 to 7, ... tokens, drafts included), and in their share (in quarters).
    """
    return own, length.bit_length(), round(4 * share)


class Acceptance:
    """How many drafts of each kind were what the target said; of the last ``memory`` or so.

    Of a kind that little is known of, the share counts for as much as ``prior`` drafts.
    """

    def __init__(self, prior: int = 4, memory: int = 500) -> None:
        self.prior, self.memory = prior, memory
        self.heard: dict[Kind, tuple[float, int]] = {}  # accepted, and out of how many

    def of(self, kind: Kind, share: float) -> float:
        """The probability that a draft is accepted, given that those before it were."""
        return self.heard.get(kind, (share, self.prior))[0]

    def hear(self, kind: Kind, share: float, accepted: bool) -> None:
        """What became of a draft."""
        before, num = self.heard.get(kind, (share, self.prior))
        num = min(num + 1, self.memory)
        self.heard[kind] = before + (accepted - before) / num, num


@dataclass(frozen=True)
class Copied:
    """Drafts from one tree after a match of ``length`` tokens: the token, kind and share of each."""

    length: int
    drafts: list[tuple[int, Kind, float]]
    acceptance: list[float]

    @property
    def expected(self) -> float:
        """How many are accepted, in the mean."""
        return sum(accumulate(self.acceptance, mul))


class SuffixHistory:
    """A request's own tree, beside that of past answers."""

    def __init__(self, config: SuffixConfig, past: PastAnswers | None, acceptance: Acceptance) -> None:
        self.config, self.past, self.acceptance = config, past, acceptance
        self.tree = SuffixTree(config.depth)
        self.prompt: int | None = None  # its length, once it is complete
        self.open: deque[tuple[int, Kind, float]] = deque()  # drafts of which nothing is known yet
        self.at = 0  # where in the text the first of them would stand

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._judge(token)
            self.tree.append(token)

    def answering(self) -> None:
        self.prompt = len(self.tree.text)

    def drafts(self, anchor: int, n: int) -> tuple[list[int], list[float]]:
        """Drafts from the tree that promises most, and the probability of each to be accepted."""
        self._judge(anchor)
        context = [*self.tree.text[max(0, len(self.tree.text) - self.config.max_match + 1) :], anchor]
        trees = [self.tree] if self.past is None else [self.tree, self.past.tree]
        found = [self._copy(tree, context, n) for tree in trees]
        best = max(found, key=lambda copied: (copied.expected, copied.length))
        self.open, self.at = deque(best.drafts), len(self.tree.text) + 1
        return [token for token, _, _ in best.drafts], best.acceptance

    def close(self) -> None:
        """The answer joins the past ones."""
        if self.past is not None and self.prompt is not None and self.prompt < len(self.tree.text):
            self.past.add(self.tree.text[self.prompt :])

    def _copy(self, tree: SuffixTree, context: list[int], n: int) -> Copied:
        """Drafts after the longest match in a tree."""
        config = self.config
        length, node, offset = tree.match(context)
        limit = min(n, config.max_drafts, int(config.factor * length))
        tokens, shares = tree.follow(node, offset, limit, config.min_probability)
        kinds = [kind_of(tree is self.tree, length + k, share) for k, share in enumerate(shares)]
        acceptance = [self.acceptance.of(kind, share) for kind, share in zip(kinds, shares, strict=True)]
        return Copied(length, list(zip(tokens, kinds, shares, strict=True)), acceptance)

    def _judge(self, token: int) -> None:
        """The next true token: was it drafted? All count, verified or not, up to the first wrong one."""
        if self.open and len(self.tree.text) == self.at:
            draft, kind, share = self.open.popleft()
            self.acceptance.hear(kind, share, draft == token)
            if draft != token:
                self.open.clear()
            self.at += 1


class Suffix(Lookup):
    """Copies the likeliest continuation, from the request or from past answers."""

    has_confidence: ClassVar[bool] = True

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__(config.max_drafts)
        self.config = config

    def begin(self, slots: int, capacity: int) -> LookupState:
        past = PastAnswers(self.config.depth, self.config.memory) if self.config.past else None
        acceptance = Acceptance()
        return LookupState(lambda: SuffixHistory(self.config, past, acceptance), slots)
