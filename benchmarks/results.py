"""What a benchmark measured: one JSON file per benchmark, and the page made from all of them.

`python benchmarks/results.py` regenerates `RESULTS.md` from `results/*.json`, so no number is typed by hand.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "RESULTS.md"


@dataclass(frozen=True)
class Row:
    """One number: what was measured (`case`, `measure`, `value`, `unit`) and what it is held against.

    `ratio` says how many times better than the baseline the value is, as the benchmark's meaning defines it;
    `n` is the number of repetitions behind the median.
    """

    case: str
    measure: str
    value: float
    unit: str
    n: int
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None


def hardware() -> str:
    """The machine in a few words: GPU if there is one, else processor and cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()}× {torch.cuda.get_device_name(0)}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("lanewise", "torch", "transformers")
    }


def write_rows(name: str, rows: Sequence[Row], *, command: str, meaning: str) -> Path:
    """Write `results/{name}.json`: the rows, how to get them again, and one sentence on what they mean."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    common = {"hardware": hardware(), "versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    document = {
        "command": command,
        "meaning": meaning,
        "rows": [asdict(row) | common for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def page() -> str:
    """RESULTS.md from every JSON file: command, meaning, table."""
    parts = ["# Benchmark results", "", "Made by `python benchmarks/results.py`; do not edit."]
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        parts += ["", f"## {path.stem}", "", f"`{document['command']}`", "", document["meaning"], ""]
        parts += ["| case | measure | value | baseline | times | n |", "|---|---|---|---|---|---|"]
        parts += [_line(row) for row in document["rows"]]
        for where in sorted({_origin(row) for row in document["rows"]}):
            parts += ["", where]
    return "\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> str:
    baseline = "" if row["baseline"] is None else f"{row['baseline']}: {row['baseline_value']:.4g}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    value = f"{row['value']:.4g} {row['unit']}"
    return f"| {row['case']} | {row['measure']} | {value} | {baseline} | {ratio} | {row['n']} |"


def _origin(row: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{row['date']}, {row['hardware']}; {packages}."


if __name__ == "__main__":
    PAGE.write_text(page())
