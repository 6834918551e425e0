"""A scripted engine for tests: it says what it is told to, and breaks on demand.

It keeps the protocol's promises and asserts that its caller keeps theirs.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from lanewise.loaders import Adapter, Inventory, Layout

from ..api.schemas import ChatRequest
from ..errors import EngineFailure, LanewiseError, Overloaded, Unavailable, Unprocessable
from .openai_output import OpenAIStream, whole_body
from .protocol import Call, Chunk, Lane
from .text import Finish, Piece, TokenLogprob, TokenText

Script = Callable[[Call], Sequence[str]] | Mapping[str, Sequence[str]]
"""What to say: the tokens' texts, from the call or by lane key ("base" for the base)."""

_LOGPROB = -0.25


class FakeEngine:
    """See `protocol.Engine`. `loads`, `unloads` and `aborts` record what was asked of it, in order.

    Faults, all off: `refuse_load` is raised by the next load, `refuse_layouts` fit no lane, `fail_after`
    breaks every answer once it has said that many tokens, `overloaded` refuses every request, `die` ends all
    answers and the engine's health.
    """

    def __init__(
        self,
        inventory: Inventory,
        script: Script,
        *,
        delay_s: float = 0.0,
        max_lanes: int = 8,
        max_rank: int = 64,
        max_running: int = 256,
        load_s: float = 0.0,
    ) -> None:
        self._inventory = inventory
        self._script = script
        self._delay_s = delay_s
        self._load_s = load_s
        self._max_lanes = max_lanes
        self._max_rank = max_rank
        self._max_running = max_running
        self._started = False
        self._stopping = False
        self._dead = False
        self._answers: set[_ScriptedAnswer] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._digests: dict[str, str] = {}  # of every key ever loaded

        self.lanes: set[str] = set()
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.aborts: list[str] = []
        self.refuse_load: LanewiseError | None = None
        self.refuse_layouts: set[Layout] = set()
        self.fail_after: int | None = None
        self.overloaded = False

    @property
    def inventory(self) -> Inventory:
        return self._inventory

    @property
    def context_length(self) -> int:
        return self._inventory.context_length

    @property
    def max_lanes(self) -> int:
        return self._max_lanes

    @property
    def max_rank(self) -> int:
        return self._max_rank

    @property
    def healthy(self) -> bool:
        return self._started and not self._dead

    @property
    def running(self) -> int:
        """How many requests are being answered."""
        return len(self._answers)

    async def start(self) -> None:
        assert not self._started, "an engine starts once"
        self._started = True

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        try:
            await asyncio.wait_for(self._quiet.wait(), grace_s)
        except TimeoutError:
            self._end_all(Unavailable("the server stopped before the answer was finished"))
        self._started = False

    def check(self, adapter: Adapter) -> None:
        if adapter.layout in self.refuse_layouts:
            raise Unprocessable(f"no lane holds the layout {adapter.layout}", code="invalid_adapter")

    async def load(self, lane: Lane, adapter: Adapter) -> None:
        assert lane.key not in self.lanes, f"{lane.key} is loaded already"
        assert len(self.lanes) < self._max_lanes, "the caller has made sure that a slot is free"
        assert self._digests.setdefault(lane.key, lane.digest) == lane.digest, f"{lane.key} was re-bound"
        self.lanes.add(lane.key)  # at once: the slot is taken while the load runs
        self.loads.append(lane.key)
        await asyncio.sleep(self._load_s)
        if self.refuse_load is not None:
            error, self.refuse_load = self.refuse_load, None
            self.lanes.remove(lane.key)
            raise error

    async def unload(self, lane: Lane) -> None:
        assert lane.key in self.lanes, f"{lane.key} is not loaded"
        assert all(answer.call.lane != lane for answer in self._answers), f"{lane.key} is in use"
        self.lanes.remove(lane.key)
        self.unloads.append(lane.key)

    async def stream(self, call: Call) -> OpenAIStream:
        answer = self._accept(call)
        return OpenAIStream(call, answer.prompt_tokens, answer.answers, answer)

    async def complete(self, call: Call) -> Chunk:
        answer = self._accept(call)
        return await whole_body(call, answer.prompt_tokens, answer.answers, answer)

    def die(self) -> None:
        self._dead = True
        self._end_all(EngineFailure("the engine died"))

    def forget(self, answer: "_ScriptedAnswer") -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._quiet.set()

    def _accept(self, call: Call) -> "_ScriptedAnswer":
        if self._stopping or not self.healthy:
            raise Unavailable("the engine is stopping" if self._stopping else "the engine is not healthy")
        if self.overloaded or len(self._answers) >= self._max_running:
            raise Overloaded(f"{len(self._answers)} answers are running; try again later")
        assert call.lane is None or call.lane.key in self.lanes, f"{call.lane} is not loaded"
        answer = _ScriptedAnswer(self, call, self._tokens(call), self._delay_s)
        self._answers.add(answer)
        self._quiet.clear()
        return answer

    def _tokens(self, call: Call) -> Sequence[str]:
        if callable(self._script):
            return self._script(call)
        return self._script["base" if call.lane is None else call.lane.key]

    def _end_all(self, error: LanewiseError) -> None:
        for answer in list(self._answers):
            answer.end(error)


