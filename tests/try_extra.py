"""What an extra is for, tried where only that extra is installed: `python tests/try_extra.py NAME`, without pytest."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "deltanox"]


def run(*arguments: str, **options) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def none() -> None:
    """A ready config trains in an empty folder, and its model writes text."""
    with tempfile.TemporaryDirectory() as folder:
        small = {
            "train.steps": 3, "optimiser.warmup_steps": 1, "train.sample_tokens": 0, "train.directory": "run",
            "train.steps_per_call": 1, "model.num_layers": 4, "model.embed_size": 32, "model.mlp_size": 32,
            "data.row_length": 64, "data.batch_size": 2, "data.validation_bytes": 2000, "data.validation_fraction": 0.3,
        }  # fmt: skip
        overrides = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
        run("train", "qwen3_5_nano", "--text", str(ROOT / "configs"), str(ROOT / "README.md"), *overrides, cwd=folder)
        assert {"log.jsonl", "loss.png"} <= {path.name for path in Path(folder, "run").iterdir()}
        assert run("generate", "run", "--prompt", "def ", "--max-tokens", "4", cwd=folder).startswith("def ")


def check() -> None:
    """The README's block about wrong shapes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "install_import_hook" in block]
    subprocess.run([sys.executable, "-c", block], check=True)


def hf() -> None:
    """Text from a Hugging Face checkpoint by its tokenizer.json."""
    import tokenizers

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint")
        shutil.copytree(ROOT / "tests" / "interop" / "fixtures" / "qwen3_5", checkpoint)
        size = json.loads((checkpoint / "config.json").read_text())["text_config"]["vocab_size"]
        words = {chr(ord("A") + i): i for i in range(size)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
        tokenizer.save(str(checkpoint / "tokenizer.json"))
        assert run("generate", str(checkpoint), "--prompt", "AB", "--max-tokens", "2").startswith("AB")


def notebook() -> None:
    """Both notebooks up to the cell that imports what they need, in a kernel."""
    import nbclient
    import nbformat

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        imports = [i for i, cell in enumerate(book.cells) if cell.cell_type == "code" and "import jax" in cell.source]
        book.cells = book.cells[: imports[0] + 1]
        nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()


def tpu() -> None:
    """A config is compiled for a TPU that is not there."""
    small = ["--set", "data.row_length=64", "--set", "data.batch_size=1"]
    for topology in ("v5e", "tpu7x"):
        assert "roofline" in run("aot", "qwen3_5_moe_tiny", "--what", "forward", "--topology", topology, *small)


if __name__ == "__main__":
    {"none": none, "check": check, "hf": hf, "notebook": notebook, "tpu": tpu}[sys.argv[1]]()
    print("works:", sys.argv[1])
