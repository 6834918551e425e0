"""A base checkpoint on disk: Hugging Face's layout, one safetensors file or several behind an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from .errors import UnsupportedBase
from .inventory import Inventory

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class BaseCheckpoint:
    """A base whose config was read and whose weights were found, but not yet read."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    inventory: Inventory = field(repr=False)
    files: Mapping[str, tuple[str, ...] | None] = field(repr=False)
    """File name → the tensors the index expects in it; None without an index: whatever the file holds."""

    @classmethod
    def open(cls, folder: Path) -> BaseCheckpoint:
        """Read `config.json` and find the weights. Raises UnsupportedBase naming the file or field."""
        config = _read_json(folder / "config.json")
        _check_quantization(config)
        return cls(folder, config, Inventory.from_config(config), _weight_files(folder))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint with its name, memory-mapped, file by file.

        Raises UnsupportedBase when a file is damaged or lacks a tensor that the index promises.
        """
        for file, names in self.files.items():
            try:
                with safe_open(self.folder / file, framework="pt") as weights:
                    for name in weights.keys() if names is None else names:
                        yield name, weights.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise UnsupportedBase(f"{self.folder / file}: {error}") from error


def _weight_files(folder: Path) -> dict[str, tuple[str, ...] | None]:
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if not (folder / _INDEX).is_file():
        raise UnsupportedBase(f"{folder}: no weights found; expected {_SINGLE} or {_INDEX}")
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedBase(f"{folder / _INDEX}: weight_map is missing; expected tensor names with files")
    files: dict[str, list[str]] = {}
    for name, file in cast(dict[str, object], weight_map).items():
        if not isinstance(file, str) or PurePath(file).name != file:
            raise UnsupportedBase(
                f"{folder / _INDEX}: {name} is in {file!r}; expected a file beside the index"
            )
        files.setdefault(file, []).append(name)
    for file in files:
        if not (folder / file).is_file():
            raise UnsupportedBase(f"{folder / file}: the file is missing; {_INDEX} expects weights in it")
    return {file: tuple(names) for file, names in files.items()}


def _check_quantization(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UnsupportedBase(f"config.json: quantization_config is {quantization!r}; expected an object")
    for name, expected in _BLOCK_FP8.items():
        found = cast(dict[str, object], quantization).get(name)
        if found != expected:
            raise UnsupportedBase(
                f"config.json: quantization_config.{name} is {found!r}; "
                f"expected {expected!r}, or no quantization_config for an unquantised base"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(file.read_bytes())
    except OSError as error:
        raise UnsupportedBase(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedBase(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UnsupportedBase(f"{file}: holds a {type(value).__name__}; expected a JSON object")
    return cast(dict[str, Any], value)