class _ScriptedAnswer:
    """One request's pieces: every choice says the script, token by token in turn."""

    def __init__(self, engine: FakeEngine, call: Call, tokens: Sequence[str], delay_s: float) -> None:
        limit = call.body.answer_limit
        self.call = call
        self.answers = call.body.choices
        self.prompt_tokens = _words(call)
        self._engine = engine
        self._tokens = tokens[:limit]
        self._last: Finish = "length" if len(tokens) > len(self._tokens) else "stop"
        self._delay_s = delay_s
        self._said = 0  # tokens, over all choices
        self._error: asyncio.Future[LanewiseError] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> "_ScriptedAnswer":
        return self

    async def __anext__(self) -> Piece:
        total = max(len(self._tokens), 1) * self.answers
        if self._said == total:
            raise StopAsyncIteration
        if self._engine.fail_after is not None and self._said >= self._engine.fail_after:
            self.end(EngineFailure("the engine failed as it was told to"))
        # A plain sleep would not see `die` and `stop`. Waiting for 0 s still lets others run.
        await asyncio.wait([self._error], timeout=self._delay_s)
        if self._error.done():
            self._said = total
            raise self._error.result()
        index, choice = divmod(self._said, self.answers)
        self._said += 1
        if self._said == total:
            self._engine.forget(self)
        return self._piece(index, choice)

    def end(self, error: LanewiseError) -> None:
        if not self._error.done():
            self._error.set_result(error)
        self._engine.forget(self)

    def close(self) -> None:
        total = max(len(self._tokens), 1) * self.answers
        if self._said < total and not self._error.done():
            self._engine.aborts.append(self.call.id)
        self._said = total
        self._engine.forget(self)

    def _piece(self, index: int, choice: int) -> Piece:
        finish = self._last if index + 1 >= len(self._tokens) else None
        if not self._tokens:
            return Piece(choice, "", 1, finish)
        text = self._tokens[index]
        start = sum(map(len, self._tokens[:index]))
        shown = TokenLogprob(TokenText(text, text.encode(), _LOGPROB), (), start)
        wanted = self.call.body.logprobs is not None and self.call.body.logprobs is not False
        return Piece(choice, text, index + 1, finish, (shown,) if wanted else ())


def _words(call: Call) -> int:
    """The prompt's length in the fake's tokens: words."""
    body = call.body
    if isinstance(body, ChatRequest):
        texts = [message.content if isinstance(message.content, str) else "" for message in body.messages]
    else:
        texts = [body.prompt if isinstance(body.prompt, str) else ""]
    return sum(len(text.split()) for text in texts)
