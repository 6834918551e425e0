"""Text leaves whole and unstopped, however the tokens cut it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from lanewise.server.engines.sampling import Pick
from lanewise.server.engines.text import ChoiceText, Detokenizer, StopStrings, token_text

MULTIBYTE = "aé€😀\u200d字\n"


def test_characters_that_span_tokens_come_out_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode(MULTIBYTE)
    assert len(tokens) == len(MULTIBYTE.encode())
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push(token) for token in tokens]
    assert [part for part in parts if part] == list(MULTIBYTE)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("tail", [b"\xe2\x82", b"\xff", b"\xf0\x9f\x98"])
def test_what_never_becomes_a_character_comes_at_the_end(
    tokenizer: PreTrainedTokenizerBase, tail: bytes
) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in tokens_of(tokenizer, b"ab" + tail))
    assert text == "ab"
    assert text + detokenizer.flush() == (b"ab" + tail).decode(errors="replace")


@given(data=st.binary(max_size=60))
def test_pieces_of_any_bytes_add_up(tokenizer: PreTrainedTokenizerBase, data: bytes) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in tokens_of(tokenizer, data)) + detokenizer.flush()
    assert text == data.decode(errors="replace")


@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_as_if_the_whole_text_were_known(text: str, stops: list[str]) -> None:
    filtered, out, stopped = StopStrings(stops), "", False
    for char in text:
        released, stopped = filtered.push(char)
        out += released
        if stopped:
            break
    else:
        out += filtered.flush()
    # A stop string is acted on when its last character comes: the one that ends first wins.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end = min((end for end, _ in ends), default=None)
    expected = text if end is None else text[: min(start for e, start in ends if e == end)]
    assert stopped == (end is not None)
    assert out == expected


def test_logprobs_travel_with_their_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = ChoiceText(tokenizer, 0, ["END"], logprobs=True)
    tokens = tokenizer.encode("aé EN EN")
    pieces = [text.push(Pick(token, -1.0), None) for token in tokens]
    pieces.append(text.push(Pick(tokenizer.encode("D")[0], -1.0), None))
    assert "".join(piece.text for piece in pieces) == "aé EN "
    assert pieces[-1].finish == "stop"
    shown = [t.chosen.text for piece in pieces for t in piece.tokens]
    assert shown == ["a", "bytes:\\xc3", "bytes:\\xa9", " ", "E", "N", " "]
    assert b"".join(t.chosen.bytes or b"?" for piece in pieces for t in piece.tokens).decode() == "aé EN "
    for piece in pieces:
        assert bool(piece.tokens) == bool(piece.text)


def test_the_last_token_releases_everything(tokenizer: PreTrainedTokenizerBase) -> None:
    text = ChoiceText(tokenizer, 2, ["END"], logprobs=True)
    first, second = tokenizer.encode("EN")
    assert text.push(Pick(first), None).text == ""
    last = text.push(Pick(second), "length")
    assert (last.choice, last.text, last.finish, last.generated) == (2, "EN", "length", 2)
    assert len(last.tokens) == 2


def test_an_ending_token_is_counted_and_not_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    text = ChoiceText(tokenizer, 0, ["END"], logprobs=True)
    [token] = tokenizer.encode("E")
    text.push(Pick(token), None)
    last = text.end()
    assert (last.text, last.finish, last.generated, len(last.tokens)) == ("E", "stop", 2, 1)


def test_special_tokens_have_a_name_in_logprobs_and_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(eos, int)
    assert token_text(tokenizer, eos, 0.0).text == "<|im_end|>"
    text = ChoiceText(tokenizer, 0, [], logprobs=False)
    assert text.push(Pick(eos), "length").text == ""


def tokens_of(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    """Tokens of any bytes, also those that are no text: the tiny base has one per byte."""
    by_byte = {}
    for token in range(256):
        raw = token_text(tokenizer, token, 0.0).bytes
        assert raw is not None
        by_byte[raw[0]] = token
    return [by_byte[byte] for byte in data]
