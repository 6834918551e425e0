"""An adapter on disk, checked against a base's inventory and read into one canonical form.

    header     the file is what its header says                    → UnsafeFile
    fit        every tensor is a factor the inventory has room for  → InvalidAdapter, every finding at once
    values     every number is finite, the digest is taken          → InvalidAdapter

The first two read no weight. Factors keep the dtype they were stored in (bf16, fp16 or fp32): nothing is cast
here, the engine's factor pool decides.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import AdapterConfig, parse_json_object
from .digest import AdapterDigest
from .errors import Finding, InvalidAdapter
from .fit import Pair, fit
from .inventory import Inventory, Layout
from .tensor_file import TensorFile, bytes_of, read_small

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Adapter:
    """A checked adapter. Its factors stay on disk until `pairs` reads them; the file is held open.

    `modules` are inventory names, in the inventory's order; `nbytes` is what the factors take as stored.
    """

    config: AdapterConfig
    layout: Layout
    digest: str
    _file: TensorFile = field(repr=False)
    _pairs: tuple[Pair, ...] = field(repr=False)

    @property
    def rank(self) -> int:
        return self.config.rank

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(pair.module.name for pair in self._pairs)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for pair in self._pairs for entry in (*pair.a, *pair.b))

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """(module, A, B, scale) of every adapted module, read one at a time; scale = alpha / r.

        Shapes: linear A [r, in], B [out, r]; expert A [E', r, in], B [E', out, r], where E' is the number of
        experts, or 1 on the shared side of `shared_outer`. Raises UnsafeFile when the file was changed since.
        """
        for pair in self._pairs:
            a, b = self._file.read(*pair.a), self._file.read(*pair.b)
            if not pair.per_expert:
                a, b = a[0], b[0]
            yield pair.module.name, a, b, self.config.scale


def read_adapter(folder: Path, inventory: Inventory, *, max_rank: int) -> Adapter:
    """Read an adapter folder: `adapter_model.safetensors` and `adapter_config.json`, neither a symlink.

    Raises UnsafeFile or InvalidAdapter.
    """
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).exists()]
    if missing:
        expected = f"{CONFIG} and {WEIGHTS} in {folder}"
        raise InvalidAdapter([Finding(name, "the file is missing", expected) for name in missing])
    config = parse_json_object(read_small(folder / CONFIG, _MAX_CONFIG_BYTES), CONFIG)
    return read_adapter_file(folder / WEIGHTS, config, inventory, max_rank=max_rank)


def read_adapter_file(
    file: Path,
    config: Mapping[str, Any],
    inventory: Inventory,
    *,
    max_rank: int,
    digest: str | None = None,
) -> Adapter:
    """Read a safetensors file whose config came separately, as in a push.

    `digest` is the digest when the caller already took it while the bytes arrived. Raises UnsafeFile or
    InvalidAdapter.
    """
    parsed = AdapterConfig.parse(config)
    if parsed.rank > max_rank:
        raise InvalidAdapter([Finding("r", f"is {parsed.rank}", f"at most {max_rank}, this server's limit")])
    tensors = TensorFile(file)
    layout, pairs = fit(tensors.entries, parsed, inventory)
    taken = AdapterDigest(config)
    _check_values(tensors, taken if digest is None else None)
    return Adapter(parsed, layout, digest or taken.hexdigest(), tensors, pairs)


def _check_values(tensors: TensorFile, digest: AdapterDigest | None) -> None:
    """One pass over the file in small pieces: is every number finite, and what is the digest?"""
    findings: list[Finding] = []
    if digest is not None:
        digest.update(tensors.head)
    for entry in tensors.entries.values():
        finite = True
        for piece in tensors.chunks(entry):
            if digest is not None:
                digest.update(bytes_of(piece))
            finite = finite and bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all())
        if not finite:
            findings.append(Finding(entry.name, "holds NaN or Inf", "finite numbers"))
    if findings:
        raise InvalidAdapter(findings)
