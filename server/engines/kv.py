"""Keys and values of running choices, and the attention that reads them.

Every running choice has a seat of its own: a row of the cache that no other choice ever reads. Rows all have
the same length, so that the decode rows of a whole batch are one padded attention. The cache starts empty,
grows by need and is given back when the last seat is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

ATTENTION = "lanewise"
_BLOCK = 256  # tokens by which rows grow


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of the choice in `seat` that one step computes."""

    seat: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class KvCache:
    """Keys and values for at most `max_seats` choices of at most `context_length` tokens."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_seats: int,
        context_length: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        heads, hidden = config.num_attention_heads, config.hidden_size
        self._layers: int = config.num_hidden_layers
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim: int = getattr(config, "head_dim", None) or hidden // heads
        self._max_seats = max_seats
        self._context_length = context_length
        self._taken: set[int] = set()
        self._empty = torch.empty(
            (self._layers, 2, 0, self._kv_heads, 0, self._head_dim), dtype=dtype, device=device
        )
        self._cache = self._empty  # [layers, key or value, seats, kv heads, tokens, head dim]

    @property
    def free_seats(self) -> int:
        return self._max_seats - len(self._taken)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def take(self) -> int:
        """The lowest free seat: low seats keep the batch's rows side by side."""
        assert self.free_seats, "no seat is free"
        seat = next(seat for seat in range(self._max_seats) if seat not in self._taken)
        self._taken.add(seat)
        return seat

    def give_back(self, seat: int) -> None:
        """Free a seat and wipe it, so that nothing of this choice (an overflow, say) can reach the next."""
        self._taken.remove(seat)
        if not self._taken:
            self._cache = self._empty
        elif seat < self._cache.shape[2]:
            self._cache[:, :, seat] = 0

    def reserve(self, seats: int, tokens: int) -> None:
        """Make room for seats [0, seats) of `tokens` tokens."""
        assert seats <= self._max_seats, f"{seats} seats of {self._max_seats}"
        assert tokens <= self._context_length, f"{tokens} tokens of {self._context_length}"
        old = self._cache
        have_seats, have_tokens = old.shape[2], old.shape[4]
        if seats <= have_seats and tokens <= have_tokens:
            return
        if seats > have_seats:
            seats = min(max(seats, 2 * have_seats), self._max_seats)
        blocks = -(-max(tokens, have_tokens) // _BLOCK)
        tokens = min(blocks * _BLOCK, self._context_length)
        shape = (*old.shape[:2], max(seats, have_seats), old.shape[3], tokens, old.shape[5])
        self._cache = old.new_zeros(shape)  # not `empty`: padding is multiplied by 0, and 0·NaN is NaN
        self._cache[:, :, :have_seats, :, :have_tokens] = old

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [seats, kv heads, tokens, head dim]."""
        return self._cache[index, 0], self._cache[index, 1]


class StepAttention:
    """Where the rows of one forward belong: `decode` spans of one token each, then `prefill` spans."""

    def __init__(self, cache: KvCache, decode: Sequence[Span], prefill: Sequence[Span]) -> None:
        assert all(span.length == 1 for span in decode), "a decode row is one token"
        spans = [*decode, *prefill]
        cache.reserve(1 + max(span.seat for span in spans), max(span.end for span in spans))
        self._cache = cache
        self._decode = decode
        self._prefill = prefill
        self._seats = self._tensor([span.seat for span in spans for _ in range(span.length)])
        self.positions = self._tensor([at for span in spans for at in range(span.start, span.end)])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new keys and values, then attend: each row to its own seat, up to its own position.

        Shapes: query [heads, T, D], key and value [kv heads, T, D] → [T, heads, D].
        """
        keys, values = self._cache.layer(layer)
        keys[self._seats, :, self.positions] = key.transpose(0, 1)
        values[self._seats, :, self.positions] = value.transpose(0, 1)
        parts: list[Tensor] = []
        if self._decode:
            parts.append(self._attend_decode(query[:, : len(self._decode)], keys, values, scaling))
        row = len(self._decode)
        for span, mask in zip(self._prefill, self._prefill_masks, strict=True):
            seen = (span.seat, slice(None), slice(span.end))
            out = scaled_dot_product_attention(
                query[None, :, row : row + span.length],
                keys[seen][None],
                values[seen][None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
            parts.append(out[0].transpose(0, 1))
            row += span.length
        return torch.cat(parts)

    def _attend_decode(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """All decode rows at once. Heads that share a key-value head become its queries: no key is copied."""
        heads, rows, dim = query.shape
        kv_heads = keys.shape[1]
        longest = self._decode_mask.shape[-1]
        grouped = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
        out = scaled_dot_product_attention(
            grouped,
            keys[self._decode_seats, :, :longest],
            values[self._decode_seats, :, :longest],
            attn_mask=self._decode_mask,
            scale=scaling,
        )
        return out.reshape(rows, heads, dim)

    @cached_property
    def _decode_seats(self) -> Tensor | slice:
        seats = [span.seat for span in self._decode]
        # Side by side, as they mostly are, a slice reads them in place where an index would copy them.
        return slice(len(seats)) if seats == list(range(len(seats))) else self._tensor(seats)

    @cached_property
    def _decode_mask(self) -> Tensor:
        """Which tokens each decode row sees: [rows, 1, 1, longest] bool."""
        ends = self._tensor([span.end for span in self._decode])
        places = torch.arange(max(span.end for span in self._decode), device=ends.device)
        return (places < ends[:, None])[:, None, None]

    @cached_property
    def _prefill_masks(self) -> list[Tensor | None]:
        """Per span [length, end] bool; None where plain causality is enough."""
        places = torch.arange(max((span.end for span in self._prefill), default=0), device=self._cache.device)
        return [
            None if span.start == 0 else places[: span.end] <= places[span.start : span.end, None]
            for span in self._prefill
        ]

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._cache.device)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: StepAttention,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, D] → [1, T, heads, D], and no weights."""
    assert attention_mask is None, "no mask is made for an attention transformers does not know"
    assert sliding_window is None, "the torch engine refuses sliding windows when it loads a base"
    layer = module.layer_idx
    assert isinstance(layer, int)
    return step(layer, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)
