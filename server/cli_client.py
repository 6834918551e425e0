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

from lanewise.clients import Client, ClientError, ConnectionFailed, ServerRefused, Version

if TYPE_CHECKING:  # at run time openai is imported late: only `chat` need wait for it
    from openai import Stream
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

Url = Annotated[str, typer.Option(envvar="LANEWISE_URL", help="The server.")]
DEFAULT_URL = "http://127.0.0.1:8000"

adapters = typer.Typer(
    name="adapters", help="List, push, activate and delete adapters.", no_args_is_help=True
)
# Piped output is for grep and cut: it is not wrapped.
_console = Console() if sys.stdout.isatty() else Console(width=1000)
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
    from openai import APIConnectionError, APIError, OpenAI

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
            except APIConnectionError:
                _fail(f"nothing answers at {url}; `lanewise serve` starts a server")
            except APIError as error:
                if message:
                    _fail(error.message)
                turns.pop()  # the conversation goes on without what was refused
                _errors.print(f"[red]error[/red] {escape(error.message)}", soft_wrap=True, highlight=False)
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
def list_adapters(
    name: Annotated[str | None, typer.Argument(help="List this one's versions.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Adapters and their active versions; with a NAME, every version of that one."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("version", "state", "rank", "layout", "size", "created", "digest", "versions"):
        table.add_column(column, no_wrap=True)
    with _shown_errors(), Client(url) as client:
        for adapter in [client.adapter(name)] if name else client.adapters():
            count = str(len(adapter.versions))
            if not name and adapter.active is None:
                table.add_row(f"{adapter.name}@–", "none active", *[""] * 5, count)
            for version in client.versions(adapter.name):
                if name or version.version == adapter.active:
                    table.add_row(*_row(version), count)
    _console.print(table)


def _row(version: Version) -> tuple[str, ...]:
    created = datetime.fromtimestamp(version.created, UTC).astimezone()
    return (
        version.model,
        version.state,
        str(version.rank),
        version.layout,
        f"{version.nbytes / 1e6:.1f} MB",
        created.strftime("%m-%d %H:%M"),
        version.digest[:8],
    )


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
def activate_version(
    name: Annotated[str, typer.Argument(help="The adapter, or adapter@version.")],
    version: Annotated[int | None, typer.Argument()] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make a stored version the one that answers; running requests keep theirs."""
    name, number = _split(name, version)
    if number is None:
        raise typer.BadParameter("which version? Give NAME VERSION or NAME@VERSION")
    with _shown_errors(), Client(url) as client:
        _console.print(f"{client.activate(name, number).model} is active", highlight=False)


@adapters.command()
def delete(
    name: Annotated[str, typer.Argument(help="The adapter, or adapter@version.")],
    version: Annotated[int | None, typer.Argument()] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete an adapter with all its versions, or one version. New requests are refused at once."""
    name, number = _split(name, version)
    with _shown_errors(), Client(url) as client:
        client.delete(name, number)
    _console.print(f"deleted {name if number is None else f'{name}@{number}'}", highlight=False)


def _split(name: str, version: int | None) -> tuple[str, int | None]:
    """`argon 3` and `argon@3` are the same."""
    adapter, at, number = name.partition("@")
    if not at:
        return name, version
    if version is not None or not number.isdecimal():
        raise typer.BadParameter(f"{name}: expected NAME, NAME VERSION or NAME@VERSION")
    return adapter, int(number)


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
    except ConnectionFailed as error:
        _fail(f"{error}; is a server running there? `lanewise serve` starts one")
    except ClientError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    _errors.print(f"[red]error[/red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1) from None
