"""The TPU kernels of the delta rule, interpreted on the CPU, against the recurrence in float64; and their rules."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from deltanox.ops import Residuals, gated_delta_net, gated_delta_rule
from deltanox.ops.delta_rule import tpu
from deltanox.ops.delta_rule.chunked import Options
from deltanox.ops.delta_rule.reference import recurrence
from deltanox.ops.delta_rule.tiling import Problem, Tiling, choose, vmem_bytes
from helpers import cosine, rel
from rule_calls import compare, make, run

slow = pytest.mark.slow
BFLOAT16 = {"out": 5e-3, "state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dstate": 8e-3, "dg": 1e-2, "dbeta": 1e-2}


def both(arrays, **options):
    return run("pallas", arrays, **options), run("reference", arrays, **options)


@pytest.mark.parametrize("T", [1, 65, 129, *(pytest.param(T, marks=slow) for T in (2, 63, 64, 127, 1000))])
def test_lengths(T):
    """Any length: the tail of the last chunk is cut, not padded."""
    compare(*both(make(T, (1,), T, 1, 2, 64, 64)))


@pytest.mark.parametrize(
    ("h", "H", "K", "V", "every"),
    [
        (2, 2, 64, 128, 2),
        *(pytest.param(*x, marks=slow) for x in ((2, 4, 64, 64, 6), (1, 4, 128, 64, 4), (2, 6, 256, 128, 2))),
    ],
)
def test_head_ratios_sizes_and_kept_states(h, H, K, V, every):
    options = {"residuals": Residuals(states_every=every)}
    compare(*both(make(h + H, (2,), 400, h, H, K, V), options=options))


@pytest.mark.parametrize(
    ("T", "every"), [(300, 8), pytest.param(300, 64, marks=slow), pytest.param(600, 12, marks=slow)]
)
def test_fewer_chunks_than_from_one_kept_state_to_the_next(T, every):
    """One state is kept, and an odd number of chunks is no pair of tiles: nothing is written over it."""
    compare(*both(make(3, (1,), T, 1, 1, 64, 64), options={"residuals": Residuals(states_every=every)}))


@pytest.mark.parametrize(
    ("dtype", "T"), [("float32", 300), *(pytest.param(*x, marks=slow) for x in (("bfloat16", 300), ("float32", 100)))]
)
def test_kept_inverses(dtype, T):
    """T^-1 kept by the kernels, and by the other engine in a record of the same shape and dtype."""
    arrays = make(19, (2,), T, 1, 2, 64, 64, dtype=dtype)
    options = {"chunk_size": 128, "residuals": Residuals(states_every=1, t_inv="save")}
    want = run("reference", arrays)
    for implementation in ("pallas", "auto"):
        for name, x in run(implementation, arrays, options=options).items():
            assert rel(x, want[name]) <= (1e-5 if dtype == "float32" else BFLOAT16[name]), (implementation, name)


@pytest.mark.parametrize("implementation", [pytest.param("pallas", marks=slow), "xla"])
def test_gates_in_bfloat16(implementation):
    """`decay_dtype` rounds g and β, and nothing else."""
    q, k, v, g, beta, state = make(20, (1,), 200, 1, 2, 64, 64)
    g, beta = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (g, beta))
    options = {"decay_dtype": jnp.bfloat16}
    got = run(implementation, (q, k, v, g, beta, state), options=options)
    want = run("reference", (q, k, v, g, beta, state))
    for name in got:
        assert rel(got[name], want[name]) <= (3e-3 if name in ("dg", "dbeta") else 1e-5), name
    assert rel(run(implementation, (q, k, v, 1.001 * g, beta, state), options=options)["out"], got["out"]) == 0


@pytest.mark.parametrize("cotangents", [pytest.param(("out",), marks=slow), ("state",)])
def test_one_cotangent(cotangents):
    compare(*both(make(3, (1,), 200, 1, 1, 64, 64), cotangents=cotangents))


def test_strong_decays_among_mild_ones():
    """g of -inf, -1e5 and -100, and A = 16: exact resets, and gradients that do not drown beside them."""
    q, k, v, g, beta, state = make(5, (1,), 300, 1, 2, 64, 64, A=16.0)
    g = g.at[0, 17].set(-1e5).at[0, 140, 0].set(-100.0).at[0, 200].set(-jnp.inf).at[0, 255:257].set(-150.0)
    g = g.at[0, 220:250].set(-0.01 * jnp.arange(30.0)[:, None] / 30)
    got, want = both((q, k, v, g, beta, state))
    compare(got, want)
    assert np.all(np.asarray(got["dg"])[0, [17, 200, 255, 256]] == 0)


def test_segments_and_masks():
    """Boundaries at, before and after the edges of chunks, segments of one token, padding with NaN on both sides."""
    arrays = list(make(6, (2,), 300, 1, 2, 64, 64, A=0.05))
    ids = np.zeros((2, 300), np.int32)
    for i, edge in enumerate([1, 2, 3, 127, 128, 129, 255, 256, 257, 299]):
        ids[0, edge:] = i + 1
    ids[1, 100:] = 5
    mask = np.ones((2, 300), bool)
    mask[0, :3], mask[1, 270:] = False, False
    clean = {"segment_ids": jnp.asarray(ids), "mask": jnp.asarray(mask)}
    want = run("reference", arrays, **clean)
    dirty = [jnp.where(mask.reshape(2, 300, *[1] * (x.ndim - 2)), x, jnp.nan) for x in arrays[:3]]
    got = run("pallas", (*dirty, *arrays[3:]), **clean)
    compare(got, want)
    for name in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        assert not np.any(np.asarray(got[name])[~mask]), name


def repeated(T, dtype):
    """One key for all tokens, β = 0.99, no decay: what an inverse by powers of the chunk's matrix cannot do."""
    q, k, v, g, beta, state = make(8, (1,), T, 1, 1, 64, 64, dtype=dtype)
    return q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * g, 0 * beta + 0.99, state


