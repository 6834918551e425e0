"""Writes an adapter in another layout, bit for bit unless asked to multiply or cast.

    per_expert_2d      ….experts.{e}.gate_proj      A [r, in]          B [out, r]
    stacked            ….experts.w1                 A [E, r, in]       B [E, out, r]
    shared_outer       ….experts.w1                 A [1, r, in]       B [E, out, r]   (w2: A of E, B of 1)
    target_parameters  ….experts[.base_layer]       A [E·r, in]        B [out, r·E]     (PEFT since 0.19.1)

Experts are expanded or, when they are equal bit for bit, shared. target_parameters has one pair for gate and
up: if their A differ they are stacked, with B in two blocks on a diagonal and twice the rank, as PEFT does
with its own older adapters; reading such a pair back drops the blocks of zeros again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .adapter import Adapter
from .errors import Finding, InvalidAdapter
from .inventory import Layout, Module
from .names import PEFT_NAMES
from .tensor_file import FLOAT_DTYPES
from .write import TensorSpec, write_adapter_stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ExpertLayout = Literal["per_expert_2d", "stacked", "shared_outer", "target_parameters"]
_Number = TypeVar("_Number", int, float)
EXPERT_LAYOUTS: tuple[ExpertLayout, ...] = ("per_expert_2d", "stacked", "shared_outer", "target_parameters")

_PREFIX = "base_model.model."
_ROLES_SINCE = "0.20.0"  # the PEFT release whose roles of A and B target_parameters are written with


@dataclass(frozen=True)
class Conversion:
    """What a conversion changed. `worst_error` is the largest relative one of a cast, None without a cast."""

    before: Layout
    after: Layout
    tensors: int
    bytes_before: int
    bytes_after: int
    folded: int
    """Modules whose B was multiplied, because their scale is not the one of the config."""
    padded: int
    """Modules whose rank was filled up with zeros."""
    doubled: int
    """Banks whose gate and up have different A, and so twice the rank as target_parameters."""
    dtype: str | None
    worst_error: float | None
    worst_tensor: str | None


@dataclass(frozen=True)
class _Factors:
    """One module's canonical pair on its way: A […, r, in], B […, out, r]."""

    module: Module
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(frozen=True)
class _Written:
    """One pair as it is written: its path, what patterns match it by, and its tensors by name."""

    path: str
    pattern: str
    rank: int
    scale: float
    tensors: Mapping[str, Tensor] = field(repr=False)


@dataclass
class _Changes:
    folded: int = 0
    padded: int = 0
    doubled: int = 0
    worst_error: float = 0.0
    worst_tensor: str | None = None


