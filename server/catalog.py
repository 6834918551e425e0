"""Which adapters and versions exist, and which version of each is active. It outlives the process.

    {data}/lock                    held while a server owns the folder
    {data}/adapters/{name}/{n}/    adapter_model.safetensors, adapter_config.json, version.json: never changed
    {data}/adapters/{name}/active  the number of the active version
    {data}/retired/{name}          the highest number a deleted version had, so that none is given twice
    {data}/incoming/{random}/      what is being received or deleted; emptied at start

A folder or file appears under its name by one rename after its bytes are fsynced, so a reader sees all of
it or nothing, also after `kill -9` or power loss. Blocking work runs in a worker thread; the maps below
change only on the event loop: after the disk has, but for a deletion, which nobody must see half done. What
the disk refuses is a StorageFailure. What is damaged or not ours is logged and left alone.
"""

import fcntl
import io
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVarTuple

from anyio import CancelScope, to_thread
from pydantic import TypeAdapter

from lanewise.loaders import Adapter, LoaderError, parse_json_object
from lanewise.loaders.config import canonical_json
from lanewise.loaders.tensor_file import read_small

from .errors import Conflict, InvalidRequest, NotFound, StorageFailure

FACTORS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
VERSION_FILE = "version.json"
ACTIVE_FILE = "active"
BASE = "base"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_MAX_JSON_BYTES = 4 << 20
Arguments = TypeVarTuple("Arguments")
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
    owns the folder or a stored adapter has the base's name, StorageFailure when the folder cannot be used.
    """

    def __init__(self, folder: Path, base_name: str) -> None:
        self.folder = folder.resolve()
        self.base_name = base_name
        self._last: dict[str, int] = {}  # the highest number ever given, by adapter
        self._records: dict[str, AdapterRecord] = {}
        with _using_disk():
            for part in (self._adapters, self._retired, self._incoming):
                part.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / "lock")
            try:
                self._restore()
            except BaseException:
                self._lock.close()
                raise

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

    @asynccontextmanager
    async def receiving(self) -> AsyncGenerator[Path]:
        """A fresh folder for a version on its way in; gone afterwards unless `store` took it.

        Raises StorageFailure for every OSError of the block too: it writes there.
        """
        folder = self._incoming / uuid.uuid4().hex
        with _using_disk():
            try:
                await to_thread.run_sync(folder.mkdir)
                yield folder
            finally:
                with CancelScope(shield=True):
                    await to_thread.run_sync(_discard, folder)

    def files(self, version: Version) -> tuple[Path, dict[str, Any]]:
        """The version's factors file and its config. Blocks. Raises UnsafeFile or InvalidAdapter (config)."""
        folder = self._folder(version)
        config = read_small(folder / CONFIG_FILE, _MAX_JSON_BYTES)
        return folder / FACTORS_FILE, parse_json_object(config, CONFIG_FILE)

    async def store(self, name: str, received: Path, config: Mapping[str, Any], adapter: Adapter) -> Version:
        """Make the received factors the adapter's next version. It is on disk for good once this returns.

        Raises StorageFailure; then there is no such version.
        """
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
        await _on_disk(self._write_version, version, received, config)
        record.versions[version.number] = version
        self._records[name] = record
        return version

    async def activate(self, version: Version) -> None:
        """Point the adapter at this version: one atomic change, on disk first. Raises StorageFailure."""
        record = self.adapter(version.adapter)
        assert version.number in record.versions, f"{version.key} is not stored"
        target = self._adapters / version.adapter / ACTIVE_FILE
        await _on_disk(self._replace_file, target, str(version.number))
        record.active_number = version.number

    async def delete_adapter(self, name: str) -> None:
        """Raises StorageFailure; then the adapter is still there."""
        assert name in self._records, f"{name} does not exist"
        record = self._records.pop(name)
        try:
            await _on_disk(self._delete, self._adapters / name, name)
        except StorageFailure:
            self._records[name] = record
            raise

    async def delete_version(self, version: Version) -> None:
        """The version must not be active. Raises StorageFailure; then the version is still there."""
        record = self.adapter(version.adapter)
        assert version.number != record.active_number, f"{version.key} is active"
        before = record.versions
        record.versions = {number: v for number, v in before.items() if number != version.number}
        try:
            await _on_disk(self._delete, self._folder(version), version.adapter)
        except StorageFailure:
            record.versions = before
            raise
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
        (received / CONFIG_FILE).write_bytes(canonical_json(config))
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
        if folder.exists():  # or somebody removed it by hand
            grave = self._incoming / uuid.uuid4().hex
            folder.rename(grave)
            _sync(folder.parent)
            _discard(grave)

    def _restore(self) -> None:
        """Take up what an earlier server stored."""
        for leftover in self._incoming.iterdir():
            _discard(leftover)
        for file in self._retired.iterdir():
            if _NAME.fullmatch(file.name) and (number := _read_number(file)):
                self._last[file.name] = number
        for home in sorted(self._adapters.iterdir()):
            if not _NAME.fullmatch(home.name) or not _is_folder(home):
                _log.warning("%s is not an adapter's folder; it is left alone", home)
                continue
            try:
                record = self._restored(home)
            except OSError as error:
                _log.error("%s cannot be read and is not served: %s", home, error.strerror)
                continue
            if record.versions:
                self._check_base_name(home.name)
                self._records[home.name] = record

    def _restored(self, home: Path) -> AdapterRecord:
        numbered = {number: entry for entry in home.iterdir() if (number := parse_number(entry.name))}
        self._last[home.name] = max(self._last.get(home.name, 0), *numbered, 0)
        versions = filter(None, (_restored_version(numbered[number]) for number in sorted(numbered)))
        record = AdapterRecord(home.name, {version.number: version for version in versions})
        active = _read_number(home / ACTIVE_FILE)
        if active in record.versions:
            record.active_number = active
        elif record.versions and os.path.lexists(home / ACTIVE_FILE):
            _log.error("%s: the active version is not served; activate another", home.name)
        return record

    def _check_base_name(self, stored: str) -> None:
        if stored in (BASE, self.base_name):
            raise Conflict(
                f"{self._adapters / stored} holds an adapter that is named like the base;"
                " give the base another --base-name or move that folder away"
            )


