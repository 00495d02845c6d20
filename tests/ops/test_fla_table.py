"""The test table of flash-linear-attention's gated delta rule: float32 within a tenth of its tolerances, half
precision within them.

A row is (B, T, h, H, D, scale, gate_normalizer, ...); g = log σ(u) / gate_normalizer with u uniform in [0, 1). Where
the norm is not in the op,
q and k are normalised before the call. The reference is the recurrence in float64 on the same inputs. Small rows run
by default, the others are slow. The TPU kernels, interpreted, take the rows up to a million numbers an array whose
head sizes they know, within bounds of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.ops import decay_and_beta, gated_delta_rule
from helpers import cosine, rel

NAMES = ("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
# tolerances of the table: out and state, dq dk dv dstate, dg dbeta
TABLE = {"out": 5e-3, "state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dstate": 8e-3, "dg": 2e-2, "dbeta": 2e-2}
# of the kernels in bfloat16; in float32 all are 1e-5
KERNELS = {"out": 5e-3, "state": 5e-3, **dict.fromkeys(("dq", "dk", "dv", "dstate"), 8e-3)}
KERNELS |= dict.fromkeys(("dg", "dbeta", "dA_log", "ddt_bias"), 1e-2)
DTYPES = (jnp.float32, jnp.bfloat16)


def rows(*table, columns):
    """pytest parameters: an engine and a row; all but the smallest rows, and the kernels, are slow, and rows of more
    than half a million numbers an array exhaustive: most of their time is the reference's."""
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    parameters = []
    for row in table:
        named = dict(zip(columns, row))
        size, name = named["B"] * named["T"] * named["H"] * named["D"], "-".join(map(str, row))
        large = [exhaustive] if size > 5e5 else []
        parameters.append(pytest.param("xla", named, id=name, marks=[slow, *large] if size > 5e4 else []))
        if named["D"] in (64, 128) and size < 1.1e6:
            parameters.append(pytest.param("pallas", named, id=f"kernels-{name}", marks=[slow, *large]))
    return parameters


def draw(seed, row, dtype, *, normal=False, initial=False):
    keys = jax.random.split(jax.random.key(seed), 8)
    B, T, h, D = (row[name] for name in ("B", "T", "h", "D"))
    H = row.get("H", h)
    make = jax.random.normal if normal else jax.random.uniform
    q, k = (make(key, (B, T, h, D)) for key in keys[:2])
    v = make(keys[2], (B, T, H, D))
    beta = jax.nn.sigmoid(jax.random.uniform(keys[3], (B, T, H)))
    g = jax.nn.log_sigmoid(jax.random.uniform(keys[4], (B, T, H))) / row.get("gate_normalizer", 1.0)
    g = jnp.where(jax.random.uniform(keys[5], g.shape) <= row.get("mask_p", 0.0), 0, g)
    state = jax.random.normal(keys[6], (B, H, D, D)) if initial else jnp.zeros((B, H, D, D))
    if not row.get("l2norm", True):
        q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return [x.astype(dtype) for x in (q, k, v)] + [g, beta, state]


@functools.partial(jax.jit, static_argnames=("implementation", "scale", "l2norm", "chunk_size", "gradients"))
def run(arrays, *, implementation, scale, l2norm=True, chunk_size=64, gradients=True):
    def loss(*arrays):
        *rest, initial_state = arrays
        out, state = gated_delta_rule(
            *rest, initial_state=initial_state, scale=scale, use_qk_l2norm=l2norm, chunk_size=chunk_size,
            implementation=implementation,
        )  # fmt: skip
        keys = jax.random.split(jax.random.key(9))
        total = jnp.sum(out.astype(jnp.float32) * jax.random.normal(keys[0], out.shape))
        return total + jnp.sum(state * jax.random.normal(keys[1], state.shape)), (out, state)

    if not gradients:
        return dict(zip(NAMES, loss(*arrays)[1]))
    grads, values = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(*arrays)
    return dict(zip(NAMES, (*values, *grads)))


