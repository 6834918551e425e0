"""The commands that talk to a running server: `chat` and `adapters`."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lanewise.clients import Client, ClientError, ServerRefused

if TYPE_CHECKING:  # at run time openai is imported late: only `chat` need wait for it
    from openai import Stream
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

Url = Annotated[str, typer.Option(envvar="LANEWISE_URL", help="The server.")]
DEFAULT_URL = "http://127.0.0.1:8000"

adapters = typer.Typer(
    name="adapters", help="List, push, activate and delete adapters.", no_args_is_help=True
)
_console = Console()
_errors = Console(stderr=True)


def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask this and leave; otherwise a conversation.")
    ] = None,
    model: Annotated[str, typer.Option(help="adapter, adapter@7 or base.")] = "base",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a model; the version that answers is shown after each answer."""
    from openai import APIError, OpenAI

    turns = [{"role": "system", "content": system}] if system else []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        while (text := message or _next_line()) is not None:
            turns.append({"role": "user", "content": text})
            try:
                stream = openai.chat.completions.create(
                    model=model,
                    messages=cast("list[ChatCompletionMessageParam]", turns),
                    temperature=temperature,
                    max_tokens=max_tokens,
                    stream=True,
                )
                turns.append({"role": "assistant", "content": _print_answer(stream)})
            except APIError as error:
                _fail(str(error))
            if message:
                break


def _next_line() -> str | None:
    """What the person types; None at the end of input."""
    try:
        return _console.input("[bold]>[/bold] ").strip() or _next_line()
    except EOFError:
        return None


def _print_answer(stream: "Stream[ChatCompletionChunk]") -> str:
    """Write the answer as it comes, then who gave it."""
    said: list[str] = []
    provenance: dict[str, object] = {}
    for chunk in stream:
        for choice in chunk.choices:
            said.append(choice.delta.content or "")
            sys.stdout.write(said[-1])
            sys.stdout.flush()
        provenance = (chunk.model_extra or {}).get("lanewise") or provenance
    sys.stdout.write("\n")
    version = provenance.get("version")
    who = provenance.get("adapter", "?")
    _errors.print(f"[dim]{who}{'' if version is None else f'@{version}'}[/dim]", highlight=False)
    return "".join(said)


@adapters.command("list")
def list_adapters(url: Url = DEFAULT_URL) -> None:
    """Every adapter with its versions; the active one is marked."""
    table = Table("adapter", "version", "state", "rank", "layout", "size", "created", "digest", box=None)
    with _shown_errors(), Client(url) as client:
        for adapter in client.adapters():
            for version in client.versions(adapter.name):
                active = version.version == adapter.active
                table.add_row(
                    adapter.name,
                    str(version.version),
                    version.state,
                    str(version.rank),
                    version.layout,
                    f"{version.nbytes / 1e6:.1f} MB",
                    datetime.fromtimestamp(version.created, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
                    version.digest[:12],
                    style="bold" if active else "dim",
                )
    _console.print(table)


@adapters.command()
def push(
    name: str,
    folder: Annotated[Path, typer.Argument(help="Holds adapter_model.safetensors, adapter_config.json.")],
    activate: Annotated[bool, typer.Option(help="Serve it from now on.")] = True,
    url: Url = DEFAULT_URL,
) -> None:
    """Push a folder as the adapter's next version."""
    try:
        with _shown_errors(), Client(url, timeout_s=600) as client:
            version = client.push_folder(name, folder, activate=activate)
    except (OSError, json.JSONDecodeError) as error:
        raise typer.BadParameter(f"{folder}: {error}") from None
    _console.print(
        f"{version.model} is {version.state}, digest {version.digest}", highlight=False, soft_wrap=True
    )


@adapters.command("activate")
def activate_version(name: str, version: int, url: Url = DEFAULT_URL) -> None:
    """Make a stored version the one that answers; running requests keep theirs."""
    with _shown_errors(), Client(url) as client:
        _console.print(f"{client.activate(name, version).model} is active", highlight=False)


@adapters.command()
def delete(
    name: str,
    version: Annotated[int | None, typer.Argument(help="Only this version; otherwise the adapter.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete an adapter, or one version of it. New requests are refused at once."""
    with _shown_errors(), Client(url) as client:
        client.delete(name, version)
    _console.print(f"deleted {name if version is None else f'{name}@{version}'}", highlight=False)


@contextmanager
def _shown_errors() -> Generator[None]:
    """Print what the server said no with, one line a finding, and leave with status 1."""
    try:
        yield
    except ServerRefused as error:
        _errors.print(f"[red]{error.status}[/red] {escape(error.message)}", soft_wrap=True, highlight=False)
        for finding in error.details[1:]:
            _errors.print("  " + " — ".join(finding.values()), soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(1) from None
    except ClientError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    _errors.print(f"[red]error[/red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1) from None
