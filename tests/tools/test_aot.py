"""Compiled for TPUs that are not there: memory, kernels, schedules and counts, against closed formulas."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import deltanox
from deltanox.cli import main
from deltanox.tools import aot
from deltanox.tools._hlo import read_program
from deltanox.tools._schedule import multiplicities, read_schedule
from deltanox.tools.chips import CHIPS, parse_topology
from helpers import SMALL_MODEL, needs_libtpu

SIZE = 128
ROWS = 2**20  # 256 MiB in bfloat16: more than the VMEM of any chip


def kernel(x, w, o, product):
    product[...] = jax.lax.dot(x[...], w[...], preferred_element_type=jnp.float32)
    o[...] = product[...].astype(o.dtype)


def tiny_dot(x, w, name="tiny_dot"):
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // SIZE,),
        in_specs=[pl.BlockSpec((SIZE, SIZE), lambda i: (i, 0)), pl.BlockSpec((SIZE, SIZE), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((SIZE, SIZE), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((SIZE, SIZE), jnp.float32)],
        name=name,
    )(x, w)


def structs(rows=ROWS):
    return jax.ShapeDtypeStruct((rows, SIZE), jnp.bfloat16), jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)


def twice_and_in_loops(x, w):
    """Three calls by the name of tiny_dot, one of them run 2 · 3 times, and one by another name."""
    x = tiny_dot(tiny_dot(x, w), w + 1)
    x = tiny_dot(x, w, name="another")

    def outer(x, _):
        return jax.lax.scan(lambda x, _: (jnp.tanh(tiny_dot(x, w)), None), x + 1, None, length=3)[0], None

    return jax.lax.scan(outer, x, None, length=2)[0]


# Whole programs --------------------


@needs_libtpu
@pytest.mark.parametrize("topology", CHIPS)
def test_every_figure_of_a_small_program(topology):
    report = aot.compile(twice_and_in_loops, *structs(), topology=topology, donate_argnums=0)
    x, w, calls = ROWS * SIZE * 2, SIZE * SIZE * 2, 2 + 1 + 6
    assert report.kernel_calls == {"tiny_dot": 3, "another": 1}
    launches = {name: sum(k.launches for k in report.kernels if k.name == name) for name in report.kernel_calls}
    assert launches == {"tiny_dot": 8, "another": 1}
    assert (report.argument_bytes, report.output_bytes, report.aliased_bytes) == (x + w, x, x)
    assert report.host_bytes == 0
    assert report.device_bytes == x + w + report.temporary_bytes + report.code_bytes
    assert report.flops == report.mxu_flops == calls * 2 * ROWS * SIZE * SIZE
    assert report.bytes == calls * (2 * x + w)
    assert (report.no_schedule, report.notes) == ("", ())
    chip = report.chip
    assert chip.cores == (1 if topology == "tpu7x" else CHIPS[topology].cores)
    for k in report.kernels:
        # a scratch of 64 KiB, at the least; two windows of x and two of the output
        assert SIZE * SIZE * 4 + 4 * w <= k.vmem_bytes < chip.vmem_bytes
        assert k.issued > k.bundles > 0 and k.unknown_trips == 0 and k.matmuls > 0
        assert 0 < k.utilization["MATMUL"] <= 1 and all(0 <= share <= 1 for share in k.utilization.values())
    issued = sum(k.launches * k.issued for k in report.kernels)
    assert report.bundles == issued + report.other_bundles and report.other_bundles > 0
    assert report.bounds == {
        "flops": report.flops / chip.flops,
        "bytes": report.bytes / chip.hbm_bandwidth,
        "bundles": report.bundles / chip.clock,
    }
    assert report.roofline_seconds == max(report.bounds.values())

    told = json.loads(report.to_json())
    assert told["kernel_calls"] == report.kernel_calls and told["chip"]["name"] == topology
    assert told["kernels"][0]["issued"] == report.kernels[0].issued
    assert told["roofline_seconds"] == report.roofline_seconds
    table = str(report)
    assert "another" in table and f"{report.bundles:,} bundles" in table and "schedule  none" not in table


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e", "tpu7x"])
def test_issued_bundles_grow_with_the_grid(topology):
    kernels = [aot.compile(tiny_dot, *structs(n * ROWS), topology=topology).kernels[0] for n in (1, 2, 4)]
    one, two, four = (k.issued for k in kernels)
    assert four - two == 2 * (two - one)
    # the grid's steps are all but a few of the turns, and a step issues most of the code
    assert 0.5 < (two - one) / (ROWS // SIZE) / kernels[0].bundles <= 1


@needs_libtpu
def test_the_process_is_left_as_it_was():
    before, mesh = dict(os.environ), jax.sharding.get_mesh()
    aot.compile(jnp.sin, structs()[0], topology="v5e")
    assert dict(os.environ) == before and jax.sharding.get_mesh() == mesh
    assert float(jnp.sin(jnp.float32(0))) == 0


class Layer(eqx.Module):
    weight: jax.Array | jax.ShapeDtypeStruct
    activation: object
    name: str = "layer"

    def __call__(self, x, scale):
        return self.activation(tiny_dot(x, self.weight, name=self.name)) * scale, self.name


@needs_libtpu
def test_modules_bring_arrays_and_what_is_static():
    x, w = structs()
    weight = jnp.zeros(w.shape, w.dtype)
    for layer in (Layer(weight, jnp.tanh), Layer(w, jnp.tanh), eqx.filter_jit(Layer(weight, jnp.tanh))):
        report = aot.compile(layer, x, 2.0, topology="v6e")
        assert report.kernel_calls == {"layer": 1}
        assert report.argument_bytes == (ROWS * SIZE + SIZE * SIZE) * 2
        assert report.output_bytes == ROWS * SIZE * 2


@needs_libtpu
def test_kernels_are_named_through_transformations():
    @jax.custom_vjp
    def op(x, w):
        return tiny_dot(x, w, name="op_forward")

    op.defvjp(lambda x, w: (op(x, w), w), lambda w, d: (tiny_dot(d, w, name="op_backward"), jnp.zeros_like(w)))
    x, w = structs()
    stacked = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)

    def loss(x, w):
        with jax.named_scope("scope"):
            return jnp.sum(jax.vmap(op, (0, None))(x, w).astype(jnp.float32) ** 2)

    report = aot.compile(jax.grad(loss), stacked, w, topology="tpu7x")
    assert report.kernel_calls == {"op_forward": 1, "op_backward": 1}
    assert report.flops == 2 * 2 * 2 * ROWS * SIZE * SIZE


@needs_libtpu
def test_a_loop_of_unknown_length_is_said():
    def f(x, w, n):
        return jax.lax.fori_loop(0, n, lambda i, x: tiny_dot(x, w), x)

    report = aot.compile(f, *structs(), jax.ShapeDtypeStruct((), jnp.int32), topology="v5e")
    assert [k.launches for k in report.kernels] == [1]
    assert report.notes == (
        "a while loop of unknown length is counted once",
        "kernels in a loop whose trip count is not in the compiled program are counted once",
    )


@needs_libtpu
def test_a_ragged_product_is_counted_by_its_rows():
    rows, size, experts = 4096, 512, 64
    shapes = [((rows, size), jnp.bfloat16), ((experts, size, size), jnp.bfloat16), ((experts,), jnp.int32)]
    report = aot.compile(jax.lax.ragged_dot, *(jax.ShapeDtypeStruct(*s) for s in shapes), topology="v6e")
    assert report.flops == 2 * rows * size * size
    assert report.bytes == (2 * rows * size + experts * size * size) * 2 + experts * 4
    # how long libtpu's own kernel loops is decided by the sizes of the groups
    assert any(note.startswith("some of XLA's operations have loops without") for note in report.notes)


@needs_libtpu
def test_host_memory_and_several_devices():
    x, w = structs()
    available = aot.devices("v5e:2x2")
    mesh = Mesh(np.array(available), ("rows",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("rows"))
    f = jax.shard_map(
        tiny_dot, mesh=mesh, in_specs=(split.spec, PartitionSpec()), out_specs=split.spec, check_vma=False
    )
    placed = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)
    report = aot.compile(f, placed, w, topology="v5e:2x2", mesh=mesh)
    assert report.argument_bytes == (ROWS // 4 * SIZE + SIZE * SIZE) * 2
    assert report.flops == 2 * ROWS // 4 * SIZE * SIZE

    def fetch(x):
        return jnp.sin(jax.device_put(x, jax.memory.Space.Device))

    one = Mesh(np.array(available[:1]), ("rows",), axis_types=(AxisType.Auto,))
    host = NamedSharding(one, PartitionSpec(), memory_kind="pinned_host")
    report = aot.compile(fetch, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), topology="v5e")
    assert report.host_bytes == ROWS * SIZE * 2
    assert report.argument_bytes == 0


@needs_libtpu
def test_what_does_not_fit_is_xlas_error():
    x = jax.ShapeDtypeStruct((20 * 2**30,), jnp.int8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)memory"):
        aot.compile(lambda x: x + 1, x, topology="v5e")


@needs_libtpu
def test_without_a_schedule_the_rest_is_there():
    program = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1")
from test_aot import structs, tiny_dot
from deltanox.tools import aot
report = aot.compile(tiny_dot, *structs(), topology="v5e")
assert report.no_schedule.startswith("libtpu was loaded before"), report.no_schedule
assert report.kernel_calls == {"tiny_dot": 1} and report.kernels[0].issued is None and report.bundles is None
assert report.flops > 0 and set(report.bounds) == {"flops", "bytes"}
assert "schedule  none: libtpu was loaded before" in str(report)
print(report.to_json())
"""
    paths = [str(Path(deltanox.__file__).parents[1]), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    extra = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **extra})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["other_bundles"] is None


