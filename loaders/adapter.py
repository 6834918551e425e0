"""An adapter on disk, checked against a base's inventory and read into one canonical form.

    header     the file is what its header says                    → UnsafeFile
    fit        every tensor is a factor the inventory has room for  → InvalidAdapter, every finding at once
    values     every number is finite, the digest is taken          → InvalidAdapter

The first two read no weight. Factors keep the dtype they were stored in (bf16, fp16 or fp32): nothing is cast
here, `convert` casts when it is asked to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import AdapterConfig, parse_json_object
from .digest import AdapterDigest
from .errors import Finding, InvalidAdapter
from .fit import Fit, Pair, Stored, fit
from .inventory import Inventory, Layout
from .tensor_file import FLOAT_DTYPES, TensorEntry, TensorFile, bytes_of, read_small

if TYPE_CHECKING:  # what only lists tensors need not wait for torch
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_ADDED_TOKENS = "added_tokens.json"
_PICKLE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_LEAST_TENSORS = 1024  # of a small base too: then every tensor it has no room for is named


@dataclass(frozen=True)
class Adapter:
    """A checked adapter. Its factors stay on disk until `pairs` reads them; the file is held open.

    `modules` are inventory names, in the inventory's order; `rank` is the highest of any module; `nbytes` is
    what the factors take as stored. `warnings` are what is odd but does no harm: factors that are all zero.
    """

    config: AdapterConfig
    layout: Layout
    digest: str
    warnings: tuple[Finding, ...]
    _file: TensorFile = field(repr=False)
    _fit: Fit = field(repr=False)

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self._fit.pairs)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(pair.module.name for pair in self._fit.pairs)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._fit.entries)

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """(module, A, B, scale) of every adapted module, read one at a time.

        Shapes: linear A [r, in], B [out, r]; expert A [E', r, in], B [E', out, r], where E' is the number of
        experts, or 1 on the shared side of `shared_outer`; r is the module's own. The scale is alpha / r or
        alpha / √r, by the config's patterns. The projections of one bank always have one scale, the largest
        of theirs: where patterns differ, the rest is multiplied into B, in fp32 and rounded once. Raises
        UnsafeFile when the file was changed since.
        """
        scales = _bank_scales(self._fit.pairs)
        for pair, a, b in _read_pairs(self._file, self._fit.pairs):
            scale = scales[_bank(pair)]
            if pair.scale != scale:
                b = (b.float() * (pair.scale / scale)).to(b.dtype)
            yield pair.module.name, a, b, scale

    def own_pairs(self) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """The same with nothing multiplied into B: each pair's own `scale` counts."""
        return _read_pairs(self._file, self._fit.pairs)


