"""The catalog on disk: what was acknowledged is there, what was not is not."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanewise.loaders import Adapter, InvalidAdapter, Inventory, UnsafeFile, read_adapter_file
from lanewise.server.catalog import FACTORS_FILE, Catalog
from lanewise.server.errors import Conflict, InvalidRequest, NotFound, StorageFailure

pytestmark = pytest.mark.anyio
Store = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(factors: Any, inventory: Inventory) -> Store:
    async def stored(catalog: Catalog, name: str, variant: int = 0) -> Any:
        push = factors(variant=variant)
        async with catalog.receiving() as folder:
            file = folder / FACTORS_FILE
            file.write_bytes(push.body)
            adapter: Adapter = read_adapter_file(file, push.config, inventory, max_rank=8)
            return await catalog.store(name, folder, push.config, adapter)

    return stored


async def test_stored_versions_are_read_back(data: Path, store: Store, factors: Any) -> None:
    catalog = Catalog(data, "tiny")
    first, second = await store(catalog, "argon"), await store(catalog, "argon", 1)
    await catalog.activate(first)
    catalog.close()
    catalog = Catalog(data, "tiny")
    record = catalog.adapter("argon")
    assert list(record.versions.values()) == [first, second]
    assert record.active == first
    file, config = catalog.files(second)
    assert file.read_bytes() == factors(variant=1).body
    assert config == factors(variant=1).config
    catalog.close()


async def test_numbers_are_never_given_twice(data: Path, store: Store) -> None:
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    await catalog.delete_version(await store(catalog, "argon"))
    assert (await store(catalog, "argon")).number == 3
    await catalog.delete_adapter("argon")
    with pytest.raises(NotFound):
        catalog.adapter("argon")
    catalog.close()
    catalog = Catalog(data, "tiny")
    assert catalog.adapters == {}
    assert (await store(catalog, "argon")).number == 4
    catalog.close()


async def test_half_written_folders_are_removed_at_start(data: Path, store: Store) -> None:
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    catalog.close()
    (data / "incoming" / "torn").mkdir()
    (data / "incoming" / "torn" / FACTORS_FILE).write_bytes(b"half")
    (data / "incoming" / "draft").write_text("3")
    catalog = Catalog(data, "tiny")
    assert list((data / "incoming").iterdir()) == []
    assert list(catalog.adapters) == ["argon"]
    catalog.close()


async def test_damage_is_logged_and_the_rest_is_served(
    data: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(data, "tiny")
    for number in range(3):
        await catalog.activate(await store(catalog, "argon", number))
    catalog.close()
    (data / "adapters" / "argon" / "3" / "version.json").write_text("{")
    other = data / "adapters" / "argon" / "2" / "version.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"number": 7}))
    catalog = Catalog(data, "tiny")
    record = catalog.adapter("argon")
    assert list(record.versions) == [1]
    assert record.active is None
    assert "3 is damaged" in caplog.text
    assert "activate another" in caplog.text
    assert (await store(catalog, "argon")).number == 4
    catalog.close()


async def test_deleted_files_are_not_found(data: Path, store: Store) -> None:
    catalog = Catalog(data, "tiny")
    version = await store(catalog, "argon")
    await catalog.delete_version(version)
    with pytest.raises(NotFound):
        catalog.version("argon", 1)
    with pytest.raises(UnsafeFile, match=r"adapter_config\.json"):
        catalog.files(version)
    catalog.close()


Damage = Callable[[Path], object]
FOREIGN: dict[str, Damage] = {
    "a file among the adapters": lambda data: (data / "adapters" / ".DS_Store").write_text("x"),
    "one with an adapter's name": lambda data: (data / "adapters" / "notes").write_text("x"),
    "a folder of the file system": lambda data: (data / "adapters" / "lost+found").mkdir(),
    "a symlink loop": lambda data: (data / "adapters" / "loop").symlink_to("loop"),
    "a symlink to an adapter": lambda data: (data / "adapters" / "twin").symlink_to("argon"),
    "a symlink to a version": lambda data: (data / "adapters" / "argon" / "3").symlink_to("1"),
    "a file with a version's name": lambda data: (data / "adapters" / "argon" / "3").write_text("x"),
    "a number that is none of ours": lambda data: (data / "adapters" / "argon" / "\u0663").mkdir(),
    "a retired word": lambda data: (data / "retired" / "neon").write_text("many"),
    "retired bytes": lambda data: (data / "retired" / "neon").write_bytes(b"\xff\xfe"),
    "a retired folder": lambda data: (data / "retired" / "neon").mkdir(),
    "a hidden retired file": lambda data: (data / "retired" / ".DS_Store").write_bytes(b"\0"),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
async def test_what_is_not_ours_is_left_alone(data: Path, store: Store, foreign: Damage) -> None:
    catalog = Catalog(data, "tiny")
    await catalog.activate(await store(catalog, "argon"))
    await catalog.activate(await store(catalog, "argon", 1))
    catalog.close()
    foreign(data)
    catalog = Catalog(data, "tiny")
    assert list(catalog.adapters) == ["argon"]
    assert list(catalog.adapter("argon").versions) == [1, 2]
    assert catalog.adapter("argon").active_number == 2
    assert (await store(catalog, "argon", 2)).number >= 3
    catalog.close()


@pytest.mark.parametrize("active", [b"", b"\xff\xfe", b"-1", b"1.0", b"two", b"9" * 100, b"7"])
async def test_a_damaged_active_file_is_logged_and_its_adapter_waits(
    data: Path, store: Store, active: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(data, "tiny")
    await catalog.activate(await store(catalog, "argon"))
    catalog.close()
    (data / "adapters" / "argon" / "active").write_bytes(active)
    catalog = Catalog(data, "tiny")
    assert list(catalog.adapter("argon").versions) == [1]
    assert catalog.adapter("argon").active is None
    assert "activate another" in caplog.text
    catalog.close()


@pytest.mark.parametrize(
    "change",
    [{"number": "1"}, {"number": 1.5}, {"number": True}, {"rank": "2"}, {"digest": None}, "deep", "[]"],
)
async def test_a_version_with_a_damaged_description_is_not_served(
    data: Path, store: Store, change: dict[str, Any] | str
) -> None:
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    await store(catalog, "argon", 1)
    catalog.close()
    file = data / "adapters" / "argon" / "1" / "version.json"
    usual = json.loads(file.read_text())
    file.write_text(
        "[" * 100_000
        if change == "deep"
        else json.dumps(usual | change)
        if isinstance(change, dict)
        else change
    )
    catalog = Catalog(data, "tiny")
    assert list(catalog.adapter("argon").versions) == [2]
    catalog.close()


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"r": NaN}'])
async def test_a_damaged_config_is_named(data: Path, store: Store, text: str) -> None:
    catalog = Catalog(data, "tiny")
    version = await store(catalog, "argon")
    (data / "adapters" / "argon" / "1" / "adapter_config.json").write_text(text)
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        catalog.files(version)
    catalog.close()


async def test_an_adapter_named_like_the_base_is_not_shadowed(data: Path, store: Store) -> None:
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    catalog.close()
    for _ in range(2):  # the refusal lets go of the lock
        with pytest.raises(Conflict, match="--base-name"):
            Catalog(data, "argon")
    catalog = Catalog(data, "tiny")
    await catalog.delete_adapter("argon")
    catalog.close()
    Catalog(data, "argon").close()


def test_the_lock_is_not_followed_and_not_emptied(data: Path, tmp_path: Path) -> None:
    Catalog(data, "tiny").close()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock = data / "lock"
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(StorageFailure):
        Catalog(data, "tiny")
    assert precious.read_text() == "precious"
    lock.unlink()
    lock.write_text("a note")
    Catalog(data, "tiny").close()
    assert lock.read_text() == "a note"


def test_a_data_folder_that_cannot_be_used_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailure, match="Not a directory"):
        Catalog(tmp_path / "file", "tiny")


async def test_what_the_disk_refuses_changes_nothing(
    data: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    catalog = Catalog(data, "tiny")
    first, second = await store(catalog, "argon"), await store(catalog, "argon", 1)
    await catalog.activate(first)
    with monkeypatch.context() as broken:
        broken.setattr("lanewise.server.catalog._sync", full)
        for change in (
            store(catalog, "neon"),
            catalog.activate(second),
            catalog.delete_version(second),
            catalog.delete_adapter("argon"),
        ):
            with pytest.raises(StorageFailure, match="No space left on device") as raised:
                await change
            assert str(data) not in raised.value.message
            assert raised.value.code == "storage_failed"
    assert list(catalog.adapters) == ["argon"]
    assert list(catalog.adapter("argon").versions) == [1, 2]
    assert catalog.adapter("argon").active == first
    assert list((data / "adapters").iterdir()) == [data / "adapters" / "argon"]
    await catalog.delete_version(second)
    catalog.close()


async def test_what_was_removed_by_hand_can_be_deleted(data: Path, store: Store) -> None:
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    await store(catalog, "argon", 1)
    shutil.rmtree(data / "adapters" / "argon" / "1")
    await catalog.delete_version(catalog.version("argon", 1))
    shutil.rmtree(data / "adapters" / "argon")
    await catalog.delete_adapter("argon")
    assert catalog.adapters == {}
    assert (await store(catalog, "argon")).number == 3
    catalog.close()


async def test_a_deletion_that_runs_is_seen_whole(
    data: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request meanwhile would find its files gone and call that damage."""
    catalog = Catalog(data, "tiny")
    await store(catalog, "argon")
    seen: list[bool] = []

    def looks(path: Path) -> None:
        seen.append("argon" in catalog.adapters)

    monkeypatch.setattr("lanewise.server.catalog._sync", looks)
    await catalog.delete_adapter("argon")
    assert seen
    assert not any(seen)
    catalog.close()


async def test_receiving_keeps_the_event_loop_free(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(data, "tiny")
    threads: list[threading.Thread] = []
    for module, name in ((os, "mkdir"), (os, "rmdir"), (os, "unlink")):
        real = getattr(module, name)

        def watched(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            threads.append(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    async with catalog.receiving() as folder:
        (folder / "part").touch()
    assert not folder.exists()
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    catalog.close()


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "7", "x" * 128])
def test_names_that_are_allowed(data: Path, name: str) -> None:
    catalog = Catalog(data, "tiny")
    catalog.check_name(name)
    catalog.close()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "a/b", "a@1", "a:b", "a b", "é", "a\n", "x" * 129, "base", "tiny"]
)
def test_names_that_are_refused(data: Path, name: str) -> None:
    catalog = Catalog(data, "tiny")
    with pytest.raises(InvalidRequest):
        catalog.check_name(name)
    catalog.close()
