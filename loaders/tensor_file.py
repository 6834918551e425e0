"""Reads a safetensors file that nobody vouches for.

Every claim of the header is checked against the file's real length before anything is allocated for it, so a
hostile file costs no more memory than its own header. Format: https://github.com/huggingface/safetensors,
"Format": 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps. Data is
read, not memory-mapped: a file that is cut short under a mapping would kill the process with SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # what only reads headers need not wait for torch
    from torch import Tensor

from .config import unique_keys
from .errors import UnsafeFile

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 200_000  # GLM-5.2 with one 2-D pair per expert has 116,200
_LEAST_HEADER = 1 << 20  # room for metadata
_HEADER_PER_TENSOR = 512  # a long name, dtype, shape and offsets take 250
_MAX_NAME = 1024
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**63
_LENGTH_BYTES = 8
_CHUNK_BYTES = 8 << 20

_FIELDS = {"dtype", "shape", "data_offsets"}
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Of factors: safetensors' names and torch's."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it: `start` is its offset in the file, `nbytes` its length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """A checked safetensors file, kept open so that renaming or deleting its path takes nothing away."""

    def __init__(self, path: Path, most_tensors: int = MAX_TENSORS) -> None:
        """`most_tensors` bounds the header as well: parsing it is what a hostile one costs.

        Raises UnsafeFile when the file is not a regular one, its header does not describe it exactly, or
        there are more tensors.
        """
        self.path = path
        self._most_tensors = min(most_tensors, MAX_TENSORS)
        self._most_header = min(_LEAST_HEADER + _HEADER_PER_TENSOR * most_tensors, MAX_HEADER_BYTES)
        self._fd = _open_regular(path)
        weakref.finalize(self, os.close, self._fd)
        self._identity = self._stat()
        self.head, entries = self._read_header()
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}

    @property
    def size(self) -> int:
        return self._identity[0]

    def read(self, *entries: TensorEntry) -> Tensor:
        """Tensors of one shape and float dtype, stacked as [n, …].

        Raises UnsafeFile when the file was changed since it was checked.
        """
        import torch

        first = entries[0]
        out = torch.empty((len(entries), *first.shape), dtype=getattr(torch, FLOAT_DTYPES[first.dtype]))
        for row, entry in zip(out, entries, strict=True):
            assert (entry.shape, entry.dtype) == (first.shape, first.dtype), "stacked tensors are alike"
            self._read_into(bytes_of(row), entry.start)
        self._require_unchanged()
        return out

    def chunks(self, entry: TensorEntry) -> Iterator[Tensor]:
        """A float tensor's values in flat pieces that share one buffer: use each before the next."""
        import torch

        dtype: torch.dtype = getattr(torch, FLOAT_DTYPES[entry.dtype])
        buffer = torch.empty(min(entry.nbytes, _CHUNK_BYTES), dtype=torch.uint8)
        for done in range(0, entry.nbytes, _CHUNK_BYTES):
            piece = buffer[: entry.nbytes - done]
            self._read_into(bytes_of(piece), entry.start + done)
            yield piece.view(dtype)
        self._require_unchanged()

    def _read_header(self) -> tuple[bytes, list[TensorEntry]]:
        if self.size < _LENGTH_BYTES:
            raise self._unsafe(f"truncated: {self.size} bytes", "at least 8 bytes of header length")
        length = int.from_bytes(self._read(_LENGTH_BYTES, 0), "little")
        if length > self._most_header:
            raise self._unsafe(f"a header of {length} bytes", f"at most {self._most_header} bytes")
        start = _LENGTH_BYTES + length
        if start > self.size:
            raise self._unsafe(f"truncated in its header: {self.size} bytes", f"at least {start} bytes")
        text = self._read(length, _LENGTH_BYTES)
        entries = self._parse(text)
        end = self._require_contiguous(entries, start)
        if self.size < end:
            raise self._unsafe(f"truncated: {self.size} bytes", f"{end} bytes as its header says")
        if self.size > end:
            raise self._unsafe(
                f"{self.size} bytes", f"{end} bytes as its header says, and nothing after them"
            )
        return length.to_bytes(_LENGTH_BYTES, "little") + text, entries

    def _parse(self, text: bytes) -> list[TensorEntry]:
        if not text.startswith(b"{"):
            raise self._unsafe("a header that is not a JSON object", "safetensors")
        try:
            header: object = json.loads(text.decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._unsafe(f"a header that is not valid JSON ({error})", "safetensors") from error
        assert isinstance(header, dict)
        tensors = cast(dict[str, Any], header)
        self._check_metadata(tensors.pop("__metadata__", {}))
        if len(tensors) > self._most_tensors:
            raise self._unsafe(f"{len(tensors)} tensors", f"at most {self._most_tensors}")
        entries = [self._entry(name, value, _LENGTH_BYTES + len(text)) for name, value in tensors.items()]
        return sorted(entries, key=lambda entry: (entry.start, entry.nbytes))

    def _check_metadata(self, value: object) -> None:
        if isinstance(value, dict) and all(
            isinstance(v, str) for v in cast(dict[str, object], value).values()
        ):
            return
        raise self._unsafe("__metadata__ that does not map names to strings", "strings")

    def _entry(self, name: str, value: object, data_start: int) -> TensorEntry:
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self._unsafe(f"a tensor named {name[:80]!r}", f"at most {_MAX_NAME} printable characters")
        if not isinstance(value, dict):
            raise self._unsafe(f"{name!r} described by a {type(value).__name__}", "a JSON object")
        fields = cast(dict[str, object], value)
        if fields.keys() != _FIELDS:
            raise self._unsafe(f"{name!r} with unknown or missing fields", ", ".join(sorted(_FIELDS)))
        dtype, shape, offsets = fields["dtype"], _naturals(fields["shape"]), _naturals(fields["data_offsets"])
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise self._unsafe(f"{name!r} with an unknown dtype", f"one of {', '.join(_ITEM_BYTES)}")
        if shape is None or len(shape) > _MAX_DIMENSIONS:
            raise self._unsafe(f"{name!r} with a malformed shape", f"a list of up to {_MAX_DIMENSIONS} sizes")
        if offsets is None or len(offsets) != 2:
            raise self._unsafe(f"{name!r} with malformed data_offsets", "[begin, end]")
        begin, end = offsets
        nbytes = _ITEM_BYTES[dtype] * math.prod(shape)
        if end - begin != nbytes:
            raise self._unsafe(
                f"{name!r} with {end - begin} bytes", f"{nbytes} bytes for {dtype} {list(shape)}"
            )
        return TensorEntry(name, dtype, shape, data_start + begin, nbytes)

    def _require_contiguous(self, entries: list[TensorEntry], start: int) -> int:
        """Where the last tensor ends; every byte between `start` and there belongs to exactly one tensor."""
        for entry in entries:
            if entry.start != start:
                problem = "overlaps the tensor before it" if entry.start < start else "leaves a gap before it"
                raise self._unsafe(f"{entry.name!r} {problem}", "tensors side by side")
            start += entry.nbytes
        return start

    def _read(self, nbytes: int, offset: int) -> bytes:
        data = bytearray(nbytes)
        self._read_into(memoryview(data), offset)
        return bytes(data)

    def _read_into(self, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(self._fd, [target], offset)
            if count == 0:
                raise self._unsafe("cut short since it was checked", f"{self.size} bytes")
            target, offset = target[count:], offset + count

    def _require_unchanged(self) -> None:
        if self._stat() != self._identity:
            raise self._unsafe("changed since it was checked", "a file that nobody writes to any more")

    def _stat(self) -> tuple[int, int]:
        info = os.fstat(self._fd)
        return info.st_size, info.st_mtime_ns

    def _unsafe(self, found: str, expected: str) -> UnsafeFile:
        return UnsafeFile(f"{self.path.name}: found {found}; expected {expected}")


def _open_regular(path: Path) -> int:
    """Open without following a symlink and without waiting on a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise UnsafeFile(f"{path.name}: cannot be opened ({reason}); expected a regular file") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeFile(f"{path.name}: found a folder or device; expected a regular file")
    return fd


def read_small(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes. Raises UnsafeFile when it is larger or not a regular file."""
    fd = _open_regular(path)
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UnsafeFile(f"{path.name}: more than {limit} bytes; expected a small file")
    return data


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    if not all(type(item) is int and 0 <= item < _MAX_SIZE for item in items):
        return None
    return tuple(cast(list[int], items))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, shared and writable."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data
