"""What a request may name, and what it gets."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lanewise.server.catalog import Catalog, Version
from lanewise.server.errors import InvalidRequest, NotFound
from lanewise.server.selection import select

BASE_NAME = "org/tiny:fp8"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """argon with versions 1, 2 (active), 10; idle with version 1 and none active."""
    for adapter, number in (("argon", 1), ("argon", 2), ("argon", 10), ("idle", 1)):
        folder = tmp_path / "adapters" / adapter / str(number)
        folder.mkdir(parents=True)
        version = Version(adapter, number, digest="d", created=0, rank=1, layout="linear", nbytes=0)
        (folder / "version.json").write_text(json.dumps(asdict(version)))
    (tmp_path / "adapters" / "argon" / "active").write_text("2")
    catalog = Catalog(tmp_path, BASE_NAME)
    catalog.close()
    return catalog


@pytest.mark.parametrize(
    ("model", "lora_path", "key"),
    [
        ("base", None, None),
        (BASE_NAME, None, None),
        ("argon", None, "argon@2"),
        ("argon@1", None, "argon@1"),
        ("argon@10", None, "argon@10"),
        ("base:argon", None, "argon@2"),
        (f"{BASE_NAME}:argon@1", None, "argon@1"),
        ("idle@1", None, "idle@1"),
        ("base", "argon", "argon@2"),
        (BASE_NAME, "argon@1", "argon@1"),
        ("argon", "argon", "argon@2"),
        ("argon@1", "argon", "argon@1"),
        ("base:argon@1", "argon", "argon@1"),
    ],
)
def test_selected(catalog: Catalog, model: str, lora_path: str | None, key: str | None) -> None:
    version = select(catalog, model, lora_path)
    assert (version and version.key) == key


@pytest.mark.parametrize(
    ("model", "lora_path"),
    [
        *[(model, None) for model in ("neon", "Argon", "argon ", " argon", "tiny", "org/tiny", "BASE")],
        *[(model, None) for model in ("base:", "base:base", "base:idle", "tiny:argon", "argon:base", "idle")],
        *[(model, None) for model in ("argon@3", "argon@0", "argon@01", "argon@-1", "argon@²", "argon@1@1")],
        *[(model, None) for model in ("argon@" + "9" * 500, "argon@", "@1", "@")],
        *[("base", lora_path) for lora_path in ("neon", "base", "argon@3", "base:argon", "idle")],
    ],
)
def test_not_found(catalog: Catalog, model: str, lora_path: str | None) -> None:
    with pytest.raises(NotFound) as error:
        select(catalog, model, lora_path)
    assert error.value.code == "model_not_found"
    assert error.value.param == ("lora_path" if lora_path else "model")


@pytest.mark.parametrize(
    ("model", "lora_path"), [("idle", "argon"), ("argon", "idle"), ("argon@1", "argon@2"), ("neon", "argon")]
)
def test_two_names_that_disagree(catalog: Catalog, model: str, lora_path: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        select(catalog, model, lora_path)
    assert error.value.param == "lora_path"
