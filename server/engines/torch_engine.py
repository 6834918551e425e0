"""The embedded engine: transformers' model in this process, with the LoRA branch beside it.

One thread owns the model and does all torch work. The event loop hands it commands (plain callables) through
a queue; it runs them between steps and hands back each step's pieces in one callback. So whatever must not
happen during a forward, such as writing a lane's factors, is a command.
"""

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from lanewise.kernels.attach import ExpertLayout, LanePool, attach
from lanewise.kernels.base import load_base
from lanewise.kernels.lora import BASE_SLOT
from lanewise.loaders import Adapter, BaseCheckpoint, Inventory, UnsupportedBase

from ..errors import EngineFailure, InvalidRequest, LanewiseError, Overloaded, Unavailable, Unprocessable
from .architectures import check_served, prepare
from .openai_input import Question, Reader
from .openai_output import OpenAIStream, whole_body
from .protocol import Call, Chunk, Lane
from .sampling import Row
from .scheduler import Choice, Outcome, Scheduler
from .seats import Seats
from .text import ChoiceText, Piece

_log = logging.getLogger(__name__)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_STOPPED = "the engine has stopped"
_MOST_FAILED_STEPS = 3  # in a row; then the engine says that it is not healthy

Result = TypeVar("Result")


class TorchEngine:
    """Serves one base and its lanes on one CPU or GPU; see `protocol.Engine`.

    `max_running` choices run at once and `max_waiting` more may wait; `prefill_tokens` bounds what one step
    spends on prompts. `dtype` None: float32 on the CPU, bfloat16 elsewhere. `threads` sets torch's threads
    for the whole process; None leaves them alone.
    """

    def __init__(
        self,
        base: Path,
        *,
        max_lanes: int = 8,
        max_rank: int = 64,
        max_running: int = 32,
        max_waiting: int = 256,
        prefill_tokens: int = 256,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        expert_layout: ExpertLayout = "shared_outer",
        threads: int | None = None,
    ) -> None:
        self._base = base
        self._max_lanes = max_lanes
        self._max_rank = max_rank
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._prefill_tokens = prefill_tokens
        self._device = device
        self._dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        self._expert_layout: ExpertLayout = expert_layout
        self._threads = threads

        # The event loop's side.
        self._slots: dict[str, int] = {}  # lane key → slot
        self._free_slots = list(range(max_lanes))
        self._answers: dict[Choice, _Answer] = {}  # every choice accepted and not ended
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._reading = anyio.CapacityLimiter(1)  # a tokenizer is not for two threads at once
        self._loaded: _Loaded | None = None
        self._asked: set[Future[Any]] = set()  # work on the engine's thread that is waited for
        self._over = False  # the engine's thread has ended

        # The engine thread's side.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._ended = False
        self._failed_steps = 0

    @property
    def inventory(self) -> Inventory:
        return self._ready.checkpoint.inventory

    @property
    def context_length(self) -> int:
        return self.inventory.context_length

    @property
    def max_lanes(self) -> int:
        return self._max_lanes

    @property
    def max_rank(self) -> int:
        return self._max_rank

    @property
    def healthy(self) -> bool:
        """False after several failed steps in a row, until one succeeds: requests go on being tried."""
        return self._alive and self._failed_steps < _MOST_FAILED_STEPS

    @property
    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._loaded is not None

    @property
    def seats_nbytes(self) -> int:
        """Memory that the layers take now for what they remember of running choices."""
        return self._ready.seats.nbytes

    async def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._serve, args=(loop,), name="lanewise-engine", daemon=True)
        self._thread.start()
        try:
            self._loaded = await self._on_thread(self._load_base)
        except BaseException:
            await self._end_thread()
            raise

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        with anyio.move_on_after(grace_s):
            await self._quiet.wait()
        for answer in set(self._answers.values()):
            answer.fail(Unavailable("the server stopped before the answer was finished"))
        await self._end_thread()
        self._loaded = None

    def check(self, adapter: Adapter) -> None:
        if self._expert_layout == "shared_outer" and adapter.layout not in ("shared_outer", "linear"):
            raise Unprocessable(
                f"the adapter has factors per expert ({adapter.layout}) and this server keeps the outer ones"
                " shared; start the server with --expert-layout stacked",
                code="invalid_adapter",
            )

    async def load(self, lane: Lane, adapter: Adapter) -> None:
        """Raises Unprocessable for factors that this engine's pool cannot hold."""
        assert lane.key not in self._slots, f"{lane.key} is loaded already"
        assert self._free_slots, "the caller has made sure that a slot is free"
        pool = self._ready.pool
        slot = self._free_slots.pop()
        try:
            # Reading and converting happens beside the engine's thread, only the copy on it.
            pairs = await anyio.to_thread.run_sync(lambda: list(adapter.pairs()))
            await self._on_thread(lambda: pool.write(slot, pairs))
        except BaseException as error:
            self._commands.put(lambda: pool.clear(slot))
            self._free_slots.append(slot)
            if isinstance(error, ValueError):
                raise Unprocessable(str(error), code="invalid_adapter") from error
            raise
        self._slots[lane.key] = slot

    async def unload(self, lane: Lane) -> None:
        slot = self._slots.pop(lane.key)
        ready = self._ready
        assert all(choice.slot != slot for choice in self._answers), f"{lane.key} is in use"

        def clear() -> None:
            assert not ready.scheduler.uses(slot), f"slot {slot} is in use"
            ready.pool.clear(slot)

        await self._on_thread(clear)
        self._free_slots.append(slot)

    async def stream(self, call: Call) -> OpenAIStream:
        answer = await self._accept(call)
        return OpenAIStream(call, answer.question.prompt_tokens, answer.question.answers, answer)

    async def complete(self, call: Call) -> Chunk:
        answer = await self._accept(call)
        return await whole_body(call, answer.question.prompt_tokens, answer.question.answers, answer)

    async def _accept(self, call: Call) -> "_Answer":
        """Read the request and queue its choices. Raises what `Engine.stream` does."""
        ready = self._ready
        self._check_room(1)
        question = await anyio.to_thread.run_sync(ready.reader.read, call.body, limiter=self._reading)
        if question.answers > self._capacity:
            raise InvalidRequest(
                f"{question.answers} answers at once; this server holds {self._capacity}", param="n"
            )
        self._check_room(question.answers)
        slot = BASE_SLOT if call.lane is None else self._slots[call.lane.key]
        choices = _choices(question, slot, ready)
        answer = _Answer(self, question, choices)
        self._answers |= dict.fromkeys(choices, answer)
        self._quiet.clear()
        self._commands.put(lambda: ready.scheduler.receive(choices))
        return answer

    @property
    def _capacity(self) -> int:
        return self._max_running + self._max_waiting

    def _check_room(self, answers: int) -> None:
        if self._stopping or not self._alive:
            raise Unavailable("the engine is stopping" if self._stopping else "the engine is not running")
        if len(self._answers) + answers > self._capacity:
            raise Overloaded(f"{len(self._answers)} answers are running or waiting; try again later")

    @property
    def _ready(self) -> "_Loaded":
        if self._loaded is None:
            raise Unavailable(_STOPPED if self._stopping else "the engine has not started")
        return self._loaded

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """On the event loop: pass a step's outcomes to the requests they belong to."""
        for choice, outcome in outcomes:
            answer = self._answers.get(choice)
            if answer is None:
                continue  # aborted while the step ran
            if isinstance(outcome, EngineFailure):
                answer.fail(outcome)
            else:
                answer.put(choice, outcome)

    def forget(self, choices: Iterable[Choice], *, abort: bool) -> None:
        """On the event loop: these choices have ended, or are to end now."""
        ended = [choice for choice in choices if self._answers.pop(choice, None)]
        if abort and ended:
            scheduler = self._ready.scheduler
            self._commands.put(lambda: scheduler.abort(ended))
        if not self._answers:
            self._quiet.set()

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the engine's thread, between steps. Raises Unavailable when the thread has ended."""
        if self._over:
            raise Unavailable(_STOPPED)
        future: Future[Result] = Future()
        self._asked.add(future)

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised again where it was asked for
                future.set_exception(error)

        self._commands.put(command)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._asked.remove(future)

    async def _end_thread(self) -> None:
        def end() -> None:
            self._ended = True

        assert self._thread is not None, "the engine is not started"
        self._commands.put(end)
        await anyio.to_thread.run_sync(self._thread.join)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """The engine's thread: commands, then a step, until told to end."""
        try:
            while not self._ended:
                self._obey()
                if not self._ended and self._loaded is not None and not self._loaded.scheduler.idle:
                    outcomes = self._step(self._loaded.scheduler)
                    loop.call_soon_threadsafe(self.deliver, outcomes)
        finally:
            loop.call_soon_threadsafe(self._thread_ended)

    def _obey(self) -> None:
        """Run the commands that wait; with nothing else to do, sleep until one comes."""
        if self._loaded is None or self._loaded.scheduler.idle:
            self._commands.get()()
        while not self._ended:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _step(self, scheduler: Scheduler) -> list[Outcome]:
        try:
            outcomes = scheduler.step()
        except Exception:  # noqa: BLE001  whatever breaks a forward ends the requests in it, not the engine
            _log.exception("a step failed")
            self._failed_steps += 1
            return [
                (choice, EngineFailure("the engine failed while answering; the request may be retried"))
                for choice in scheduler.fail_running()
            ]
        self._failed_steps = 0
        return outcomes

    def _thread_ended(self) -> None:
        """On the event loop: nothing may go on waiting for the thread."""
        self._over = True
        for future in self._asked:
            if not future.done():
                future.set_exception(Unavailable(_STOPPED))
        for answer in set(self._answers.values()):
            answer.fail(EngineFailure("the engine's thread ended"))

    def _load_base(self) -> "_Loaded":
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        _check_device(self._device)
        checkpoint = BaseCheckpoint.open(self._base)
        if not any((self._base / name).is_file() for name in _TOKENIZER_FILES):
            raise UnsupportedBase(f"{self._base}: no tokenizer; expected {' or '.join(_TOKENIZER_FILES)}")
        check_served(checkpoint.config)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._base)
            model = load_base(checkpoint.config, checkpoint.tensors(), self._dtype, self._device)
            pool = attach(model, self._max_lanes, self._max_rank, self._expert_layout)
        except (ValueError, OSError) as error:
            raise UnsupportedBase(f"{self._base}: {error}") from error
        if not tokenizer.chat_template:
            _log.warning("%s has no chat template: only /v1/completions is served", self._base)
        context = checkpoint.inventory.context_length
        seats = Seats(
            prepare(model),
            max_seats=self._max_running,
            context_length=context,
            dtype=self._dtype,
            device=self._device,
        )
        scheduler = Scheduler(
            model, pool, seats, max_running=self._max_running, prefill_tokens=self._prefill_tokens
        )
        reader = Reader(tokenizer, model.config.vocab_size, context)
        ends = _end_tokens(self._base, model.config)
        # Two copies, since one reads on worker threads while the other writes on the engine's.
        return _Loaded(checkpoint, pool, seats, scheduler, reader, copy.deepcopy(tokenizer), ends)


