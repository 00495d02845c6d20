"""The gated delta rule: every implementation against the recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from deltanox.ops import Residuals, decay_and_beta, gated_delta_rule, gated_delta_step
from helpers import cosine, rel
from rule_calls import NAMES, compare, make, run

slow = pytest.mark.slow
ENGINES = ("chunked", "xla")


def numpy_recurrence(q, k, v, g, beta, state, scale):
    """The definition once more, in plain loops over batch, tokens and heads."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    out, state = np.zeros(v.shape), state.copy()
    for b in range(q.shape[0]):
        for head in range(v.shape[2]):
            source = head // (v.shape[2] // q.shape[2])
            for t in range(q.shape[1]):
                key = k[b, t, source] / np.sqrt((k[b, t, source] ** 2).sum() + 1e-6)
                query = q[b, t, source] / np.sqrt((q[b, t, source] ** 2).sum() + 1e-6)
                s = np.exp(g[b, t, head]) * state[b, head]
                s = s + np.outer(key, beta[b, t, head] * (v[b, t, head] - s.T @ key))
                state[b, head], out[b, t, head] = s, s.T @ query * scale
    return out, state


def test_reference_is_the_recurrence():
    arrays = make(0, (2,), 13, 3, 6, 5, 7)  # all sizes differ: a swapped axis cannot pass (case 57)
    out, state = gated_delta_rule(*arrays[:5], initial_state=arrays[5], use_qk_l2norm=True, implementation="reference")
    want_out, want_state = numpy_recurrence(*arrays, scale=5**-0.5)
    assert rel(out, want_out) < 1e-7
    assert rel(state, want_state) < 1e-7


