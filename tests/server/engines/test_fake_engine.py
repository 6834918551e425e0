"""The scripted engine keeps the protocol, so that a test of the server is a test against any engine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lanewise.loaders import Inventory
from lanewise.server.engines import Call, Chunk, Engine, Lane
from lanewise.server.engines.fake import FakeEngine
from lanewise.server.errors import EngineFailure, Overloaded, Unavailable

pytestmark = pytest.mark.anyio

MakeCall = Callable[..., Call]
ReadStream = Callable[[Engine, Call], Awaitable[list[Chunk]]]
SCRIPT = {"base": ["I ", "am ", "the ", "base"], "a@1": ["one"], "a@2": []}


@pytest.fixture
async def engine(inventory: Inventory) -> FakeEngine:
    engine = FakeEngine(inventory, SCRIPT)
    await engine.start()
    return engine


async def test_it_says_its_script(engine: FakeEngine, chat: MakeCall, read_stream: ReadStream) -> None:
    body = await engine.complete(chat(n=2))
    chunks = await read_stream(engine, chat())
    assert [c["message"]["content"] for c in body["choices"]] == ["I am the base"] * 2
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "I am the base"
    assert engine.running == 0
    assert engine.aborts == []


async def test_max_tokens_cuts_the_script(engine: FakeEngine, completion: MakeCall) -> None:
    [choice] = (await engine.complete(completion(max_tokens=2, logprobs=0)))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("I am ", "length")
    assert choice["logprobs"]["text_offset"] == [0, 2]


async def test_lanes_select_the_script(
    engine: FakeEngine, completion: MakeCall, residents: list[Any]
) -> None:
    adapter = residents[0].adapter
    for version in (1, 2):
        await engine.load(Lane("a", version, f"digest {version}"), adapter)
    first = await engine.complete(completion("x", Lane("a", 1, "digest 1")))
    second = await engine.complete(completion("x", Lane("a", 2, "digest 2")))
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["one", ""]
    await engine.unload(Lane("a", 1, "digest 1"))
    assert (engine.loads, engine.unloads, engine.lanes) == (["a@1", "a@2"], ["a@1"], {"a@2"})
    with pytest.raises(AssertionError, match="re-bound"):
        await engine.load(Lane("a", 1, "another digest"), adapter)


async def test_a_lane_in_use_is_not_unloaded(
    engine: FakeEngine, completion: MakeCall, residents: list[Any]
) -> None:
    lane = Lane("a", 1, "digest")
    await engine.load(lane, residents[0].adapter)
    stream = await engine.stream(completion("x", lane))
    with pytest.raises(AssertionError, match="in use"):
        await engine.unload(lane)
    await stream.aclose()
    await engine.unload(lane)


@pytest.mark.parametrize("read", [0, 1])
async def test_closing_aborts(engine: FakeEngine, completion: MakeCall, read: int) -> None:
    stream = await engine.stream(completion(call_id="7"))
    for _ in range(read):
        await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert engine.aborts == ["7"]
    assert engine.running == 0


async def test_faults(engine: FakeEngine, completion: MakeCall) -> None:
    engine.fail_after = 2
    stream = await engine.stream(completion())
    assert [(await anext(stream))["choices"][0]["text"] for _ in range(2)] == ["I ", "am "]
    with pytest.raises(EngineFailure):
        await anext(stream)
    engine.fail_after, engine.overloaded = None, True
    with pytest.raises(Overloaded):
        await engine.stream(completion())
    engine.overloaded = False
    running = await engine.stream(completion())
    engine.die()
    with pytest.raises(EngineFailure):
        await anext(running)
    assert not engine.healthy
    with pytest.raises(Unavailable):
        await engine.stream(completion())


async def test_stop_waits_then_ends_the_rest(inventory: Inventory, completion: MakeCall) -> None:
    engine = FakeEngine(inventory, lambda call: ["word "] * (3 if call.id == "short" else 1000), delay_s=0.01)
    await engine.start()
    short = asyncio.ensure_future(engine.complete(completion(call_id="short", max_tokens=None)))
    long = asyncio.ensure_future(engine.complete(completion(call_id="long", max_tokens=None)))
    await asyncio.sleep(0)
    await engine.stop(0.2)
    assert (await short)["choices"][0]["text"] == "word word word "
    with pytest.raises(Unavailable):
        await long
