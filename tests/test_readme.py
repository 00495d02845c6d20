"""What the README shows is run: its Python blocks as they stand, its commands by name, its links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