def check(engine, got, want, dtype, tolerances=TABLE):
    for name in got:
        if engine == "pallas":
            bound = 1e-5 if dtype == jnp.float32 else KERNELS[name]
            assert cosine(got[name], want[name]) >= 0.999, name
        else:
            bound = tolerances[name] * (0.1 if dtype == jnp.float32 else 1)
        assert rel(got[name], want[name]) <= bound, f"{name}: {rel(got[name], want[name]):.1e} above {bound:.1e}"


def both(engine, arrays, dtype, tolerances=TABLE, **options):
    got, want = (run(arrays, implementation=i, **options) for i in (engine, "reference"))
    check(engine, got, want, dtype, tolerances)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("engine", "row"),
    rows(
        (1, 63, 1, 1, 64, 1, 1), (2, 500, 4, 4, 60, 1, 1), (2, 1000, 2, 8, 128, 1, 0.1), (3, 1024, 2, 2, 128, 0.1, 1),
        (4, 1024, 3, 3, 128, 1, 10), (4, 2048, 4, 4, 64, 0.1, 1), (2, 1024, 4, 4, 128, 1, 0.1), (2, 1024, 4, 8, 128, 1, 10),
        columns=("B", "T", "h", "H", "D", "scale", "gate_normalizer"),
    ),
)  # fmt: skip
def test_a_forward(engine, row, dtype):
    arrays = draw(0, row, dtype, normal=True, initial=True)
    both(
        engine,
        arrays,
        dtype,
        dict.fromkeys(NAMES, 2e-3 if dtype == jnp.float32 else 5e-3),
        scale=row["scale"],
        gradients=False,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("engine", "row"),
    rows(
        (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False), (2, 75, 4, 4, 64, 1, 0.01, 0, False), (2, 500, 3, 3, 60, 1, 1, 0, False),
        (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False), (3, 1024, 4, 4, 100, 1, 0.1, 0, False), (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
        (2, 1500, 4, 4, 128, 0.1, 10, 0, False), (4, 2048, 8, 8, 64, 0.1, 1, 0, False), (2, 256, 2, 4, 64, 1, 1, 0, False),
        (2, 512, 2, 8, 64, 1, 0.1, 0, True), (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
        columns=("B", "T", "h", "H", "D", "scale", "gate_normalizer", "mask_p", "l2norm"),
    ),
)  # fmt: skip
def test_b_forward_and_backward(engine, row, dtype):
    both(engine, draw(1, row, dtype), dtype, scale=row["scale"], l2norm=row["l2norm"])


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_c_chunk_sizes(chunk_size):
    row = dict(B=1, T=64, h=2, H=4, D=32, scale=0.1, l2norm=False)
    tolerances = {name: 1e-2 if name in ("dg", "dbeta") else 5e-3 for name in NAMES}
    both("xla", draw(2, row, jnp.float32), jnp.float32, tolerances, scale=0.1, l2norm=False, chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("engine", "row"),
    rows(
        (2, 500, 4, 4, 64, 1, False, False), (3, 1024, 4, 4, 128, 0.1, True, True), (2, 1024, 4, 8, 128, 0.1, True, False),
        (4, 2048, 8, 8, 64, 0.1, False, True), (2, 75, 2, 4, 16, 1, True, True),
        columns=("B", "T", "h", "H", "D", "scale", "l2norm", "negative"),
    ),
)  # fmt: skip
def test_d_rate_from_logits(engine, row, dtype):
    """β = σ(logit), or 2 σ(logit) where negative eigenvalues are allowed."""
    arrays = draw(3, row, dtype)
    arrays[4] = (2.0 if row["negative"] else 1.0) * jax.nn.sigmoid(
        jax.random.normal(jax.random.key(4), arrays[4].shape)
    )
    both(engine, arrays, dtype, scale=row["scale"], l2norm=row["l2norm"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("engine", "row"),
    rows(
        (2, 75, 4, 4, 64, 1, True, True), (2, 500, 3, 3, 60, 1, False, True), (2, 1000, 3, 3, 64, 0.1, True, False),
        (3, 1024, 4, 4, 100, 1, True, True), (4, 1024, 4, 4, 128, 0.1, False, True), (4, 2048, 8, 8, 64, 0.1, True, False),
        (2, 256, 2, 4, 64, 1, True, True), (2, 512, 1, 4, 64, 0.1, False, True), (2, 512, 2, 8, 64, 1, True, True),
        (2, 1024, 4, 8, 128, 0.1, True, True),
        columns=("B", "T", "h", "H", "D", "scale", "bias", "l2norm"),
    ),
)  # fmt: skip
def test_h_gates_from_projections(engine, row, dtype):
    q, k, v, _, beta, _ = draw(5, row, dtype)
    keys = jax.random.split(jax.random.key(6), 3)
    raw, A_log = jax.random.normal(keys[0], beta.shape), jax.random.normal(keys[1], beta.shape[-1:])
    dt_bias = jax.random.normal(keys[2], A_log.shape) if row["bias"] else jnp.zeros_like(A_log)

    @functools.partial(jax.jit, static_argnames="implementation")
    def gradients(implementation):
        def loss(q, k, v, raw, A_log, dt_bias):
            g, _ = decay_and_beta(raw, raw, A_log, dt_bias)
            out, _ = gated_delta_rule(
                q, k, v, g, beta, scale=row["scale"], use_qk_l2norm=row["l2norm"], implementation=implementation
            )
            return jnp.sum(out.astype(jnp.float32) * jax.random.normal(jax.random.key(9), out.shape)), out

        grads, out = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(q, k, v, raw, A_log, dt_bias)
        return dict(zip(("out", "dq", "dk", "dv", "dg", "dA_log", "ddt_bias"), (out, *grads)))

    check(engine, gradients(engine), gradients("reference"), dtype, {**TABLE, "dA_log": 2e-2, "ddt_bias": 2e-2})


@pytest.mark.parametrize(
    ("B", "T", "H", "bias"), [(1, 32, 2, False), (2, 64, 4, True), (4, 128, 8, True), (4, 128, 16, False)]
)
def test_i_gate_alone(B, T, H, bias):
    keys = jax.random.split(jax.random.key(7), 4)
    raw, weight = (jax.random.normal(key, (B, T, H)) for key in keys[:2])
    A_log = jax.random.normal(keys[2], (H,))
    dt_bias = jax.random.normal(keys[3], (H,)) if bias else jnp.zeros((H,))

    def loss(raw, A_log, dt_bias):
        g, _ = decay_and_beta(raw, raw, A_log, dt_bias)
        return jnp.sum(g * weight), g

    gradients, g = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(raw, A_log, dt_bias)
    x = np.asarray(raw, np.float64) + np.asarray(dt_bias, np.float64)
    A, w = np.exp(np.asarray(A_log, np.float64)), np.asarray(weight, np.float64)
    d_raw = -A * w / (1 + np.exp(-x))
    want = (-A * np.log1p(np.exp(x)), d_raw, (-A * np.log1p(np.exp(x)) * w).sum((0, 1)), d_raw.sum((0, 1)))
    for got, expected in zip((g, *gradients), want):
        assert rel(got, expected) < 1e-5


@pytest.mark.parametrize("row", [dict(B=1, T=128, h=1, H=1, D=64), dict(B=2, T=256, h=2, H=4, D=64)])
def test_j_no_gate_is_gate_zero(row):
    arrays = draw(8, row, jnp.float32, normal=True, initial=True)

    def gradients(g):
        def loss(q, k, v, beta, state):
            out, final = gated_delta_rule(q, k, v, g, beta, initial_state=state, use_qk_l2norm=True)
            return jnp.sum(out**2) + jnp.sum(final**2)

        return jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*arrays[:3], *arrays[4:])

    for got, want in zip(gradients(None), gradients(jnp.zeros_like(arrays[3]))):
        assert rel(got, want) < 1e-5
