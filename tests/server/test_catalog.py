"""The catalog on disk: what was acknowledged is there, what was not is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanewise.loaders import Adapter, Inventory, UnsafeFile, read_adapter_file
from lanewise.server.catalog import FACTORS_FILE, Catalog
from lanewise.server.errors import InvalidRequest, NotFound

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
