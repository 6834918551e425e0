"""Lanes are a cache on the engine: a version gets one when a request first needs it.

A lease holds a lane from a request's first token to its last; only lanes without a lease are evicted, the
least recently leased first. Everything here runs on the event loop, so what happens between two awaits is
atomic; loads and unloads take turns behind one lock, so a slot is freed before it is filled again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from anyio import to_thread

from lanewise.loaders import Adapter

from .catalog import Version
from .engines.protocol import Engine, Lane
from .errors import Overloaded


@dataclass(eq=False)
class _Resident:
    """A lane that is loaded or on its way. `leases` counts requests that run on it or wait for it."""

    lane: Lane
    leases: int = 0
    loaded: bool = False
    revoked: bool = False
    loading: asyncio.Task[None] = field(init=False)


class Lanes:
    """Leases on lanes, loading and evicting as needed.

    `read` gets a version's factors (it blocks, and runs in a worker thread); `wait_s` is the longest a
    request waits for a lane.
    """

    def __init__(self, engine: Engine, read: Callable[[Version], Adapter], wait_s: float) -> None:
        self._engine = engine
        self._read = read
        self._wait_s = wait_s
        self._residents: dict[str, _Resident] = {}  # least recently leased first
        self._changing = asyncio.Lock()
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> int:
        """Lanes on the engine."""
        return sum(resident.loaded for resident in self._residents.values())

    @property
    def leased(self) -> int:
        """Lanes that some request runs on."""
        return sum(resident.loaded and resident.leases > 0 for resident in self._residents.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a lane."""
        return sum(resident.leases for resident in self._residents.values() if not resident.loaded)

    def is_loaded(self, version: Version) -> bool:
        resident = self._residents.get(version.key)
        return resident is not None and resident.loaded

    def leases(self, version: Version) -> int:
        """Requests that run on the version or wait for its lane."""
        resident = self._residents.get(version.key)
        return 0 if resident is None else resident.leases

    @asynccontextmanager
    async def lease(self, version: Version, adapter: Adapter | None = None) -> AsyncGenerator[Lane]:
        """Hold the version's lane, loading it first if need be; requests for one version share one load.

        `adapter` spares reading the factors when the caller just has. Raises Overloaded when no lane came
        free in time, and whatever reading or loading raises.
        """
        resident = self._residents.pop(version.key, None) or self._begin(version, adapter)
        self._residents[version.key] = resident  # now the most recently leased
        resident.leases += 1
        try:
            try:
                async with asyncio.timeout(self._wait_s):
                    await asyncio.shield(resident.loading)
            except TimeoutError:
                raise Overloaded(
                    f"no lane came free for {version.key} in {self._wait_s:g} s: all"
                    f" {self._engine.max_lanes} lanes are in use by running requests",
                    param="model",
                    code="no_free_lane",
                ) from None
            assert resident.loaded, f"{version.key} was leased but its lane is gone"
            yield resident.lane
        finally:
            self._release(resident)

    def retire(self, version: Version) -> None:
        """The version was deleted: free its lane when the last lease on it ends."""
        if resident := self._residents.get(version.key):
            resident.revoked = True
            if not resident.leases:
                self._spawn(self._drop(resident))

    async def close(self) -> None:
        """End loads and unloads still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, version: Version, adapter: Adapter | None) -> _Resident:
        resident = _Resident(Lane(version.adapter, version.number, version.digest))
        resident.loading = self._spawn(self._load(resident, version, adapter))
        return resident

    async def _load(self, resident: _Resident, version: Version, adapter: Adapter | None) -> None:
        try:
            adapter = adapter or await to_thread.run_sync(self._read, version)
            async with self._changing:
                if await self._make_room(resident):
                    await self._engine.load(resident.lane, adapter)
                    resident.loaded = True
                if resident.loaded and resident.revoked and not resident.leases:
                    await self._unload(resident)
        finally:
            if not resident.loaded and self._residents.get(version.key) is resident:
                del self._residents[version.key]

    async def _make_room(self, newcomer: _Resident) -> bool:
        """Free a slot; False when all are leased and nobody waits for the newcomer any more."""
        while self.loaded >= self._engine.max_lanes:
            idle = (r for r in self._residents.values() if r.loaded and not r.leases)
            if victim := next(idle, None):
                await self._unload(victim)
            elif newcomer.leases:
                self._released.clear()
                await self._released.wait()
            else:
                return False
        return True

    async def _unload(self, resident: _Resident) -> None:
        assert not resident.leases, f"{resident.lane.key} is leased"
        del self._residents[resident.lane.key]
        resident.loaded = False
        await self._engine.unload(resident.lane)

    async def _drop(self, resident: _Resident) -> None:
        async with self._changing:
            if resident.loaded and not resident.leases:
                await self._unload(resident)

    def _release(self, resident: _Resident) -> None:
        resident.leases -= 1
        self._released.set()
        if resident.revoked and not resident.leases:
            self._spawn(self._drop(resident))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