def test_repeated_keys():
    """As good as the recurrence in float32, or twice its error: both lose what cancels."""
    arrays = repeated(256, jnp.float32)
    got, want = both(arrays)
    weights = [np.random.default_rng(7)]
    weights = [jnp.asarray(weights[0].standard_normal(x.shape, np.float32)) for x in (arrays[2], arrays[5])]

    def by_token(*arrays):
        out, state = recurrence(*arrays, None, None, scale=64**-0.5, l2norm_eps=1e-6)
        return jnp.vdot(out, weights[0]) + jnp.vdot(state, weights[1])

    floats = jax.jit(jax.grad(by_token, argnums=tuple(range(6))))(*arrays)
    for name, x in zip(("dq", "dk", "dv", "dg", "dbeta", "dstate"), floats):
        assert rel(got[name], want[name]) <= max(1e-5, 2 * rel(x, want[name])), name
    compare({name: got[name] for name in ("out", "state")}, want)


@pytest.mark.parametrize("A", [1.0, *(pytest.param(A, marks=slow) for A in (0.05, 16.0))])
def test_bfloat16(A):
    """ "default": bfloat16 activations, one pass of the matrix unit for most products."""
    arrays = make(9, (1,), 384, 1, 2, 128, 128, A=A, dtype=jnp.bfloat16)
    got, want = both(arrays)
    for name, bound in BFLOAT16.items():
        assert rel(got[name], want[name]) <= bound, name
        assert cosine(got[name], want[name]) >= 0.999, name


@pytest.mark.parametrize(("precision", "bound"), [("default", 5e-2), ("high", 1e-2)])
def test_repeated_keys_in_bfloat16(precision, bound):
    got, want = both(repeated(512, jnp.bfloat16), options={"precision": precision})
    for name in ("out", "state"):
        assert rel(got[name], want[name]) <= bound, name


NET = ("qkv", "a", "b", "A_log", "dt_bias", "conv_weight", "initial_state")


@functools.cache
def net_arrays(dtype, size=64):
    h, H, K, V, T = 1, 2, size, size, 200
    rng = np.random.default_rng(11)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    qkv, a, b = (normal(2, T, n).astype(dtype) for n in (2 * h * K + H * V, H, H))
    A_log = jnp.log(jnp.asarray([0.05, 16.0], jnp.float32))
    return qkv, a, b, A_log, normal(H), normal(qkv.shape[-1], 4).astype(dtype), normal(2, H, K, V)


def net(implementation, arrays, **options):
    *rest, state = arrays
    return gated_delta_net(
        *rest, initial_state=state, num_key_heads=1, key_head_size=state.shape[2], implementation=implementation,
        **options,
    )  # fmt: skip


