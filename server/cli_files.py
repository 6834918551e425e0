"""The commands that look at files: `inspect` and `convert`. They need no server and no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:  # at run time imported late: other commands need not wait for it
    from lanewise.loaders import Adapter, Conversion, Finding, Inspection, Inventory

_MAX_CONFIG_BYTES = 4 << 20
_QUICK_BYTES = 256 << 20  # read within a second or so
_SHOWN_RANK = 16

# Piped output is for grep and cut: it is not wrapped.
_console = Console() if sys.stdout.isatty() else Console(width=1000)
_errors = Console(stderr=True)


class Layout(StrEnum):
    per_expert_2d = "per_expert_2d"
    stacked = "stacked"
    shared_outer = "shared_outer"
    target_parameters = "target_parameters"


class Dtype(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES: dict[Dtype, Any] = {Dtype.bf16: "BF16", Dtype.fp16: "F16", Dtype.fp32: "F32"}

Base = Annotated[
    Path | None, typer.Option(metavar="CONFIG", help="The base's config.json, or the folder it is in.")
]


def inspect(
    path: Annotated[Path | None, typer.Argument(help="Adapter folder; without it the base is shown.")] = None,
    base: Base = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    values: Annotated[
        bool | None,
        typer.Option(help="Read every number too; without a word, if there are at most 256 MB of them."),
    ] = None,
) -> None:
    """Say what an adapter holds and everything that is wrong with it; exit with 1 if something is.

    With --base it is checked against that base. Without PATH, what may be adapted in the base is shown.
    """
    inventory = None if base is None else _inventory(base)
    if path is not None:
        from lanewise.loaders import inspect_adapter

        if not path.is_dir():
            _fail(f"{path} is not a folder")
        limit = {None: _QUICK_BYTES, True: None, False: 0}[values]
        found = inspect_adapter(path, inventory, values_up_to=limit)
        if as_json:
            _print_json(_adapter_document(found))
        else:
            _print_adapter(path, found, checked_against=inventory)
        raise typer.Exit(1 if found.problems else 0)
    if inventory is None:
        raise typer.BadParameter("give an adapter's folder, --base, or both")
    if as_json:
        _print_json(_base_document(inventory))
    else:
        _print_base(inventory)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Adapter folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    to: Annotated[Layout, typer.Option(help="Layout of the expert factors.")],
    base: Base = None,
    fold_scale: Annotated[
        bool, typer.Option("--fold-scale", help="One alpha and one r for all: the rest goes into B.")
    ] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Cast, and say what rounding cost.")] = None,
) -> None:
    """Write an adapter in another layout. OUT is there whole or not at all; nothing is overwritten."""
    inventory = None if base is None else _inventory(base)
    from lanewise.loaders import LoaderError
    from lanewise.loaders import convert as convert_adapter

    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            _fail(f"{target} exists; give a new folder")
        adapter = _read(source, inventory)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            "{task.percentage:>3.0f}%",
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=_errors, transient=True) as progress:
            task = progress.add_task("converting", total=1.0)
            report = convert_adapter(
                adapter,
                target,
                to.value,
                fold_scale=fold_scale,
                dtype=None if dtype is None else _DTYPES[dtype],
                on_progress=lambda share: progress.update(task, completed=share),
            )
    except LoaderError as error:
        _fail_with(error)
    except OSError as error:
        _fail(str(error))
    _print_conversion(target, report)


def _read(folder: Path, inventory: Inventory | None) -> Adapter:
    from lanewise.loaders import own_inventory, read_adapter

    return read_adapter(folder, inventory or own_inventory(folder), max_rank=1 << 30)


def _inventory(base: Path) -> Inventory:
    """Of a config.json by its path, or in a folder. Ends the command when it cannot be used."""
    from lanewise.loaders import Inventory, LoaderError, parse_json_object
    from lanewise.loaders.tensor_file import read_small

    file = base / "config.json" if base.is_dir() else base
    try:
        return Inventory.from_config(parse_json_object(read_small(file, _MAX_CONFIG_BYTES), str(file)))
    except LoaderError as error:
        _fail_with(error)


def _adapter_document(found: Inspection) -> dict[str, Any]:
    return {
        "layout": found.layout,
        "rank": found.rank,
        "scale": found.scale,
        "modules": found.modules,
        "factors": found.factors,
        "regions": {name: region.modules for name, region in found.regions.items()},
        "parameters_per_rank": found.parameters_per_rank,
        "parameters": found.parameters,
        "bytes": found.nbytes,
        "dtypes": found.dtypes,
        "values_read": found.values_read,
        "problems": _documents(found.problems),
        "warnings": _documents(found.warnings),
    }


def _base_document(inventory: Inventory) -> dict[str, Any]:
    return {
        "architecture": inventory.architecture,
        "modules": len(inventory.modules),
        "factors": 2 * len(inventory.modules),
        "regions": inventory.regions,
        "parameters_per_rank": inventory.parameters_per_rank,
    }


def _documents(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"tensor": f.where, "problem": f.problem, "expected": f.expected} for f in findings]


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def _print_base(inventory: Inventory) -> None:
    table = _table("region", "modules", "per rank", f"at rank {_SHOWN_RANK}, bf16")
    for region, count in inventory.regions.items():
        per_rank = sum(m.parameters(1) for m in inventory.modules.values() if m.region == region)
        table.add_row(region, f"{count:,}", f"{per_rank:,}", _size(2 * _SHOWN_RANK * per_rank))
    per_rank = inventory.parameters_per_rank
    table.add_section()
    table.add_row("all", f"{len(inventory.modules):,}", f"{per_rank:,}", _size(2 * _SHOWN_RANK * per_rank))
    _console.print(
        f"[bold]{escape(inventory.architecture)}[/bold]: what may be adapted, experts as shared_outer"
    )
    _console.print(table)
    if inventory.tied_head:
        _console.print("lm_head is tied to the embedding, so it stays frozen")


def _print_adapter(path: Path, found: Inspection, checked_against: Inventory | None) -> None:
    if found.layout is not None:
        dtypes = ", ".join(found.dtypes)
        _console.print(f"[bold]{escape(path.name)}[/bold]: {found.layout}, rank {found.rank}, {dtypes}")
        _console.print(f"scale {found.scale}")
        table = _table("region", "modules", "parameters", "size")
        for name, region in found.regions.items():
            table.add_row(name, f"{region.modules:,}", f"{region.parameters:,}", _size(region.nbytes))
        table.add_section()
        table.add_row("all", f"{found.modules:,}", f"{found.parameters:,}", _size(found.nbytes))
        _console.print(table)
    base = (
        "itself only; --base checks names and shapes"
        if checked_against is None
        else checked_against.architecture
    )
    values = "values read" if found.values_read else "values not read"
    _console.print(f"checked against {escape(base)}; {values}")
    for colour, kind, findings in (
        ("yellow", "warning", found.warnings),
        ("red", "problem", found.problems),
    ):
        for finding in findings:
            _console.print(f"[{colour}]{kind}[/{colour}] {escape(str(finding))}", soft_wrap=True)
    if not found.problems:
        _console.print("[green]no problems[/green]")


def _print_conversion(target: Path, report: Conversion) -> None:
    _console.print(
        f"[green]wrote[/green] {escape(str(target))}: {report.before} → {report.after}, "
        f"{report.tensors:,} tensors, {_size(report.bytes_before)} → {_size(report.bytes_after)}",
        soft_wrap=True,
    )
    changes = {
        "modules have another scale, multiplied into B": report.folded,
        "modules were filled up with zeros to the highest rank": report.padded,
        "banks have gate and up with different A: twice the rank, in two blocks": report.doubled,
    }
    for change, count in changes.items():
        if count:
            _console.print(f"{count:,} {change}")
    if report.worst_error is not None:
        where = f" in {report.worst_tensor}" if report.worst_tensor else ""
        _console.print(
            f"cast to {report.dtype}: worst relative error {report.worst_error:.2g}{where}", soft_wrap=True
        )
    if not report.folded and not report.worst_error:
        _console.print("every number is as it was, bit for bit")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"


def _fail_with(error: Exception) -> NoReturn:
    """Every finding on a line of its own."""
    findings: Sequence[Finding] = getattr(error, "findings", ())
    for finding in findings:
        _errors.print(f"[red]problem[/red] {escape(str(finding))}", soft_wrap=True)
    _fail(f"{len(findings)} problem(s)" if findings else str(error))


def _fail(message: str) -> NoReturn:
    _errors.print(f"[red]error[/red]: {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)