def convert(
    adapter: Adapter,
    folder: Path,
    to: ExpertLayout,
    *,
    fold_scale: bool = False,
    dtype: Literal["BF16", "F16", "F32"] | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Conversion:
    """Write `adapter` to a new `folder` in layout `to`.

    `fold_scale` is for engines that know one r and one alpha only, such as SGLang: every module gets the
    highest rank, filled up with zeros, and the commonest scale; where a module's own differs, the ratio is
    multiplied into B in fp32 and rounded once. `dtype` casts. `on_progress` hears which share of the work is
    done: everything is looked at once before anything is written.

    Raises InvalidAdapter when the layout cannot hold the factors (experts that differ where shared_outer has
    one factor, numbers that the dtype cannot hold), UnsafeFile when the file was changed since it was
    checked, and OSError when `folder` exists with files in it.
    """
    plan = _Plan.of(adapter, to, fold_scale, dtype, _Progress(len(adapter.modules), on_progress))
    changes = _Changes()
    specs: list[TensorSpec] = []
    written: list[_Written] = []
    for pair in plan.pairs(changes):
        specs += [TensorSpec.of(name, tensor) for name, tensor in pair.tensors.items()]
        written.append(replace(pair, tensors={}))
    config = _config(adapter, to, written)
    write_adapter_stream(
        folder, specs, (item for p in plan.pairs(_Changes()) for item in p.tensors.items()), config
    )
    return Conversion(
        before=adapter.layout,
        after=adapter.layout if adapter.layout == "linear" else to,
        tensors=len(specs),
        bytes_before=adapter.nbytes,
        bytes_after=sum(spec.nbytes for spec in specs),
        folded=changes.folded,
        padded=changes.padded,
        doubled=changes.doubled,
        dtype=dtype,
        worst_error=None if dtype is None else changes.worst_error,
        worst_tensor=changes.worst_tensor,
    )


@dataclass
class _Progress:
    modules: int
    tell: Callable[[float], None]
    passes: int = 2
    done: int = 0

    def module(self) -> None:
        self.done += 1
        self.tell(self.done / (self.modules * self.passes))


@dataclass(frozen=True)
class _Plan:
    """How every pair is changed; `pairs` can be run again and gives the same."""

    adapter: Adapter
    to: ExpertLayout
    rank: int | None  # of all modules, None: each keeps its own
    scale: float | None
    dtype: torch.dtype | None
    progress: _Progress

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        to: ExpertLayout,
        fold_scale: bool,
        dtype: str | None,
        progress: _Progress,
    ) -> _Plan:
        import torch

        target = None if dtype is None else getattr(torch, FLOAT_DTYPES[dtype])
        plan = cls(adapter, to, None, None, target, progress)
        if not fold_scale:
            return plan
        progress.passes += 1
        ranks: list[int] = []
        scales: list[float] = []
        for group in plan.groups():
            ranks += [factors.rank for factors in group]
            scales += [factors.scale for factors in group]
        return replace(plan, rank=max(ranks), scale=Counter(scales).most_common(1)[0][0])

    def groups(self) -> Iterator[list[_Factors]]:
        """Linear modules one by one, the projections of a bank together."""
        group: list[_Factors] = []
        for pair, a, b in self.adapter.own_pairs():
            self.progress.module()
            factors = _Factors(pair.module, a, b, pair.scale)
            if group and _bank(group[0].module) != _bank(pair.module):
                yield self._trimmed(group)
                group = []
            group.append(factors)
        yield self._trimmed(group)

    def pairs(self, changes: _Changes) -> Iterator[_Written]:
        for group in self.groups():
            ready = [self._uniform(factors, changes) for factors in group]
            for pair in self._laid_out(ready, changes):
                yield replace(pair, tensors=self._cast(pair.tensors, changes))

    def _trimmed(self, group: list[_Factors]) -> list[_Factors]:
        """Gate and up of target_parameters without the zeros that keep them apart."""
        if self.adapter.layout != "target_parameters" or group[0].module.experts is None:
            return group
        by_name = {_projection(factors.module): factors for factors in group}
        if {"w1", "w3"} <= by_name.keys():
            gate, up = by_name["w1"], by_name["w3"]
            half, odd = divmod(gate.rank, 2)
            if not odd and not gate.b[..., half:].any() and not up.b[..., :half].any():
                by_name["w1"] = replace(gate, a=gate.a[..., :half, :], b=gate.b[..., :half])
                by_name["w3"] = replace(up, a=up.a[..., half:, :], b=up.b[..., half:])
        return list(by_name.values())

    def _uniform(self, factors: _Factors, changes: _Changes) -> _Factors:
        """With fold_scale: the common rank and the common scale."""
        import torch

        if self.rank is None or self.scale is None:
            return factors
        a, b, missing = factors.a, factors.b, self.rank - factors.rank
        if missing:
            changes.padded += 1
            a = torch.nn.functional.pad(a, (0, 0, 0, missing))
            b = torch.nn.functional.pad(b, (0, missing))
        if factors.scale != self.scale:
            changes.folded += 1
            b = (b.float() * (factors.scale / self.scale)).to(b.dtype)
            if not bool(torch.isfinite(b).all()):
                problem = f"times {factors.scale / self.scale:g} is too large for {b.dtype}"
                raise InvalidAdapter([Finding(f"{factors.module.name}.lora_B", problem, "a wider dtype")])
        return _Factors(factors.module, a, b, self.scale)

    def _laid_out(self, group: list[_Factors], changes: _Changes) -> Iterator[_Written]:
        if group[0].module.experts is None:
            for factors in group:
                name = factors.module.name
                yield _written(name, re.escape(name), factors, {"": (factors.a, factors.b)})
        elif self.to == "shared_outer":
            for factors in group:
                shared = _Factors(factors.module, _shared(factors, "A"), _shared(factors, "B"), factors.scale)
                name = factors.module.name
                yield _written(name, re.escape(name), shared, {"": (shared.a, shared.b)})
        elif self.to == "target_parameters":
            yield from self._parameters([_expanded(factors) for factors in group], changes)
        else:
            for factors in map(_expanded, group):
                yield _stacked(factors) if self.to == "stacked" else _per_expert(factors)

    def _parameters(self, group: list[_Factors], changes: _Changes) -> Iterator[_Written]:
        by_name = {_projection(factors.module): factors for factors in group}
        bank = _bank(group[0].module)
        down = by_name.pop("w2", None)
        if by_name:
            fused = _fused(by_name.get("w1"), by_name.get("w3"))
            changes.doubled += fused.rank > max(factors.rank for factors in by_name.values())
            yield _parameter(bank, "gate_up_proj", fused, "" if down is None else ".base_layer")
        if down is not None:
            yield _parameter(bank, "down_proj", down, "")

    def _cast(self, tensors: Mapping[str, Tensor], changes: _Changes) -> dict[str, Tensor]:
        import torch

        cast: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            cast[name] = tensor if self.dtype is None else tensor.to(self.dtype)
            if cast[name].dtype == tensor.dtype:
                continue
            if not bool(torch.isfinite(cast[name]).all()):
                problem = f"holds numbers that are too large for {self.dtype}"
                raise InvalidAdapter([Finding(name, problem, "a wider dtype")])
            error = (cast[name].double() - tensor.double()).abs() / tensor.double().abs()
            worst = float(error.nan_to_num(0.0).max())  # 0/0: nothing was lost
            if worst > changes.worst_error:
                changes.worst_error, changes.worst_tensor = worst, name
        return cast


