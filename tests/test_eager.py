"""Calls outside `jax.jit`: the second call with the same shapes compiles nothing.

JAX finds a compiled loop by the identity of its body. An op that makes its body anew at every call compiles at every
call, and each of these programs stays in memory.
"""

import jax
import numpy as np
import pytest

from deltanox import Qwen3_5Config, qwen3_5
from deltanox.generate import generate, prefill
from transformed import CASES, gradients, mapped

EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """A function that counts the programs compiled by a call."""
    count = 0

    def listen(event, duration, **_):
        nonlocal count
        count += event == EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)

    def compiled(f):
        before = count
        jax.block_until_ready(f())
        return count - before

    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


def test_programs_are_counted(compiled):
    assert compiled(lambda: jax.jit(lambda x: x + 1)(np.ones(3, np.float32))) == 1


QUICK = ("rule, xla", "cross entropy in blocks", "attention in blocks", "norm and projection, auto", "convolution, xla")
LONGER = ("rule, reference", "convolution, reference", "experts", "product", "RMSNorm", "SwiGLU", "model")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_a_second_call_compiles_nothing(name, compiled):
    """The call itself, its gradient, and a map of both."""
    f, params, xs = CASES[name]()
    loss, argnums = gradients(f, xs)
    x = jax.tree.map(lambda x: x[0], xs)
    calls = {
        "call": lambda: f(params, x),
        "gradient": lambda: jax.grad(loss, argnums)(params, x),
        "vmap": lambda: mapped(f)(params, xs),
        "vmap of the gradient": lambda: mapped(jax.grad(loss, argnums))(params, xs),
    }
    for what, call in calls.items():
        compiled(call)
        assert compiled(call) == 0, what


def test_a_second_text_compiles_nothing(compiled):
    config = Qwen3_5Config(
        vocab_size=19, embed_size=12, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
        key_head_size=8, value_head_size=8, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16, tied_head=True,
    )  # fmt: skip
    lm = qwen3_5(config, key=jax.random.key(0))
    for call in (
        lambda: generate(lm, [1, 2, 3], max_new_tokens=4),
        lambda: prefill(lm, np.asarray([[1, 2, 3]]), capacity=8)[0],
    ):
        compiled(call)
        assert compiled(call) == 0
