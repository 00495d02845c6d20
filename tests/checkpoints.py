"""The small checkpoints that transformers wrote, and how tensors and models are compared bit by bit."""

from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parent / "interop" / "fixtures"
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def tensors_of(folder) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint's folder."""
    found = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        found |= load_file(path)
    return found


def same(a, b) -> None:
    """Two models are equal, bit by bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and np.array_equal(x, y)
