"""What the tests share: the error measure, the one table of tolerances, and what several files need."""

import importlib.util
import os

import numpy as np
import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"),
    reason="libtpu, which compiles for TPUs, is not installed here (the extra `dev` has it, on Linux and x86-64)",
)

# A model that is small, to be followed by more of its settings and by other tables
SMALL_MODEL = """
[model]
vocab_size = 257
embed_size = 16
num_layers = 2
full_attention_interval = 2
mlp_size = 16
num_key_heads = 1
num_value_heads = 2
key_head_size = 8
value_head_size = 4
num_heads = 2
num_kv_heads = 1
head_size = 8
"""

# Relative L2 error against the float64 recurrence, per compute dtype.
# bfloat16: eight bits of mantissa, rounded once per array that leaves the op (2^-9 a value) and once per input of a product.
TOLERANCE = {
    "float64": {"value": 1e-12, "gradient": 1e-11},
    "float32": {"value": 1e-5, "gradient": 1e-5},
    "bfloat16": {"value": 5e-3, "gradient": 1e-2},
    "float16": {"value": 1e-3, "gradient": 2e-3},
}


def rel(got, want) -> float:
    """Relative L2 error of `got` against `want`; absolute where `want` is zero; NaN where either holds NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shapes differ: {got.shape} and {want.shape}"
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (size if size else 1.0))


def cosine(got, want) -> float:
    """Cosine of the angle between two arrays read as vectors."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    return float(got @ want / (np.linalg.norm(got) * np.linalg.norm(want)))
