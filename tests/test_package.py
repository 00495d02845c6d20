"""What is installed: the ready configs, the command, and the packages that the code and the notebooks import."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import deltanox
from deltanox.train import find_config, read_config, ready_configs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Peers of the benchmarks: nobody needs them for anything else.
PEERS = {"torch", "transformers", "jla"}


def names(requirements) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}


def imported(source: str) -> set[str]:
    """First parts of the names of all imports that are neither Python's nor our own."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) - {"deltanox"}


def test_every_import_of_the_library_is_a_dependency():
    found = set().union(*(imported(path.read_text("utf-8")) for path in (ROOT / "src").rglob("*.py")))
    assert found - names(PROJECT["dependencies"]) == PEERS | names(PROJECT["optional-dependencies"]["hf"])


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_import_what_their_extra_brings(path):
    """A string such as "beartype.beartype" in the import hook is an import too."""
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    found = imported(source) | {
        name.split(".")[0] for name in re.findall(r'install_import_hook\([^"]*"\w+", "([\w.]+)"', source)
    }
    assert "jax" in found
    assert found <= names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["notebook"])


def test_the_development_tools_contain_the_other_extras():
    extras = {name: names(values) for name, values in PROJECT["optional-dependencies"].items()}
    for name in ("hf", "check", "notebook"):
        assert extras[name] <= extras["dev"], name


def test_one_version():
    assert deltanox.__version__ == PROJECT["version"]


def test_ready_configs_are_those_of_the_repository():
    ready = ready_configs()
    assert {path.name for path in ready.values()} == {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert list(ready)[:2] == ["qwen3_5_moe_tiny", "qwen3_5_nano"]
    for path in ready.values():
        assert path.read_text("utf-8").startswith("# "), f"{path}: the first line says what it is"


def test_a_ready_config_is_found_by_name_where_no_file_has_it(tmp_path, monkeypatch):
    """A name with a dot in it keeps it, a file of that name comes first, and a folder is no file."""
    monkeypatch.chdir(tmp_path)
    assert read_config("qwen3_5_0.8b").model.num_layers == 24
    assert find_config("qwen3_5_0.8b").stem == "qwen3_5_0.8b"
    Path("qwen3_5_nano").mkdir()
    assert find_config("qwen3_5_nano").is_file()
    Path("qwen3_5_nano").rmdir()
    Path("qwen3_5_nano").write_text("# mine")
    assert find_config("qwen3_5_nano") == Path("qwen3_5_nano")
    with pytest.raises(ValueError, match=r"there is no file `configs/qwen3_5_9B.toml` .*a name such as qwen3_5_9b "):
        find_config("configs/qwen3_5_9B.toml")


def _start(*command: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", **environment},
    )  # fmt: skip


def test_the_package_runs_as_a_module():
    out, error = _start("-m", "deltanox", "--version").communicate()
    assert error == ""
    assert re.fullmatch(
        rf"deltanox {re.escape(deltanox.__version__)} \(jax [\d.]+, jaxlib .*, Python 3\.\d+.*\)\n", out
    )


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_control_c_while_importing_ends_at_once_and_in_silence(tmp_path):
    """The import of JAX is replaced by one that waits: Ctrl-C comes in the middle of it."""
    (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    # A job in the background of a shell, as a runner of tests may be, has SIGINT ignored, and so have its children.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import deltanox_command as c; c.main()"
    with _start("-c", program, PYTHONPATH=path) as process:
        try:
            assert process.stdout.readline() == "importing\n"
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, error) == (130, "", "")
    assert time.monotonic() - begin < 20
