"""The mixer's core on a TPU that is not there: what its kernels issue and what a call takes.

    deltanox bench gdn --topology tpu7x --length 8192 65536 --heads 16/64

Value and gradients of `gated_delta_net` for one row of bfloat16 tokens, states in and out, segment ids given, or with
--layer of the whole mixer, its weights and its input, compiled ahead of time. Bundles are counted for a head-chunk, 64
tokens of one value head, and are static: what a kernel issues at the least, with all branches taken. Nothing is
measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print a line a pass and length. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench gdn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--topology", default="tpu7x", help="v4, v5e, v5p, v6e or tpu7x (default: tpu7x)")
    parser.add_argument("--length", type=int, nargs="+", default=[8192, 65536], help="tokens (default: 8192 65536)")
    parser.add_argument("--heads", default="16/64", help="key and value heads (default: 16/64)")
    parser.add_argument("--size", type=int, default=128, help="size of a head (default: 128)")
    parser.add_argument("--states-every", type=int, help="see deltanox.ops.Residuals (default: its own)")
    parser.add_argument("--t-inv", choices=("save", "recompute"), default="recompute", help="see Residuals")
    parser.add_argument("--precision", choices=("default", "high", "highest"), help="(default: that of bfloat16)")
    parser.add_argument("--conv", type=int, default=0, metavar="W", help="taps of a convolution (default: none)")
    parser.add_argument(
        "--layer", type=int, metavar="D", help="the whole mixer on D features, with its weights, instead"
    )
    parser.add_argument("--remat", action="store_true", help="with --layer: keep its input only")
    parser.add_argument("--json", action="store_true", help="print JSON, a record a pass and length")
    arguments = parser.parse_args(argv)
    try:
        key_heads, heads = (int(x) for x in arguments.heads.split("/"))
    except ValueError:
        raise ValueError(f"bench gdn: --heads must be KEY/VALUE, such as 16/64, but it is {arguments.heads}") from None
    for length in arguments.length:
        for name in ("forward", "gradient"):
            compiled = _compile_layer if arguments.layer else _compile
            record = compiled(arguments, name, key_heads, heads, length)
            if arguments.json:
                print(json.dumps(record), flush=True)
                continue
            kernels = ", ".join(f"{k} {bundles:.0f}" for k, bundles in record["bundles_per_head_chunk"].items())
            print(
                f"{name:9s} T={length} {arguments.heads} heads of {arguments.size}, {record['topology']}: "
                f"{kernels or record['no_schedule']}; temporary {record['temporary_bytes'] / 1e9:.2f} GB, "
                f"with arguments and results {record['peak_bytes'] / 1e9:.2f} GB; "
                f"roofline {1e3 * record['roofline_seconds']:.1f} ms",
                flush=True,
            )
    return 0


def _compile(arguments: argparse.Namespace, name: str, key_heads: int, heads: int, length: int) -> dict:
    import jax

    from deltanox.ops import gated_delta_net
    from deltanox.tools import aot

    size, width = arguments.size, arguments.conv
    channels = (2 * key_heads + heads) * size

    def struct(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    arrays = dict(
        qkv=struct(1, length, channels), a=struct(1, length, heads), b=struct(1, length, heads),
        A_log=struct(heads, dtype="float32"), dt_bias=struct(heads, dtype="float32"),
        initial_state=struct(1, heads, size, size, dtype="float32"),
        conv_weight=struct(channels, width) if width else None,
        conv_state=struct(1, width - 1, channels) if width else None,
    )  # fmt: skip

    def core(arrays, ids):
        return gated_delta_net(
            **arrays, segment_ids=ids, num_key_heads=key_heads, key_head_size=size, implementation="pallas",
            precision=arguments.precision, **_chunks(arguments),
        )  # fmt: skip

    def gradient(arrays, ids, cotangents):
        out, pull = jax.vjp(lambda arrays: core(arrays, ids), arrays)
        return out, pull(cotangents)

    ids = struct(1, length, dtype="int32")
    if name == "forward":
        report = aot.compile(core, arrays, ids, topology=arguments.topology)
    else:
        report = aot.compile(gradient, arrays, ids, jax.eval_shape(core, arrays, ids), topology=arguments.topology)
    return _record(report, arguments, name, heads, length)


def _compile_layer(arguments: argparse.Namespace, name: str, key_heads: int, heads: int, length: int) -> dict:
    import equinox as eqx
    import jax

    from deltanox import GatedDeltaNet
    from deltanox.tools import aot

    size = arguments.size
    layer = eqx.filter_eval_shape(
        GatedDeltaNet, arguments.layer, num_key_heads=key_heads, num_value_heads=heads, key_head_size=size,
        value_head_size=size, conv_size=arguments.conv or 4, dtype="bfloat16", precision=arguments.precision,
        key=jax.random.key(0), **_chunks(arguments),
    )  # fmt: skip
    weights, static = eqx.partition(layer, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def forward(weights, x):
        return jax.vmap(lambda x: eqx.combine(weights, static)(x)[0])(x)

    def gradient(weights, x, cotangent):
        out, pull = jax.vjp(jax.checkpoint(forward) if arguments.remat else forward, weights, x)
        return out, pull(cotangent)

    x = jax.ShapeDtypeStruct((1, length, arguments.layer), "bfloat16")
    if name == "forward":
        report = aot.compile(forward, weights, x, topology=arguments.topology)
    else:
        report = aot.compile(gradient, weights, x, x, topology=arguments.topology)
    return _record(report, arguments, name, heads, length)


def _chunks(arguments: argparse.Namespace) -> dict:
    """The options of the record: T^-1 is kept in chunks of 128 tokens."""
    from deltanox.ops import Residuals

    saved = arguments.t_inv == "save"
    every = (1 if saved else 2) if arguments.states_every is None else arguments.states_every
    return {"residuals": Residuals(states_every=every, t_inv=arguments.t_inv), "chunk_size": 128 if saved else 64}


def _record(report, arguments: argparse.Namespace, name: str, heads: int, length: int) -> dict:
    bundles: dict[str, float] = {}
    for kernel in report.kernels:
        if kernel.issued is not None:
            share = kernel.issued * kernel.launches / (heads * length / 64)
            bundles[kernel.name] = bundles.get(kernel.name, 0.0) + share
    return {
        "pass": name, "length": length, "heads": arguments.heads, "topology": report.topology,
        "bundles_per_head_chunk": bundles, "calls": report.kernel_calls, "no_schedule": report.no_schedule,
        "argument_bytes": report.argument_bytes, "output_bytes": report.output_bytes,
        "temporary_bytes": report.temporary_bytes,
        "peak_bytes": report.argument_bytes + report.output_bytes + report.temporary_bytes - report.aliased_bytes,
        "roofline_seconds": report.roofline_seconds,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