def _bank(module: Module) -> str:
    return module.name if module.experts is None else module.name.rpartition(".")[0]


def _projection(module: Module) -> str:
    return module.name.rpartition(".")[2]


def _written(
    path: str, pattern: str, factors: _Factors, pieces: Mapping[str, tuple[Tensor, Tensor]]
) -> _Written:
    """`pieces`: what follows the path's bank in a name → A and B. "" is the path itself."""
    tensors: dict[str, Tensor] = {}
    for piece, (a, b) in pieces.items():
        tensors[f"{_PREFIX}{piece or path}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{piece or path}.lora_B.weight"] = b
    return _Written(path, pattern, factors.rank, factors.scale, tensors)


def _stacked(factors: _Factors) -> _Written:
    name = factors.module.name
    return _written(name, re.escape(name), factors, {"": (factors.a, factors.b)})


def _per_expert(factors: _Factors) -> _Written:
    bank, name = _bank(factors.module), PEFT_NAMES[_projection(factors.module)]
    pieces = {
        f"{bank}.{expert}.{name}": pair for expert, pair in enumerate(zip(factors.a, factors.b, strict=True))
    }
    return _written(f"{bank}.0.{name}", rf"{re.escape(bank)}\.\d+\.{name}", factors, pieces)


def _parameter(bank: str, name: str, factors: _Factors, inner: str) -> _Written:
    a, b = factors.a.flatten(0, 1), factors.b.permute(1, 2, 0).flatten(1)
    path = f"{bank}.{name}"
    return _written(path, re.escape(path), factors, {f"{bank}{inner}": (a, b)})


def _expanded(factors: _Factors) -> _Factors:
    experts = factors.module.experts
    assert experts is not None
    return replace(factors, a=factors.a.expand(experts, -1, -1), b=factors.b.expand(experts, -1, -1))


def _shared(factors: _Factors, side: Literal["A", "B"]) -> Tensor:
    """The factor, and where shared_outer has one for all experts, that one. Raises if they differ."""
    factor = factors.a if side == "A" else factors.b
    if not factors.module.outer(side):
        return factor
    for expert, other in enumerate(factor):
        if not _same_bits(other, factor[0]):
            name = f"{_PREFIX}{factors.module.name}.lora_{side}.weight"
            problem = f"differs between experts 0 and {expert}"
            expected = "equal factors of all experts, of which shared_outer keeps one"
            raise InvalidAdapter([Finding(name, problem, expected)])
    return factor[:1]