def test_reference_gradients_are_finite_differences():
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in make(1, (1,), 5, 1, 2, 3, 4)]

        def f(*arrays):
            *arrays, initial_state = map(jnp.asarray, arrays)
            out, state = gated_delta_rule(*arrays, initial_state=initial_state, implementation="reference")
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

        check_grads(f, arrays, order=1, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


def test_two_tokens_in_closed_form():
    """Case 75: the error is taken against the decayed state."""
    q, k, v, g, beta, _ = make(2, (1,), 2, 1, 1, 3, 4)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    first = beta[0, 0, 0] * jnp.outer(k[0, 0, 0], v[0, 0, 0])
    decayed = jnp.exp(g[0, 1, 0]) * first
    second = decayed + beta[0, 1, 0] * jnp.outer(k[0, 1, 0], v[0, 1, 0] - decayed.T @ k[0, 1, 0])
    for implementation in (*ENGINES, "reference"):
        out, state = gated_delta_rule(q, k, v, g, beta, implementation=implementation, scale=1.0)
        assert rel(out[0, 1, 0], second.T @ q[0, 1, 0]) < 1e-6
        assert rel(state[0, 0], second) < 1e-6


@pytest.mark.parametrize(
    ("T", "sizes"),
    [(1, (2, 4, 5, 7)), (17, (1, 1, 8, 8)), (130, (2, 2, 16, 8)), (130, (1, 3, 16, 24)), (70, (2, 8, 4, 4))],
)
def test_engines_equal_reference(sizes, T):
    arrays = make(3, (2,), T, *sizes)
    want = run("reference", arrays)
    for implementation in ENGINES:
        compare(run(implementation, arrays), want, factor=0.1)


@pytest.mark.parametrize(
    "T", [3, 33, 65, *(pytest.param(T, marks=slow) for T in (2, 15, 16, 31, 63, 64, 75, 127, 129))]
)
def test_any_length(T):
    """Case 16: lengths around the block and the chunk."""
    arrays = make(4, (1,), T, 1, 2, 8, 4)
    compare(run("xla", arrays, options={"chunk_size": 32}), run("reference", arrays), factor=0.1)


@pytest.mark.parametrize("cotangents", [("out",), ("state",)])
def test_one_cotangent(cotangents):
    arrays = make(5, (2,), 70, 1, 2, 32, 4, A=0.05)
    want = run("reference", arrays, cotangents=cotangents)
    for implementation in ENGINES:
        compare(run(implementation, arrays, cotangents=cotangents), want, factor=0.1)


def test_residuals_change_nothing():
    arrays = make(6, (2,), 9 * 16 + 5, 1, 2, 8, 4)
    want = run("reference", arrays)
    for n, t_inv in ((1, "save"), (2, "recompute"), (3, "save"), (64, "recompute")):
        options = {"chunk_size": 16, "residuals": Residuals(states_every=n, t_inv=t_inv)}
        compare(run("xla", arrays, options=options), want, factor=0.1)


def test_residuals_are_what_the_record_says():
    """States every n chunks and T^-1 have the documented sizes; no other array grows with T beyond the inputs (case
    76)."""
    T, C, H, K, V = 1024, 64, 2, 16, 8
    arrays = make(6, (1,), T, 1, H, K, V)
    inputs = sum(x.size for x in arrays)

    def saved(residuals):
        def f(*arrays):
            return gated_delta_rule(*arrays[:5], initial_state=arrays[5], residuals=residuals, implementation="xla")

        kept = jax.eval_shape(lambda *arrays: jax.vjp(f, *arrays)[1], *arrays)
        return sum(x.size for x in jax.tree.leaves(kept) if jnp.issubdtype(x.dtype, jnp.floating))

    least = saved(Residuals(states_every=16, out="recompute"))
    chunks = T // C
    assert least <= inputs + H * K * V  # the inputs and one state (the initial one is not kept twice by necessity)
    assert saved(Residuals(states_every=2, out="recompute")) - least == (chunks // 2 - 1) * H * K * V
    assert saved(Residuals(states_every=16, out="recompute", t_inv="save")) - least == chunks * H * C * C
    assert saved(Residuals(states_every=16, out="save")) - least == T * H * V


@pytest.mark.parametrize("implementation", ENGINES)
def test_gradient_memory_is_linear(implementation):
    """Case 76: no state a token is kept."""
    T, H, K, V = 2048, 2, 64, 64
    arrays = make(8, (1,), T, H, H, K, V)

    def loss(*arrays):
        out, _ = gated_delta_rule(*arrays[:5], initial_state=arrays[5], implementation=implementation)
        return jnp.sum(out**2)

    compiled = jax.jit(jax.grad(loss, argnums=tuple(range(6)))).lower(*arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 12 * 4 * T * H * (2 * K + V)  # twelve copies of q, k, v
    assert temporary < 4 * T * H * K * V / 8


@pytest.mark.parametrize("implementation", ENGINES)
def test_leading_axes_and_batch(implementation):
    """Case 40: gradients of a batch are those of its rows; any number of leading axes."""
    arrays = make(9, (3, 2), 33, 1, 2, 8, 4)
    together = run(implementation, arrays, cotangents=("out",), seed=1)
    flat = run(implementation, [x.reshape(6, *x.shape[2:]) for x in arrays], cotangents=("out",), seed=1)
    for name in NAMES:
        assert rel(together[name].reshape(flat[name].shape), flat[name]) < 1e-6

    def row(*arrays):
        out, state = gated_delta_rule(*arrays[:5], initial_state=arrays[5], implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(state**2)

    flat_arrays = [x.reshape(6, *x.shape[2:]) for x in arrays]
    batched = jax.grad(lambda *a: row(*a), argnums=tuple(range(6)))(*flat_arrays)
    mapped = jax.vmap(jax.grad(row, argnums=tuple(range(6))))(*flat_arrays)
    for x, y in zip(batched, mapped):
        assert rel(x, y) < 1e-6


@pytest.mark.parametrize("implementation", ENGINES)
def test_cotangents_of_any_layout(implementation):
    """Case 39: broadcast and transposed cotangents."""
    arrays = make(10, (2,), 40, 1, 2, 8, 4)

    def f(implementation, transpose):
        def loss(*arrays):
            out, _ = gated_delta_rule(
                *arrays[:5], initial_state=arrays[5], implementation=implementation, use_qk_l2norm=True
            )
            if transpose:
                weight = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape[::-1]) / out.size
                return jnp.sum(out.T * weight)
            return jnp.sum(out)

        return jax.grad(loss, argnums=tuple(range(6)))(*arrays)

    for transpose in (False, True):
        for x, y in zip(f(implementation, transpose), f("reference", transpose)):
            assert rel(x, y) < 1e-5


def test_no_decay_is_zero_decay():
    q, k, v, _, beta, state = make(11, (2,), 50, 1, 2, 8, 4)
    for implementation in (*ENGINES, "reference"):
        without = gated_delta_rule(q, k, v, None, beta, initial_state=state, implementation=implementation)
        zero = gated_delta_rule(q, k, v, jnp.zeros_like(beta), beta, initial_state=state, implementation=implementation)
        for x, y in zip(without, zero):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", [*ENGINES, "reference"])
def test_value_heads_are_grouped(implementation):
    """Case 55: with two key heads and six value heads, key head 1 is read by value heads 3, 4 and 5 only."""
    q, k, v, g, beta, _ = make(12, (1,), 20, 2, 6, 4, 3)
    before, _ = gated_delta_rule(q, k, v, g, beta, implementation=implementation)
    after, _ = gated_delta_rule(q, k.at[:, :, 1].mul(2), v, g, beta, implementation=implementation)
    changed = np.abs(np.asarray(before - after)).max(axis=(0, 1, 3)) > 0
    assert changed.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("T0", [1, 64, 149, *(pytest.param(T0, marks=slow) for T0 in (2, 3, 4, 5, 63, 65))])
def test_split_and_continue(T0):
    """Case 47: a call on an existing state continues it, wherever the sequence is split."""
    *arrays, initial_state = make(13, (2,), 150, 1, 2, 16, 24)
    first, rest = [x[:, :T0] for x in arrays], [x[:, T0:] for x in arrays]
    whole_out, whole = gated_delta_rule(*arrays, initial_state=initial_state, use_qk_l2norm=True, implementation="xla")
    head, state = gated_delta_rule(*first, initial_state=initial_state, use_qk_l2norm=True, implementation="xla")
    tail, state = gated_delta_rule(*rest, initial_state=state, use_qk_l2norm=True, implementation="xla")
    assert rel(jnp.concatenate([head, tail], axis=1), whole_out) < 1e-6
    assert rel(state, whole) < 1e-6


def test_steps_equal_the_sequence():
    """Case 53: decoding token by token is the same recurrence."""
    *arrays, state = make(14, (2,), 20, 1, 2, 8, 4)
    out, final = gated_delta_rule(*arrays, initial_state=state, use_qk_l2norm=True)
    step = jax.jit(lambda *a, initial_state: gated_delta_step(*a, initial_state=initial_state, use_qk_l2norm=True))
    for t in range(20):
        one, state = step(*(x[:, t] for x in arrays), initial_state=state)
        assert rel(one, out[:, t]) < 1e-5
    assert rel(state, final) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", 0, 1e-6), ("float16", 3e-4, 1e-2), ("bfloat16", 3e-3, 1e-1)]
)
def test_state_dtype_of_long_decodes(dtype, low, high):
    """Case 23: the state is float32 by default; a narrower one drifts by what its mantissa says."""
    *arrays, _ = make(15, (1,), 2048, 1, 1, 16, 24, A=0.05)
    want, _ = gated_delta_rule(*arrays, use_qk_l2norm=True, implementation="reference")

    def token(state, x):
        out, state = gated_delta_step(*x, initial_state=state.astype(jnp.float32), use_qk_l2norm=True)
        return state.astype(dtype), out

    _, out = jax.lax.scan(token, jnp.zeros((1, 1, 16, 24), dtype), [jnp.moveaxis(x, 1, 0) for x in arrays])
    assert low <= rel(jnp.moveaxis(out, 0, 1), want) <= high


def test_narrow_state_between_chunks():
    arrays = make(16, (1,), 512, 1, 2, 16, 24, A=0.05)
    want = run("reference", arrays)
    errors = [
        rel(run("xla", arrays, options={"state_dtype": dtype})["out"], want["out"])
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    assert errors[0] < 1e-6
    assert 1e-4 < errors[1] < 2e-2


@pytest.mark.parametrize("implementation", ENGINES)
def test_float64(implementation):
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in make(17, (2,), 70, 1, 2, 8, 4)]
        got = run(implementation, arrays)
        assert got["out"].dtype == got["state"].dtype == jnp.float64
        compare(got, run("reference", arrays), "float64")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    arrays = make(18, (2,), 200, 1, 2, 16, 24, dtype=dtype)
    got = run("xla", arrays)
    assert got["out"].dtype == got["dq"].dtype == dtype
    assert got["state"].dtype == got["dg"].dtype == jnp.float32
    compare(got, run("reference", arrays), jnp.dtype(dtype).name)


def test_derivatives_of_every_order():
    """`chunked` and, with x64, `reference` have forward mode and second derivatives; `xla` says that it has not."""
    *arrays, _ = make(19, (1,), 5, 1, 1, 2, 2)

    def f(implementation):
        return lambda k: jnp.sum(
            gated_delta_rule(arrays[0], k, *arrays[2:], implementation=implementation, use_qk_l2norm=True)[0] ** 2
        )

    hessian = jax.hessian(f("chunked"))(arrays[1])
    with jax.enable_x64(True):
        assert rel(hessian, jax.hessian(f("reference"))(arrays[1])) < 1e-5
    tangent = jax.jvp(f("chunked"), (arrays[1],), (jnp.ones_like(arrays[1]),))[1]
    assert rel(tangent, jnp.sum(jax.grad(f("xla"))(arrays[1]))) < 1e-5
    for second in (jax.hessian, lambda f: jax.grad(lambda k: jnp.sum(jax.grad(f)(k)))):
        with pytest.raises(NotImplementedError, match="use implementation='chunked'"):
            second(f("xla"))(arrays[1])
    with pytest.raises(NotImplementedError, match="switch on jax_enable_x64"):
        jax.hessian(f("reference"))(arrays[1])


@pytest.mark.parametrize("implementation", ENGINES)
def test_rows_do_not_depend_on_the_batch_or_what_follows(implementation):
    """Case 72: bit-identical for B = 1 and B = 8, and for T = 100 and the first 100 of T = 200.

    Heads of 64 or more: below, XLA's CPU code sums a short axis in an order that depends on the batch.
    """
    *arrays, _ = make(20, (8,), 200, 1, 2, 64, 64)
    op = jax.jit(lambda *a: gated_delta_rule(*a, use_qk_l2norm=True, implementation=implementation)[0])
    whole = op(*arrays)
    np.testing.assert_array_equal(whole[:1], op(*(x[:1] for x in arrays)))
    np.testing.assert_array_equal(whole[:, :100], op(*(x[:, :100] for x in arrays)))


class TestNumerics:
    """What breaks other implementations. T = 1,024 as in the acceptance of the op."""

    T = 1024

    def gates(self, name):
        arrays = make(21, (1,), self.T, 1, 2, 32, 16)
        q, k, v, _, beta, state = arrays
        x = jax.random.normal(jax.random.key(5), beta.shape)
        g = {
            "A=0.05": -0.05 * jax.nn.softplus(x),
            "A=1": -jax.nn.softplus(x),
            "A=16": -16 * jax.nn.softplus(x),
            "one of -1e5": jnp.where(jnp.arange(self.T)[None, :, None] % 64 == 8, -1e5, -0.01 * jax.nn.sigmoid(x)),
            "one of -100": jnp.where(jnp.arange(self.T)[None, :, None] == 8, -100.0, -0.01 * jax.nn.sigmoid(x)),
            "-40 to -70": jax.nn.log_sigmoid(jax.random.uniform(jax.random.key(6), x.shape)) / 0.01,
            "-20": jnp.full(x.shape, -20.0),
            "-1e4": jnp.full(x.shape, -1e4),
            "0 to -200": -200 * jax.random.uniform(jax.random.key(6), x.shape),
        }[name]
        return q, k, v, g, beta, state

    @pytest.mark.parametrize(
        "name", ["A=0.05", "A=1", "A=16", "one of -1e5", "one of -100", "-40 to -70", "-20", "-1e4", "0 to -200"]
    )
    def test_gates(self, name):
        """Cases 26, 27, 28 and 30: strong decays, masks before exp, no cancellation in the sums nor in their
        gradients."""
        arrays = self.gates(name)
        compare(run("xla", arrays), run("reference", arrays))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["A=0.05", "A=1", "A=16", "one of -1e5", "one of -100", "-40 to -70", "-1e4"])
    def test_gates_differentiated_by_jax(self, name):
        arrays = self.gates(name)
        compare(run("chunked", arrays), run("reference", arrays))

    @pytest.mark.parametrize("implementation", ENGINES)
    def test_spike(self, implementation):
        """Case 28: what follows a gate of -1e5 within its chunk is not worse than what precedes it."""
        *arrays, _ = self.gates("one of -1e5")
        got, want = (
            gated_delta_rule(*(x[:, :64] for x in arrays), use_qk_l2norm=True, implementation=i)[0]
            for i in (implementation, "reference")
        )
        assert rel(got[:, 9:], want[:, 9:]) < 1e-6

    @pytest.mark.parametrize("implementation", ["xla", "reference", pytest.param("chunked", marks=slow)])
    @pytest.mark.parametrize(
        ("position", "value"), [(0, -jnp.inf), (5, -jnp.inf), (16, -105.0), (63, -jnp.inf), (64, -1e5)]
    )
    def test_reset(self, implementation, position, value):
        """Case 29: g = -inf, like anything below -104, is a fresh start."""
        q, k, v, g, beta, state = make(22, (1,), 80, 1, 2, 8, 4)
        g = g.at[:, position].set(value)

        def f(g, state):
            out, final = gated_delta_rule(q, k, v, g, beta, initial_state=state, implementation=implementation)
            return jnp.sum(out[:, position:] ** 2) + jnp.sum(final**2), (out, final)

        (_, (out, final)), (dg, dstate) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(g, state)
        fresh_out, fresh = gated_delta_rule(
            *(x[:, position:] for x in (q, k, v)),
            g[:, position:].at[:, 0].set(0),
            beta[:, position:],
            implementation="reference",
        )
        assert rel(out[:, position:], fresh_out) < 1e-6
        assert rel(final, fresh) < 1e-6
        assert np.isfinite(dg).all()
        assert not np.asarray(dg[:, : position + 1]).any()
        assert not np.asarray(dstate).any()

    @pytest.mark.parametrize(
        ("rate", "noise"),
        [
            (0.99, 0.0),
            (0.99, 1e-3),
            *(pytest.param(*x, marks=slow) for x in ((0.5, 1e-3), (1.0, 1e-3), (2.0, 0.0), (2.0, 1e-3))),
        ],
    )
    def test_repeated_keys(self, noise, rate):
        """Cases 33 and 34: the inverse where keys repeat, held against what the float32 recurrence itself loses."""
        q, k, v, _, beta, state = make(23, (1,), 1024 if rate < 2 else 64, 1, 2, 32, 16)
        k = jnp.broadcast_to(k[:, :1], k.shape) + noise * jax.random.normal(jax.random.key(3), k.shape)
        arrays = (q, k, v, jnp.zeros_like(beta), jnp.full_like(beta, rate), state)
        want = run("reference", arrays)

        def token(state, x):
            out, state = gated_delta_step(*x, initial_state=state, use_qk_l2norm=True)
            return state, out

        def recurrence(*arrays):
            *tokens, state = arrays
            state, out = jax.lax.scan(token, state, [jnp.moveaxis(x, 1, 0) for x in tokens])
            return jnp.moveaxis(out, 0, 1), state

        def loss(*arrays):
            rng, values = np.random.default_rng(7), recurrence(*arrays)
            return sum(jnp.sum(x * rng.standard_normal(x.shape, np.float32)) for x in values), values

        gradients, values = jax.jit(jax.grad(loss, argnums=tuple(range(6)), has_aux=True))(*arrays)
        own = dict(zip(NAMES, (*values, *gradients)))
        for implementation in ENGINES:
            got = run(implementation, arrays)
            for name in NAMES:
                bound, error = max(1e-5, 2 * rel(own[name], want[name])), rel(got[name], want[name])
                if rate == 2:
                    # Eigenvalues of -1: nothing fades, and what rounding a key's norm costs adds up over the chunk, in the
                    # state (1.5e-5) more than in the output (9e-6). Case 34's bound.
                    bound = 1e-4
                assert error <= bound, f"{implementation}, {name}: {error:.1e} above {bound:.1e}"

    @pytest.mark.parametrize("implementation", ["xla", pytest.param("chunked", marks=slow)])
    @pytest.mark.parametrize("A", [pytest.param(0.05, marks=slow), pytest.param(1.0, marks=slow), 16.0])
    def test_direction_of_the_gate_parameters(self, implementation, A):
        """The gradients of A_log and dt_bias sum over all tokens: their direction is what is lost first."""
        q, k, v, _, _, state = make(24, (1,), self.T, 2, 4, 16, 8)
        a, b = jax.random.normal(jax.random.key(1), (2, 1, self.T, 4))
        A_log, dt_bias = jnp.log(A * (0.5 + jnp.arange(4.0) / 4)), jnp.linspace(-1, 1, 4)

        def loss(A_log, dt_bias, implementation):
            g, beta = decay_and_beta(a, b, A_log, dt_bias)
            out, final = gated_delta_rule(
                q, k, v, g, beta, initial_state=state, use_qk_l2norm=True, implementation=implementation
            )
            key = jax.random.key(2)
            return jnp.sum(out * jax.random.normal(key, out.shape)) + jnp.sum(
                final * jax.random.normal(key, final.shape)
            )

        got, want = (jax.grad(loss, argnums=(0, 1))(A_log, dt_bias, i) for i in (implementation, "reference"))
        for x, y in zip(got, want):
            assert cosine(x, y) >= 0.9999
            assert rel(x, y) <= 1e-4

    @pytest.mark.parametrize("size", [1.0, 0.1, 0.01, 1e-3, 0.0])
    def test_eps_of_the_norm(self, size):
        """Case 43: eps is added to the sum of squares, inside the root; zero rows have finite gradients."""
        q, k, v, g, beta, state = make(25, (1,), 70, 1, 2, 16, 8)
        arrays = (q * size, k * size, v, g, beta, state)
        got, want = run("xla", arrays), run("reference", arrays)
        compare(got, want)
        assert all(np.isfinite(x).all() for x in got.values())
        unit = k[0, 0, 0] * size
        out, _ = gated_delta_rule(*(x[:, :1] for x in arrays[:5]), use_qk_l2norm=True, scale=1.0)
        key, query = (
            x / np.sqrt(np.sum(np.square(x)) + 1e-6) for x in (np.asarray(unit), np.asarray(q[0, 0, 0] * size))
        )
        assert rel(out[0, 0, 0], (key @ query) * np.asarray(beta[0, 0, 0] * v[0, 0, 0])) < 1e-5