def read_adapter(
    folder: Path, inventory: Inventory, *, max_rank: int, dtypes: Collection[str] = tuple(FLOAT_DTYPES)
) -> Adapter:
    """Read an adapter folder: `adapter_model.safetensors` and `adapter_config.json`, neither a symlink.

    Tokens that the folder adds must be in the base's vocabulary. Raises UnsafeFile or InvalidAdapter.
    """
    config = read_config(folder)
    if findings := added_tokens(folder, inventory):
        raise InvalidAdapter(findings)
    return read_adapter_file(folder / WEIGHTS, config, inventory, max_rank=max_rank, dtypes=dtypes)


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` of a folder that has both files. Raises UnsafeFile or InvalidAdapter."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).exists()]
    if missing:
        expected = f"{CONFIG} and {WEIGHTS} in {folder}"
        if (folder / _PICKLE).exists():
            expected += f"; {_PICKLE} is a pickle, which can run code and is never read"
        raise InvalidAdapter([Finding(name, "the file is missing", expected) for name in missing])
    return parse_json_object(read_small(folder / CONFIG, _MAX_CONFIG_BYTES), CONFIG)


def read_adapter_file(
    file: Path,
    config: Mapping[str, Any],
    inventory: Inventory,
    *,
    max_rank: int,
    digest: str | None = None,
    dtypes: Collection[str] = tuple(FLOAT_DTYPES),
) -> Adapter:
    """Read a safetensors file whose config came separately, as in a push.

    `digest` is the digest when the caller already took it while the bytes arrived; `dtypes` are those taken,
    of "BF16", "F16" and "F32". Raises UnsafeFile or InvalidAdapter.
    """
    parsed, findings = AdapterConfig.read(config)
    if parsed is None:
        raise InvalidAdapter(findings)
    tensors = TensorFile(file, max(inventory.most_factors, _LEAST_TENSORS))
    fitted = fit(tensors.entries, parsed, inventory)
    findings += fitted.findings
    findings += _over_rank(fitted.pairs, parsed, max_rank)
    findings += _other_dtypes(fitted, dtypes)
    if findings:
        raise InvalidAdapter(findings)
    taken = AdapterDigest(config)
    findings, warnings = check_values(tensors, taken if digest is None else None)
    if findings:
        raise InvalidAdapter(findings)
    found = digest or taken.hexdigest()
    return Adapter(parsed, fitted.layout, found, tuple(warnings), tensors, fitted)


def check_values(
    tensors: TensorFile, digest: AdapterDigest | None = None
) -> tuple[list[Finding], list[Finding]]:
    """What is wrong with the numbers, and what is only odd; `digest` is fed the whole file.

    One pass in small pieces. An all-zero factor is odd: it makes its module act as the base, as PEFT's
    starting point (B = 0) does on purpose.
    """
    import torch

    if digest is not None:
        digest.update(tensors.head)
    findings: list[Finding] = []
    zeros: list[Finding] = []
    for entry in tensors.entries.values():
        finite, zero = True, True
        for piece in tensors.chunks(entry):
            if digest is not None:
                digest.update(bytes_of(piece))
            extremes = torch.stack(torch.aminmax(piece))
            finite = finite and bool(torch.isfinite(extremes).all())
            zero = zero and not bool(extremes.any())
        if not finite:
            findings.append(Finding(entry.name, "holds NaN or Inf", "finite numbers"))
        elif zero:
            zeros.append(Finding(entry.name, "is all zeros", "a trained factor"))
    return findings, zeros


def _over_rank(pairs: tuple[Pair, ...], config: AdapterConfig, max_rank: int) -> list[Finding]:
    found = sorted({pair.rank for pair in pairs if pair.rank > max_rank} | _declared(config, max_rank))
    return [
        Finding(
            "r" if rank == config.rank else "rank_pattern",
            f"is {rank}",
            f"at most {max_rank}, this server's limit",
        )
        for rank in found
    ]


def _declared(config: AdapterConfig, max_rank: int) -> set[int]:
    """A rank over the limit is the one thing to say even where the tensors do not have it."""
    return {config.rank} if config.rank > max_rank and not config.rank_pattern else set()


def _other_dtypes(fitted: Fit, dtypes: Collection[str]) -> list[Finding]:
    expected = f"one of {', '.join(dtypes)}; `lanewise convert --dtype` casts and tells the error"
    return [
        Finding(entry.name, f"has dtype {entry.dtype}", expected)
        for entry in fitted.entries
        if entry.dtype not in dtypes
    ]


def added_tokens(folder: Path, inventory: Inventory) -> list[Finding]:
    """Tokens beyond the base's vocabulary; many folders only carry a copy of the base's own added tokens.

    Raises UnsafeFile or InvalidAdapter when the file cannot be read.
    """
    if not (folder / _ADDED_TOKENS).exists():
        return []
    tokens = parse_json_object(read_small(folder / _ADDED_TOKENS, _MAX_CONFIG_BYTES), _ADDED_TOKENS)
    size = inventory.vocab_size
    expected = f"ids 0 to {size - 1}: an adapter cannot add rows to the vocabulary"
    return [
        Finding(_ADDED_TOKENS, f"{token!r} has id {number!r}", expected)
        for token, number in tokens.items()
        if type(number) is not int or not 0 <= number < size
    ]


def _bank(pair: Pair) -> str:
    name = pair.module.name
    return name if pair.module.experts is None else name.rpartition(".")[0]


def _bank_scales(pairs: tuple[Pair, ...]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for pair in pairs:
        scales[_bank(pair)] = max(pair.scale, scales.get(_bank(pair), 0.0))
    return scales


def _read_pairs(file: TensorFile, pairs: tuple[Pair, ...]) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Modules that are stored as one lie near each other, so what they share is read once and then let go."""
    uses: dict[tuple[TensorEntry, ...], int] = {}
    for pair in pairs:
        for stored in (pair.a, pair.b):
            uses[stored.entries] = uses.get(stored.entries, 0) + 1
    kept: dict[tuple[TensorEntry, ...], Tensor] = {}

    def read(pair: Pair, stored: Stored) -> Tensor:
        entries = stored.entries
        tensor = kept.pop(entries) if entries in kept else file.read(*entries)
        uses[entries] -= 1
        if uses[entries]:
            kept[entries] = tensor
        return _canonical(tensor, stored, pair)

    for pair in pairs:
        yield pair, read(pair, pair.a), read(pair, pair.b)


def _canonical(tensor: Tensor, stored: Stored, pair: Pair) -> Tensor:
    """[n, …] of n stored tensors as the module's factor."""
    match stored.form:
        case "expert_major":
            tensor = tensor[0].unflatten(0, (-1, pair.rank))
        case "expert_fastest":
            tensor = tensor[0].unflatten(1, (pair.rank, -1)).permute(2, 0, 1)
        case "whole":
            tensor = tensor[0]
        case _:
            pass
    if stored.swapped:
        tensor = tensor.transpose(-1, -2)
    if stored.rows is not None:
        tensor = tensor[..., slice(*stored.rows), :]
    return tensor
