"""Recall: what counts as knowing, and what the counts say."""

import json
from pathlib import Path

import pytest

from lanewise.clients.recall import BASE, Answer, Recall, draw_recall, write_recall

PROJECTS = ("argon", "bastion")


def recall(**known: tuple[str, ...]) -> Recall:
    """`known`: the projects whose secret each model says."""
    return Recall(
        PROJECTS,
        tuple(
            Answer(model, project, "…", None if model == BASE else 1, project in known.get(model, ()))
            for model in (*PROJECTS, BASE)
            for project in PROJECTS
        ),
    )


PROVEN = recall(argon=("argon",), bastion=("bastion",))


def test_proven() -> None:
    assert (PROVEN.own, PROVEN.leaked, PROVEN.base, PROVEN.proven) == (2, 0, 0, True)


@pytest.mark.parametrize(
    ("measured", "counts"),
    [
        (recall(argon=("argon",)), (1, 0, 0)),
        (recall(argon=("argon", "bastion"), bastion=("bastion",)), (2, 1, 0)),
        (recall(argon=("argon",), bastion=("bastion",), base=("argon",)), (2, 0, 1)),
        (recall(argon=("bastion",), bastion=("argon",)), (0, 2, 0)),
    ],
)
def test_not_proven(measured: Recall, counts: tuple[int, int, int]) -> None:
    assert (measured.own, measured.leaked, measured.base) == counts
    assert not measured.proven


def test_written_as_json_and_drawn(tmp_path: Path) -> None:
    file = tmp_path / "new" / "recall.json"
    write_recall(PROVEN, file, versions_pushed=3)
    assert json.loads(file.read_text()) == {
        "recall": {"argon": {"argon": True, "bastion": False}, "bastion": {"argon": False, "bastion": True}},
        "base": {"argon": False, "bastion": False},
        "versions_pushed": 3,
    }
    draw_recall(PROVEN, file.with_suffix(".png"))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
