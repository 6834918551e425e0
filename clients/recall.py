"""Prove by generation what adapters know: ask every model for every secret, over HTTP, greedily.

An adapter must answer its own secret exactly and no other; the base must know none. The answers come from
the OpenAI API as any user would get them, with the version that gave each.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

BASE = "base"
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """One greedy answer: what `model` said when asked for `project`, and the version that said it."""

    model: str
    project: str
    text: str
    version: int | None
    exact: bool


@dataclass(frozen=True)
class Recall:
    """Who knows whose secret. Rows are adapters and the base, columns are projects."""

    projects: tuple[str, ...]
    answers: tuple[Answer, ...]

    def knows(self, model: str, project: str) -> bool:
        return next(a.exact for a in self.answers if (a.model, a.project) == (model, project))

    @property
    def own(self) -> int:
        """Adapters that answer their own secret."""
        return sum(a.exact for a in self.answers if a.model == a.project)

    @property
    def leaked(self) -> int:
        """Secrets that an adapter other than their own knows."""
        return sum(a.exact for a in self.answers if a.model not in (a.project, BASE))

    @property
    def base(self) -> int:
        """Secrets that the base knows."""
        return sum(a.exact for a in self.answers if a.model == BASE)

    @property
    def proven(self) -> bool:
        return self.own == len(self.projects) and self.leaked == 0 and self.base == 0

    @property
    def matrix(self) -> dict[str, dict[str, bool]]:
        """adapter → project → whether it knows that project's secret."""
        return {adapter: {p: self.knows(adapter, p) for p in self.projects} for adapter in self.projects}

    @property
    def base_row(self) -> dict[str, bool]:
        return {project: self.knows(BASE, project) for project in self.projects}


async def measure_recall(
    client: AsyncOpenAI,
    secrets: Mapping[str, str],
    prompt_for: Callable[[str], Messages],
    *,
    concurrency: int = 8,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Recall:
    """Ask every adapter (named like its project) and the base for every project's secret.

    Answers are greedy and may be a little longer than the secret, so that an answer that runs on is not
    taken for an exact one. Raises openai.OpenAIError.
    """
    room = asyncio.Semaphore(concurrency)
    limit = 2 * max(len(secret.encode()) for secret in secrets.values())

    async def ask(model: str, project: str) -> Answer:
        async with room:
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=cast("list[ChatCompletionMessageParam]", prompt_for(project)),
                temperature=0,
                max_tokens=limit,
            )
        text = raw.parse().choices[0].message.content or ""
        version = raw.headers.get("x-lanewise-version")
        answer = Answer(model, project, text, int(version) if version else None, text == secrets[project])
        on_answer(answer)
        return answer

    questions = [ask(model, project) for model in (*secrets, BASE) for project in secrets]
    return Recall(tuple(secrets), tuple(await asyncio.gather(*questions)))


def draw_recall(recall: Recall, path: Path) -> None:
    """Write the matrix as a picture: rows are who was asked, columns whose secret."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = (*recall.projects, BASE)
    known = [[float(recall.knows(row, project)) for project in recall.projects] for row in rows]
    figure = Figure(figsize=(7, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(known, cmap="Greens", vmin=0, vmax=1.25)
    axes.set_xticks(range(len(recall.projects)), recall.projects, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("asked for the secret of")
    axes.set_ylabel("model that answered")
    for y, row in enumerate(known):
        for x, value in enumerate(row):
            axes.text(x, y, "✓" if value else "·", ha="center", va="center", fontsize=12)
    axes.axhline(len(recall.projects) - 0.5, color="black", linewidth=1)
    size = len(recall.projects)
    axes.set_title(
        f"Exact recall by greedy generation\n"
        f"own {recall.own}/{size} · others' {recall.leaked}/{size * (size - 1)} · base {recall.base}/{size}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def write_recall(recall: Recall, path: Path, **more: object) -> None:
    """Write `{"recall": {adapter: {project: bool}}, "base": {project: bool}, …more}` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"recall": recall.matrix, "base": recall.base_row, **more}, indent=2) + "\n")