def _fused(gate: _Factors | None, up: _Factors | None) -> _Factors:
    """One pair [E, r, in], [E, 2·out, r] for both; a missing one gets zeros."""
    import torch

    one = gate or up
    assert one is not None
    if gate is None or up is None:
        zeros = torch.zeros_like(one.b)
        return replace(one, b=torch.cat([one.b, zeros] if up is None else [zeros, one.b], dim=1))
    if gate.scale == up.scale and _same_bits(gate.a, up.a):
        return replace(gate, b=torch.cat([gate.b, up.b], dim=1))
    if gate.scale != up.scale:
        where = f"{_PREFIX}{up.module.name}.lora_B.weight"
        problem = f"has scale {up.scale:g}, {gate.module.name} has {gate.scale:g}"
        expected = "one scale for gate and up, which target_parameters keeps as one; fold the scale"
        raise InvalidAdapter([Finding(where, problem, expected)])
    rank = max(gate.rank, up.rank)  # equal halves, so that they can be told apart again
    pad = torch.nn.functional.pad
    a = torch.cat([pad(f.a, (0, 0, 0, rank - f.rank)) for f in (gate, up)], dim=1)
    b = torch.cat([pad(gate.b, (0, 2 * rank - gate.rank)), pad(up.b, (rank, rank - up.rank))], dim=1)
    return replace(gate, a=a, b=b)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal to the sign of a zero."""
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    words = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    return torch.equal(one.contiguous().view(words), other.contiguous().view(words))


def _config(adapter: Adapter, to: ExpertLayout, written: Sequence[_Written]) -> dict[str, Any]:
    """The adapter's config with what the new layout changes. Ranks and scales are all said anew."""
    rank, scale = Counter((pair.rank, pair.scale) for pair in written).most_common(1)[0][0]
    config = dict(adapter.config.raw)
    for field_name in ("_sglang_lora_format", "moe_hybrid_shared_lora", "target_parameters", "use_rslora"):
        config.pop(field_name, None)
    config |= {
        "r": rank,
        "lora_alpha": _alpha(scale, rank),
        "rank_pattern": _patterns(written, lambda pair: pair.rank, rank),
        "alpha_pattern": _patterns(written, lambda p: _alpha(p.scale, p.rank), _alpha(scale, rank)),
        "target_modules": _targets(written, to),
    }
    if adapter.layout == "linear":
        return config
    if to == "target_parameters":
        parameters = {".".join(p.path.rsplit(".", 3)[1:]) for p in written if _is_parameter(p)}
        config |= {"target_parameters": sorted(parameters), "peft_version": _ROLES_SINCE}
    elif to != "per_expert_2d":
        config["_sglang_lora_format"] = to
    return config


def _is_parameter(pair: _Written) -> bool:
    return pair.path.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _targets(written: Sequence[_Written], to: ExpertLayout) -> list[str]:
    paths = [pair.path for pair in written if to != "target_parameters" or not _is_parameter(pair)]
    return sorted({path.rpartition(".")[2] for path in paths})


def _alpha(scale: float, rank: int) -> float | int:
    """The alpha whose alpha / r is `scale` to the last bit, as a whole number where it is one."""
    product = scale * rank
    near = (product, math.nextafter(product, math.inf), math.nextafter(product, 0.0))
    alpha = next((alpha for alpha in near if alpha / rank == scale), product)
    return int(alpha) if alpha.is_integer() else alpha


def _patterns(
    written: Sequence[_Written], value: Callable[[_Written], _Number], default: _Number
) -> dict[str, _Number]:
    """What differs from the default, by the last part of a path where all of that name agree."""
    by_leaf: dict[str, set[_Number]] = {}
    for pair in written:
        by_leaf.setdefault(pair.path.rpartition(".")[2], set()).add(value(pair))
    patterns: dict[str, _Number] = {}
    for pair in written:
        leaf = pair.path.rpartition(".")[2]
        if value(pair) != default:
            patterns[leaf if len(by_leaf[leaf]) == 1 else pair.pattern] = value(pair)
    return patterns
