"""The gated DeltaNet layer against the float64 token loop, and the faults that others met in theirs."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

import token_loop
from deltanox.nn import DeltaNetState, GatedDeltaNet
from deltanox.ops import Residuals
from deltanox.precision import Precision
from helpers import rel

# Of the norm: where q and k of a head are almost orthogonal its output is small, and a smaller one magnifies its rounding.
EPS = 1e-2
SIZES = dict(num_key_heads=2, num_value_heads=6, key_head_size=3, value_head_size=5)
ARRAYS = {
    "in_proj_qkv": lambda m: m.in_proj_qkv.weight, "in_proj_z": lambda m: m.in_proj_z.weight, "in_proj_b": lambda m: m.in_proj_b.weight,
    "in_proj_a": lambda m: m.in_proj_a.weight, "conv": lambda m: m.conv.weight, "A_log": lambda m: m.A_log,
    "dt_bias": lambda m: m.dt_bias, "norm": lambda m: m.norm.weight, "out_proj": lambda m: m.out_proj.weight,
}  # fmt: skip


def draw(getkey, *shape):
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    return jnp.asarray(random.normal(size=shape).astype(np.float32))


def make(getkey, embed_size=7, *, decay=None, **options):
    """A layer whose weights are large enough to matter, drawn by numpy."""
    layer = GatedDeltaNet(embed_size, **(SIZES | dict(eps=EPS) | options), key=getkey())
    for name, where in ARRAYS.items():
        old = where(layer)
        if name not in ("A_log", "dt_bias"):
            offset = 1.0 if name == "norm" else 0.0
            layer = eqx.tree_at(where, layer, (offset + 0.5 * draw(getkey, *old.shape)).astype(old.dtype))
    if decay is not None:
        layer = eqx.tree_at(lambda m: m.A_log, layer, jnp.full_like(layer.A_log, np.log(decay)))
    return layer


@eqx.filter_jit
def run(layer, x, state=None, *, segment_ids=None, mask=None):
    return layer(x, state, segment_ids=segment_ids, mask=mask)


@eqx.filter_jit
def batched(layer, x, state=None, *, mask=None):
    axes = (0, None if state is None else 0, None if mask is None else 0)
    return jax.vmap(lambda x, state, mask: layer(x, state, mask=mask), in_axes=axes)(x, state, mask)


def by_hand(weights, x, past, state, *, segment_ids=None, mask=None, gate="silu", h=2, K=3, V=5):
    """The layer's formula for one sequence, in the dtype of its arrays."""
    T = x.shape[0]
    ids = np.zeros(T) if segment_ids is None else np.asarray(segment_ids)
    real = np.ones(T, bool) if mask is None else np.asarray(mask)
    w = weights
    out, past, state = token_loop.row(
        x @ w["in_proj_qkv"].T,
        x @ w["in_proj_a"].T,
        x @ w["in_proj_b"].T,
        w["A_log"],
        w["dt_bias"],
        w["conv"],
        past,
        state,
        ids,
        real,
        h,
        K,
    )
    out, z = out.reshape(T, -1, V), (x @ w["in_proj_z"].T).reshape(T, -1, V)
    act = 1 / (1 + jnp.exp(-z))
    out = out / jnp.sqrt((out**2).mean(-1, keepdims=True) + EPS) * w["norm"] * (z * act if gate == "silu" else act)
    return out.reshape(T, -1) @ w["out_proj"].T, past, state


def in_float64(f):
    """`f` compiled in float64 under ordinary promotion, numpy in and out."""

    @functools.wraps(f)
    def call(*args):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args)
            return jax.tree.map(np.asarray, jax.jit(f)(*wide))

    return call


def packing(T, packed):
    t = np.arange(T)
    mask = (t >= 2) & (t != 6) & (t < T - 1)
    return dict(
        segment_ids=jnp.asarray((t >= 4).astype(np.int32) + (t >= 5)) if "ids" in packed else None,
        mask=jnp.asarray(mask) if "mask" in packed else None,
    )


