"""What `lanewise serve` makes of its options."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lanewise.server import cli
from lanewise.server.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the command would have served."""
    served: list[Settings] = []
    monkeypatch.setattr(cli, "_serve", served.append)
    monkeypatch.setattr(cli.logging, "basicConfig", _leave_logging_alone)
    for name in ("LANEWISE_BASE", "LANEWISE_PORT"):
        monkeypatch.delenv(name, raising=False)
    return served


def _leave_logging_alone(**_: object) -> None:
    pass


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, ["serve", *arguments])


def test_options_become_settings(served: list[Settings]) -> None:
    result = run(
        *("--base", "models/tiny", "--adapter", "argon=a", "--adapter", "neon=b/c"),
        *("--port", "0", "--max-lanes", "3", "--grace-s", "0"),
    )
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert settings.served_base_name == "tiny"
    assert settings.adapters == {"argon": Path("a"), "neon": Path("b/c")}
    assert (settings.port, settings.max_lanes, settings.grace_s) == (0, 3, 0)
    assert settings.host == "127.0.0.1"


def test_environment_fills_in_and_options_win(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANEWISE_BASE", "from-environment")
    monkeypatch.setenv("LANEWISE_PORT", "7")
    assert run("--port", "9").exit_code == 0
    assert (served[0].base, served[0].port) == (Path("from-environment"), 9)


def test_environment_that_is_not_json_is_named(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANEWISE_ADAPTERS", "argon=folder")
    result = run("--base", "x")
    assert result.exit_code == 2
    assert "adapters" in result.output
    assert not served


def test_help_tells_every_setting_its_default_and_its_variable() -> None:
    shown = " ".join(run("--help").output.replace("│", " ").split())
    for name, field in Settings.model_fields.items():
        if name != "adapters":
            assert f"--{name.replace('_', '-')}" in shown
            assert f"LANEWISE_{name.upper()}" in shown
            assert field.default is None or field.is_required() or f"default: {field.default}" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--base"),
        (["--base", "x", "--port", "99999"], "--port"),
        (["--base", "x", "--max-lanes", "0"], "--max-lanes"),
        (["--base", "x", "--adapter", "argon"], "NAME=FOLDER"),
        (["--base", "x", "--adapter", "a=1", "--adapter", "a=2"], "NAME=FOLDER"),
    ],
)
def test_bad_options_are_named(served: list[Settings], arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert not served
