"""Text as it comes, beside one decode of all ids: whole characters, no stop string, nothing taken back."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serve.text import UNSURE, Text
from tests.tiny import tokenizer

CASES = Path(__file__).parent / "cases"
BYTES = json.loads((CASES / "s03_stream_bytes.json").read_text())["cases"]
STOPS = {
    case["name"]: case
    for case in json.loads((CASES / "s01_stop_cases.json").read_text())["cases"]
    if "stop" in case
}


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def decoder_of(pieces: list[bytes]):
    """A vocabulary of these pieces; ids count from 0."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def cut(text: str, stop) -> str:
    """Before the first stop string."""
    return text[: min([text.find(s) for s in stop if s in text], default=len(text))]


def heard(text: Text, ids) -> tuple[list[str], list[int]]:
    """What comes out token by token, then at the end; and the ids up to the one that ends the text."""
    out = []
    for i in ids:
        out.append(text.feed(i))
        if text.stopped:
            break
    return [*out, text.close()], text.ids


@pytest.mark.parametrize("case", BYTES, ids=lambda case: " ".join(case["pieces_hex"]))
def test_bytes_that_are_no_whole_character_wait(case):
    pieces = [bytes.fromhex(piece) for piece in case["pieces_hex"]]
    (*out, last), _ = heard(Text(decoder_of(pieces)), range(len(pieces)))
    if "rounds" in case:  # so many tokens of a round come together
        ends = [sum(case["rounds"][: k + 1]) for k in range(len(case["rounds"]))]
        starts = [0, *ends[:-1]]
        assert ["".join(out[a:b]) for a, b in zip(starts, ends, strict=True)] == case["emit_per_round"]
    else:
        assert out == case["emit"]
    assert last == case["at_finish"]
    assert "".join(out) + last == b"".join(pieces).decode(errors="replace")


def test_a_stop_string_early_in_a_long_round_keeps_the_tokens_up_to_it():
    case = STOPS["stop string early in a long round"]
    pieces = [piece.encode() for piece in case["pieces"]]
    text = Text(decoder_of(pieces), [case["stop"]])
    out, ids = heard(text, range(len(pieces)))
    assert text.stopped
    assert ("".join(out), text.text, len(ids)) == (
        case["emit_text"],
        case["emit_text"],
        case["token_ids_kept"],
    )


def test_a_stop_string_across_two_rounds_is_cut():
    case = STOPS["stop string across two rounds"]
    pieces = [piece.encode() for round_ in case["rounds"] for piece in round_]
    text = Text(decoder_of(pieces), [case["stop"]])
    assert heard(text, range(2)) == ([case["emit_text"], "", ""], [0, 1])
    assert text.stopped


SOME = "aab\u00e9\u4f60\U0001f389\ufffd".encode()
PIECES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=4),
        st.lists(st.sampled_from(sorted(set(SOME))), min_size=1, max_size=5).map(bytes),
        st.text("aab\u00e9\u4f60\U0001f389\ufffd", max_size=3).map(str.encode),
    ),
    max_size=14,
)
STOP_LISTS = st.lists(st.text("aab\u00e9\u4f60\U0001f389\ufffd", min_size=1, max_size=4), max_size=3)


@settings(max_examples=250, deadline=None, database=None)
@given(PIECES, STOP_LISTS)
def test_what_comes_is_one_decode_cut_before_the_first_stop_string(pieces, stop):
    """Random bytes, whole characters and their parts; at each token as much as is certain, and no more."""
    decode = decoder_of(pieces)
    text = Text(decode, stop)
    out, ids = heard(text, range(len(pieces)))
    whole = decode(ids)
    assert "".join(out) == text.text == cut(whole, stop)
    assert text.stopped == any(s in whole for s in stop)
    assert text.stopped or len(ids) == len(pieces)
    held = UNSURE + max(map(len, stop), default=1) - 1
    for n in range(1, len(ids)):
        assert len("".join(out[:n])) >= len(decode(ids[:n])) - held


@settings(max_examples=200, deadline=None, database=None)
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_ends_at_the_token_that_completes_it(words, stop):
    """One character a token, so the first stop string is known by trying every beginning."""
    text = Text(decode_bytes, stop)
    _, ids = heard(text, words.encode())
    ends = [n for n in range(1, len(words) + 1) if any(words[:n].endswith(s) for s in stop)]
    assert len(ids) == min(ends, default=len(words))
    assert text.stopped == bool(ends)


