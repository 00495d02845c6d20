"""The gated delta rule on this machine's CPU beside its peers, in one run, each in a process
of its own.

Peers that are not installed are left out and named. They are, on the Python that runs this:

    pip install torch transformers                                         (transformers' chunked rule in PyTorch)
    pip download --no-deps jax-linear-attention==0.1.0 && unzip ... -d FOLDER  (Python 3.12 or newer; pass --jla FOLDER)

All run in turn, several rounds. Each time is the least of all rounds and repeats, `spread` how far the slowest round's
least time is above it; the ratio is ours over the peer's: below 1 we are faster. A large spread tells of other work.
Several lengths give a table each, and how our time grows from the first to each of the others.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from ._rounds import in_turn, spread

LABELS = {"forward": "forward", "both": "forward and backward"}
PEERS = ("deltanox", "jax-linear-attention", "transformers")


def _inputs(arguments: argparse.Namespace):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (arguments.batch, arguments.length[-1], arguments.heads, arguments.size)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    g, beta = -rng.random(shape[:3], dtype=np.float32), rng.random(shape[:3], dtype=np.float32)
    return q, k, v, g, beta


def _jax(arguments: argparse.Namespace, op: Callable) -> tuple[Callable, Callable]:
    import jax
    import jax.numpy as jnp

    inputs = [jnp.asarray(x) for x in _inputs(arguments)]
    forward = jax.jit(op)
    both = jax.jit(jax.grad(lambda *x: jnp.sum(op(*x) ** 2), argnums=tuple(range(5))))
    return lambda: jax.block_until_ready(forward(*inputs)), lambda: jax.block_until_ready(both(*inputs))


def _torch(arguments: argparse.Namespace) -> tuple[Callable, Callable]:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as op

    inputs = [torch.tensor(x, requires_grad=True) for x in _inputs(arguments)]

    def forward():
        with torch.no_grad():
            op(*inputs, use_qk_l2norm_in_kernel=True)

    def both():
        op(*inputs, use_qk_l2norm_in_kernel=True)[0].square().sum().backward()

    return forward, both


def _pair(arguments: argparse.Namespace) -> tuple[Callable, Callable]:
    """The forward pass, and the forward and backward passes, of one implementation."""
    if arguments.only == "transformers":
        return _torch(arguments)
    if arguments.only == "jax-linear-attention":
        sys.path.insert(0, arguments.jla or "")
        from jla.ops.chunked import gated_delta_rule  # pyright: ignore[reportMissingImports]
    else:
        from deltanox.ops import gated_delta_rule
    return _jax(arguments, lambda q, k, v, g, b: gated_delta_rule(q, k, v, g, b, use_qk_l2norm=True)[0])


def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    result = {}
    for name, run in zip(("forward", "both"), _pair(arguments)):
        run()
        times = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        result[name] = min(times)
    return result


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="deltanox bench peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, nargs="+", default=[2048], help="tokens; several for a table each")
    parser.add_argument("--heads", type=int, default=16, help="key and value heads")
    parser.add_argument("--size", type=int, default=128, help="size of a head")
    parser.add_argument("--repeats", type=int, default=7, help="runs of a round (default: 7)")
    parser.add_argument("--rounds", type=int, default=3, help="times that all run in turn (default: 3)")
    parser.add_argument("--jla", metavar="FOLDER", help="an unpacked jax-linear-attention wheel")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)  # the child processes
    arguments = parser.parse_args(argv)
    if arguments.only:
        print(json.dumps(_measure(arguments)))
        return 0

    first = None
    for length in arguments.length:
        ours = _table(arguments, argv, length)
        if ours and first:
            growth = ", ".join(f"{ours[name] / first[name]:.1f} {label}" for name, label in LABELS.items())
            print(f"ours, T={length} over T={arguments.length[0]}: {growth}")
        first = first or ours
    return 0


def _table(arguments: argparse.Namespace, argv: Sequence[str], length: int) -> dict[str, float] | None:
    """Measure and print one line a peer. Returns our times."""
    print(
        f"B={arguments.batch} T={length} H={arguments.heads} K=V={arguments.size} float32, seconds "
        f"(least of {arguments.rounds} rounds of {arguments.repeats}), and ours / theirs"
    )
    print(f"{'':22} {'forward':>9} {'spread':>7} {'ratio':>6} {'forward+backward':>17} {'spread':>7} {'ratio':>6}")
    found = in_turn({peer: partial(_run, argv, peer, length) for peer in PEERS}, arguments.rounds)
    ours: dict[str, float] | None = None
    for peer, rounds in found.items():
        errors = [times for times in rounds if isinstance(times, str)]
        if errors:
            print(f"{peer:22} left out: {errors[0]}")
            continue
        line, least = f"{peer:22}", {}
        for name, width in (("forward", 9), ("both", 17)):
            seconds = [times[name] for times in rounds if not isinstance(times, str)]
            least[name] = min(seconds)
            ratio = f"{(ours or least)[name] / least[name]:.2f}" if ours or peer == "deltanox" else "-"
            line += f" {least[name]:{width}.3f} {spread(seconds):>7} {ratio:>6}"
        print(line)
        ours = least if peer == "deltanox" else ours
    return ours


def _run(argv: Sequence[str], peer: str, length: int) -> dict[str, float] | str:
    """The times of a peer in a process of its own, or why there are none."""
    command = [sys.executable, "-m", "deltanox.cli", "bench", "peers", *argv, "--only", peer, "--length", str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])