@dataclass(frozen=True)
class _Loaded:
    """What exists once the base is loaded."""

    checkpoint: BaseCheckpoint
    pool: LanePool
    seats: Seats
    scheduler: Scheduler
    reader: Reader
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]


class _Answer:
    """An accepted request on the event loop's side: its pieces as they come (`openai_output.Pieces`)."""

    def __init__(self, engine: TorchEngine, question: Question, choices: Sequence[Choice]) -> None:
        self.question = question
        self._engine = engine
        self._running = set(choices)
        self._unread = len(choices)  # choices whose last piece was not read yet
        self._queue: asyncio.Queue[Piece | LanewiseError] = asyncio.Queue()

    def __aiter__(self) -> "_Answer":
        return self

    async def __anext__(self) -> Piece:
        if not self._unread:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, LanewiseError):
            self._unread = 0
            raise item
        if item.finish:
            self._unread -= 1
        return item

    def put(self, choice: Choice, piece: Piece) -> None:
        self._queue.put_nowait(piece)
        if piece.finish:
            self._running.remove(choice)
            self._engine.forget([choice], abort=False)

    def fail(self, error: LanewiseError) -> None:
        """End the whole request, its other choices too."""
        self._queue.put_nowait(error)
        self.close()

    def close(self) -> None:
        running, self._running = self._running, set[Choice]()
        self._engine.forget(running, abort=True)