@pytest.mark.parametrize(
    ("words", "stop", "out", "left"),
    [
        ("abcx", ["abcd"], ["", "", "", "abcx"], ""),  # nearly a stop string
        ("aab", ["ab"], ["", "a", ""], ""),  # the first a is none of it
        ("abab", ["ababx", "x"], ["", "", "", ""], "abab"),  # held to the end
        ("abcd", ["abcd", "bc"], ["", "", "a"], ""),  # the inner one is complete first
        ("xbcd", ["abc", "cd"], ["x", "b", "", ""], ""),
        ("a\n\nb", ["\n\n"], ["a", "", ""], ""),
        ("ab", [], ["a", "b"], ""),
    ],
)
def test_text_that_may_begin_a_stop_string_waits_and_no_other(words, stop, out, left):
    assert heard(Text(decode_bytes, stop), words.encode())[0] == [*out, left]


@pytest.mark.parametrize("stop", ["\u4f60\u597d", "\U0001f389!", "\u00e9\u00e9"])
def test_a_stop_string_of_many_bytes_comes_a_byte_a_token(stop):
    text = Text(decode_bytes, [stop])
    out, ids = heard(text, f"so {stop} more".encode())
    assert ("".join(out), text.stopped) == ("so ", True)
    assert decode_bytes(ids) == f"so {stop}"


def test_of_two_stop_strings_in_one_token_the_first_counts():
    text = Text(decoder_of([b"go x y"]), ["y", "x"])
    assert heard(text, [0])[0] == ["go ", ""]


def test_a_stop_string_that_closing_completes_is_cut_too():
    """The replacement character is certain only when nothing follows."""
    text = Text(decode_bytes, ["!\ufffd"])
    assert heard(text, b"a!\xe4")[0] == ["a", "", "", ""]
    assert (text.text, text.stopped) == ("a", True)


LEVEL = tokenizer()


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(0, len(LEVEL) - 1), max_size=20), st.booleans())
def test_a_byte_level_tokenizer_a_token_a_byte(ids, skip):
    """The decoder of the targets' library: any byte after any other, with and without special tokens."""

    def decode(ids):
        return LEVEL.decode(ids, skip_special_tokens=skip)

    assert "".join(heard(Text(decode), ids)[0]) == decode(ids)


# A decoder as sentencepiece models have it: a word brings its space, the first one of a text loses it, and
# characters without a token of their own are byte tokens.
WORDS = ["\u2581", "\u2581a", "\u2581b", "b", "\u00e9"]
VOCAB = {
    name: i
    for i, name in enumerate(["<unk>", "<s>", "<tool>", *WORDS, *(f"<0x{b:02X}>" for b in range(256))])
}


def pieces_tokenizer() -> Tokenizer:
    out = Tokenizer(models.BPE(vocab=VOCAB, merges=[], byte_fallback=True, unk_token="<unk>"))
    out.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    out.add_special_tokens(["<s>", "<tool>"])
    return out


PIECES_TOKENIZER = pieces_tokenizer()


def ids_of(*parts: str) -> list[int]:
    """Ids of names; of byte tokens where a part is no name."""
    return [
        i
        for part in parts
        for i in ([VOCAB[part]] if part in VOCAB else [VOCAB[f"<0x{b:02X}>"] for b in part.encode()])
    ]


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        (("\u2581a", "\u2581b"), ["a", " b", ""]),  # one leading space is dropped, the next is not
        (("<s>", "\u2581a", "\u2581b"), ["", "a", " b", ""]),
        (("\u2581", "\u2581a"), ["", " a", ""]),
        (("\u2581a", "<tool>", "<tool>", "\u2581b"), ["a", "", "", " b", ""]),  # also after a silent token
        (("\u2581a", "\u4f60\u597d"), ["a", "", "", "\u4f60", "", "", "\u597d", ""]),  # a run of byte tokens
        (("\U0001f389\U0001f389b",), ["", "", "", "\U0001f389", "", "", "", "\U0001f389", "b", ""]),
    ],
)
def test_a_decoder_that_needs_what_stands_before(parts, want):
    ids = ids_of(*parts)
    out, _ = heard(Text(PIECES_TOKENIZER.decode), ids)
    assert out == want
    assert "".join(out) == PIECES_TOKENIZER.decode(ids)


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(st.sampled_from(["<s>", "<tool>", *WORDS, "\u4f60", "\U0001f389", "\u00e8", "c"]), max_size=8),
    STOP_LISTS,
)
def test_words_and_byte_tokens_in_any_order(parts, stop):
    text = Text(PIECES_TOKENIZER.decode, stop)
    out, ids = heard(text, ids_of(*parts))
    assert "".join(out) == text.text == cut(PIECES_TOKENIZER.decode(ids), stop)


def test_an_empty_stop_string_and_a_token_after_the_end_are_ours_to_avoid():
    with pytest.raises(AssertionError):
        Text(decode_bytes, [""])
    text = Text(decode_bytes, ["a"])
    text.feed(ord("a"))
    with pytest.raises(AssertionError, match="after a stop string"):
        text.feed(ord("b"))
