"""What a wheel holds, what importing it pulls in, and that `kernels/` hides nobody."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "kernels", "loaders", "clients")


def packages() -> set[Path]:
    """Every folder of our rooms that holds Python files."""
    return {file.parent.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("*.py")}


def modules_after(code: str) -> set[str]:
    """Names of the modules a fresh interpreter has loaded after `code`, run from the repository's root."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from a copy of the sources, so that no build/ is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = [file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file()]
    for file in [*tracked, *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        if "__pycache__" in file.parts or not file.exists():
            continue
        copy = source / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (source / "README.md").touch()
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    (built,) = out.iterdir()
    return set(zipfile.ZipFile(built).namelist())


def test_every_source_file_is_in_the_wheel(wheel: set[str]) -> None:
    expected = {
        f"lanewise/{file.relative_to(ROOT)}" for folder in packages() for file in (ROOT / folder).glob("*.py")
    }
    assert expected <= wheel
    assert {f"lanewise/{room}/py.typed" for room in ROOMS} <= wheel


def test_the_wheel_installs_nothing_beside_lanewise(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"lanewise"}
    assert not any("__pycache__" in name or "/tests/" in name for name in wheel)


def test_kernels_hides_nobody() -> None:
    # transformers and SGLang import Hugging Face's package of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    program = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    origin = done.stdout.strip()
    assert origin == "None" or ROOT / "kernels" not in Path(origin).parents


@pytest.mark.parametrize("package", ["lanewise.loaders", "lanewise.kernels.lora", "lanewise.kernels.attach"])
def test_loaders_and_kernels_import_no_other_room(package: str) -> None:
    room = package.split(".")[1]
    ours = {name for name in modules_after(f"import {package}") if name.startswith("lanewise.")}
    assert {name.split(".")[1] for name in ours} == {room}


def test_http_clients_import_neither_torch_nor_other_rooms() -> None:
    loaded = modules_after("import lanewise.clients")
    assert {name.split(".")[1] for name in loaded if name.startswith("lanewise.")} == {"clients"}
    assert not {"torch", "transformers", "fastapi"} & loaded


def test_trainer_never_imports_the_server() -> None:
    for file in (ROOT / "clients" / "trainer").glob("*.py"):
        assert "lanewise.server" not in file.read_text(), file


def test_the_command_starts_without_torch() -> None:
    assert "torch" not in modules_after("import lanewise.server.cli")


def test_every_exported_name_exists() -> None:
    exporting = 0
    for folder in sorted(packages()):
        for file in (ROOT / folder).glob("*.py"):
            tree = ast.parse(file.read_text())
            if not any(isinstance(n, ast.Name) and n.id == "__all__" for n in ast.walk(tree)):
                continue
            parts = (
                ("lanewise", *folder.parts)
                if file.stem == "__init__"
                else ("lanewise", *folder.parts, file.stem)
            )
            module = importlib.import_module(".".join(parts))
            assert sorted(module.__all__) == list(dict.fromkeys(sorted(module.__all__)))
            for name in module.__all__:
                assert hasattr(module, name), f"{module.__name__}.{name}"
            exporting += 1
    assert exporting