@pytest.mark.parametrize("packed, gate", [("--", "silu"), ("ids mask", "sigmoid")])
def test_values_and_gradients(getkey, packed, gate):
    """Rows 51 and 57: dk ≠ dv, T ≠ H; both states' and every parameter's gradient."""
    T = 13
    layer = make(getkey, gate=gate)
    x, past, state = draw(getkey, T, 7), draw(getkey, 3, 42), draw(getkey, 6, 3, 5)
    cotangents = draw(getkey, T, 7), draw(getkey, 3, 42), draw(getkey, 6, 3, 5)
    options = packing(T, packed)
    if options["mask"] is not None:
        cotangents = (jnp.where(options["mask"][:, None], cotangents[0], 0), *cotangents[1:])

    @eqx.filter_jit
    def ours(layer, x, state):
        def f(layer, x, state):
            y, new = layer(x, state, **options)
            return sum(jnp.sum(a * b) for a, b in zip((y, new.conv, new.recurrent), cotangents)), (y, new)

        return eqx.filter_grad(lambda args: f(*args), has_aux=True)((layer, x, state))

    (dlayer, dx, dstate), (y, new) = ours(layer, x, DeltaNetState(past, state))
    weights = {name: where(layer) for name, where in ARRAYS.items()}

    @in_float64
    def want(weights, x, past, state, cotangents):
        def f(*args):
            out = by_hand(*args, **options, gate=gate)
            return sum(jnp.sum(a * b) for a, b in zip(out, cotangents)), out

        return jax.grad(f, argnums=(0, 1, 2, 3), has_aux=True)(weights, x, past, state)

    (dweights, *dinputs), (y0, past0, state0) = want(weights, x, past, state, cotangents)
    for got, exact in ((y, y0), (new.conv, past0), (new.recurrent, state0)):
        assert rel(got, exact) < 1e-5
    for got, exact in zip((dx, dstate.conv, dstate.recurrent), dinputs):
        assert rel(got, exact) < 1e-5
    for name, where in ARRAYS.items():
        # A_log's and dt_bias's are sums over all tokens of terms of both signs, which leave a small part of their size
        assert rel(where(dlayer), dweights[name]) < (5e-5 if name in ("A_log", "dt_bias") else 1e-5), name


def test_initialisation(getkey):
    """Row 19, and Qwen's scales: 10^6 heads in bfloat16, all decay rates finite, as their gradients are."""
    layer = GatedDeltaNet(
        1, num_key_heads=1, num_value_heads=10**6, key_head_size=1, value_head_size=1, dtype=jnp.bfloat16, key=getkey()
    )
    A = np.exp(np.asarray(layer.A_log, np.float64))
    assert layer.A_log.dtype == layer.dt_bias.dtype == layer.norm.weight.dtype == jnp.float32
    assert np.all(np.isfinite(layer.A_log)) and np.all(
        np.isfinite(layer.A_log.astype(jnp.bfloat16).astype(jnp.float32))
    )
    assert 0.0099 < A.min() < 0.011 and 15.99 < A.max() < 16.001 and abs(A.mean() / 8.005 - 1) < 0.01
    from deltanox.ops import decay_and_beta

    tokens = jnp.ones((1, 10**6), jnp.bfloat16)
    assert np.all(
        np.isfinite(jax.grad(lambda A: decay_and_beta(tokens, tokens, A, layer.dt_bias)[0].sum())(layer.A_log))
    )
    assert np.all(np.asarray(layer.dt_bias) == 1) and np.all(np.asarray(layer.norm.weight) == 1)
    for where in (
        lambda m: m.in_proj_qkv,
        lambda m: m.in_proj_z,
        lambda m: m.in_proj_b,
        lambda m: m.out_proj,
        lambda m: m.conv,
    ):
        weight = np.asarray(where(layer).weight.astype(jnp.float32))
        assert (
            where(layer).weight.dtype == jnp.bfloat16
            and abs(weight.std() / 0.02 - 1) < 0.01
            and abs(weight.mean()) < 1e-4
        )


