"""Prompt lookup decoding (Saxena 2023; vLLM's method ``ngram``): drafts are copied from the request itself.

The newest tokens, anchor included, are looked for earlier in prompt and answer: the longest n-gram that
stood there before wins, and of its occurrences the last. What followed it are the drafts. Where the text
ends before there are enough, the copy reads on in its own output, as in LZ77:

    text     the cat sat. the cat | sat          anchor: sat; its trigram stood there before
    drafts   . the cat sat . the                 four tokens of the text, then what was copied

(vLLM takes the first occurrence, which never runs out and knows least of what is going on now.) Each n-gram
of a text is one entry of a table, n-gram to the position after it: a token costs as many entries as there
are sizes, a round as many look-ups, however long the text is.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.lookup import Lookup, LookupState


@dataclass
class NgramConfig:
    """``serve.ngram.*``"""

    shortest: int = 2  # tokens of an n-gram, the anchor included (vLLM: prompt_lookup_min)
    longest: int = 4  # (prompt_lookup_max)
    max_drafts: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"serve.ngram.shortest={self.shortest}, serve.ngram.longest={self.longest}: give at least 1 "
                "token, and a longest n-gram that is no shorter"
            )
        if self.max_drafts < 1:
            raise ValueError(f"serve.ngram.max_drafts={self.max_drafts}: give at least 1 draft")


class NgramHistory:
    """A text and, for each of its n-grams, where what last followed it begins."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.text: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append tokens, and enter every n-gram that ends in one of them."""
        for token in tokens:
            ngrams = self._ending_in(token)
            self.text.append(token)
            self.after.update(dict.fromkeys(ngrams, len(self.text)))

    def answering(self) -> None:
        """Prompt and answer are one text."""

    def drafts(self, anchor: int, n: int) -> tuple[list[int], list[float]]:
        """``n`` drafts, or none where no n-gram that ends in the anchor stood in the text before."""
        start = next((self.after[ngram] for ngram in self._ending_in(anchor) if ngram in self.after), None)
        if start is None:
            return [], []
        copied = [*self.text[start : start + n], anchor]
        return [copied[k % len(copied)] for k in range(n)], []

    def close(self) -> None:
        """Nothing outlives its request."""

    def _ending_in(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams of the text with this token after it, longest first."""
        newest = (*self.text[max(0, len(self.text) - self.longest + 1) :], token)
        return [newest[-size:] for size in range(len(newest), self.shortest - 1, -1)]


class Ngram(Lookup):
    """Copies what followed the newest n-gram the last time."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config.max_drafts)
        self.config = config

    def begin(self, slots: int, capacity: int) -> LookupState:
        return LookupState(lambda: NgramHistory(self.config.shortest, self.config.longest), slots)