def parse_number(text: str) -> int | None:
    """A version number as it is written: 1 to 18 ASCII digits, the first not 0; None for anything else."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _restored_version(folder: Path) -> Version | None:
    """The version stored in `folder`; None, and an error in the log, if the disk damaged it."""
    try:
        if not _is_folder(folder):
            raise ValueError("it is not a folder")
        stored = read_small(folder / VERSION_FILE, _MAX_JSON_BYTES)
        version = TypeAdapter(Version).validate_json(stored, strict=True)
        if (version.adapter, str(version.number)) != (folder.parent.name, folder.name):
            raise ValueError(f"the folder holds {version.key}")
    except (OSError, LoaderError, ValueError) as error:
        _log.error("%s is damaged and is not served: %s", folder, error)
        return None
    return version


def _read_number(file: Path) -> int | None:
    """The number in an `active` or `retired` file; None without one, and an error in the log if damaged."""
    if not os.path.lexists(file):
        return None
    try:
        number = parse_number(read_small(file, 64).decode().strip())
    except (OSError, LoaderError, UnicodeDecodeError):
        number = None
    if number is None:
        _log.error("%s is damaged: expected a version number", file)
    return number


def _locked(file: Path) -> io.FileIO:
    """The lock file, held. It may be anybody's: it is not followed if a symlink, and never written to."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    lock = io.FileIO(descriptor, "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Conflict(
            f"data folder {file.parent} is in use by another server; stop it or give another --data"
        ) from None
    return lock


async def _on_disk(work: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
    """Run `work` in a worker thread. Raises StorageFailure for its OSErrors."""
    with _using_disk():
        await to_thread.run_sync(work, *arguments)


@contextmanager
def _using_disk() -> Generator[None]:
    """Turn what the disk refuses into a StorageFailure. Clients see the reason, the log also the path."""
    try:
        yield
    except OSError as error:
        _log.error("the data folder cannot be used: %s", error)
        raise StorageFailure(
            f"the server's data folder cannot be used: {error.strerror or type(error).__name__};"
            " free space or make it writable, then retry",
            code="storage_failed",
        ) from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    """Remove what nobody needs any more; if the disk refuses, the next start tries again."""
    try:
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error.strerror)
