"""Which adapters and versions exist, and which version of each is active. It outlives the process.

    {data}/lock                    held while a server owns the folder
    {data}/adapters/{name}/{n}/    adapter_model.safetensors, adapter_config.json, version.json: never changed
    {data}/adapters/{name}/active  the number of the active version
    {data}/retired/{name}          the highest number a deleted version had, so that none is given twice
    {data}/incoming/{random}/      what is being received or deleted; emptied at start

A folder or file appears under its name by one rename after its bytes are fsynced, so a reader sees all of
it or nothing, also after `kill -9` or power loss. Blocking work runs in a worker thread; the maps below
change only on the event loop, after the disk has.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyio import to_thread

from lanewise.loaders import Adapter

from .errors import Conflict, InvalidRequest, NotFound

FACTORS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
VERSION_FILE = "version.json"
ACTIVE_FILE = "active"
BASE = "base"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """One immutable version. `created` is in Unix seconds, `nbytes` counts the factors."""

    adapter: str
    number: int
    digest: str
    created: int
    rank: int
    layout: str
    nbytes: int

    @property
    def key(self) -> str:
        return f"{self.adapter}@{self.number}"


@dataclass
class AdapterRecord:
    """An adapter: its stored versions by number, and which of them is active."""

    name: str
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    active_number: int | None = None

    @property
    def active(self) -> Version | None:
        return None if self.active_number is None else self.versions[self.active_number]

    @property
    def created(self) -> int:
        return min(version.created for version in self.versions.values())


class Catalog:
    """Adapters and versions of one data folder.

    Changes of one adapter must not overlap; the caller sees to that. Raises Conflict when another server
    owns the folder.
    """

    def __init__(self, folder: Path, base_name: str) -> None:
        self.folder = folder.resolve()
        self.base_name = base_name
        for part in (self._adapters, self._retired, self._incoming):
            part.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Conflict(
                f"data folder {folder} is in use by another server; stop it or give another --data"
            ) from None
        for leftover in self._incoming.iterdir():
            _remove(leftover)
        self._last = self._last_numbers()
        self._records = {record.name: record for record in self._restored()}

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()

    @property
    def adapters(self) -> Mapping[str, AdapterRecord]:
        """Every adapter that has a version, by name."""
        return self._records

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest unless `name` may name an adapter."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"adapter name {name[:200]!r} is not allowed; expected 1 to 128 letters, digits, '.', '_' or"
                " '-', the first a letter or digit",
                param="name",
            )
        if name in (BASE, self.base_name):
            raise InvalidRequest(f"adapter name {name!r} is taken by the base; choose another", param="name")

    def adapter(self, name: str) -> AdapterRecord:
        """Raises NotFound."""
        if record := self._records.get(name):
            return record
        raise NotFound(
            f"adapter {name[:200]!r} does not exist; GET /v1/adapters lists those that do",
            param="name",
            code="adapter_not_found",
        )

    def version(self, name: str, number: int) -> Version:
        """Raises NotFound."""
        if version := self.adapter(name).versions.get(number):
            return version
        raise NotFound(
            f"adapter {name!r} has no version {number}; GET /v1/adapters/{name}/versions lists those it has",
            param="version",
            code="version_not_found",
        )

    @contextmanager
    def receiving(self) -> Generator[Path]:
        """A fresh folder for a version on its way in; gone afterwards unless `store` took it."""
        folder = self._incoming / uuid.uuid4().hex
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(folder)

    def files(self, version: Version) -> tuple[Path, dict[str, Any]]:
        """The version's factors file and its config. Blocks. Raises NotFound if it was deleted meanwhile."""
        folder = self._folder(version)
        try:
            return folder / FACTORS_FILE, json.loads((folder / CONFIG_FILE).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"{version.key} was deleted", param="version", code="version_not_found") from None

    async def store(self, name: str, received: Path, config: Mapping[str, Any], adapter: Adapter) -> Version:
        """Make the received factors the adapter's next version. It is on disk for good once this returns."""
        record = self._records.get(name) or AdapterRecord(name)
        version = Version(
            adapter=name,
            number=self._last.get(name, 0) + 1,
            digest=adapter.digest,
            created=int(time.time()),
            rank=adapter.rank,
            layout=adapter.layout,
            nbytes=adapter.nbytes,
        )
        self._last[name] = version.number  # also if writing fails half-way: no number is tried twice
        await to_thread.run_sync(self._write_version, version, received, config)
        record.versions[version.number] = version
        self._records[name] = record
        return version

    async def activate(self, version: Version) -> None:
        """Point the adapter at this version: one atomic change, on disk first."""
        record = self.adapter(version.adapter)
        assert version.number in record.versions, f"{version.key} is not stored"
        target = self._adapters / version.adapter / ACTIVE_FILE
        await to_thread.run_sync(self._replace_file, target, str(version.number))
        record.active_number = version.number

    async def delete_adapter(self, name: str) -> None:
        assert name in self._records, f"{name} does not exist"
        await to_thread.run_sync(self._delete, self._adapters / name, name)
        del self._records[name]

    async def delete_version(self, version: Version) -> None:
        """The version must not be active."""
        record = self.adapter(version.adapter)
        assert version.number != record.active_number, f"{version.key} is active"
        await to_thread.run_sync(self._delete, self._folder(version), version.adapter)
        del record.versions[version.number]
        if not record.versions:
            del self._records[version.adapter]

    @property
    def _adapters(self) -> Path:
        return self.folder / "adapters"

    @property
    def _retired(self) -> Path:
        return self.folder / "retired"

    @property
    def _incoming(self) -> Path:
        return self.folder / "incoming"

    def _folder(self, version: Version) -> Path:
        return self._adapters / version.adapter / str(version.number)

    def _write_version(self, version: Version, received: Path, config: Mapping[str, Any]) -> None:
        (received / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        (received / VERSION_FILE).write_text(json.dumps(asdict(version), indent=2))
        for file in received.iterdir():
            _sync(file)
        _sync(received)
        home = self._adapters / version.adapter
        if not home.exists():
            home.mkdir()
            _sync(self._adapters)
        received.rename(self._folder(version))
        _sync(home)

    def _replace_file(self, target: Path, text: str) -> None:
        draft = self._incoming / uuid.uuid4().hex
        draft.write_text(text)
        _sync(draft)
        draft.rename(target)
        _sync(target.parent)

    def _delete(self, folder: Path, name: str) -> None:
        self._replace_file(self._retired / name, str(self._last[name]))
        grave = self._incoming / uuid.uuid4().hex
        folder.rename(grave)
        _sync(folder.parent)
        _remove(grave)

    def _last_numbers(self) -> dict[str, int]:
        """The highest number ever given, by adapter."""
        last = {file.name: int(file.read_text()) for file in self._retired.iterdir()}
        for home in self._adapters.iterdir():
            numbers = (int(folder.name) for folder in home.iterdir() if folder.name.isdecimal())
            last[home.name] = max(last.get(home.name, 0), *numbers, 0)
        return last

    def _restored(self) -> Iterator[AdapterRecord]:
        for home in sorted(self._adapters.iterdir()):
            folders = (folder for folder in home.iterdir() if folder.name.isdecimal())
            versions = filter(None, map(_restored_version, folders))
            record = AdapterRecord(home.name, {v.number: v for v in sorted(versions, key=_number)})
            if (home / ACTIVE_FILE).exists():
                active = int((home / ACTIVE_FILE).read_text())
                if active in record.versions:
                    record.active_number = active
                else:
                    _log.error("%s: active version %d is not served; activate another", home.name, active)
            if record.versions:
                yield record


def _number(version: Version) -> int:
    return version.number


def _restored_version(folder: Path) -> Version | None:
    """The version stored in `folder`; None, and an error in the log, if the disk damaged it."""
    try:
        version = Version(**json.loads((folder / VERSION_FILE).read_bytes()))
        if (version.adapter, str(version.number)) != (folder.parent.name, folder.name):
            raise ValueError(f"the folder holds {version.key}")
    except (OSError, ValueError, TypeError) as error:
        _log.error("%s is damaged and is not served: %s", folder, error)
        return None
    return version


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
