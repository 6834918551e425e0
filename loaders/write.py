"""Writes an adapter folder that is there whole or not at all, also after a power cut."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter import CONFIG, WEIGHTS
from .tensor_file import FLOAT_DTYPES, bytes_of

if TYPE_CHECKING:
    from torch import Tensor

_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        names = {torch_name: name for name, torch_name in FLOAT_DTYPES.items()}
        return cls(name, names[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write factors under their PEFT names, with their config, as a new folder.

    Everything is written and synced beside `folder`, then renamed. Raises OSError when `folder` exists with
    files in it: a version is never overwritten.
    """
    from safetensors.torch import save_file

    with _staged(folder, config) as weights:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, weights, metadata=_METADATA)


def write_adapter_stream(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
) -> None:
    """The same with one tensor in memory at a time: `tensors` come exactly as `specs` say, in that order."""
    with _staged(folder, config) as weights, weights.open("wb") as stream:
        stream.write(_header(specs))
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            assert spec == TensorSpec.of(name, tensor), f"{name} is not the tensor that was announced"
            stream.write(bytes_of(tensor.contiguous()))


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """As https://github.com/huggingface/safetensors lays it out, filled up to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": _METADATA}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _staged(folder: Path, config: Mapping[str, Any]) -> Generator[Path]:
    """Gives the file to write the factors to. They and the config become `folder` at the end, or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield staging / WEIGHTS
        (staging / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
        for path in (staging / WEIGHTS, staging / CONFIG, staging):
            _sync(path)
        staging.chmod(0o755)
        staging.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when the rename succeeded


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