def net_gradients(implementation, arrays, **options):
    def loss(*arrays):
        rng = np.random.default_rng(12)
        return sum(
            jnp.vdot(x.astype(jnp.float32), jnp.asarray(rng.standard_normal(x.shape, np.float32)))
            for x in net(implementation, arrays, **options)
        )

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(NET)))))(*arrays)


@pytest.mark.parametrize(
    ("dtype", "size", "bound"),
    [*(pytest.param("float32", n, 1e-5, marks=slow) for n in (64, 128)), ("bfloat16", 128, 1e-2), pytest.param("bfloat16", 64, 1e-2, marks=slow)],
)  # fmt: skip
def test_merged_arrays(dtype, size, bound):
    """The mixer's core reads q, k and v out of the merged array, and gives its gradient as one: moved by the kernel,
    where heads of 64 do not begin in the middle of a register."""
    arrays = net_arrays(dtype, size)
    wide = [x.astype(jnp.float32) for x in arrays]
    for got, want in zip(net("pallas", arrays), net("xla", wide)):
        assert rel(got, want) <= bound
    for name, got, want in zip(NET, net_gradients("pallas", arrays), net_gradients("xla", wide)):
        assert rel(got, want) <= bound and cosine(got, want) >= 0.999, name


def test_no_transpose_of_tokens():
    """Between the projections and the kernel the tokens' array is neither transposed nor padded nor cut."""
    arrays = net_arrays("bfloat16")
    text = str(jax.make_jaxpr(lambda *x: net("pallas", (*x[:5], None, x[5])))(*arrays[:5], arrays[6]))
    width = arrays[0].shape[-1]
    touched = [line for line in text.splitlines() if f"bf16[2,200,{width}]" in line.split("=")[0]]
    assert not [line for line in touched if any(op in line for op in ("transpose", " pad", "slice", "concatenate"))]


@slow
def test_vmap_jit_and_scan():
    arrays = make(13, (3,), 130, 1, 2, 64, 64)
    want = run("pallas", arrays)
    f = functools.partial(gated_delta_rule, use_qk_l2norm=True, implementation="pallas")
    mapped = jax.jit(jax.vmap(lambda *x: f(*x[:5], initial_state=x[5])))(*arrays)
    for got, name in zip(mapped, ("out", "state")):
        assert rel(got, want[name]) < 1e-6
    shared = jax.vmap(lambda v: f(*(x[0] for x in arrays[:2]), v, *(x[0] for x in arrays[3:5])))(arrays[2])[0]
    for i in range(3):
        alone = f(*(x[0] for x in arrays[:2]), arrays[2][i], *(x[0] for x in arrays[3:5]))[0]
        assert rel(shared[i], alone) < 1e-6

    def layers(v):
        return jax.lax.scan(lambda v, _: (f(*arrays[:2], v, *arrays[3:5])[0], None), v, None, length=2)[0].sum()

    twice = lambda v: f(*arrays[:2], f(*arrays[:2], v, *arrays[3:5])[0], *arrays[3:5])[0].sum()  # noqa: E731
    assert rel(jax.jit(jax.grad(layers))(arrays[2]), jax.jit(jax.grad(twice))(arrays[2])) < 1e-5
    saved = jax.checkpoint(layers, policy=jax.checkpoint_policies.save_only_these_names("gdn_states", "gdn_out"))
    assert rel(jax.jit(jax.grad(saved))(arrays[2]), jax.jit(jax.grad(twice))(arrays[2])) < 1e-5


def test_auto_is_xla_on_a_cpu_and_says_what_kernels_cannot_take():
    arrays = make(14, (1,), 70, 1, 2, 64, 64)
    np.testing.assert_array_equal(run("auto", arrays)["out"], run("xla", arrays)["out"])
    small = make(14, (1,), 70, 1, 2, 5, 7)
    np.testing.assert_array_equal(run("auto", small)["out"], run("xla", small)["out"])
    cases = [
        (small, {}, "head sizes must be 64, 128 or 256, but K = 5 and V = 7"),
        (
            arrays,
            {"residuals": Residuals(states_every=1)},
            "multiples of 128 tokens.*set states_every to a multiple of 2",
        ),
        (
            arrays,
            {"residuals": Residuals(t_inv="save")},
            "T\\^-1 is kept for chunks of 128 tokens, but chunk_size = 64: set chunk_size=128, or residuals.t_inv",
        ),
        ([x.astype(jnp.float16) for x in arrays], {}, "bfloat16 and float32, not float16"),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=f"implementation='pallas' cannot take these inputs: .*{message}"):
            gated_delta_rule(*given[:5], implementation="pallas", **options)