# The command --------------------

CONFIG = f"""{SMALL_MODEL}tied_head = true
[data]
row_length = 32
batch_size = 2
[optimiser]
warmup_steps = 1
[train]
steps = 4
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return str(path)


@needs_libtpu
def test_command_forward(config, capsys):
    assert main(["aot", config, "--topology", "v5e", "--what", "forward", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["topology"] == "v5e:1x1" and told["kernels"] == [] and told["aliased_bytes"] == 0
    assert told["bundles"] == told["other_bundles"] > 0


@needs_libtpu
@pytest.mark.slow
def test_command_step(config, capsys):
    assert main(["aot", config, "--set", "train.accumulation=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tpu7x:1x1x1  one TPU7x device, 1 TensorCore of tpu7x")
    assert "kernels   none" in out


@needs_libtpu
@pytest.mark.slow
def test_command_step_of_low_rank_changes(config, capsys):
    """Their step holds no moments of the weights."""
    arguments = []
    for change in ([], ["--set", "lora.rank=1"]):
        assert main(["aot", config, "--json", *change]) == 0
        arguments.append(json.loads(capsys.readouterr().out)["argument_bytes"])
    assert arguments[1] < arguments[0] / 1.5


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["none.toml"], "deltanox: config: there is no file `none.toml`"),
        (["small.toml", "--topology", "v9"], "deltanox: aot: `topology` must be one of v4, v5e, v5p, v6e, tpu7x"),
        (["small.toml", "--topology", "v5e:2x2x2"], "deltanox: aot: the shape of a v5e topology has 2 sizes"),
    ],
)
def test_wrong_use_is_one_sentence(config, capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(Path(config).parent)
    assert main(["aot", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


def test_without_libtpu_a_sentence_says_so(monkeypatch):
    from deltanox.tools import _libtpu

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(_libtpu, "load", _libtpu.load.__wrapped__)
    with pytest.raises(ValueError, match="aot: libtpu is not installed: pip install 'libtpu>=0.0.52'"):
        aot.compile(jnp.sin, structs()[0])


# Parts --------------------


@pytest.mark.parametrize("name, mxu", [("v4", 128), ("v5e", 128), ("v5p", 128), ("v6e", 256), ("tpu7x", 256)])
def test_clock_and_peak_agree(name, mxu):
    # four matrix units a core, as the schedules have them, each a multiplication and an addition a cell and cycle
    chip = CHIPS[name]
    assert chip.flops / (chip.cores * chip.clock) == pytest.approx(4 * mxu**2 * 2, rel=0.01)
    half = chip.share(1)
    assert (half.flops, half.hbm_bytes, half.clock) == (
        chip.flops / chip.cores,
        chip.hbm_bytes // chip.cores,
        chip.clock,
    )


def test_topologies():
    assert parse_topology("v5e") == (CHIPS["v5e"], "v5e:1x1")
    assert parse_topology("tpu7x:4x4x4") == (CHIPS["tpu7x"], "tpu7x:4x4x4")
    for wrong in ("", "v5", "v5e:", "v5e:0x1", "v4:2x2", "tpu7x:2x2x1x1", "v5e:2x2 "):
        with pytest.raises(ValueError, match="aot: "):
            parse_topology(wrong)


BUNDLES = """
     0   :  { %s0 = smov.u32 0 }
   0x1 LB: > { %s1 = sadd.s32 1, %s0 }
   0x2 LB: >> { %s2 = sadd.s32 1, %s1 }
   0x3   : >> { %p1 = scmp.ge.s32.totalorder %s2, 5 /* loop exit test */ }
   0x4   : >> { %v1 = vld [vmem:[#allocation0_spill] sm:$0xff] }
   0x5   : > { %p2 = scmp.ge.s32.totalorder %s1, 3 /* loop exit test */  ;;  %1 = vmatmul.mubr.f32 %v1 }
   0x6 LB: > { %p3 = scmp.ge.s32.totalorder %s1, %s9 /* loop exit test */ }
   0x7   :  { exit }
"""
UNITS = """== CAPACITY:
MATMUL, SALU
    2     2
== UTILIZATION:
0 2
0 2
0 1
0 1
0 0
1 2
0 1
0 0
"""
ALLOCATIONS = """
  #allocation0 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped, tag = 'a'] // #allocation0
  #allocation1 [shape = 's32[1]', space=sflag, size = 0x4, scoped, tag = 'b']
    #allocation2 [shape = 'u8[512]', space=vmem, size = 0x200, scoped, tag = 'c']
"""


def test_bundles_are_issued_as_often_as_their_loops_turn():
    times, unknown = multiplicities(BUNDLES.splitlines()[1:])
    assert times == [1, 3, 15, 15, 15, 3, 1, 1] and unknown == 1
    schedule = read_schedule(BUNDLES, ALLOCATIONS, UNITS)
    assert schedule._replace(utilization={}) == (8, 54, 1, 1, 1, 0x1200, {})
    total = 54 * 2
    assert schedule.utilization == {
        "MATMUL": round(3 / total, 3),
        "SALU": round((2 + 3 * 2 + 15 + 15 + 3 * 2 + 1) / total, 3),
    }
    assert read_schedule(BUNDLES)[-2:] == (None, {})


HLO = """HloModule jit_f

%body (p.0: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p.0 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  %x.0 = f32[8] get-tuple-element(%p.0), index=1
  %n.0 = s32[] get-tuple-element(%p.0), index=2
  %two = s32[] constant(2)
  %add.0 = s32[] add(%i.0, %two)
  %k.1 = f32[8] custom-call(%x.0), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/vmap(jvp(k))/pallas_call"}, backend_config={"custom_call_config":{"body":"AAAA"}}
  ROOT %t.0 = (s32[], f32[8], s32[]) tuple(%add.0, %k.1, %n.0)
}

%test (p.1: (s32[], f32[8], s32[])) -> pred[] {
  %p.1 = (s32[], f32[8], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] get-tuple-element(%p.1), index=2
  ROOT %lt = pred[] compare(%i.1, %n.1), direction=LT
}

%fused (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8] parameter(0)
  ROOT %k.2 = f32[8] custom-call(%p.2), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/scope/other/pallas_call"}
}

ENTRY %main (x: f32[8], m: s32[]) -> f32[8] {
  %x = f32[8] parameter(0)
  %m = s32[] parameter(1)
  %one = s32[] constant(1)
  %copy = s32[] copy(%one)
  %limit = s32[] constant(LIMIT)
  %start = (s32[], f32[8], s32[]) tuple(%copy, %x, %limit)
  %loop = (s32[], f32[8], s32[]) while(%start), condition=%test, body=%body
  %out = f32[8] get-tuple-element(%loop), index=1
  ROOT %fusion = f32[8] fusion(%out), kind=kCustom, calls=%fused
}
"""


@pytest.mark.parametrize("limit, trips", [(8, 4), (9, 4), (10, 5), (1, 0)])
def test_trips_are_read_off_the_compiled_program(limit, trips):
    program = read_program(HLO.replace("LIMIT", str(limit)))
    assert [(k.name, k.label, k.runs) for k in program.kernels] == [("k", "k.1", trips), ("other", "fusion", 1)]
    assert program.kernels[0].code == "AAAA"
    assert program.runs["add.0"] == trips and program.runs["loop"] == 1 and "k.2" not in program.runs
    assert program.notes == set()


@pytest.mark.parametrize(
    "old, new", [("constant(LIMIT)", "copy(%m)"), ("add(%i.0, %two)", "multiply(%i.0, %two)"), ("direction=LT", "direction=NE")]
)  # fmt: skip
def test_a_loop_that_cannot_be_read_counts_once(old, new):
    program = read_program(HLO.replace(old, new).replace("LIMIT", "8"))
    assert [k.runs for k in program.kernels] == [1, 1]
    assert program.notes == {"kernels in a loop whose trip count is not in the compiled program are counted once"}
