"""A scan over stacked layers is a Python loop over layers."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.nn._stack import Stack
from helpers import rel


class Stats(NamedTuple):
    count: jax.Array
    rows: jax.Array


class Layer(eqx.Module):
    """An affine recurrence with a state [D] and an integer statistic."""

    weight: jax.Array
    decay: jax.Array
    power: int = eqx.field(static=True)

    def __init__(self, size, *, key):
        a, b = jax.random.split(key)
        self.weight = jax.random.normal(a, (size, size)) / size**0.5
        self.decay = jax.random.uniform(b, (size,))
        self.power = 2

    def init_state(self, fill=0.0):
        return jnp.full(self.decay.shape, fill)

    def __call__(self, x, state=None, *, mask=None):
        state = jnp.zeros_like(self.decay) if state is None else state
        u = jnp.tanh(x @ self.weight.T)
        if mask is not None:
            u = jnp.where(mask[:, None], u, 0.0)

        def step(s, u):
            s = self.decay * s + u
            return s, s**self.power

        state, y = jax.lax.scan(step, state, u)
        stats = Stats((x > 0).sum(0, dtype=jnp.int32), jnp.asarray(x.shape[0], jnp.float32))
        return x + y, state, stats


class Bare(eqx.Module):
    weight: jax.Array

    def __call__(self, x, state=None):
        return x * self.weight[None], None, None


def loop(stack, x, states=None, **kwargs):
    new, stats = [], []
    for i in range(len(stack)):
        state = None if states is None else jax.tree.map(lambda s, i=i: s[i], states)
        x, state, stat = stack[i](x, state, **kwargs)
        new.append(state)
        stats.append(stat)
    stacked = jax.tree.map(lambda *s: jnp.stack(s), *new)
    return x, stacked, jax.tree.map(lambda *s: sum(s[1:], s[0]), *stats)


@pytest.fixture
def stack(getkey):
    return Stack(lambda key: Layer(5, key=key), 4, key=getkey())


@pytest.mark.parametrize("given", [False, True])
def test_equals_a_python_loop(getkey, stack, given):
    x = jax.random.normal(getkey(), (7, 5))
    states = jax.random.normal(getkey(), (4, 5)) if given else None
    mask = jnp.array([False, True, True, True, True, False, True])
    for got, want in zip(
        jax.tree.leaves(stack(x, states, mask=mask)), jax.tree.leaves(loop(stack, x, states, mask=mask))
    ):
        assert got.dtype == want.dtype
        assert rel(got, want) < 1e-6


@pytest.mark.parametrize("unroll", [1, 3, 4])
@pytest.mark.parametrize("remat", [False, True, jax.checkpoint_policies.dots_saveable])
def test_gradients_equal_a_python_loop(getkey, remat, unroll):
    stack = Stack(lambda key: Layer(5, key=key), 4, remat=remat, unroll=unroll, key=getkey())
    x, states, weights = (jax.random.normal(getkey(), shape) for shape in ((7, 5), (4, 5), (7, 5)))

    def loss(run):
        def value(arguments):
            stack, x, states = arguments
            y, states, _ = run(stack, x, states)
            return (y * weights).sum() + (states**2).sum()

        return eqx.filter_grad(value)((stack, x, states))

    got, want = loss(lambda stack, x, states: stack(x, states)), loss(loop)
    assert len(jax.tree.leaves(got)) == 4
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert rel(a, b) < 1e-5


def test_layers_differ_and_are_made_from_split_keys(getkey):
    key = getkey()
    stack = Stack(lambda key: Layer(5, key=key), 3, key=key)
    for i, k in enumerate(jax.random.split(key, 3)):
        np.testing.assert_array_equal(stack[i].weight, Layer(5, key=k).weight)
    np.testing.assert_array_equal(stack[-1].weight, stack[2].weight)
    assert rel(stack[0].weight, stack[1].weight) > 0.1
    with pytest.raises(IndexError, match="3 layers, and no layer 3"):
        stack[3]


def test_layers_without_state_or_statistics():
    stack = Stack(lambda key: Bare(jnp.full((2,), 3.0)), 3, key=jax.random.key(0))
    y, states, stats = stack(jnp.ones((4, 2)))
    np.testing.assert_array_equal(y, np.full((4, 2), 27.0))
    assert states is None
    assert stats is None


def test_init_state_is_stacked(stack):
    np.testing.assert_array_equal(stack.init_state(fill=2.0), np.full((4, 5), 2.0))


@pytest.mark.parametrize("remat", [False, True])
def test_states_that_nobody_reads_cost_nothing(getkey, remat):
    """Forward and backward compile to the flops and the memory of layers that return no state at all."""

    class WithState(eqx.Module):
        weight: jax.Array
        with_state: bool = eqx.field(static=True)

        def __call__(self, x, state=None):
            y = jnp.tanh(x @ self.weight)
            state = jnp.sin(y).T @ (y @ self.weight.T) if self.with_state else None  # as dear as the output
            return y, state, None

    x = jax.random.normal(getkey(), (64, 32))
    costs = []
    for with_state in (True, False):
        stack = Stack(lambda key: WithState(jnp.eye(32), with_state), 5, remat=remat, key=getkey())  # noqa: B023

        @jax.jit
        def grad(x, arrays, stack=stack):
            return jax.grad(lambda arrays: eqx.combine(arrays, stack)(x)[0].sum())(arrays)

        compiled = grad.lower(x, eqx.filter(stack, eqx.is_array)).compile()
        costs.append((compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes))
    assert costs[0] == costs[1]


def test_remat_saves_memory(getkey):
    x = jax.random.normal(getkey(), (256, 16))
    sizes = []
    for remat in (False, True):
        stack = Stack(lambda key: Layer(16, key=key), 8, remat=remat, key=getkey())
        grad = eqx.filter_jit(eqx.filter_grad(lambda stack, x: stack(x)[0].sum()))
        sizes.append(grad.lower(stack, x).compile().compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 0.6 * sizes[0]


def test_refuses_wrong_depths_and_states(getkey, stack):
    with pytest.raises(ValueError, match="`depth` must be at least 1, but it is 0"):
        Stack(lambda key: Layer(5, key=key), 0, key=getkey())
    with pytest.raises(ValueError, match="`unroll` must be at least 1, but it is 0"):
        Stack(lambda key: Layer(5, key=key), 4, unroll=0, key=getkey())
    with pytest.raises(ValueError, match=r"axis of depth = 4, but one has the shape \(3, 5\).*init_state"):
        stack(jnp.ones((7, 5)), jnp.ones((3, 5)))
