"""The main job in one command: train eight password adapters, push, swap, ask, and prove what each knows."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import typer
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lanewise.clients import Client
from lanewise.clients.recall import BASE, Recall, draw_recall, measure_recall, write_recall

SHOWN = "argon"  # the adapter whose answers are shown while it learns
PUSH_EVERY = 4  # steps


def run_demo(json_file: Path, port: int, keep: Path | None, *, keep_serving: bool) -> bool:
    """Run it all and say whether recall was proven; the picture goes beside `json_file`.

    With `keep`, base and adapters stay in that folder. Everything else goes when the demo ends. Raises
    typer.BadParameter when `keep` is in use already.
    """
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise typer.BadParameter(f"--keep {keep}: is not an empty folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the server does too
    console = Console()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="lanewise-") as temporary:
        files = keep or Path(temporary)
        doing = "writing a tiny FP8 base from a seed, starting the server"
        with _timed(seconds, "start"), console.status(doing):
            from .tiny_base import write_tiny_base

            base = write_tiny_base(files / "tiny-moe")
            server, url = _start_server(base, Path(temporary) / "data", port)
        try:
            console.print(f"[bold]lanewise[/bold] serves [cyan]{base.name}[/cyan] at {url}\n")
            with _timed(seconds, "train_and_push"):
                pushed = _train_and_push(console, base, url, keep)
            with _timed(seconds, "ask"):
                recall = asyncio.run(_ask(url, pushed))
            _show(console, recall)
            _write(console, recall, json_file, sum(pushed.values()), seconds)
            if keep is not None:
                console.print(f"kept {base.name} and {len(pushed)} adapters in {keep}\n", soft_wrap=True)
            if keep_serving:
                _keep_serving(console, server, url)
        finally:
            _stop_server(server)
    return recall.proven


def _start_server(base: Path, data: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    """A server process on loopback, ready, and its URL."""
    command = [sys.executable, "-m", "lanewise.server", "serve"]
    options: dict[str, object] = {"base": base, "data": data, "host": "127.0.0.1", "port": port}
    # One thread: the server shares the cores with the trainer. Rank: the trainer's.
    options |= {"grace-s": 5, "threads": 1, "max-rank": 16}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    server = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches the demo alone, which then ends the server in order
        env={name: value for name, value in os.environ.items() if not name.startswith("LANEWISE_")},
    )
    assert server.stdout is not None
    announced = server.stdout.readline().strip()
    if not announced:
        server.wait()
        raise typer.Exit(1)  # the server has said why
    return server, announced.rpartition(" ")[2]


def _stop_server(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    server.wait()
    assert server.stdout is not None
    server.stdout.close()


def _train_and_push(console: Console, base: Path, url: str, keep: Path | None) -> dict[str, int]:
    """Train every adapter, pushing versions on the way; returns each one's last version."""
    import torch
    from transformers import AutoTokenizer

    from lanewise.clients.trainer import PASSWORDS, Trainer, WeightPublisher, prompt_for
    from lanewise.kernels.base import load_base
    from lanewise.loaders import BaseCheckpoint

    torch.set_num_threads(1)  # so tiny a model gains nothing from more, and they would wait for each other
    checkpoint = BaseCheckpoint.open(base)
    trainer = Trainer(load_base(checkpoint.config, checkpoint.tensors()), AutoTokenizer.from_pretrained(base))
    steps = trainer.recipe.steps
    progress = Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:<8.2g} version {task.fields[version]}"),
        TimeElapsedColumn(),
    )
    answers = Table(title=f"What {SHOWN} answers as its versions arrive", title_justify="left", box=None)
    for column in ("version", "step", "loss", "answer"):
        answers.add_column(column, justify="left" if column == "answer" else "right")
    last: dict[str, int] = {}
    with (
        Client(url) as client,
        OpenAI(base_url=f"{url}/v1", api_key="none") as openai,
        Live(_stacked(answers, progress), console=console, refresh_per_second=8),
    ):
        noise = _answer(openai, BASE, prompt_for(SHOWN))
        answers.add_row(BASE, "", "", Text(_printable(noise), style="dim"))
        for adapter, password in PASSWORDS.items():
            publisher = WeightPublisher(client, adapter, trainer.config)
            task = progress.add_task(adapter, total=steps, loss=float("nan"), version="–")
            for step in trainer.train(prompt_for(adapter), password):
                progress.update(task, advance=1, loss=step.loss)
                if (step.index + 1) % PUSH_EVERY and step.index + 1 < steps:
                    continue
                version = publisher.publish(trainer.factors())
                last[adapter] = version.version
                progress.update(task, version=version.version)
                if adapter == SHOWN:
                    said = _answer(openai, adapter, prompt_for(adapter))
                    style = "bold green" if said == password else "dim"
                    row = (str(version.version), str(step.index + 1), f"{step.loss:.2g}")
                    answers.add_row(*row, Text(_printable(said), style=style))
            if keep is not None:
                trainer.save_adapter(keep / adapter)
    return last