def test_shapes_of_a_release(getkey):
    """Qwen3.5-0.8B's mixer: 10,543,264 parameters, in Hugging Face's shapes."""
    layer = eqx.filter_eval_shape(
        GatedDeltaNet,
        1024,
        num_key_heads=16,
        num_value_heads=16,
        key_head_size=128,
        value_head_size=128,
        key=jax.random.key(0),
    )
    shapes = {name: where(layer).shape for name, where in ARRAYS.items()}
    assert shapes == {
        "in_proj_qkv": (6144, 1024), "in_proj_z": (2048, 1024), "in_proj_b": (16, 1024), "in_proj_a": (16, 1024), "conv": (6144, 4),
        "A_log": (16,), "dt_bias": (16,), "norm": (128,), "out_proj": (1024, 2048),
    }  # fmt: skip
    assert sum(np.prod(s) for s in shapes.values()) == sum(x.size for x in jax.tree.leaves(layer)) == 10_543_264


def test_row_20_policies_keep_the_decay(getkey):
    """Row 20: casting to bfloat16 leaves A_log, dt_bias and the norm's weight in float32."""
    layer = Precision("bfloat16", "bfloat16").cast_parameters(make(getkey))
    for name, where in ARRAYS.items():
        assert where(layer).dtype == (jnp.float32 if name in ("A_log", "dt_bias", "norm") else jnp.bfloat16), name


def test_bfloat16(getkey):
    """Activations and the convolution's state are bfloat16, the recurrent state float32, in the sequence and in the step."""
    layer = make(getkey)
    low = Precision(compute="bfloat16").cast_compute(layer)
    x = draw(getkey, 9, 7).astype(jnp.bfloat16)
    y, state = run(low, x)
    step, after = run(low, x[:1], low.init_state())
    for out, new in ((y, state), (step, after)):
        assert out.dtype == new.conv.dtype == jnp.bfloat16 and new.recurrent.dtype == jnp.float32
    # eight roundings of 2^-9 follow each other
    assert rel(y, run(Precision().cast_compute(low), x.astype(jnp.float32))[0]) < 2e-2
    empty = low.init_state()
    assert empty.conv.dtype == jnp.bfloat16 and empty.recurrent.dtype == jnp.float32
    assert jax.tree.map(lambda a: (a.shape, a.dtype), empty) == jax.tree.map(lambda a: (a.shape, a.dtype), state)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_unpadded(getkey, side):
    """Rows 1, 2: a batch of one, four or five pads, NaN in them: outputs 1e-6, states, and gradients of all parameters."""
    T, pads = 10, 4
    layer = make(getkey, 32, num_value_heads=4)
    real = slice(pads, T) if side == "left" else slice(0, T - pads)
    mask = np.zeros((1, T), bool)
    mask[:, real] = True
    x = jnp.where(mask[..., None], draw(getkey, 1, T, 32), jnp.nan)

    @eqx.filter_jit
    def both(layer, x, mask):
        def loss(layer):
            y, state = batched(layer, x, mask=mask)
            return jnp.sum(jnp.sin(y)), (y, state)

        return eqx.filter_grad(loss, has_aux=True)(layer)

    gradient, (y, state) = both(layer, x, jnp.asarray(mask))
    gradient0, (y0, state0) = both(layer, x[:, real], None)
    assert rel(y[:, real], y0) < 1e-6 and not np.any(y[~mask])
    assert np.array_equal(state.conv, state0.conv) and rel(state.recurrent, state0.recurrent) < 1e-6
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient0)):
        assert np.all(np.isfinite(a)) and rel(a, b) < 1e-5


