"""The `lanewise` command."""

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic_settings.exceptions import SettingsError
from rich.console import Console
from rich.markup import escape

from . import cli_client, cli_files
from .errors import LanewiseError
from .settings import Settings

main = typer.Typer(
    name="lanewise",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
)
main.add_typer(cli_client.adapters)
main.command()(cli_client.chat)
main.command()(cli_files.inspect)
main.command()(cli_files.convert)
_errors = Console(stderr=True)
_ADAPTER_HELP = "Adapter folder to store and activate at start; repeatable."


@main.callback()
def lanewise(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """One frozen base, many hot-swapped LoRA adapters."""
    if show_version:
        typer.echo(f"lanewise {version('lanewise')}")
        raise typer.Exit


def _setting(name: str, **more: Any) -> Any:
    """An option for one of the settings, described as there."""
    field = Settings.model_fields[name]
    default = "required" if field.is_required() else f"default: {field.default}"
    shown = f"[{default}; env: LANEWISE_{name.upper()}]".replace("default: None; ", "").replace("{}; ", "")
    return typer.Option(help=f"{field.description} {escape(shown)}", show_default=False, **more)


@main.command()
def serve(
    context: typer.Context,
    base: Annotated[Path | None, _setting("base")] = None,
    base_name: Annotated[str | None, _setting("base_name")] = None,
    adapters: Annotated[
        list[str] | None, typer.Option("--adapter", metavar="NAME=FOLDER", help=_ADAPTER_HELP)
    ] = None,
    data: Annotated[Path | None, _setting("data")] = None,
    host: Annotated[str | None, _setting("host")] = None,
    port: Annotated[int | None, _setting("port")] = None,
    grace_s: Annotated[float | None, _setting("grace_s")] = None,
    device: Annotated[str | None, _setting("device")] = None,
    threads: Annotated[int | None, _setting("threads")] = None,
    expert_layout: Annotated[str | None, _setting("expert_layout")] = None,
    max_lanes: Annotated[int | None, _setting("max_lanes")] = None,
    max_rank: Annotated[int | None, _setting("max_rank")] = None,
    max_running: Annotated[int | None, _setting("max_running")] = None,
    max_waiting: Annotated[int | None, _setting("max_waiting")] = None,
    client_stall_s: Annotated[float | None, _setting("client_stall_s")] = None,
    body_stall_s: Annotated[float | None, _setting("body_stall_s")] = None,
    lane_wait_s: Annotated[float | None, _setting("lane_wait_s")] = None,
    max_pushes: Annotated[int | None, _setting("max_pushes")] = None,
    max_push_bytes: Annotated[int | None, _setting("max_push_bytes")] = None,
    max_json_bytes: Annotated[int | None, _setting("max_json_bytes")] = None,
) -> None:
    """Serve a base and its adapters over OpenAI's HTTP API."""
    given = context.params | {"adapters": _named_folders(adapters or [])}
    from lanewise.loaders import LoaderError  # imported late, with torch: other commands need not wait for it

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        settings = _settings({name: value for name, value in given.items() if value not in (None, {})})
        _serve(settings)
    except (LanewiseError, LoaderError, OSError) as error:
        _errors.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


@main.command()
def demo(
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Result; the picture goes beside it.")
    ] = Path("lanewise-data/recall.json"),
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep base and adapters here, to serve them.")
    ] = None,
    exit_after: Annotated[bool, typer.Option("--exit", help="End after the proof.")] = False,
) -> None:
    """Train eight password adapters, push and hot-swap them, and prove by generation what each knows."""
    from .demo import run_demo  # imported late, with openai and torch

    if not run_demo(json_file, port, keep, keep_serving=not exit_after):
        raise typer.Exit(1)


def _serve(settings: Settings) -> None:
    from .engines.torch_engine import TorchEngine
    from .serve import serve

    engine = TorchEngine(
        settings.base,
        max_lanes=settings.max_lanes,
        max_rank=settings.max_rank,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        device=settings.device,
        threads=settings.threads,
        expert_layout=settings.expert_layout,
    )
    serve(engine, settings, lambda url: typer.echo(f"lanewise serves {settings.served_base_name} at {url}"))


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except SettingsError as error:  # a variable of the environment that is not JSON where JSON is expected
        raise typer.BadParameter(f"in the environment: {error}") from None
    except ValidationError as error:
        problems = [f"--{str(p['loc'][0]).replace('_', '-')}: {p['msg']}" for p in error.errors()]
        raise typer.BadParameter("; ".join(problems)) from None


def _named_folders(pairs: list[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not name or name in named:
            raise typer.BadParameter(f"--adapter {pair!r}; expected NAME=FOLDER, each name once")
        named[name] = Path(folder)
    return named