def _choices(question: Question, slot: int, loaded: _Loaded) -> list[Choice]:
    """n choices per prompt, numbered as OpenAI does: prompt · n + i."""
    sampling = question.sampling
    ends = question.stop_tokens | (frozenset() if question.ignore_eos else loaded.ends)
    return [
        Choice(
            prompt=prompt,
            slot=slot,
            row=Row(sampling, sampling.random(index), Counter()),
            text=ChoiceText(loaded.tokenizer, index, question.stops, sampling.logprobs is not None),
            limit=limit,
            ends=ends,
        )
        for number, (prompt, limit) in enumerate(zip(question.prompts, question.limits, strict=True))
        for index in range(number * question.choices, (number + 1) * question.choices)
    ]


def _check_device(name: str) -> None:
    """Raises EngineFailure naming --device, before minutes go into reading a base."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineFailure(f"--device {name} is not a device; expected cpu, cuda or cuda:N") from error
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise EngineFailure(
            f"--device {name}: torch finds {found} CUDA devices here; expected a lower N or cpu"
        )


def _end_tokens(base: Path, config: PreTrainedConfig) -> frozenset[int]:
    """The tokens that end an answer: generation_config.json's, else config.json's."""
    eos: int | list[int] | None = config.eos_token_id
    if (base / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(base).eos_token_id or eos
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
