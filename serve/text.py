"""Tokens to text as they come: whole characters only, nothing of a stop string, nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
UNSURE = 3  # characters at the end that bytes still to come may change: UTF-8 needs at most 3 more


class Text:
    """The text of one answer, fed a token at a time.

    ``decode`` turns ids into text with replacement characters for bytes that are none (a tokenizer's
    ``decode``). What ``feed`` and ``close`` return, joined, is one decode of all ids, cut before the first
    stop string. ``stopped`` says that a stop string is complete: nothing may follow.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        assert all(stop), stop
        self.decode, self.stop = decode, tuple(stop)
        self.ids: list[int] = []
        self.stopped = False
        self.text = ""  # everything returned so far
        self._context = self._settled = (
            0  # ids before _settled are text; those from _context on are its context
        )
        self._shown = 0  # characters after the settled ones that are text already
        self._held = ""  # text that may turn out to begin a stop string

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before; often none."""
        assert not self.stopped, "a token after a stop string"
        self.ids.append(token)
        tail = self._tail()
        unsure = min(len(tail) - len(tail.rstrip(REPLACEMENT)), UNSURE)
        new = tail[self._shown : len(tail) - unsure]
        if unsure:
            self._shown += len(new)
        else:
            self._context, self._settled, self._shown = self._settled, len(self.ids), 0
        return self._release(new, last=False)

    def close(self) -> str:
        """What was held back, now that no token follows."""
        return "" if self.stopped else self._release(self._tail()[self._shown :], last=True)

    def _tail(self) -> str:
        """The text after the settled ids; some tokenizers decode a first token otherwise, so not alone."""
        before = self.decode(self.ids[self._context : self._settled])
        return self.decode(self.ids[self._context :])[len(before) :]

    def _release(self, new: str, last: bool) -> str:
        self._held += new
        found = [at for at in map(self._held.find, self.stop) if at >= 0]
        if found:
            self.stopped, keep = True, min(found)
        else:
            keep = len(self._held) - (0 if last else self._may_begin_stop())
        out, self._held = self._held[:keep], "" if self.stopped else self._held[keep:]
        self.text += out
        return out

    def _may_begin_stop(self) -> int:
        """How many characters at the end of the held text may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self.stop)), 0)
