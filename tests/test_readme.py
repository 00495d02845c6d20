"""What the README shows is run: its Python blocks as they stand, its commands by name, its links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deltanox

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_python_blocks():
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("block", BLOCKS, ids=[" ".join(block.split()[:4]) for block in BLOCKS])
def test_each_python_block_runs_alone(block):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_checker_is_not_switched_on_too_late():
    """The block of the checker, pasted after another, says so."""
    assert deltanox.__name__ in sys.modules
    (block,) = [block for block in BLOCKS if "install_import_hook" in block]
    with pytest.raises(AssertionError, match="start a new Python"):
        exec(block, {})


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_exist(link):
    assert (ROOT / link).exists()


def test_files_exist():
    """The file tree names what is there."""
    tree = README.split("## Files")[1].split("```")[1]
    for name in re.findall(r"^  (\w[\w./]*)", tree, re.MULTILINE):
        assert (ROOT / "src" / "deltanox" / name).exists(), name
    for name in re.findall(r"^(\w+/)", tree, re.MULTILINE):
        assert (ROOT / name).exists(), name
