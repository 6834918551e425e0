"""Seats: what the layers remember of each running choice, and which seats the rows of a step belong to.

Every running choice has a seat of its own; no other choice ever reads or writes it. A layer keeps named
tensors with one row per seat: those of the first kind grow with a choice's tokens (keys, values), those of
the second do not (a recurrent state). All rows of a tensor have the same size, so that the decode rows of a
whole batch are one padded operation. Memory starts empty, grows by need and is given back when the last seat
is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

_BLOCK = 256  # tokens by which rows grow


@dataclass(frozen=True)
class PerToken:
    """A layer's tensor [seats, heads, tokens, dim], in the model's dtype."""

    heads: int
    dim: int


@dataclass(frozen=True)
class PerChoice:
    """A layer's tensor [seats, *shape], in the model's dtype unless it has one of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


LayerMemory = Mapping[str, PerToken | PerChoice]
"""What one layer remembers of a choice, by name."""


class Seats:
    """The memory of at most `max_seats` choices of at most `context_length` tokens; one entry per layer."""

    def __init__(
        self,
        layers: Sequence[LayerMemory],
        *,
        max_seats: int,
        context_length: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self.device = torch.device(device)
        self._layers = layers
        self._max_seats = max_seats
        self._context_length = context_length
        self._dtype = dtype
        self._taken: set[int] = set()
        self._size = 0, 0  # seats and tokens that there is memory for
        self._tensors: dict[tuple[int, str], Tensor] = {}

    @property
    def free(self) -> int:
        return self._max_seats - len(self._taken)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def take(self) -> int:
        """The lowest free seat: low seats keep the batch's rows side by side."""
        assert self.free, "no seat is free"
        seat = next(seat for seat in range(self._max_seats) if seat not in self._taken)
        self._taken.add(seat)
        return seat

    def give_back(self, seat: int) -> None:
        """Free a seat and wipe it: the next choice starts from zeros and sees nothing of this one."""
        self._taken.remove(seat)
        if not self._taken:
            self._size = 0, 0
            self._tensors.clear()
        elif seat < self._size[0]:
            for tensor in self._tensors.values():
                tensor[seat] = 0

    def reserve(self, seats: int, tokens: int) -> None:
        """Make room for seats [0, seats) of `tokens` tokens."""
        assert seats <= self._max_seats, f"{seats} seats of {self._max_seats}"
        assert tokens <= self._context_length, f"{tokens} tokens of {self._context_length}"
        have_seats, have_tokens = self._size
        if seats <= have_seats and tokens <= have_tokens:
            return
        if seats > have_seats:
            seats = min(max(seats, 2 * have_seats), self._max_seats)
        blocks = -(-max(tokens, have_tokens) // _BLOCK)
        self._size = max(seats, have_seats), min(blocks * _BLOCK, self._context_length)
        for index, layer in enumerate(self._layers):
            for name, memory in layer.items():
                old, new = self._tensors.get((index, name)), self._zeros(memory)
                if old is not None:
                    new[tuple(slice(size) for size in old.shape)] = old
                self._tensors[index, name] = new

    def memory(self, layer: int, name: str) -> Tensor:
        """One tensor of a layer, of all seats; write to it in place."""
        return self._tensors[layer, name]

    def _zeros(self, memory: PerToken | PerChoice) -> Tensor:
        """Not `empty`: padding is multiplied by 0, and 0·NaN is NaN."""
        seats, tokens = self._size
        if isinstance(memory, PerToken):
            shape = seats, memory.heads, tokens, memory.dim
            return torch.zeros(shape, dtype=self._dtype, device=self.device)
        return torch.zeros((seats, *memory.shape), dtype=memory.dtype or self._dtype, device=self.device)


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of the choice in `seat` that one step computes."""

    seat: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class Step:
    """Where the rows of one forward belong: `decode` spans of one token each, then `prefill` spans."""

    def __init__(self, seats: Seats, decode: Sequence[Span], prefill: Sequence[Span]) -> None:
        assert all(span.length == 1 for span in decode), "a decode row is one token"
        self.decode = decode
        self.prefill = prefill
        self.spans = [*decode, *prefill]
        seats.reserve(1 + max(span.seat for span in self.spans), max(span.end for span in self.spans))
        self._seats = seats
        self.row_seats = self._tensor([span.seat for span in self.spans for _ in range(span.length)])
        self.positions = self._tensor([at for span in self.spans for at in range(span.start, span.end)])

    def memory(self, layer: int, name: str) -> Tensor:
        return self._seats.memory(layer, name)

    @cached_property
    def rows(self) -> list[slice]:
        """Each span's rows in the flattened batch."""
        ends = list(accumulate(span.length for span in self.spans))
        return [slice(end - span.length, end) for span, end in zip(self.spans, ends, strict=True)]

    @cached_property
    def decode_seats(self) -> Tensor | slice:
        seats = [span.seat for span in self.decode]
        # Side by side, as they mostly are, a slice reads them in place where an index would copy them.
        return slice(len(seats)) if seats == list(range(len(seats))) else self._tensor(seats)

    @cached_property
    def sees(self) -> Tensor:
        """Which tokens of its own choice each row may see: [T, longest] bool."""
        longest = max(span.end for span in self.spans)
        return torch.arange(longest, device=self._seats.device) <= self.positions[:, None]

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._seats.device)
