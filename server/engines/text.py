"""From tokens to text: never half a character, never a piece of a stop string.

A character may span tokens and so may a stop string; text that may still become either is withheld until
the next token decides. A token's logprob travels with the first of its text that is released.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .sampling import Pick

Finish = Literal["stop", "length"]

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so one that is still undecoded after this many tokens is not UTF-8.
_MOST_WITHHELD = 16
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # GPT-2's spelling of bytes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # sentencepiece's


@dataclass(frozen=True)
class TokenText:
    """One token as it is shown in logprobs; `bytes` is None where the tokenizer does not say."""

    text: str
    bytes: bytes | None
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the answer and the likeliest in its place; `start` counts characters before it."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    start: int


@dataclass(frozen=True)
class Piece:
    """What one step adds to one choice. A choice's last piece, and only it, has `finish`.

    `generated` is how many tokens the choice has sampled so far, the stop token included.
    """

    choice: int
    text: str
    generated: int
    finish: Finish | None = None
    tokens: tuple[TokenLogprob, ...] = ()


class Detokenizer:
    """Text of a growing list of tokens, a whole character at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # tokens whose text is out, kept because text may depend on what precedes
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith(_UNDECODED):
            if len(self._waiting) < _MOST_WITHHELD:
                return ""
            # The last one may still become a character; its token stays.
            kept = self._waiting[-1:]
            self._shown, self._waiting = self._waiting[:-1], kept
            return text[:-1]
        self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """What is left at the end, undecodable bytes shown as U+FFFD."""
        text = self._new_text() if self._waiting else ""
        self._shown, self._waiting = self._waiting, []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._waiting)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens, skip_special_tokens=True)


class StopStrings:
    """Passes text on, withholds what may be the start of a stop string, ends at the first one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = stops
        self._withheld = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to release, whether a stop string was met; the stop string itself is never released)."""
        text = self._withheld + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._withheld = ""
            return text[: min(found)], True
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._withheld = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        text, self._withheld = self._withheld, ""
        return text


class ChoiceText:
    """One choice's answer, from picks to pieces."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, choice: int, stops: Sequence[str], logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._logprobs = logprobs
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._generated = 0
        self._decoded = 0  # characters out of the detokenizer
        self._released = 0  # characters out of here
        self._unreleased: list[TokenLogprob] = []

    def push(self, pick: Pick, finish: Finish | None) -> Piece:
        """The piece that a token of the answer makes. With `finish` it is the last one."""
        self._generated += 1
        if self._logprobs:
            self._unreleased.append(self._shown(pick))
        text = self._detokenizer.push(pick.token)
        if finish:
            text += self._detokenizer.flush()
        self._decoded += len(text)
        text, stopped = self._stops.push(text)
        if stopped:
            return self._piece(text, "stop", cut=True)
        if finish:
            text += self._stops.flush()
        return self._piece(text, finish)

    def end(self) -> Piece:
        """The last piece, after a token that ends the answer and is not part of it."""
        self._generated += 1
        text, stopped = self._stops.push(self._detokenizer.flush())
        if not stopped:
            text += self._stops.flush()
        return self._piece(text, "stop", cut=stopped)

    def _piece(self, text: str, finish: Finish | None, cut: bool = False) -> Piece:
        self._released += len(text)
        everything = finish is not None and not cut
        tokens = [t for t in self._unreleased if everything or t.start < self._released]
        self._unreleased = self._unreleased[len(tokens) :]
        return Piece(self._choice, text, self._generated, finish, tuple(tokens))

    def _shown(self, pick: Pick) -> TokenLogprob:
        chosen = token_text(self._tokenizer, pick.token, pick.logprob)
        top = tuple(token_text(self._tokenizer, token, logprob) for token, logprob in pick.top)
        return TokenLogprob(chosen, top, self._decoded)


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, skip_special_tokens: bool = False
) -> str:
    text = tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str), "one list of tokens decodes to one text"
    return text


def token_text(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> TokenText:
    """A token by itself. One that is not whole characters is written as OpenAI does: `bytes:\\xe2\\x82`."""
    text = decode(tokenizer, [token])
    if _UNDECODED not in text:
        return TokenText(text, text.encode(), logprob)
    raw = _token_bytes(tokenizer, token)
    if raw is None:
        return TokenText(text, None, logprob)
    return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw, logprob)


def _token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes | None:
    name = tokenizer.convert_ids_to_tokens(token)
    assert isinstance(name, str), "one token has one name"
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(match[1])
    if all(char in _BYTE_OF for char in name):
        return bytes(_BYTE_OF[char] for char in name)
    return None


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
