"""Wrong shapes without the run-time type checker: our own sentences, in a process of its own."""

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp
from deltanox.nn import GatedAttention, RotaryEmbedding, SparseMoE
from deltanox.ops.attention import causal_attention
from deltanox.ops.moe import expert_mlp

key = jax.random.key(0)
attention = GatedAttention(10, num_heads=6, num_kv_heads=2, head_size=8, rotary_size=4, key=key)
moe = SparseMoE(8, num_experts=4, top_k=2, expert_size=5, shared_size=7, key=key)
x = jnp.zeros((3, 10))
calls = dict(
    batched=lambda: attention(jnp.zeros((2, 3, 10))),
    single=lambda: attention(jnp.zeros((10,))),
    mask=lambda: attention(x, mask=jnp.ones((4,), bool)),
    float_mask=lambda: attention(x, mask=jnp.ones((3,))),
    ids=lambda: attention(x, segment_ids=jnp.ones((2, 3), jnp.int32)),
    positions=lambda: attention(x, positions=jnp.ones((4, 3), jnp.int32)),
    moe_batched=lambda: moe(jnp.zeros((2, 3, 8))),
    moe_mask=lambda: moe(jnp.zeros((3, 8)), mask=jnp.ones((2,), bool)),
    rotary=lambda: RotaryEmbedding(4)(jnp.zeros((2, 3), jnp.int32)),
    rotary_float=lambda: RotaryEmbedding(4)(jnp.zeros((3,))),
    swapped=lambda: causal_attention(jnp.zeros((6, 9, 4)), jnp.zeros((2, 9, 4)), jnp.zeros((2, 9, 4))),
    integers=lambda: causal_attention(*[jnp.zeros((9, 2, 4), jnp.int32)] * 3),
    experts=lambda: expert_mlp(
        jnp.zeros((3, 8)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2)), *[jnp.zeros((4, 8, 8))] * 2
    ),
)
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        print(name, "|", error)
"""

WORDS = {
    "batched": ["GatedAttention", "`x`", "[T, D]", "float32[2, 3, 10]", "wrap the layer in jax.vmap"],
    "single": ["`x`", "float32[10]", "x[None]"],
    "mask": ["`mask`", "bool[4]", "[T]"],
    "float_mask": ["`mask`", "booleans", "float32[3]"],
    "ids": ["`segment_ids`", "int32[2, 3]", "jax.vmap"],
    "positions": ["`positions`", "[3, T]", "int32[4, 3]"],
    "moe_batched": ["SparseMoE", "float32[2, 3, 8]", "wrap the layer in jax.vmap"],
    "moe_mask": ["SparseMoE", "`mask`", "bool[2]"],
    "rotary": ["`positions`", "int32[2, 3]", "jax.vmap"],
    "rotary_float": ["`positions`", "float32[3]", "astype(jnp.int32)"],
    "swapped": ["q: float32[6, 9, 4]", "k: float32[2, 9, 4]", "*B T n hd"],
    "integers": ["`q`", "int32[9, 2, 4]", "floating"],
    "experts": ["`experts`", "[*B k]", "int32[2, 2]"],
}


def test_sentences_without_the_checker():
    source = pathlib.Path(__file__).parents[2] / "src"
    environment = dict(os.environ, PYTHONPATH=str(source), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)
    for name, words in WORDS.items():
        assert name in said, f"{name}: nothing was raised"
        missing = [word for word in words if word not in said[name]]
        assert not missing, f"{name}: {missing} not in: {said[name]}"