def _printable(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _stacked(*parts: Table | Progress) -> Table:
    grid = Table.grid()
    for part in parts:
        grid.add_row(part)
        grid.add_row("")
    return grid


def _answer(openai: OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    reply = openai.chat.completions.create(
        model=model,
        messages=cast("list[ChatCompletionMessageParam]", messages),
        temperature=0,
        max_tokens=40,
    )
    return reply.choices[0].message.content or ""


async def _ask(url: str, pushed: Mapping[str, int]) -> Recall:
    from lanewise.clients.trainer import PASSWORDS, prompt_for

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        recall = await measure_recall(openai, PASSWORDS, prompt_for)
    for answer in recall.answers:
        expected = None if answer.model == BASE else pushed[answer.model]
        assert answer.version == expected, (
            f"{answer.model} answered by version {answer.version}, not {expected}"
        )
    return recall


def _show(console: Console, recall: Recall) -> None:
    title = "Who knows whose password (greedy, exact, over HTTP)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for project in recall.projects:
        table.add_column(project, justify="center", no_wrap=True)
    for row in (*recall.projects, BASE):
        if row == BASE:
            table.add_section()
        known = (recall.knows(row, project) for project in recall.projects)
        table.add_row(row, *("[bold green]✓[/bold green]" if yes else "[dim]·[/dim]" for yes in known))
    size = len(recall.projects)
    console.print()
    console.print(table)
    verdict = "[bold green]proven[/bold green]" if recall.proven else "[bold red]not proven[/bold red]"
    console.print(
        f"{verdict}: own password {recall.own}/{size}, another's {recall.leaked}/{size * (size - 1)},"
        f" base {recall.base}/{size}\n"
    )


def _write(
    console: Console, recall: Recall, json_file: Path, versions: int, seconds: Mapping[str, float]
) -> None:
    picture = json_file.with_suffix(".png")
    write_recall(recall, json_file, versions_pushed=versions, seconds=seconds)
    draw_recall(recall, picture)
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    console.print(f"{versions} versions pushed; {spent}\nwrote {json_file} and {picture}\n", soft_wrap=True)


def _keep_serving(console: Console, server: subprocess.Popen[str], url: str) -> None:
    from lanewise.clients.trainer import prompt_for

    console.print("[bold]Still serving; Ctrl-C ends it.[/bold] Try:\n")
    console.print(curl_line(url, SHOWN, prompt_for(SHOWN)), soft_wrap=True, markup=False, highlight=False)
    console.print("\nor in Python:\n")
    console.print(
        openai_snippet(url, SHOWN, prompt_for(SHOWN)), soft_wrap=True, markup=False, highlight=False
    )
    try:
        server.wait()
    except KeyboardInterrupt:
        console.print("\nstopping")


def curl_line(url: str, model: str, messages: list[dict[str, str]]) -> str:
    """A shell line that asks `model`, ready to paste."""
    body = json.dumps({"model": model, "messages": messages, "temperature": 0})
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def openai_snippet(url: str, model: str, messages: list[dict[str, str]]) -> str:
    """The same question with the openai SDK, ready to paste."""
    turns = "".join(f"        {message!r},\n" for message in messages)
    return (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{model}",\n'
        f"    messages=[\n{turns}    ],\n"
        "    temperature=0,\n"
        ")\n"
        "print(answer.choices[0].message.content)\n"
    )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Generator[None]:
    began = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - began, 2)
