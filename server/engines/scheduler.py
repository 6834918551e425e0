"""Continuous batching: every step is one forward over whatever is running, whichever lanes that needs.

transformers has continuous batching of its own (looked at: 5.24). It knows no adapter per request, shares
prefix blocks with no version in their key, returns no top-k logprobs and is private API; hence this file.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lanewise.kernels.attach import LanePool

from ..errors import EngineFailure
from .sampling import Pick, Row, sample
from .seats import Seats, Span, Step
from .text import ChoiceText, Finish, Piece


@dataclass(eq=False)
class Choice:
    """One answer being made: a prompt, a lane's slot (−1: base) and the rules its tokens are chosen by."""

    prompt: Sequence[int]
    slot: int
    row: Row
    text: ChoiceText
    limit: int  # most tokens to answer with
    ends: frozenset[int]  # tokens that end the answer and are not part of it
    answer: list[int] = field(default_factory=list[int])
    computed: int = 0  # tokens that the layers remember
    seat: int | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def decoding(self) -> bool:
        """Only the newest token is left to compute."""
        return bool(self.answer)

    def tokens(self, start: int, end: int) -> list[int]:
        if start >= len(self.prompt):
            return self.answer[start - len(self.prompt) : end - len(self.prompt)]
        assert end <= len(self.prompt), "a span is all prompt or all answer"
        return list(self.prompt[start:end])


Outcome = tuple[Choice, Piece | EngineFailure]
"""What a step did to a choice: a piece of its answer, or its end by failure."""


@dataclass(frozen=True)
class _Batch:
    """The rows of one forward: decode spans, then prefill spans; `choices` in the same order."""

    choices: list[Choice]
    spans: list[Span]
    decode: int  # how many of the spans are decode rows


class Scheduler:
    """Waiting and running choices of one model. All methods are called on the engine's thread.

    A step gives every decoding choice its next token and spends up to `prefill_tokens` on prompts, so that a
    long prompt never holds up the others for longer than that.
    """

    def __init__(
        self, model: PreTrainedModel, pool: LanePool, seats: Seats, *, max_running: int, prefill_tokens: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._seats = seats
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def uses(self, slot: int) -> bool:
        return any(choice.slot == slot for choice in (*self._waiting, *self._running))

    def receive(self, choices: Sequence[Choice]) -> None:
        self._waiting.extend(choices)

    def abort(self, choices: Sequence[Choice]) -> None:
        """Forget choices, wherever they are; those that have ended are passed over."""
        for choice in choices:
            if choice in self._running:
                self._leave(choice)
            elif choice in self._waiting:
                self._waiting.remove(choice)

    def fail_running(self) -> list[Choice]:
        """Give up everything that runs, after a step that raised; what waits goes on waiting."""
        failed = list(self._running)
        self.abort(failed)
        return failed

    def step(self) -> list[Outcome]:
        """Admit, forward, sample, publish. Not to be called when idle. Raises whatever the model raises."""
        self._admit()
        batch = self._plan()
        sampling, logits = self._forward(batch)
        picks = sample(logits, [choice.row for choice in sampling]) if sampling else []
        return self._publish(sampling, picks)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            choice = self._waiting.popleft()
            choice.seat = self._seats.take()
            self._running.append(choice)

    def _plan(self) -> _Batch:
        decoding = sorted((c for c in self._running if c.decoding), key=_seat)
        spans = [Span(_seat(c), c.computed, c.computed + 1) for c in decoding]
        prefilling, budget = list[Choice](), self._prefill_tokens
        for choice in self._running:
            if choice.decoding or not budget:
                continue
            end = min(len(choice.prompt), choice.computed + budget)
            budget -= end - choice.computed
            prefilling.append(choice)
            spans.append(Span(_seat(choice), choice.computed, end))
        return _Batch(decoding + prefilling, spans, len(decoding))

    def _forward(self, batch: _Batch) -> tuple[list[Choice], Tensor]:
        """The choices whose every token is computed now, and the logits [R, V] of what follows."""
        step = Step(self._seats, batch.spans[: batch.decode], batch.spans[batch.decode :])
        pairs = list(zip(batch.choices, batch.spans, strict=True))
        tokens = self._tensor([t for choice, span in pairs for t in choice.tokens(span.start, span.end)])
        slots = self._tensor([choice.slot for choice, span in pairs for _ in range(span.length)])
        last_rows, sampling, row = list[int](), list[Choice](), 0
        for choice, span in pairs:
            row += span.length
            if span.end == choice.length:
                sampling.append(choice)
                last_rows.append(row - 1)
        last = self._tensor(last_rows)
        arguments: dict[str, Any] = {"use_cache": False, "logits_to_keep": last, "step": step}
        with torch.inference_mode(), self._pool.using(slots, head_rows=last):
            output = self._model(input_ids=tokens[None], position_ids=step.positions[None], **arguments)
        for choice, span in pairs:
            choice.computed = span.end
        return sampling, output.logits[0]

    def _publish(self, choices: Sequence[Choice], picks: Sequence[Pick | None]) -> list[Outcome]:
        outcomes = [
            (choice, self._outcome(choice, pick)) for choice, pick in zip(choices, picks, strict=True)
        ]
        # Only now, with every outcome known: a step that raises before this ends every choice in it.
        for choice, outcome in outcomes:
            if isinstance(outcome, EngineFailure) or outcome.finish:
                self._leave(choice)
        return outcomes

    def _outcome(self, choice: Choice, pick: Pick | None) -> Piece | EngineFailure:
        if pick is None:
            return EngineFailure("the model's output is not finite: are the factors in range?")
        return self._extend(choice, pick)

    def _extend(self, choice: Choice, pick: Pick) -> Piece:
        if pick.token in choice.ends:
            return choice.text.end()
        choice.answer.append(pick.token)
        choice.row.used[pick.token] += 1
        finish: Finish | None = "length" if len(choice.answer) == choice.limit else None
        return choice.text.push(pick, finish)

    def _leave(self, choice: Choice) -> None:
        self._running.remove(choice)
        self._seats.give_back(_seat(choice))
        choice.seat = None

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._seats.device)


def _seat(choice: Choice) -> int:
    assert choice.seat is not None, "a running choice has a seat"
    return choice.seat
