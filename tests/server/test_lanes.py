"""Lanes: loaded once, evicted only when nobody holds them, freed when their version is deleted."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lanewise.loaders import Adapter, Inventory, read_adapter_file
from lanewise.server.catalog import Version
from lanewise.server.engines.fake import FakeEngine
from lanewise.server.errors import EngineFailure, Overloaded
from lanewise.server.lanes import Lanes

pytestmark = pytest.mark.anyio


def version(name: str, number: int = 1) -> Version:
    return Version(name, number, digest=f"{name}{number}", created=0, rank=2, layout="linear", nbytes=0)


A, B, C, D = map(version, "abcd")


@pytest.fixture
def read(tmp_path: Path, factors: Any, inventory: Inventory) -> Callable[[Version], Adapter]:
    file = tmp_path / "factors.safetensors"
    file.write_bytes(factors().body)
    return lambda version: read_adapter_file(file, factors().config, inventory, max_rank=8, digest="d")


@pytest.fixture
async def engine(make_engine: Callable[..., FakeEngine]) -> FakeEngine:
    engine = make_engine(max_lanes=2, load_s=0.01)
    await engine.start()
    return engine


@pytest.fixture
def lanes(engine: FakeEngine, read: Callable[[Version], Adapter]) -> Lanes:
    return Lanes(engine, read, wait_s=0.3)


async def touch(lanes: Lanes, version: Version) -> None:
    async with lanes.lease(version) as lane:
        assert lane.key == version.key


async def settled(lanes: Lanes) -> None:
    await asyncio.sleep(0.05)
    await lanes.close()


async def test_requests_for_one_version_share_one_load(lanes: Lanes, engine: FakeEngine) -> None:
    await asyncio.gather(*(touch(lanes, A) for _ in range(20)))
    assert engine.loads == ["a@1"]
    assert (lanes.loaded, lanes.leased, lanes.waiting) == (1, 0, 0)


async def test_least_recently_leased_goes_first(lanes: Lanes, engine: FakeEngine) -> None:
    for wanted in (A, B, A, C):
        await touch(lanes, wanted)
    assert engine.unloads == ["b@1"]
    assert engine.lanes == {"a@1", "c@1"}


async def test_a_leased_lane_is_never_evicted(lanes: Lanes, engine: FakeEngine) -> None:
    async with lanes.lease(A):
        for wanted in (B, C, D, B, C):
            await touch(lanes, wanted)
            assert "a@1" in engine.lanes
    assert engine.unloads == ["b@1", "c@1", "d@1", "b@1"]


async def test_all_leased_waits_and_then_refuses(lanes: Lanes, engine: FakeEngine) -> None:
    async with lanes.lease(A), lanes.lease(B):
        with pytest.raises(Overloaded, match="c@1"):
            await touch(lanes, C)
        assert lanes.waiting == 0
    await touch(lanes, C)
    assert engine.loads == ["a@1", "b@1", "c@1"]


async def test_all_leased_waits_and_gets_the_first_that_comes_free(lanes: Lanes, engine: FakeEngine) -> None:
    async with lanes.lease(A):
        async with AsyncExitStack() as held:
            await held.enter_async_context(lanes.lease(B))
            waiting = asyncio.create_task(touch(lanes, C))
            await asyncio.sleep(0.05)
            assert lanes.waiting == 1
        await waiting
        assert engine.unloads == ["b@1"]


async def test_many_versions_on_few_lanes_all_get_their_turn(
    engine: FakeEngine, read: Callable[[Version], Adapter]
) -> None:
    lanes = Lanes(engine, read, wait_s=10)
    wanted = [version(name, number) for name in "abcdef" for number in (1, 2)]

    async def use(version: Version) -> None:
        async with lanes.lease(version) as lane:
            assert lane.key in engine.lanes
            await asyncio.sleep(0.001)
            assert lane.key in engine.lanes

    await asyncio.gather(*(use(version) for version in wanted * 3))
    assert (lanes.loaded, lanes.leased, lanes.waiting) == (2, 0, 0)


async def test_cancelled_waiters_leave_no_lease(lanes: Lanes, engine: FakeEngine) -> None:
    tasks = [asyncio.create_task(touch(lanes, A)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lanes.leases(A) == 0
    await touch(lanes, A)
    assert engine.loads == ["a@1"]
    await touch(lanes, B)
    await touch(lanes, C)
    assert engine.unloads == ["a@1"]


async def test_failed_load_reaches_every_waiter_and_can_be_tried_again(
    lanes: Lanes, engine: FakeEngine
) -> None:
    engine.refuse_load = EngineFailure("no memory")
    results = await asyncio.gather(*(touch(lanes, A) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailure] * 3
    assert (lanes.loaded, lanes.waiting) == (0, 0)
    await touch(lanes, A)


async def test_retired_version_is_unloaded_when_its_last_lease_ends(lanes: Lanes, engine: FakeEngine) -> None:
    async with lanes.lease(A):
        async with lanes.lease(A):
            lanes.retire(A)
        await asyncio.sleep(0.02)
        assert engine.unloads == []
    await asyncio.sleep(0.02)
    assert engine.unloads == ["a@1"]
    await touch(lanes, B)
    lanes.retire(B)
    lanes.retire(C)  # never had a lane
    await settled(lanes)
    assert engine.unloads == ["a@1", "b@1"]


async def test_version_retired_while_it_loads_is_unloaded(lanes: Lanes, engine: FakeEngine) -> None:
    task = asyncio.create_task(touch(lanes, A))
    await asyncio.sleep(0)
    lanes.retire(A)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settled(lanes)
    assert engine.lanes == set()
    assert lanes.loaded == 0
