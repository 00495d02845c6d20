"""What policies of `deltanox.remat` cost: memory of a stack's layers, and what is computed again.

    deltanox bench remat --length 8192,65536 --heads 16/64
    deltanox bench remat --policy gdn=device mlp=offload --policy kernels --compile

Value and gradients of a scanned stack of one block (GatedDeltaNet and SwiGLU) in bfloat16, for one row of tokens. What
a layer keeps is JAX's own account of shapes, and products are counted in the jaxpr: nothing runs, and a TPU's kernels
are taken. With --compile the program is compiled for a TPU that is not there, and says how much memory it takes and
how often it calls the delta rule's forward kernel in a layer. Nothing is measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from deltanox.tools import _measure

DEFAULT = (
    "nothing", "gdn=device", "gdn=device gdn_conv=device", "gdn=offload gdn_conv=offload", "mlp=device", "kernels",
    "minimal_offloaded", "everything",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each policy and length. Returns the exit status; wrong use is a ValueError."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench remat", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _measure.add_lengths(parser)
    parser.add_argument("--heads", default="16/64", help="key and value heads (default: 16/64)")
    parser.add_argument("--size", type=int, default=128, help="size of a head (default: 128)")
    parser.add_argument("--hidden", type=int, default=4096, help="embedding size (default: 4096)")
    parser.add_argument("--mlp", type=int, default=12288, help="width of the feed-forward part (default: 12288)")
    parser.add_argument("--depth", type=int, default=4, help="layers of the compiled stack (default: 4)")
    parser.add_argument(
        "--policy", nargs="+", action="append", metavar="NAME", help="a ready policy, places as name=place, or both"
    )
    parser.add_argument("--compile", action="store_true", help="compile for a TPU as well (slow)")
    parser.add_argument("--topology", default="tpu7x", help="v4, v5e, v5p, v6e or tpu7x (default: tpu7x)")
    parser.add_argument("--json", action="store_true", help="print JSON, a record a policy and length")
    parser.add_argument("--plot", metavar="FILE", help="draw the trade as a picture, .svg or .png")
    arguments = parser.parse_args(argv)
    arguments.key_heads, arguments.value_heads = _measure.key_and_value_heads("remat", arguments.heads)
    policies = [words.split() for words in DEFAULT] if arguments.policy is None else arguments.policy
    if arguments.compile:
        from deltanox.tools import aot

        aot.prepare()
    records = []
    for length in _measure.lengths(arguments):
        for words in policies:
            records.append(record := measure(arguments, words, length))
            print(json.dumps(record) if arguments.json else line(record), flush=True)
    if arguments.plot:
        plot(records, arguments.plot)
    return 0


def measure(arguments: argparse.Namespace, words: Sequence[str], length: int) -> dict[str, Any]:
    """Bytes that a layer keeps, and the products of a layer's step beside those of one that keeps everything."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from deltanox import GatedDeltaNet, HybridBlock, SwiGLU, remat
    from deltanox.nn import Stack
    from deltanox.tools import aot
    from deltanox.tools.flops import count

    ready = [word for word in words if "=" not in word] or ["nothing"]
    policy = remat.policy(ready[0], **dict(word.split("=", 1) for word in words if "=" in word))

    def block(key: jax.Array) -> HybridBlock:
        mixer = GatedDeltaNet(
            arguments.hidden, num_key_heads=arguments.key_heads, num_value_heads=arguments.value_heads,
            key_head_size=arguments.size, value_head_size=arguments.size, dtype=jnp.bfloat16, key=key,
        )  # fmt: skip
        mlp = SwiGLU(arguments.hidden, arguments.mlp, dtype=jnp.bfloat16, key=key)
        return HybridBlock(mixer, mlp, embed_size=arguments.hidden, dtype=jnp.bfloat16)

    def step(stack: Stack, x: jax.Array, policy: remat.Policy = policy) -> Any:
        def loss(stack, x):
            y = jax.vmap(lambda x: stack(x, remat=policy)[0])(x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return eqx.filter_value_and_grad(loss)(stack, x)

    def stack(depth: int) -> Stack:
        return eqx.filter_eval_shape(lambda key: Stack(block, depth, key=key), jax.random.key(0))

    def flops(policy: remat.Policy) -> int:
        arrays, static = eqx.partition((stack(1), x), lambda x: isinstance(x, jax.ShapeDtypeStruct))
        jaxpr = jax.make_jaxpr(lambda arrays: eqx.filter(step(*eqx.combine(arrays, static), policy), eqx.is_array))
        return count(jaxpr(arrays)).flops

    x: Any = jax.ShapeDtypeStruct((1, length, arguments.hidden), jnp.bfloat16)
    layer = eqx.filter_eval_shape(block, jax.random.key(0))
    kept = remat.bytes_per_layer(policy, lambda x, layer: jax.vmap(lambda x: layer(x)[0])(x), x, layer)
    again = flops(policy) / flops(remat.everything) - 1
    record = {"policy": " ".join(words), "length": length, "device_bytes": kept.device, "host_bytes": kept.host}
    record["computed_again"] = again
    if arguments.compile:
        try:
            report = aot.compile(step, stack(arguments.depth), x, topology=arguments.topology)
        except jax.errors.JaxRuntimeError as error:
            record["compiled"] = " ".join(str(error).split())[:200]
        else:
            record["compiled"] = {
                "topology": report.topology, "depth": arguments.depth, "device_bytes": report.device_bytes,
                "temporary_bytes": report.temporary_bytes, "host_bytes": report.host_bytes,
                "gdn_forward": report.kernel_calls.get("gdn_forward", 0),
            }  # fmt: skip
    return record


def line(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    text = (
        f"T={record['length']:6d}  {record['policy']:28s} a layer keeps {record['device_bytes'] / 1e9:6.2f} GB on the "
        f"device, {record['host_bytes'] / 1e9:6.2f} GB on the host; {record['computed_again']:5.1%} computed again"
    )
    compiled = record.get("compiled")
    if isinstance(compiled, dict):
        sizes = f"temporary {compiled['temporary_bytes'] / 1e9:.2f} GB, host {compiled['host_bytes'] / 1e9:.2f} GB"
        calls = f"gdn_forward × {compiled['gdn_forward']}"
        return f"{text}; {compiled['depth']} layers on {compiled['topology']}: {sizes}, {calls}"
    return text + (f"; does not compile: {compiled}" if compiled else "")


def plot(records: Sequence[dict[str, Any]], path: str) -> None:
    """Memory of a layer against what is computed again, one panel a length."""
    from matplotlib.figure import Figure

    lengths = sorted({record["length"] for record in records})
    figure = Figure(figsize=(5.5 * len(lengths), 3.6), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(panels, lengths):
        here = [record for record in records if record["length"] == length]
        names = [f"{record['policy']}\n{record['computed_again']:.0%} computed again" for record in here]
        device = [record["device_bytes"] / 1e9 for record in here]
        panel.barh(names, device, color="C0", label="device")
        panel.barh(names, [r["host_bytes"] / 1e9 for r in here], left=device, color="C1", label="host")
        panel.invert_yaxis()
        panel.tick_params(axis="y", labelsize=7)
        panel.set_title(f"{length:,} tokens")
        panel.set_xlabel("GB kept by a layer for the backward pass")
        panel.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
