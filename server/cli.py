"""The `lanewise` command."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from . import cli_client
from .errors import LanewiseError
from .settings import Settings

main = typer.Typer(
    name="lanewise",
    help="One frozen base, many hot-swapped LoRA adapters.",
    no_args_is_help=True,
    add_completion=False,
)
main.add_typer(cli_client.adapters)
main.command()(cli_client.chat)
_errors = Console(stderr=True)


@main.callback()
def lanewise() -> None:
    """Settings not given here are read from LANEWISE_… in the environment."""


@main.command()
def serve(
    base: Annotated[Path | None, typer.Option(help="Folder of the base checkpoint.")] = None,
    base_name: Annotated[str | None, typer.Option(help="Name to serve the base under.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="Store and activate; repeatable.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for adapters that are pushed.")] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the model.")] = None,
    expert_layout: Annotated[
        str | None, typer.Option(help="shared_outer, or stacked to take per-expert adapters too.")
    ] = None,
    max_lanes: Annotated[int | None, typer.Option(help="Adapters resident at the same time.")] = None,
    max_rank: Annotated[int | None, typer.Option(help="Highest rank taken.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Answers made at the same time.")] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Answers queued before 429.")] = None,
    grace_s: Annotated[float | None, typer.Option(help="Seconds for running requests at the end.")] = None,
) -> None:
    """Serve a base and its adapters over OpenAI's HTTP API."""
    given = locals() | {"adapters": _named_folders(adapter or [])}
    del given["adapter"]
    from lanewise.loaders import LoaderError  # imported late, with torch: other commands need not wait for it

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        settings = _settings(given)
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
    exit_after: Annotated[bool, typer.Option("--exit", help="End after the proof.")] = False,
) -> None:
    """Train eight password adapters, push and hot-swap them, and prove by generation what each knows."""
    from .demo import run_demo  # imported late, with openai and torch

    if not run_demo(json_file, port, keep_serving=not exit_after):
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
        return Settings(**{name: value for name, value in given.items() if value not in (None, {})})
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
