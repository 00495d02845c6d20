"""The gated DeltaNet mixer at 8k and 64k: the delta rule's kernels alone, and the whole layer around them.

    deltanox bench gdn --length 8192,65536 --heads 16/64

One row of bfloat16 tokens, B = 1. `core` is `gated_delta_net`, states in and out, segment ids given (with --conv W its
convolution too); `layer` is the whole `GatedDeltaNet` on --hidden features with its projections, value and gradients
of weights and input. `step` is forward and backward, `backward` what it takes beyond `forward`. "pallas" are the
kernels, "xla" is the path without them.

On an attached TPU or GPU calls are timed (median, warm, by the device's own events). On another machine they are
compiled for a TPU that is not there, and nothing is measured: `static` is the kernels' instruction bundles over the
clock and XLA's own products at the chip's peak, what the call takes at the least. Bundles are those of a head-chunk, 64
tokens of one value head. Memory is the compiled program's: arguments, results and temporaries. Figures that others
publish for the same call, measured on hardware of theirs, are printed beside it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from deltanox.tools import _measure, _published
from deltanox.tools._measure import gigabytes, milliseconds

PARTS = ("core", "layer")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a call. Returns the exit status; wrong use is a ValueError."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench gdn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _measure.add_lengths(parser)
    _measure.add_arguments(parser)
    parser.add_argument(
        "--part", choices=("core", "layer"), nargs="+", default=("core", "layer"), help="(default: both)"
    )
    parser.add_argument(
        "--implementation", choices=("pallas", "xla", "chunked"), nargs="+", default=("pallas", "xla"),
        help="(default: pallas xla)",
    )  # fmt: skip
    parser.add_argument("--heads", default="16/64", help="key and value heads (default: 16/64)")
    parser.add_argument("--size", type=int, default=128, help="size of a head (default: 128)")
    parser.add_argument("--hidden", type=int, default=4096, help="features of the layer (default: 4096)")
    parser.add_argument("--states-every", type=int, help="see deltanox.ops.Residuals (default: its own)")
    parser.add_argument("--t-inv", choices=("save", "recompute"), default="recompute", help="see Residuals")
    parser.add_argument("--qkv", choices=("save", "recompute"), default="save", help="of the layer, see Residuals")
    parser.add_argument("--precision", choices=("default", "high", "highest"), help="(default: that of bfloat16)")
    parser.add_argument(
        "--conv", type=int, default=0, metavar="W", help="taps of the core's convolution (default: none)"
    )
    parser.add_argument("--remat", action="store_true", help="keep the layer's input only, and run it again")
    arguments = parser.parse_args(argv)
    heads = _measure.key_and_value_heads("gdn", arguments.heads)
    if not arguments.json:
        print(_line(HEAD), flush=True)
    for length in _measure.lengths(arguments):
        for part in arguments.part:
            for engine in arguments.implementation:
                for record in _records(arguments, part, engine, heads, length):
                    print(json.dumps(record) if arguments.json else _line(_cells(record)), flush=True)
    return 0


HEAD = ("T", "part", "engine", "run", "measured ms", "static ms", "kernels ms", "roofline ms", "peak GB", "bundles")
WIDTHS = (6, 5, 7, 8, 11, 9, 10, 11, 7)


def _line(cells: Sequence[str]) -> str:
    return _measure.table([cells], WIDTHS)


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    rest = [", ".join(f"{name} {x:.0f}" for name, x in record["bundles_per_head_chunk"].items())]
    rest += [record.get("refused", ""), record.get("no_schedule", ""), record["published"]]
    return (
        str(record["length"]), record["part"], record["engine"], record["run"], milliseconds(record["seconds"]),
        *(milliseconds(record.get(f"{name}_seconds")) for name in ("static", "kernel", "roofline")),
        gigabytes(record.get("peak_bytes")), "; ".join(filter(None, rest)),
    )  # fmt: skip


def _records(arguments: argparse.Namespace, part: str, engine: Any, heads: tuple[int, int], length: int):
    """The forward pass, both passes, and their difference."""
    make = _core if part == "core" else _layer
    found = {}
    for run in ("forward", "step"):
        fn, *args = make(arguments, run, engine, heads, length)
        found[run] = _measure.figures(arguments, fn, *args)
        if engine != "pallas":  # XLA's loops are no kernels: their bundles are in the roofline
            found[run] |= {"static_seconds": None, "kernel_seconds": None}
    if not any("refused" in record for record in found.values()):
        found["backward"] = _beyond(found["forward"], found["step"])
    label = "core with convolution" if part == "core" and arguments.conv else part
    for run, record in found.items():
        issued = record.pop("issued", {})
        yield {
            "part": part, "engine": engine, "run": run, "length": length, "heads": arguments.heads, **record,
            "bundles_per_head_chunk": {k: n / (heads[1] * length / 64) for k, n in issued.items()},
            "published": _published.told(_published.beside(label, run, arguments.heads, length)),
        }  # fmt: skip


def _beyond(forward: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    """What a step takes beyond the forward pass; its memory is the step's."""

    def less(name: str) -> float | None:
        a, b = forward.get(name), step.get(name)
        return None if a is None or b is None else b - a

    times = {name: less(name) for name in ("seconds", "static_seconds", "kernel_seconds")}
    return {"where": step["where"], **times, "peak_bytes": step["peak_bytes"]}


