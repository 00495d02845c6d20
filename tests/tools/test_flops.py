"""Operations and bytes counted in a jaxpr, against closed formulas."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from deltanox.ops.moe import expert_mlp, lay_out
from deltanox.tools.flops import Count, count

M, K, N = 16, 8, 4
DOT = 2 * M * K * N


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = struct(M, K), struct(K, N)


def counted(f, *args) -> Count:
    return count(jax.jit(f).trace(*args).jaxpr)


def dot(x, w, **options):
    return jax.lax.dot(x, w, **options)


# Products --------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dot(dtype):
    x, w = struct(M, K, dtype=dtype), struct(K, N, dtype=dtype)
    assert counted(dot, x, w) == Count(DOT, DOT, (M * K + K * N + M * N) * x.dtype.itemsize)


def test_batch_axes_and_two_contracted_axes():
    result = counted(lambda a, b: jnp.einsum("bijk,bjkl->bil", a, b), struct(3, 5, 2, 7), struct(3, 2, 7, 4))
    assert result.flops == 2 * 3 * 5 * 2 * 7 * 4


@pytest.mark.parametrize(
    "precision, dtypes, passes",
    [
        (None, "ff", 1),
        ("default", "ff", 1),
        ("high", "ff", 3),
        ("highest", "ff", 6),
        ("highest", "bb", 1),
        ("highest", "fb", 3),
        ("high", "bf", 2),
        ("BF16_BF16_F32", "ff", 1),
        ("BF16_BF16_F32_X3", "ff", 3),
        ("BF16_BF16_F32_X6", "ff", 6),
    ],
)
def test_passes_of_a_precision(precision, dtypes, passes):
    x, w = (struct(*s, dtype={"f": jnp.float32, "b": jnp.bfloat16}[d]) for s, d in zip([(M, K), (K, N)], dtypes))
    if precision in ("BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6"):
        precision = jax.lax.DotAlgorithmPreset[precision]
    dims = (((1,), (0,)), ((), ()))
    result = counted(lambda x, w: jax.lax.dot_general(x, w, dims, precision=precision), x, w)
    assert (result.flops, result.mxu_flops) == (DOT, passes * DOT)


def test_convolution():
    # [batch, channels, length] with [out, in, width]: every output is a sum over in · width products
    def f(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID")

    assert counted(f, struct(2, 6, 20), struct(8, 6, 5)).flops == 2 * (2 * 8 * 16) * 6 * 5

    def depthwise(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=6)

    assert counted(depthwise, struct(2, 6, 20), struct(6, 1, 5)).flops == 2 * (2 * 6 * 16) * 5


@pytest.mark.parametrize("experts", [1, 4, 64])
def test_a_ragged_product_costs_its_rows_whatever_the_number_of_experts(experts):
    def f(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    args = struct(M, K), struct(experts, K, N), struct(experts, dtype=jnp.int32)
    assert counted(f, *args).flops == DOT
    # its gradients are a product with the transposed matrices and one with ragged rows that are summed
    gradient = jax.value_and_grad(lambda x, w, sizes: jnp.sum(f(x, w, sizes)), argnums=(0, 1))
    assert counted(gradient, *args).flops == 3 * DOT


@pytest.mark.parametrize("experts", [4, 32])
def test_experts_cost_their_blocks(experts):
    tokens, size, inner, top_k, block = 64, 8, 6, 2, 4

    def f(x, choice, weights, gate_up, down):
        return jnp.sum(expert_mlp(x, choice, weights, gate_up, down, block_size=block))

    args = (
        struct(tokens, size), struct(tokens, top_k, dtype=jnp.int32), struct(tokens, top_k),
        struct(experts, 2 * inner, size), struct(experts, size, inner),
    )  # fmt: skip
    groups = jax.eval_shape(lambda c: lay_out(c.reshape(-1), experts, block), args[1]).group.shape[0]
    forward = 2 * (groups * block) * (2 * inner * size + inner * size)
    assert counted(f, *args).flops == forward
    assert counted(jax.value_and_grad(f, argnums=(0, 3, 4)), *args).flops == 3 * forward


# Control flow --------------------


@jax.custom_jvp
def with_jvp(x, w):
    return dot(x, w)


with_jvp.defjvp(lambda primals, tangents: (dot(*primals), dot(tangents[0], primals[1])))


@jax.custom_vjp
def with_vjp(x, w):
    return dot(x, w)


with_vjp.defvjp(lambda x, w: (dot(x, w), (x, w)), lambda saved, d: (dot(d, saved[1].T), dot(saved[0].T, d)))


def loop(n, carry_on=lambda i, y, x, w: y + dot(x, w)):
    def f(x, w):
        return jax.lax.fori_loop(0, n, lambda i, y: carry_on(i, y, x, w), jnp.zeros((M, N), x.dtype))

    return f


def sine(x, w):
    return jnp.sin(dot(x, w))


def nested(x, w):
    return jax.lax.scan(lambda y, _: (y + loop(5)(x, w), None), jnp.zeros((M, N), x.dtype), None, length=3)[0]


@pytest.mark.parametrize(
    "f, times",
    [
        (jax.jit(dot), 1),
        (jax.checkpoint(dot), 1),
        (with_jvp, 1),
        (with_vjp, 1),
        (lambda x, w: jax.vjp(with_vjp, x, w)[1](jnp.ones((M, N)))[0], 3),
        (loop(7), 7),
        (nested, 15),
        (jax.value_and_grad(lambda x, w: jnp.sum(dot(x, w)), argnums=(0, 1)), 3),
        (jax.grad(lambda x, w: jnp.sum(jax.checkpoint(sine)(x, w)), argnums=(0, 1)), 4),  # one of them again
    ],
)
def test_what_is_called_counts_as_often_as_it_runs(f, times):
    result = counted(f, X, W)
    assert (result.flops, result.notes) == (times * DOT, frozenset())


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def f(x, w, n):
        return jax.lax.fori_loop(0, n, lambda i, y: y + dot(x, w), jnp.zeros((M, N), x.dtype))

    result = counted(f, X, W, struct(dtype=jnp.int32))
    assert result.flops == DOT
    assert result.notes == {"a while loop of unknown length is counted once"}


def test_a_condition_counts_as_its_most_expensive_branch_and_says_so():
    def f(x, w, which):
        return jax.lax.cond(which, lambda: dot(x, w) + dot(x, w + 1), lambda: dot(x, w))

    result = counted(f, X, W, struct(dtype=jnp.bool_))
    assert result.flops == 2 * DOT
    assert result.notes == {"a condition is counted as its most expensive branch"}


def test_a_branch_by_platform_is_the_platforms_own():
    def f(x, w):
        named = jax.lax.platform_dependent(x, w, cpu=dot, tpu=loop(5))
        return named + jax.lax.platform_dependent(x, w, cpu=dot, default=loop(3))

    traced = jax.jit(f).trace(X, W).jaxpr
    assert count(traced).flops == 8 * DOT
    assert count(traced, platform="cpu") == Count(2 * DOT, 2 * DOT, 2 * (M * K + K * N + M * N) * 4)


def test_shards_count_together():
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(dot, mesh=mesh, in_specs=(PartitionSpec("x"), PartitionSpec()), out_specs=PartitionSpec("x"))
    assert count(jax.make_jaxpr(f)(X, W)).flops == DOT


# Kernels --------------------


def kernel(x, o):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o[...] = jnp.zeros(o.shape, o.dtype)

    o[...] += jax.lax.fori_loop(0, 3, lambda i, y: y + jnp.dot(x[...], x[...]), jnp.zeros(o.shape, o.dtype))


def test_a_kernel_counts_its_grid_and_the_blocks_that_change():
    def f(x):
        return pl.pallas_call(
            kernel,
            grid=(2, 4),
            in_specs=[pl.BlockSpec((128, 128), lambda i, j: (0, j // 2))],
            out_specs=pl.BlockSpec((None, 128, 128), lambda i, j: (i, 0, 0)),
            out_shape=struct(2, 128, 128),
        )(x)

    result = counted(f, struct(128, 256))
    assert result.flops == 8 * 3 * 2 * 128**3
    # inputs 0 0 1 1 | 0 0 1 1: four fetches; outputs 0 0 0 0 | 1 1 1 1: two
    assert result.bytes == (4 + 2) * 128 * 128 * 4
    assert result.notes == set()


@pytest.mark.parametrize(
    "index, fetches",
    [
        (lambda i, j: (i, 0), 3),
        (lambda i, j: (j, 0), 12),
        (lambda i, j: (0, 0), 1),
        (lambda i, j: (jnp.maximum(j - 1, 0), 0), 9),  # 0 0 1 2, three times
        (lambda i, j: ((i * 4 + j) % 2, 0), 12),
        (lambda i, j: (jnp.where(j < 2, i, 2), 0), 4),  # 0 0 2 2 1 1 2 2 2 2 2 2
    ],
)
def test_index_maps_are_followed(index, fetches):
    def f(x):
        return pl.pallas_call(
            lambda x, o: None,
            grid=(3, 4),
            in_specs=[pl.BlockSpec((8, 128), index)],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (0, 0)),
            out_shape=struct(8, 128),
        )(x)

    assert counted(f, struct(128, 128)).bytes == (fetches + 1) * 8 * 128 * 4


def test_blocks_chosen_by_scalars_count_at_every_step_and_say_so():
    def f(which, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(6,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, which: (which[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, which: (i // 2, 0)),
        )
        out = struct(24, 128)
        return pl.pallas_call(lambda which, x, o: None, grid_spec=spec, out_shape=out, name="choose")(which, x)

    result = counted(f, struct(6, dtype=jnp.int32), struct(128, 128))
    assert result.bytes == (6 + 6) * 8 * 128 * 4
    assert result.notes == {"choose: blocks whose index is not a function of the grid alone count at every step"}


def test_an_operand_that_stays_in_hbm_counts_once_and_says_so():
    def f(x):
        specs = [pl.BlockSpec(memory_space=pl.ANY)]
        out = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            lambda x, o: None, grid=(4,), in_specs=specs, out_specs=out, out_shape=struct(32, 128), name="copies"
        )(x)

    result = counted(f, struct(64, 128))
    assert result.bytes == (64 + 32) * 128 * 4
    assert result.notes == {"copies: an operand that stays in HBM counts as read or written once"}