def test_row_2_masked_gradients(getkey):
    """Row 2: five masked tokens of eight; the parameters' gradients are finite and those of the three tokens alone."""
    layer, x = make(getkey, 32, num_value_heads=4), draw(getkey, 8, 32)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda layer, x, mask: jnp.sum(layer(x, mask=mask)[0])))
    padded, alone = gradient(layer, x, jnp.arange(8) >= 5), gradient(layer, x[5:], None)
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(alone)):
        assert np.all(np.isfinite(a)) and rel(a, b) < 1e-5


def test_row_5_right_padded_caches(getkey):
    """Row 5: lengths 5 and 9 in one batch, padded right; row 0's cache is that of its 5 tokens, and so is the token after it."""
    layer, x, after = make(getkey), draw(getkey, 2, 9, 7), draw(getkey, 2, 1, 7)
    mask = jnp.arange(9)[None] < jnp.asarray([[5], [9]])
    _, state = batched(layer, x, mask=mask)
    _, alone = run(layer, x[0, :5])
    assert np.array_equal(state.conv[0], alone.conv) and rel(state.recurrent[0], alone.recurrent) < 1e-6
    y, _ = batched(layer, after, state)
    # a batch and a row round their products differently
    assert rel(y[0], run(layer, after[0], alone)[0]) < 3e-6
    assert rel(y[1], run(layer, after[1], run(layer, x[1])[1])[0]) < 3e-6


def test_row_7_packed_documents(getkey):
    """Rows 7, 15: 37, 51 and 40 tokens, slow decay: packed equals three calls, nothing crosses, forward or backward."""
    lengths, T = [37, 51, 40], 128
    layer = make(getkey, 16, num_value_heads=4, decay=0.05)
    x = draw(getkey, T, 16)
    ids = jnp.asarray(np.repeat([0, 1, 2], lengths), jnp.int32)
    y, state = run(layer, x, segment_ids=ids)
    start = 0
    for length in lengths:
        alone, last = run(layer, x[start : start + length])
        # 2e-6: the norm of an output near zero magnifies what the chunks round differently
        assert rel(y[start : start + length], alone) < 2e-6
        start += length
    assert np.array_equal(state.conv, last.conv) and rel(state.recurrent, last.recurrent) < 1e-6
    assert rel(run(layer, x)[0][37:], y[37:]) > 0.1  # the test can fail
    gradient = eqx.filter_jit(jax.grad(lambda x: jnp.sum(layer(x, segment_ids=ids)[0][37:88] ** 2)))(x)
    assert not np.any(gradient[:37]) and not np.any(gradient[88:]) and np.all(np.any(gradient[37:88], axis=-1))


def test_parts_and_steps_are_one_pass(getkey):
    """Rows 17, 47, 53: cut below and above the width, then 64 tokens one by one: the values of one pass, and its states."""
    T = 72
    layer = make(getkey, decay=0.05)
    x = draw(getkey, T, 7)
    whole, end = run(layer, x)
    assert rel(run(layer, x, layer.init_state())[0], whole) < 1e-6
    state, parts, start = None, [], 0
    for size in (2, 1, 5, *[1] * 64):
        y, state = run(layer, x[start : start + size], state)
        parts.append(y)
        start += size
    assert rel(jnp.concatenate(parts), whole) < 1e-5
    assert rel(state.conv, end.conv) < 1e-6 and rel(state.recurrent, end.recurrent) < 1e-5


def test_one_masked_token_leaves_the_state(getkey):
    layer = make(getkey)
    state = DeltaNetState(draw(getkey, 3, 42), draw(getkey, 6, 3, 5))
    y, after = run(layer, jnp.full((1, 7), jnp.nan), state, mask=jnp.zeros(1, bool))
    assert not np.any(y) and np.array_equal(after.conv, state.conv) and np.array_equal(after.recurrent, state.recurrent)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_options_reach_the_op(getkey, implementation):
    x, key = draw(getkey, 21, 7), getkey()
    options = dict(chunk_size=8, precision="highest", residuals=Residuals(states_every=1), state_dtype=jnp.bfloat16)
    plain, tuned, other = (
        GatedDeltaNet(7, **SIZES, **o, key=key) for o in ({}, options, dict(implementation=implementation))
    )
    assert other.conv.implementation == other.implementation == implementation
    assert rel(run(other, x)[0], run(plain, x)[0]) < 1e-5
    assert rel(run(tuned, x)[0], run(plain, x)[0]) < 5e-2
    with pytest.raises(ValueError, match="implementation='pallas' cannot take these inputs"):
        run(GatedDeltaNet(7, **SIZES, implementation="pallas", key=key), x)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict roundings"])
