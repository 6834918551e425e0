"""From pieces of text to OpenAI's objects. A whole body is the same pieces folded: there is no second path.

Source: OpenAI's API reference, the chat completion (chunk) object and the completion object. Ours is the
`lanewise` object, in bodies and in a stream's last chunk, which says which version answered.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from ..api.schemas import ChatRequest
from .protocol import Call, Chunk
from .text import Piece, TokenLogprob, TokenText


class Pieces(Protocol):
    """The pieces of one request's choices, in the order they were made, to every choice's last one."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    async def __anext__(self) -> Piece: ...

    def close(self) -> None:
        """Abort what is left. Does nothing after the end."""
        ...


class OpenAIStream:
    """A request's chunks. A class, since closing a generator that never started would not abort anything."""

    def __init__(self, call: Call, prompt_tokens: int, answers: int, pieces: Pieces) -> None:
        self._pieces = pieces
        self._chunks = _chunks(_Shape(call), prompt_tokens, answers, pieces)

    def __aiter__(self) -> "OpenAIStream":
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        self._pieces.close()
        await self._chunks.aclose()


async def whole_body(call: Call, prompt_tokens: int, answers: int, pieces: Pieces) -> Chunk:
    """All pieces folded into one answer. Cancelling closes the pieces."""
    shape = _Shape(call)
    texts, finishes = [""] * answers, [""] * answers
    tokens: list[list[TokenLogprob]] = [[] for _ in range(answers)]
    generated = [0] * answers
    try:
        async for piece in pieces:
            texts[piece.choice] += piece.text
            tokens[piece.choice] += piece.tokens
            generated[piece.choice] = piece.generated
            finishes[piece.choice] = piece.finish or ""
    finally:
        pieces.close()
    assert all(finishes), "pieces end after every choice's last one"
    choices = [shape.whole_choice(i, texts[i], finishes[i], tokens[i]) | {"index": i} for i in range(answers)]
    usage = _usage(prompt_tokens, sum(generated))
    return shape.object(choices, stream=False) | {"usage": usage, "lanewise": call.provenance}


async def _chunks(shape: "_Shape", prompt_tokens: int, answers: int, pieces: Pieces) -> AsyncGenerator[Chunk]:
    """Each chunk is held back until the next is there, so that the last one can carry the provenance."""
    generated = [0] * answers
    held: Chunk | None = None
    try:
        for opening in shape.opening_choices(answers):
            yield shape.object([opening], stream=True)
        async for piece in pieces:
            generated[piece.choice] = piece.generated
            if not (piece.text or piece.tokens or piece.finish):
                continue
            for choice in shape.chunk_choices(piece):
                if held is not None:
                    yield held
                    held = None
                chunk = shape.object([choice], stream=True)
                if choice["finish_reason"] is None:
                    yield chunk
                else:
                    held = chunk
        if shape.include_usage:
            assert held is not None
            yield held
            held = shape.object([], stream=True) | {"usage": _usage(prompt_tokens, sum(generated))}
        assert held is not None, "pieces end with a choice's last one"
        yield held | {"lanewise": shape.call.provenance}
    finally:
        pieces.close()


def _usage(prompt_tokens: int, completion_tokens: int) -> Chunk:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class _Shape:
    """The form of one call's objects: chat's or text completion's."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.include_usage = call.body.include_usage
        self._chat = isinstance(call.body, ChatRequest)
        self._logprobs = bool(call.body.logprobs) if self._chat else call.body.logprobs is not None
        self._created = int(time.time())

    def object(self, choices: list[Chunk], *, stream: bool) -> Chunk:
        if self._chat:
            prefix, kind = "chatcmpl", "chat.completion.chunk" if stream else "chat.completion"
        else:
            prefix, kind = "cmpl", "text_completion"
        return {
            "id": f"{prefix}-{self.call.id}",
            "object": kind,
            "created": self._created,
            "model": self.call.body.model,
            "choices": choices,
        }

    def opening_choices(self, answers: int) -> list[Chunk]:
        """Chat streams open each choice by naming the role."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._choice(i, {"delta": delta}, None, None) for i in range(answers)]

    def chunk_choices(self, piece: Piece) -> list[Chunk]:
        """Chat ends with a chunk that has nothing but the finish reason; text completions do not."""
        logprobs = self._logprobs_of(piece.tokens) if piece.tokens else None
        if not self._chat:
            return [self._choice(piece.choice, {"text": piece.text}, logprobs, piece.finish)]
        chunks: list[Chunk] = []
        if piece.text or piece.tokens:
            chunks.append(self._choice(piece.choice, {"delta": {"content": piece.text}}, logprobs, None))
        if piece.finish:
            chunks.append(self._choice(piece.choice, {"delta": {}}, None, piece.finish))
        return chunks

    def whole_choice(self, index: int, text: str, finish: str, tokens: list[TokenLogprob]) -> Chunk:
        content: Chunk = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return self._choice(index, content, self._logprobs_of(tokens) if self._logprobs else None, finish)

    def _choice(self, index: int, content: Chunk, logprobs: Chunk | None, finish: str | None) -> Chunk:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs_of(self, tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Chunk:
        if self._chat:
            content = [
                _chat_token(t.chosen) | {"top_logprobs": [_chat_token(other) for other in t.top]}
                for t in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [t.chosen.text for t in tokens],
            "token_logprobs": [t.chosen.logprob for t in tokens],
            # The chosen token is always among them, so there may be one more than was asked for.
            "top_logprobs": [{o.text: o.logprob for o in (*t.top, t.chosen)} for t in tokens],
            "text_offset": [t.start for t in tokens],
        }


def _chat_token(token: TokenText) -> dict[str, Any]:
    raw = None if token.bytes is None else list(token.bytes)
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}