def _core(arguments: argparse.Namespace, run: str, engine: Any, heads: tuple[int, int], length: int) -> tuple[Any, ...]:
    import jax

    from deltanox.ops import gated_delta_net

    (key_heads, value_heads), size, width = heads, arguments.size, arguments.conv
    channels = (2 * key_heads + value_heads) * size

    def struct(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    arrays = dict(
        qkv=struct(1, length, channels), a=struct(1, length, value_heads), b=struct(1, length, value_heads),
        A_log=struct(value_heads, dtype="float32"), dt_bias=struct(value_heads, dtype="float32"),
        initial_state=struct(1, value_heads, size, size, dtype="float32"),
        conv_weight=struct(channels, width) if width else None,
        conv_state=struct(1, width - 1, channels) if width else None,
    )  # fmt: skip

    def forward(arrays: Any, ids: Any) -> Any:
        return gated_delta_net(
            **arrays, segment_ids=ids, num_key_heads=key_heads, key_head_size=size, implementation=engine,
            precision=arguments.precision, **_record(arguments),
        )  # fmt: skip

    def step(arrays: Any, ids: Any, cotangents: Any) -> Any:
        out, pull = jax.vjp(lambda arrays: forward(arrays, ids), arrays)
        out, cotangents = jax.lax.optimization_barrier((out, cotangents))  # of a loss, they come after the outputs
        return out, pull(cotangents)

    ids = struct(1, length, dtype="int32")
    if run == "forward":
        return forward, arrays, ids
    return step, arrays, ids, jax.eval_shape(forward, arrays, ids)


def _layer(
    arguments: argparse.Namespace, run: str, engine: Any, heads: tuple[int, int], length: int
) -> tuple[Any, ...]:
    import equinox as eqx
    import jax

    from deltanox import GatedDeltaNet

    layer = eqx.filter_eval_shape(
        GatedDeltaNet, arguments.hidden, num_key_heads=heads[0], num_value_heads=heads[1],
        key_head_size=arguments.size, value_head_size=arguments.size, conv_size=arguments.conv or 4, dtype="bfloat16",
        implementation=engine, precision=arguments.precision, key=jax.random.key(0), **_record(arguments),
    )  # fmt: skip
    weights, static = eqx.partition(layer, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def forward(weights: Any, x: Any) -> Any:
        return jax.vmap(lambda x: eqx.combine(weights, static)(x)[0])(x)

    def step(weights: Any, x: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(jax.checkpoint(forward) if arguments.remat else forward, weights, x)
        out, cotangent = jax.lax.optimization_barrier((out, cotangent))
        return out, pull(cotangent)

    x: Any = jax.ShapeDtypeStruct((1, length, arguments.hidden), "bfloat16")
    return (forward, weights, x) if run == "forward" else (step, weights, x, x)


def _record(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of what is kept: T^-1 in chunks of 128 tokens."""
    from deltanox.ops import Residuals

    saved = arguments.t_inv == "save"
    every = (1 if saved else 2) if arguments.states_every is None else arguments.states_every
    residuals = Residuals(states_every=every, t_inv=arguments.t_inv, qkv=arguments.qkv)
    return {"residuals": residuals, "chunk_size": 128 if saved else 64}


if __name__ == "__main__":
    sys.exit(main())
