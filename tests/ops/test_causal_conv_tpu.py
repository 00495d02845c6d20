"""The TPU kernels of the causal convolution: interpreted on a CPU against the float64 recurrence, and compiled for TPUs."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from deltanox.ops import causal_conv1d
from deltanox.ops.causal_conv import tpu, tpu_backward, tpu_forward
from deltanox.ops.causal_conv.tpu_common import Tiles
from helpers import rel

VALUE = {"float32": 1e-6, "bfloat16": 5e-3}


@pytest.fixture
def small_tiles(monkeypatch):
    """128 × 128 a step, so that short rows have several tiles and blocks."""
    for module in (tpu_forward, tpu_backward):
        monkeypatch.setattr(module, "TILES", Tiles(128, 128, 64))
    jax.clear_caches()  # programs of these shapes with the other tiles
    yield
    jax.clear_caches()


def draw(getkey, B, T, C, W, dtype="float32"):
    """x, weight, bias, initial state, and the cotangents of output and state."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    shapes = [(B, T, C), (C, W), (C,), (B, W - 1, C), (B, T, C), (B, W - 1, C)]
    return [jnp.asarray(random.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes]


@functools.partial(jax.jit, static_argnames=("implementation", "silu", "key"))
def both(floats, segment_ids, mask, cotangents, *, implementation, silu, key):
    """Outputs and gradients. `key` is all else that decides what is compiled."""

    def op(x, weight, bias, state):
        return causal_conv1d(
            x, weight, bias, initial_state=state, segment_ids=segment_ids, mask=mask,
            activation="silu" if silu else None, implementation=implementation,
        )  # fmt: skip

    out, pull = jax.vjp(op, *floats)
    return out, pull(tuple(cotangents))


def run(arrays, implementation, *, bias=True, state=True, silu=True, segment_ids=None, mask=None, key=None):
    """Outputs and gradients, compiled as one; what is left out is None."""
    segment_ids, mask = (None if a is None else jnp.asarray(a) for a in (segment_ids, mask))
    x, weight, b, s, *cotangents = arrays
    floats = (x, weight, b if bias else None, s if state else None)
    key = key, tpu_forward.TILES, tpu_backward.TILES
    return both(floats, segment_ids, mask, cotangents, implementation=implementation, silu=silu, key=key)


def compare(arrays, **options):
    """The kernels against the recurrence in float64, whose float32 results are those of the same rounded inputs."""
    dtype = arrays[0].dtype.name
    got = jax.tree.leaves(run(arrays, "pallas", **options))
    want = jax.tree.leaves(run([a.astype(jnp.float32) for a in arrays], "reference", **options))
    assert len(got) == len(want) and {a.dtype.name for a in got} == {dtype}
    errors = [rel(a, b) for a, b in zip(got, want)]
    assert max(errors) <= VALUE[dtype], errors
    return got


def packed(B, T):
    """Segments of one token, and boundaries at, before and after the edges of tiles of 128; a row is unpacked."""
    t = np.arange(T)
    rows = [np.where(t < 9, t, 9) + sum((t >= c).astype(int) for c in (127, 128, 129, 256, 383)), 0 * t, t // 2]
    return np.stack([rows[i % 3] for i in range(B)]).astype(np.int32)


def masked(B, T):
    """Padding to the left that ends beside a tile's edge, to the right, with holes, of all tokens, and none."""
    t = np.arange(T)
    rows = [
        t >= min(128, T // 2),
        t < T - T // 3,
        (t >= 1) & (t % 5 != 3) & (t < T - 1),
        t < 0,
        t >= 0,
        t >= min(130, T - 1),
    ]
    return np.stack([rows[i % 6] for i in range(B)])


LENGTHS = [(1, 4), (2, 2), (64, 1), (65, 4), (129, 4)]  # the others in `test_all`


@pytest.mark.parametrize("T, W", LENGTHS)
def test_lengths(getkey, small_tiles, T, W):
    compare(draw(getkey, 1, T, 128, W))


@pytest.mark.parametrize(
    "T, W, packing", [(300, 4, "ids"), (300, 4, "mask"), (261, 4, "ids mask"), (140, 1, "ids mask"), (3, 4, "ids mask")]
)
def test_packing(getkey, small_tiles, T, W, packing):
    B = 6 if "mask" in packing else 3
    ids = packed(B, T) if "ids" in packing else None
    mask = masked(B, T) if "mask" in packing else None
    compare(draw(getkey, B, T, 128, W), segment_ids=ids, mask=mask)


@pytest.mark.parametrize("T, W, packing", [(256, 4, ""), (300, 4, "ids mask")])
def test_bfloat16(getkey, small_tiles, T, W, packing):
    B = 2
    ids = packed(B, T) if "ids" in packing else None
    mask = masked(B, T) if "mask" in packing else None
    compare(draw(getkey, B, T, 256, W, "bfloat16"), segment_ids=ids, mask=mask)


def test_tiles_of_the_size_that_is_used(getkey):
    """A tile of 1,024 tokens, and a tail; T = 1000 is in `test_all`."""
    T = 1030
    ids = np.where(np.arange(T)[None] < 700, 0, 1).astype(np.int32)
    compare(draw(getkey, 1, T, 128, 4), segment_ids=ids, mask=np.arange(T)[None] >= 256)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("packing", "dtype"),
    [*((x, "float32") for x in ("", "ids", "mask", "ids mask")), ("ids mask", "bfloat16")],
)
@pytest.mark.parametrize("W", [1, 4, 8])
@pytest.mark.parametrize("T", [1, 2, 63, 127, 257, 1000])
def test_all(getkey, T, W, packing, dtype):
    """In tiles of the size that is used."""
    ids = packed(6, T) if "ids" in packing else None
    mask = masked(6, T) if "mask" in packing else None
    compare(draw(getkey, 6, T, 256, W, dtype), segment_ids=ids, mask=mask)


def test_without_bias_state_and_activation(getkey, small_tiles):
    compare(draw(getkey, 2, 130, 128, 4), bias=False, state=False, silu=False, mask=masked(2, 130))


def test_only_the_state_has_a_cotangent(getkey, small_tiles):
    arrays = draw(getkey, 3, 130, 128, 4)
    arrays[4] = jnp.zeros_like(arrays[4])
    _, _, dx, dweight, dbias, dstate = compare(arrays, segment_ids=packed(3, 130), mask=masked(3, 130))
    assert np.any(dx) and not np.any(dweight) and not np.any(dbias)
    arrays[4], arrays[0] = arrays[0][:, :2], arrays[0][:, :2]
    arrays[4] = jnp.zeros_like(arrays[4])
    *_, dstate = compare(arrays)
    assert np.any(dstate)


def test_what_is_masked_is_not_looked_at(getkey, small_tiles):
    """NaN in pads and in a document's neighbour: the others stay as they are, bit for bit, in both directions."""
    T = 200
    arrays = draw(getkey, 2, T, 128, 4)
    mask = masked(3, T)[1:3]
    ids = np.where(np.arange(T) < 130, 0, 1)[None].repeat(2, 0).astype(np.int32)
    clean = run(arrays, "pallas", segment_ids=ids, mask=mask)
    broken = [arrays[0].at[~mask].set(jnp.nan), *arrays[1:4], arrays[4].at[~mask].set(jnp.nan), arrays[5]]
    for a, b in zip(jax.tree.leaves(run(broken, "pallas", segment_ids=ids, mask=mask)), jax.tree.leaves(clean)):
        assert np.array_equal(a, b)
    broken = [arrays[0].at[:, :130].set(jnp.nan), *arrays[1:]]
    (y, _), (dx, *_) = run(broken, "pallas", segment_ids=ids, mask=mask)
    assert np.array_equal(y[:, 130:], clean[0][0][:, 130:]) and np.array_equal(dx[:, 130:], clean[1][0][:, 130:])


@pytest.mark.parametrize("weights", ["shared", "mapped"])
def test_vmap_is_folded_into_the_batch(getkey, small_tiles, weights):
    """One kernel a direction under `jax.vmap`, of rank three, whether the weight is mapped or not."""
    x, weight, bias, state, dy, _ = draw(getkey, 6, 129, 128, 4)
    x, state, dy = (a.reshape(3, 2, *a.shape[1:]) for a in (x, state, dy))
    ids = jnp.asarray(packed(6, 129).reshape(3, 2, 129))
    weight = weight[None] * jnp.asarray([1.0, -0.5, 2.0])[:, None, None] if weights == "mapped" else weight

    def both(implementation):
        def op(x, weight, state, ids, dy):
            def loss(x, weight, bias, state):
                return jnp.sum(dy * causal_conv1d(
                    x, weight, bias, initial_state=state, segment_ids=ids, activation="silu",
                    implementation=implementation)[0])  # fmt: skip

            return jax.value_and_grad(loss, (0, 1, 2, 3))(x, weight, bias, state)

        return jax.vmap(op, (0, 0 if weights == "mapped" else None, 0, 0, 0))

    arguments = (x, weight, state, ids, dy)
    got, want = (jax.tree.leaves(jax.jit(both(i))(*arguments)) for i in ("pallas", "xla"))
    for a, b in zip(got, want):
        assert rel(a, b) < 2e-6
    text = str(jax.make_jaxpr(both("pallas"))(*arguments))
    assert set(re.findall(r"name=(conv_\w+)", text)) == {"conv_forward", "conv_backward"}
    assert set(re.findall(r"grid=\((\d+, \d+, \d+)\)", text)) == {"1, 6, 2"}


@pytest.mark.slow
@pytest.mark.all_passes
@pytest.mark.parametrize("T, C", [(161, 256), (256, 128)])
def test_memory_errors_of_kernels(getkey, monkeypatch, small_tiles, T, C):
    """The interpreter that keeps the memory spaces apart, with NaN where nothing was written, finds no race and no read
    of such memory: with a tail, and where the gradient is written over the cotangent."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    arrays = draw(getkey, 2, T, C, 4)
    ids, mask = packed(2, T), masked(3, T)[1:]
    want = run(arrays, "pallas", segment_ids=ids, mask=mask)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    for name in ("conv_forward", "conv_backward"):
        kernel = getattr(tpu, name)
        monkeypatch.setattr(tpu, name, functools.partial(_with, kernel, params))
    jax.clear_caches()  # of the program with the other interpreter
    got = run(arrays, "pallas", segment_ids=ids, mask=mask, key=params)
    assert not interpret_pallas_call.races.races_found
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.array_equal(a, b)


def _with(kernel, params, *arguments, interpret, **options):
    return kernel(*arguments, interpret=params if interpret else False, **options)


REFUSED = {
    "channels": ((1, 5, 192), "float32", 4, "C must be a multiple of 128, .* but it is 192; use 'auto' or 'xla'"),
    "width": ((1, 5, 128), "float32", 9, "W must be at most 8, .* but it is 9"),
    "dtype": ((1, 5, 128), "float16", 4, "`x` must be bfloat16 or float32, but it is float16"),
    "empty": ((0, 5, 128), "float32", 4, "the batch must not be empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    shape, dtype, width, sentence = REFUSED[case]
    x, weight = jnp.ones(shape, dtype), jnp.ones((shape[-1], width), dtype)
    with pytest.raises(
        ValueError, match="causal_conv1d: implementation='pallas' cannot take these inputs: " + sentence
    ):
        causal_conv1d(x, weight, implementation="pallas")
    y, _ = causal_conv1d(x, weight)
    assert np.array_equal(y, causal_conv1d(x, weight, implementation="xla")[0])


def gradient(implementation):
    def loss(x, weight):
        return jnp.sum(causal_conv1d(x, weight, activation="silu", implementation=implementation)[0])

    return jax.grad(loss, (0, 1))


def test_the_platform_compiled_for_decides(getkey):
    x, weight, *_ = draw(getkey, 1, 9, 128, 4)

    def lowered(implementation, platform):
        traced = jax.jit(gradient(implementation)).trace(x, weight)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for implementation in ("pallas", "auto"):
        assert re.findall(r"conv_(?:forward|backward)", lowered(implementation, "tpu"))
    assert "tpu_custom_call" not in lowered("auto", "cpu") + lowered("auto", "cuda") + lowered("xla", "tpu")
    with pytest.raises(
        NotImplementedError, match="causal_conv1d: implementation='pallas' is a TPU kernel .* compiled for cuda"
    ):
        lowered("pallas", "cuda")


def test_second_derivatives_are_refused(getkey):
    x, weight, *_ = draw(getkey, 1, 9, 128, 4)
    for transform in (jax.jacrev, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="implementation='pallas' .*use implementation='chunked'"):
            transform(lambda x: jnp.sum(gradient("pallas")(x, weight)[0]))(x)


def test_only_the_inputs_are_kept(getkey):
    x, weight, *_ = draw(getkey, 1, 64, 128, 4)
    _, pull = jax.vjp(lambda x: causal_conv1d(x, weight, activation="silu", implementation="pallas")[0], x)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull) if hasattr(leaf, "size")) <= x.size + 2 * weight.size


def test_bits_of_taps():
    """By hand: W = 3, a boundary at token 2, token 3 masked, and a past before token 0."""
    boundary = jnp.asarray([[False, False, True, False, False]])
    mask = jnp.asarray([[True, True, True, False, True]])
    bits = tpu.tap_bits(boundary, mask, jnp.zeros(1, jnp.int32), 3)
    assert bits.tolist() == [[[0b111, 0b111, 0b001, 0b000, 0b101]]]
    late = tpu.tap_bits(None, jnp.asarray([[False, False, False, True, True]]), jnp.asarray([3], jnp.int32), 3)
    assert late.tolist() == [[[0, 0, 0, 0b111, 0b111]]]
    assert tpu.tap_bits(None, jnp.asarray([[False, False, False, True, True]]), None, 3).tolist() == [[[0, 0, 0, 1, 3]]]
    assert tpu.tap_bits(None, None, None, 3) is None


COMPILE = """
import os
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost",
                  TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_STDERR_LOG_LEVEL="3", TPU_MIN_LOG_LEVEL="3")
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from deltanox.ops import causal_conv1d

def both(x, weight, bias, state, ids, mask, dy):
    def op(x, weight, bias, state):
        return causal_conv1d(x, weight, bias, initial_state=state, segment_ids=ids, mask=mask, activation="silu")[0]
    y, pull = jax.vjp(op, x, weight, bias, state)
    return y, pull(2 * dy)

for topology in sys.argv[1].split(","):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    jax.set_mesh(Mesh(np.array(devices[:1]), ("x",)))
    sharding = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    for dtype in ("bfloat16", "float32"):
        for packed in (False, True) if sys.argv[2] == "all" else (dtype == "bfloat16",):
            def spec(shape, dtype=dtype):
                return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
            T, C = 2104, 10240
            x = spec((1, T, C))
            optional = (spec((C,)), spec((1, 3, C)), spec((1, T), "int32"), spec((1, T), "bool")) if packed else (None,) * 4
            lowered = jax.jit(both).lower(x, spec((C, 4)), *optional, x)
            calls, compiled = lowered.as_text().count("@tpu_custom_call"), lowered.compile()
            print(topology, dtype, packed, calls, compiled.memory_analysis().temp_size_in_bytes / (T * C * x.dtype.itemsize), flush=True)
"""


def compiled_for(topologies: str, cases: str) -> list[list[str]]:
    """Kernel calls and temporary bytes, in a process of its own: libtpu wants its environment before JAX starts."""
    pytest.importorskip("libtpu", reason="compiles for a TPU with libtpu, which is not installed")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, topologies, cases], capture_output=True, text=True, env=os.environ, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def check_compiled(rows):
    """Both kernels are there, and nothing as large as x is made beside arguments and results: the cotangent, which is
    computed, lies where the gradient of x comes to lie. With a state before masked tokens XLA keeps both."""
    for topology, dtype, packing, calls, temporary in rows:
        assert int(calls) == 2, (topology, dtype, packing)
        assert float(temporary) < (1.1 if packing == "True" else 0.1), (topology, dtype, packing)


@pytest.mark.slow
def test_compiles_for_a_tpu():
    rows = compiled_for("tpu7x:2x2x1", "some")
    assert len(rows) == 2
    check_compiled(rows)


@pytest.mark.slow
def test_compiles_for_every_tpu():
    rows = compiled_for("v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1", "all")
    assert len(rows) == 16
    check_compiled(rows)
