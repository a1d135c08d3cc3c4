"""Tokens to text as they come: whole characters only, nothing of a stop string, nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# Replacement characters at the end that bytes still to come may change: the at most 3 bytes of a character
# that is not whole yet. Byte fallback decodes a run of byte tokens as one, so while that character is not
# whole, the up to 4 bytes of the one before it are 4 replacement characters in place of one.
UNSURE = 3 + 3


class Text:
    """The text of one answer, fed a token at a time.

    ``decode`` turns ids into text with replacement characters for bytes that are none (a tokenizer's
    ``decode``). What ``feed`` and ``close`` return, joined, is one decode of all ids, cut before the first
    stop string. ``stopped`` says that a stop string is complete: nothing may follow. Only where a decoder
    takes back text for good (byte fallback, for the characters just before an invalid byte), it stays said.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        assert all(stop), stop
        self.decode, self.stop = decode, tuple(stop)
        self.ids: list[int] = []
        self.stopped = False
        self.text = ""  # everything returned so far
        self._context = self._settled = 0  # ids before _settled are text; from _context on, its context
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
            if tail:  # a token without text is no context: what follows it would lose its leading space
                self._context = self._settled
            self._settled, self._shown = len(self.ids), 0
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