def test_a_projection_that_is_made_twice_changes_nothing(getkey, strict):
    x, state = draw(getkey, 2, 70, 7), DeltaNetState(draw(getkey, 3, 42), draw(getkey, 6, 3, 5))
    ids = jnp.asarray([0] * 30 + [1] * 40)
    layer = make(getkey, strict_hf_rounding=strict)
    other = make(getkey, strict_hf_rounding=strict, residuals=Residuals(qkv="recompute"))
    again = jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(layer))

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def gradients(arrays):
        layer, x, state = arrays
        y, after = jax.vmap(lambda x: layer(x, state, segment_ids=ids))(x)
        return jnp.sum(jnp.sin(3 * y)) + sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(after)), (y, after)

    got, want = (gradients((layer, x, state)) for layer in (again, layer))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel(a, b) <= 1e-6


def test_refusals(getkey):
    layer = make(getkey)
    key = getkey()
    checker.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            ValueError,
            match=r"GatedDeltaNet: `x` must be one sequence \[T, embed_size\] = \[T, 7\], but it is float32\[2, 9, 7\].*wrap in jax.vmap",
        ):
            layer(jnp.zeros((2, 9, 7)))
        with pytest.raises(ValueError, match=r"must be the layer's embed_size, 7, but x is float32\[9, 8\]"):
            layer(jnp.zeros((9, 8)))
        with pytest.raises(ValueError, match=r"`segment_ids` must be \[T\] = \[9\].*wrap in jax.vmap"):
            layer(jnp.zeros((9, 7)), segment_ids=jnp.zeros((2, 9), jnp.int32))
        with pytest.raises(
            ValueError, match=r"`conv_state` must be \[\*B, W-1, C\] = \[3, 42\].*tokens before channels"
        ):
            layer(jnp.zeros((9, 7)), DeltaNetState(jnp.zeros((42, 3)), jnp.zeros((6, 3, 5))))
        with pytest.raises(
            ValueError, match=r"`initial_state` must be \[\*B, H, K, V\] = \[6, 3, 5\].*keys come before values"
        ):
            layer(jnp.zeros((9, 7)), DeltaNetState(jnp.zeros((3, 42)), jnp.zeros((6, 5, 3))))
        with pytest.raises(ValueError, match=r"`conv_state` must have the inputs' dtype bfloat16"):
            layer(jnp.zeros((9, 7), jnp.bfloat16), layer.init_state())
        with pytest.raises(ValueError, match="num_value_heads = 5 must be a multiple of num_key_heads = 2"):
            GatedDeltaNet(7, **SIZES | dict(num_value_heads=5), key=key)
        with pytest.raises(ValueError, match="`conv_size` must be at least 1, but it is 0"):
            GatedDeltaNet(7, **SIZES, conv_size=0, key=key)
        with pytest.raises(ValueError, match="GatedRMSNorm: `gate` must be one of 'silu', 'sigmoid'"):
            GatedDeltaNet(7, **SIZES, gate="tanh", key=key)
        with pytest.raises(ValueError, match="GatedDeltaNet: `chunk_size` must be"):
            GatedDeltaNet(7, **SIZES, chunk_size=24, key=key)
    finally:
        checker.update("jaxtyping_disable", False)


def test_the_checker_names_the_axes(getkey):
    """With the checker on, a batch is stopped at the layer's door, with the shape and the axes."""
    with pytest.raises(Exception, match=r"(?s)f32\[2,9,7\].*T D"):
        make(getkey)(jnp.zeros((2, 9, 7)))
