"""Figures of a function for the benchmarks: measured on a device that is there, or compiled for a TPU that is not."""

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from deltanox.tools import aot

REPEATS = 5


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """The argument --length; see `lengths`."""
    parser.add_argument(
        "--length", type=numbers, nargs="+", default=[[8192, 65536]],
        help="tokens, apart by commas or spaces (default: 8192,65536)",
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where, and how the result is told."""
    parser.add_argument("--topology", default="tpu7x", help="v4, v5e, v5p, v6e or tpu7x (default: tpu7x)")
    parser.add_argument(
        "--on", choices=("auto", "device", "topology"), default="auto",
        help="time it on JAX's device, or compile it for a topology (default: the device, if it is a TPU or a GPU)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"runs on a device (default: {REPEATS})")
    parser.add_argument("--json", action="store_true", help="print JSON, a record a line")


def numbers(text: str) -> list[int]:
    """Integers, apart by commas."""
    return [int(word) for word in text.split(",") if word]


def lengths(arguments: argparse.Namespace) -> list[int]:
    """What was given as --length."""
    return [length for group in arguments.length for length in group]


def key_and_value_heads(name: str, text: str) -> tuple[int, int]:
    """Of an argument such as 16/64; `name` is the benchmark's."""
    try:
        keys, values = (int(x) for x in text.split("/"))
    except ValueError:
        raise ValueError(f"bench {name}: --heads must be KEY/VALUE, such as 16/64, but it is {text}") from None
    return keys, values


def figures(arguments: argparse.Namespace, fn: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> dict:
    """A record of `fn(*args)`: `args` as for `aot.compile`, `donate` as its `donate_argnums`.

    `seconds` are measured, None where nothing ran; everything else is of the compiled program. What XLA refuses to
    compile is a record with the key `refused`.
    """
    on_device = arguments.on == "device" or (arguments.on == "auto" and jax.default_backend() in ("tpu", "gpu"))
    try:
        if on_device:
            return measure(fn, *args, repeats=arguments.repeats, donate=donate)
        report = aot.compile(fn, *args, topology=arguments.topology, donate_argnums=donate)
    except jax.errors.JaxRuntimeError as error:
        return {"where": arguments.topology, "seconds": None, "refused": " ".join(str(error).split())[:300]}
    return {
        "where": report.topology, "seconds": None, "static_seconds": report.static_seconds,
        "kernel_seconds": report.kernel_seconds, "roofline_seconds": report.roofline_seconds,
        "temporary_bytes": report.temporary_bytes, "peak_bytes": report.peak_bytes, "host_bytes": report.host_bytes,
        "calls": report.kernel_calls, "no_schedule": report.no_schedule,
        "issued": {k.name: (k.issued or 0) * k.launches for k in report.kernels},
    }  # fmt: skip


def measure(fn: Callable[..., Any], *args: Any, repeats: int = REPEATS, donate: Sequence[int] = ()) -> dict:
    """Run `fn` on JAX's default device, on arrays of noise: the median of `repeats` after a warm-up.

    `seconds` are the device's own where it has events of its own (TPU, GPU), from the first to the last of a run, and
    the host's clock elsewhere, which `clock` says. `peak_bytes` are of the compiled program.
    """
    device = jax.devices()[0]
    dynamic, static = eqx.partition((fn, args), lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    structs, tree = jax.tree.flatten(dynamic)
    keys = jax.random.split(jax.random.key(0), len(structs) + 1)
    arrays = jax.tree.unflatten(tree, [_noise(x, key) for x, key in zip(structs, keys)])

    def run(module, *arrays):
        whole, inputs = eqx.combine((module, arrays), static)
        return eqx.filter(whole(*inputs), eqx.is_array)

    compiled = jax.jit(run, donate_argnums=[i + 1 for i in donate]).lower(arrays[0], *arrays[1]).compile()
    times = []
    for i in range(repeats + 1):
        module, inputs = jax.block_until_ready(jax.tree.map(jnp.copy, arrays) if donate else arrays)
        seconds, clock = _timed(lambda: compiled(module, *inputs), device.platform)  # noqa: B023 (called at once)
        times += [seconds] if i else []
    memory: Any = compiled.memory_analysis()
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "where": device.device_kind, "seconds": statistics.median(times), "clock": clock,
        "temporary_bytes": memory.temp_size_in_bytes, "peak_bytes": ends + memory.temp_size_in_bytes,
    }  # fmt: skip


def _noise(x: Any, key: jax.Array) -> jax.Array:
    if eqx.is_array(x):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return key
    if jnp.issubdtype(x.dtype, jnp.floating):
        return (0.02 * jax.random.normal(key, x.shape, jnp.float32)).astype(x.dtype)
    return jnp.zeros(x.shape, x.dtype)


def _timed(run: Callable[[], Any], platform: str) -> tuple[float, str]:
    if platform not in ("tpu", "gpu"):
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start, "host"
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            jax.block_until_ready(run())
            elapsed = time.perf_counter() - start
        seconds = device_seconds(Path(folder))
    return (elapsed, "host") if seconds is None else (seconds, "device")


def device_seconds(folder: Path, planes: str = r"/device:(TPU|GPU):\d+") -> float | None:
    """From the beginning of the first to the end of the last event of the devices in a trace; None without events."""
    spans = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if re.match(planes, plane.name):
                spans += [(e.start_ns, e.start_ns + e.duration_ns) for line in plane.lines for e in line.events]
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 if spans else None


def table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """Rows of cells, the first column to the left and the others to the right, the last as long as it is."""
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join([*cells, *row[len(widths) :]]).rstrip())
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    """For a table."""
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def gigabytes(size: int | None) -> str:
    """For a table."""
    return "-" if size is None else f"{size / 1e9:.2f}"