def test_other_platforms_are_refused():
    arrays = make(15, (1,), 70, 1, 2, 64, 64)
    f = jax.jit(functools.partial(gated_delta_rule, implementation="pallas"))
    with pytest.raises(
        NotImplementedError, match="is a TPU kernel.*compiled for cuda: use implementation='auto' or 'xla'"
    ):
        f.trace(*arrays[:5]).lower(lowering_platforms=("cuda",))


def test_second_derivatives_are_refused():
    arrays = make(16, (1,), 20, 1, 1, 64, 64)
    f = lambda v: gated_delta_rule(*arrays[:2], v, *arrays[3:5], implementation="pallas")[0].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="'pallas' has a hand-derived backward pass"):
        jax.hessian(f)(arrays[2])


def kernels_of(jaxpr):
    """The jaxprs of all kernels inside."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["jaxpr"]
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels_of(inner)


def dots_of(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from dots_of(inner)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "default"), ("bfloat16", "high"), ("float32", None)])
def test_every_product_says_how_it_rounds(dtype, precision):
    """A CPU does not round as the matrix unit does: so each product has bfloat16 operands and a float32 result, or asks
    for full precision."""
    arrays = make(17, (1,), 128, 1, 2, 64, 64, dtype=dtype)
    f = lambda *x: gated_delta_rule(*x, implementation="pallas", precision=precision)[0].sum()  # noqa: E731
    kernels = list(kernels_of(jax.make_jaxpr(jax.grad(f))(*arrays[:5]).jaxpr))
    assert len(kernels) >= 2
    for kernel in kernels:
        dots = list(dots_of(kernel))
        assert len(dots) > 10
        for dot in dots:
            narrow = all(x.aval.dtype == jnp.bfloat16 for x in dot.invars)
            exact = dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
            assert dot.outvars[0].aval.dtype == jnp.float32 and (narrow or exact)


def test_tilings():
    problem = Problem(16, 64, 128, 128, 65536, 4, 2, 4, True)
    for kernel, every in itertools.product(("forward", "backward"), (1, 2, 4, 8)):
        p = dataclasses.replace(problem, every=every)
        tiling = choose(kernel, p)
        assert 16 % tiling.key_heads == 0 and tiling.chunks >= 1
        assert vmem_bytes(kernel, tiling, p) < vmem_bytes(kernel, Tiling(2 * tiling.key_heads, tiling.chunks), p)
    assert choose("forward", problem).key_heads == 4 and choose("backward", problem).key_heads == 2
    assert choose("backward", problem).chunks == 4
    for name in ("key_heads", "chunks"):
        with pytest.raises(ValueError, match=f"Tiling: `{name}` must be an integer of at least 1"):
            Tiling(**{"key_heads": 1, "chunks": 1} | {name: 0})


@pytest.mark.parametrize(("merged", "t_inv"), [(False, "recompute"), (True, "save")])
def test_no_race_and_no_read_of_what_was_not_written(merged, t_inv):
    """The detailed interpreter: memory that nobody has written holds NaN, reads past the end of an array raise. Merged
    arrays are overwritten by their cotangents, and moved by the kernel itself."""
    size, T = (128, 512) if merged else (64, 300)
    q, k, v, g, beta, state = make(18, (1,), T, 1, 2, size, size)
    residuals = Residuals(states_every=1 if merged else 2, t_inv=t_inv)
    options = Options(
        0.125, 1e-6, 128 if merged else 64, "default", jnp.dtype("float32"), residuals, 1, size, "pallas", merged
    )
    arrays = tuple(x.astype(jnp.bfloat16) for x in (q, k, v))
    if merged:
        arrays = (jnp.concatenate([x.reshape(1, T, -1) for x in arrays], axis=-1),)
    inputs = tpu.Inputs(arrays, g, beta, None, None)
    how = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    out, final, states, u = tpu.run(inputs, state, options=options, keep=True, interpret=how)
    assert (u is not None) == (t_inv == "save")
    bars = tpu.gradients(inputs, states, u, out, final, options=options, interpret=how)
    for x in jax.tree.leaves((out, final, states, u, bars)):
        assert np.isfinite(np.asarray(x, np.float32)).all()
    assert not interpret_pallas_call.races.races_found
