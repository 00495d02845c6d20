"""The notebooks: run with smaller parameters, and what of them is committed."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("train_tiny_qwen3_5", "gated_delta_rule")
MISSING = 'the notebooks need the notebook tools: pip install -e ".[dev]"'


def read(name):
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def texts(cell):
    """All text that a code cell has put out, images left out."""
    for output in getattr(cell, "outputs", ()):
        yield "".join(output.get("text", ""))
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield "".join(data)


def run(name, parameters, wanted, tmp_path, monkeypatch):
    """Execute a notebook with other parameters. Returns the values of the names `wanted` at its end, and its text."""
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    pytest.importorskip("ipykernel", reason=MISSING)
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    notebook = read(name)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for key, value in parameters.items():
        cell.source, count = re.subn(rf"(?m)^{key} = [^ \n]+", f"{key} = {value!r}", cell.source)
        assert count == 1, f"{name}: one plain assignment of {key} in the cell tagged `parameters`"
    pairs = ", ".join(f"{variable!r}: {variable}" for variable in wanted)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({{{pairs}}}))"))
    # the library that is tested, whatever is installed; the plots as in a notebook
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=os.pathsep)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    *cells, last = notebook.cells
    return json.loads("".join(texts(last))), "\n".join(text for cell in cells for text in texts(cell))


@pytest.mark.slow
def test_training_notebook(tmp_path, monkeypatch):
    parameters = dict(STEPS=30, BATCH_SIZE=2, ROW_LENGTH=128, EMBED_SIZE=32, VALIDATION_BYTES=5_000, NEW_TOKENS=20)
    wanted = ["validation_bits", "train_bits", "decode_equals_prefill", "text", "markov", "gzip", "num_parameters"]
    values, text = run("train_tiny_qwen3_5", parameters, wanted, tmp_path, monkeypatch)
    bits = [bits for _, bits in sorted((int(step), bits) for step, bits in values["validation_bits"].items())]
    assert len(values["train_bits"]) == 30
    assert 7.5 < bits[0] < 8.5  # log2(257) = 8.006, the uniform guess
    assert bits[-1] < bits[0] - 1.5
    assert values["train_bits"][-1] < values["train_bits"][0] - 1.5
    assert values["decode_equals_prefill"] is True
    assert re.fullmatch(r"import os\n\n\nclass .+", values["text"], re.DOTALL)
    assert 1 < values["markov"] < 4
    assert 1 < values["gzip"] < 4
    # the wrong shape: argument, shape and axes with the checker, the remedy without
    assert "whilst typechecking parameter 'x'" in text
    assert "f32[8,128,32]" in text
    assert "'T D'" in text
    assert "whilst typechecking parameter 'g'" in text
    assert "H=4" in text
    assert "wrap in jax.vmap" in text


@pytest.mark.slow
def test_mathematics_notebook(tmp_path, monkeypatch):
    wanted = ["chunked_difference", "gradient_difference", "repeated_difference", "gate_error"]
    wanted += ["linear", "read_once", "read_ten_times", "[worst[by_powers], worst[by_blocks]]"]
    values, _ = run("gated_delta_rule", dict(LENGTH=80, MAX_ITEMS=48), wanted, tmp_path, monkeypatch)
    for name in ("chunked_difference", "gradient_difference", "repeated_difference"):
        assert values[name] < 1e-5
    # what the text says of its pictures
    assert values["gate_error"]["deltanox"] < 5e-7 < 1e-5 < values["gate_error"]["difference of prefix sums"]
    powers, blocks = values["[worst[by_powers], worst[by_blocks]]"]
    assert powers[-1] > 1e6
    assert blocks[-1] < 1e-6
    assert all(once < linear for once, linear in zip(values["read_once"], values["linear"]))
    assert values["read_ten_times"][0] < 1e-3


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_with_its_outputs(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 600_000
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it from top to bottom"
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
    shown = "\n".join(text for cell in cells for text in texts(cell))
    assert "warning" not in shown.lower()
    for text in (shown, *(cell.source for cell in notebook.cells)):
        place = re.search(r"(?<![\w.])/(home|root|work|tmp|opt|Users|usr|mnt)/|\b[A-Z]:\\|site-packages", text)
        assert place is None, f"a path of one machine: {text[max(place.start() - 40, 0) : place.end() + 40]!r}"
