"""The server without HTTP: an engine, a catalog and lanes, and the changes that touch several of them."""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from anyio import to_thread

from lanewise.loaders import Adapter, LoaderError, read_adapter, read_adapter_file

from .catalog import FACTORS_FILE, Catalog, Version
from .engines.protocol import Engine
from .errors import Conflict, EngineFailure, LanewiseError, Overloaded, Unavailable
from .lanes import Lanes
from .metrics import Metrics
from .settings import Settings

State = Literal["stored", "loaded", "active", "draining"]
_log = logging.getLogger(__name__)


class Service:
    """Serves the versions of one data folder on one engine.

    Life: `start` → requests → `drain` (nothing new, what runs may finish) → `close`.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Raises what opening the data folder does: Conflict or StorageFailure."""
        self.engine = engine
        self.settings = settings
        self.catalog = Catalog(settings.data, settings.served_base_name)
        self.lanes = Lanes(engine, self._read, settings.lane_wait_s)
        self.metrics = Metrics()
        self.started_at = int(time.time())
        self._started = False
        self.stopping = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._pushes = 0
        self._orders: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._show_gauges()

    async def start(self) -> None:
        """Load the base, then a lane for every active version that fits, then the adapters of the settings.

        Raises LoaderError or LanewiseError.
        """
        await self.engine.start()
        self._started = True
        await self._load_active()
        for name, folder in self.settings.adapters.items():
            await self._preload(name, folder)

    async def drain(self) -> None:
        """Take no new requests, and let those that run finish within the settings' grace. Can be repeated."""
        self.stopping.set()
        if self._draining is None:
            self._draining = asyncio.create_task(self.engine.stop(self.settings.grace_s))
        await asyncio.shield(self._draining)

    async def close(self) -> None:
        """Let go of everything, also after a failed start."""
        if self._started:
            await self.drain()
        await self.lanes.close()
        self.catalog.close()

    def check_open(self) -> None:
        """Raise Unavailable when new requests are not taken."""
        if self.stopping.is_set():
            raise Unavailable("the server is stopping; ask another one or retry", code="stopping")

    def state(self, version: Version) -> State:
        """Where a stored version is in its life; `draining`: not active any more, but still leased."""
        if self.catalog.adapter(version.adapter).active_number == version.number:
            return "active"
        if not self.lanes.is_loaded(version):
            return "stored"
        return "draining" if self.lanes.leases(version) else "loaded"

    @asynccontextmanager
    async def receiving(self, name: str) -> AsyncGenerator[Path]:
        """A folder to receive a push in.

        Raises InvalidRequest (name), Overloaded, Unavailable; StorageFailure for OSErrors of the block too.
        """
        self.check_open()
        self.catalog.check_name(name)
        if self._pushes >= self.settings.max_pushes:
            raise Overloaded(
                f"{self._pushes} pushes are being received, the most allowed; retry", code="too_many_pushes"
            )
        self._pushes += 1
        try:
            async with self.catalog.receiving() as folder:
                yield folder
        finally:
            self._pushes -= 1

    async def publish(
        self, name: str, received: Path, config: Mapping[str, Any], digest: str | None, *, activate: bool
    ) -> Version:
        """Check what was received, store it as the next version and, if asked, activate it.

        `digest` is what the receiver computed from the bytes; None reads them once more to compute it.
        Pushes of one adapter take their numbers, and are activated, in the order in which they arrived
        whole. Raises InvalidAdapter, UnsafeFile, Unprocessable (no lane can hold it) or StorageFailure and
        changes nothing; an error of the activation says that the version is stored.
        """
        adapter = await to_thread.run_sync(self._check, received / FACTORS_FILE, config, digest)
        self.engine.check(adapter)
        async with self._order(name):
            version = await self.catalog.store(name, received, config, adapter)
            if activate:
                try:
                    await self._activate(version, adapter)
                except LanewiseError as error:
                    error.message += f" ({version.key} is stored but not active)"
                    raise
            return version

    async def activate(self, name: str, number: int) -> Version:
        """Load the version's lane, then make it what the adapter's name stands for.

        Requests that run keep their version. Raises NotFound, Overloaded (no lane came free), StorageFailure
        or what loading raises; then nothing has changed.
        """
        async with self._order(name):
            version = self.catalog.version(name, number)
            await self._activate(version)
            return version

    async def delete(self, name: str) -> list[Version]:
        """Delete an adapter with all its versions; requests that run on them finish.

        Raises NotFound, or StorageFailure; then nothing has changed.
        """
        async with self._order(name):
            versions = list(self.catalog.adapter(name).versions.values())
            await self.catalog.delete_adapter(name)
            for version in versions:
                self.lanes.retire(version)
            return versions

    async def delete_version(self, name: str, number: int) -> Version:
        """Delete one version. Raises NotFound, StorageFailure, or Conflict for the active one of several."""
        async with self._order(name):
            version = self.catalog.version(name, number)
            record = self.catalog.adapter(name)
            if len(record.versions) == 1:
                await self.catalog.delete_adapter(name)
            elif record.active_number == number:
                raise Conflict(
                    f"{version.key} is active; activate another version first, or delete the adapter",
                    param="version",
                    code="version_is_active",
                )
            else:
                await self.catalog.delete_version(version)
            self.lanes.retire(version)
            return version

    async def _activate(self, version: Version, adapter: Adapter | None = None) -> None:
        async with self.lanes.lease(version, adapter):
            await self.catalog.activate(version)
        self.metrics.activations.labels(self.metrics.adapter_label(version.adapter)).inc()

    async def _load_active(self) -> None:
        active = [record.active for record in self.catalog.adapters.values() if record.active]
        for version in active[: self.engine.max_lanes]:
            try:
                async with self.lanes.lease(version):
                    pass
            except (LanewiseError, LoaderError) as error:
                if not self.engine.healthy:
                    raise
                # The others are served; asking for this one names the error again.
                _log.error("%s cannot be loaded: %s", version.key, error)

    async def _preload(self, name: str, folder: Path) -> None:
        """Store and activate an adapter folder, unless a stored version already has these bytes.

        Then the active version stays: it may be a newer one that a trainer pushed before this restart.
        """
        self.catalog.check_name(name)
        given = await to_thread.run_sync(self._read_folder, folder)
        record = self.catalog.adapters.get(name)
        versions = record.versions.values() if record else ()
        for version in versions:
            if version.digest == given.digest:
                if record and record.active is None:
                    await self.activate(name, version.number)
                return
        async with self.catalog.receiving() as received:
            await to_thread.run_sync(shutil.copyfile, folder / FACTORS_FILE, received / FACTORS_FILE)
            await self.publish(name, received, given.config.raw, digest=None, activate=True)

    def _read_folder(self, folder: Path) -> Adapter:
        return read_adapter(folder, self.engine.inventory, max_rank=self.engine.max_rank)

    def _read(self, version: Version) -> Adapter:
        """A stored version, checked again in full: disks forget. Raises EngineFailure if this one did."""
        try:
            adapter = self._check(*self.catalog.files(version))
        except (LoaderError, OSError) as error:
            self.catalog.version(version.adapter, version.number)  # raises NotFound: it was deleted meanwhile
            raise _damaged(version, str(error)) from error
        if adapter.digest != version.digest:
            raise _damaged(version, f"its bytes have digest {adapter.digest}, not {version.digest}")
        return adapter

    def _check(self, file: Path, config: Mapping[str, Any], digest: str | None = None) -> Adapter:
        """Read and validate; the digest is computed unless the caller has just done so."""
        return read_adapter_file(
            file, config, self.engine.inventory, max_rank=self.engine.max_rank, digest=digest
        )

    def _order(self, name: str) -> asyncio.Lock:
        """The lock that puts the changes of one adapter in order; it lives as long as someone uses it."""
        return self._orders.setdefault(name, asyncio.Lock())

    def _show_gauges(self) -> None:
        show = self.metrics.gauge
        show("lanewise_lanes_limit", "Lanes the engine has room for.", lambda: self.engine.max_lanes)
        show("lanewise_lanes_loaded", "Lanes on the engine.", lambda: self.lanes.loaded)
        show("lanewise_lanes_leased", "Lanes that requests run on.", lambda: self.lanes.leased)
        show("lanewise_lanes_waiting", "Requests that wait for a lane.", lambda: self.lanes.waiting)
        show("lanewise_adapters", "Adapters with a stored version.", lambda: len(self.catalog.adapters))
        show("lanewise_pushes_running", "Pushes being received or checked.", lambda: self._pushes)


def _damaged(version: Version, why: str) -> EngineFailure:
    return EngineFailure(
        f"{version.key} was damaged on disk and is not served: {why}; push it again and activate that",
        param="model",
        code="version_damaged",
    )
