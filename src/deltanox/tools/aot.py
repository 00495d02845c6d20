"""Compile for a TPU that is not there, and read what the program will take: memory, work, kernels and their schedules.

    from deltanox.tools import aot

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    print(aot.compile(model, x, topology="v6e"))

libtpu compiles ahead of time for any chip it knows. All figures are static: of the compiled program (memory, kernel
calls), of the function's jaxpr (products and bytes, by formulas) and of the bundles that libtpu has scheduled. Nothing
is measured: the roofline time is what the program takes at the least, but for two things that are counted as if they
happened: code that a kernel's branches skip, and traffic of arrays that are small enough for XLA to keep in VMEM.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _libtpu
from ._hlo import KernelCall, Program, read_program
from ._report import Kernel as Kernel, Report as Report
from ._schedule import Schedule, read_hlo, read_schedules
from .chips import CHIPS as CHIPS, Chip as Chip, parse_topology
from .flops import count


def prepare() -> None:
    """Load libtpu now, so that it dumps its schedules. `compile` does so by itself, unless a TPU was used before it.

    **Raises**: `ValueError` if libtpu isn't installed.
    """
    _libtpu.load()


def devices(topology: str) -> list[Any]:
    """The devices of a topology, to make a mesh of: "v5e:2x4", or "v5e" for the smallest one."""
    return _libtpu.devices(parse_topology(topology)[1])


def compile(
    fn: Callable[..., Any],
    *args: Any,
    topology: str = "tpu7x",
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Report:
    """Compile `fn(*args)` for one device of `topology` and report what the program is.

    **Arguments**:

    - `fn`: any function of arrays; an Equinox module that is called counts among the arguments.
    - `args`: PyTrees. Arrays and `jax.ShapeDtypeStruct`s are arguments of the program, everything else is static. Only
      shapes and dtypes are looked at; a struct whose sharding has a memory kind ("pinned_host") keeps it.
    - `topology`: "v4", "v5e", "v5p", "v6e" or "tpu7x", or with a shape, "tpu7x:2x2x1".
    - `donate_argnums`: which of `args` may be overwritten by the results.
    - `mesh`: of the topology's `devices`; arguments are then placed as their shardings on it say, replicated without.
      None is one device. It is the current mesh while the function is traced, which tells Pallas the chip.
    - `compiler_options`: XLA's, such as {"xla_tpu_scoped_vmem_limit_kib": "65536"}.

    **Returns**: a `Report`. With several devices work is divided evenly among them.

    **Raises**: `ValueError` for a topology that isn't known, and without libtpu. What XLA raises goes through, such as
    the error of a program that does not fit into the chip's memory.
    """
    chip, name = parse_topology(topology)
    dump = _libtpu.load()
    available = _libtpu.devices(name)
    if mesh is None:
        mesh = Mesh(np.array(available[:1]), ("device",), axis_types=(AxisType.Auto,))
    device = mesh.devices.flat[0]
    dynamic, static = eqx.partition((fn, args), _is_array)
    dynamic = jax.tree.map(lambda x: _struct(x, mesh), dynamic)
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    def run(module, *arrays):
        whole, inputs = eqx.combine((module, arrays), static)
        return eqx.filter(whole(*inputs), eqx.is_array)

    with _libtpu.LOCK, jax.set_mesh(mesh):
        traced = jax.jit(run, donate_argnums=[i + 1 for i in donate]).trace(dynamic[0], *dynamic[1])
        lowered = traced.lower()
        _libtpu.clear(dump)
        compiled = lowered.compile(compiler_options=compiler_options)
        schedules = read_schedules(dump.folder) if dump.folder is not None else {}
        text = read_hlo(dump.folder) if dump.folder is not None else ""
        _libtpu.clear(dump)
    program = _program(text, compiled)
    kernels = _kernels(program, schedules)
    work = count(traced.jaxpr)
    memory: Any = compiled.memory_analysis()
    ends = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((dynamic, traced.out_info)))
    notes = work.notes | program.notes
    if any(kernel.issued is None for kernel in kernels) and schedules:
        notes |= {"some kernels have no schedule, and their bundles are left out"}
    if any(kernel.unknown_trips for kernel in kernels):
        notes |= {"a kernel has loops without a constant trip count, whose bundles are counted once (+)"}
    labels = {kernel.label for kernel in program.kernels}
    others = {label: schedule for label, schedule in schedules.items() if label not in labels}
    if any(schedule.unknown_trips for schedule in others.values()):
        notes |= {"some of XLA's operations have loops without a constant trip count, whose bundles are counted once"}
    return Report(
        topology=name,
        device=device.device_kind,
        chip=chip.share(getattr(device, "num_cores", None) or 1),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes - memory.host_alias_size_in_bytes,
        kernels=kernels,
        flops=work.flops // mesh.size,
        mxu_flops=work.mxu_flops // mesh.size,
        kernel_flops=work.kernel_flops // mesh.size,
        bytes=max(work.bytes, ends) // mesh.size,
        other_bundles=sum(s.issued * program.runs.get(x, 0) for x, s in others.items()) if schedules else None,
        no_schedule="" if schedules else dump.reason or _no_dump(),
        notes=tuple(sorted(notes)),
    )  # fmt: skip


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _struct(x: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    spec, kind = PartitionSpec(), None
    if isinstance(x, jax.ShapeDtypeStruct) and sharding is not None:
        kind = sharding.memory_kind
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            spec = sharding.spec
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))


def _program(text: str, compiled: Any) -> Program:
    """From the text that libtpu dumped: JAX's own needs a jaxlib that knows all instructions of this libtpu."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = text or compiled.as_text() or ""
    if text:
        return read_program(text)
    return Program([], {}, frozenset({"the compiled program cannot be read by this jaxlib: kernels are not known"}))


def _no_dump() -> str:
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return "libtpu dumped nothing; a program out of JAX's compilation cache (jax_compilation_cache_dir) has no dump"
    return "libtpu dumped nothing: its flags, which are not documented, may have changed"


def _kernels(program: Program, schedules: dict[str, Schedule]) -> tuple[Kernel, ...]:
    """One record a name and schedule. libtpu schedules equal code once: a call without a schedule has its twin's."""
    by_code = {call.code: schedules[call.label] for call in program.kernels if call.label in schedules}
    groups: list[tuple[str, Schedule | None, list[KernelCall]]] = []
    for call in program.kernels:
        schedule = schedules.get(call.label, by_code.get(call.code))
        same = next((calls for name, other, calls in groups if (name, other) == (call.name, schedule)), None)
        if same is None:
            groups.append((call.name, schedule, [call]))
        else:
            same.append(call)
    kernels = [
        Kernel(name, len(calls), sum(call.runs for call in calls), **({} if known is None else known._asdict()))
        for name, known, calls in groups
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.launches * (kernel.issued or 0)))
