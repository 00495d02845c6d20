"""The rooms of the house: imports point one way, and importing the library costs little."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "deltanox"

# ops <- nn <- models <- train, interop, generate <- tools, cli; below all of them, what has no room
RANK = {
    "_types": 0, "_console": 0, "_oserror": 0, "_read": 0, "ops": 1, "precision": 1, "remat": 1, "sharding": 2, "nn": 2,
    "models": 3, "train": 4, "interop": 4, "generate": 4, "tools": 5, "cli": 5, "__main__": 5,
}  # fmt: skip

# Packages that a room may not know
FORBIDDEN = {
    "ops": {"equinox", "optax", "tqdm", "matplotlib", "torch", "transformers"},
    "precision": {"equinox", "optax", "tqdm", "matplotlib", "torch", "transformers"},
    "nn": {"optax", "tqdm", "matplotlib", "torch", "transformers"},
    "models": {"optax", "tqdm", "matplotlib", "torch", "transformers"},
    "generate": {"optax", "tqdm", "matplotlib", "torch", "transformers"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path, source: str | None = None) -> set[tuple[int, str]]:
    """Line and full dotted name of every import of a file, also those inside functions."""
    package = ["deltanox", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            # `from . import nn` names the room only in its aliases
            names = [alias.name for alias in node.names] if base == ["deltanox"] else [None]
            found |= {(node.lineno, ".".join([*base, name] if name else base)) for name in names}
    return found


def faults(path: Path, source: str | None = None) -> list[str]:
    here, wrong = room(path), []
    for line, name in sorted(imported(path, source)):
        parts = name.split(".")
        if parts[0] == "deltanox" and len(parts) > 1:
            there = parts[1]
            if there in RANK and RANK[there] > RANK[here]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {there}, which lies above it")
        elif parts[0] in FORBIDDEN.get(here, ()):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {parts[0]}")
    return wrong


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py")


def test_every_room_has_a_rank():
    assert {room(path) for path in SOURCES} <= RANK.keys()


def test_imports_point_one_way():
    assert [fault for path in SOURCES for fault in faults(path)] == []


@pytest.mark.parametrize(
    "file, source",
    [
        ("ops/attention.py", "from ..nn import RMSNorm"),
        ("ops/delta_rule/op.py", "from ...models import HybridLM"),
        ("ops/moe.py", "import equinox as eqx"),
        ("nn/_stack.py", "def f():\n    from .. import models"),
        ("models/_lm.py", "from deltanox.train import step"),
        ("generate/_stream.py", "from ..cli import main"),
        ("models/_lm.py", "import optax"),
    ],
)
def test_the_check_sees_wrong_imports(file, source):
    assert len(faults(ROOT / file, source)) == 1


def test_rooms_of_one_rank_form_no_circle():
    edges = {
        (room(path), name.split(".")[1])
        for path in SOURCES
        for _, name in imported(path)
        if name.startswith("deltanox.") and name.split(".")[1] in RANK and name.split(".")[1] != room(path)
    }
    assert [edge for edge in edges if edge[::-1] in edges] == []


def test_import_loads_nothing_heavy():
    heavy = {"matplotlib", "optax", "tqdm", "torch", "transformers", "safetensors", "beartype", "orbax", "flax"}
    code = "import sys, equinox; before = set(sys.modules); import deltanox; print(*set(sys.modules) - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    ).stdout
    names = {name.split(".")[0] for name in loaded.split()}
    assert "deltanox" in names
    assert names & heavy == set()


@pytest.mark.slow
def test_import_costs_at_most_half_more_than_equinox_and_optax():
    """Processor time, which other programs disturb less; best of five fresh interpreters each, taken in turns."""
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    best = {"deltanox": float("inf"), "equinox, optax": float("inf")}
    for _ in range(5):
        for names in best:
            run = subprocess.run(
                [sys.executable, "-c", code.format(names)],
                capture_output=True,
                text=True,
                check=True,
                env=_environment(),
            )
            best[names] = min(best[names], float(run.stdout))
    print(best)
    assert best["deltanox"] <= 1.5 * best["equinox, optax"]


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT.parent)}
