"""Loading a checkpoint against reading its bytes, and the memory that it takes.

    deltanox bench load --size 0.8B --dtype bfloat16

Writes a checkpoint of that size (constant weights) into a temporary folder, then reads its bytes and loads it in turns,
from the system's cache of the files. Peak memory is that of a fresh process that loads and does nothing else, beyond
what it held before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MEASURE = """
import re, sys
import jax
from deltanox.interop import load
def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
jax.block_until_ready(jax.numpy.zeros(1))
before = status("VmRSS")
model, config = load(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(jax.tree.leaves(model))
print(status("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(model)))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", default="0.8B", help="a size of Qwen3.5 (default: 0.8B, 1.5 GB)")
    parser.add_argument("--dtype", default="bfloat16", help="to load into; the file is bfloat16 (default: bfloat16)")
    parser.add_argument("--shard-bytes", type=int, default=2 * 2**30, help="size of a shard (default: 2 GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="best of so many (default: 5)")
    parser.add_argument("--folder", help="where to write it (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)

    import jax
    import jax.numpy as jnp

    from deltanox.interop import load, save
    from deltanox.interop._load import floating_dtype, make_skeleton
    from deltanox.models import QWEN3_5_SIZES

    if arguments.size not in QWEN3_5_SIZES:
        raise ValueError(f"bench load: --size must be one of {', '.join(QWEN3_5_SIZES)}, but it is {arguments.size}")
    floating_dtype("bench load", arguments.dtype)
    config = QWEN3_5_SIZES[arguments.size]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        made = jax.tree.map(lambda x: jnp.full(x.shape, 0.25, x.dtype), make_skeleton(config, "bfloat16"))
        save(made, config, Path(folder, "checkpoint"), shard_bytes=arguments.shard_bytes)
        del made
        checkpoint = Path(folder, "checkpoint")
        files = sorted(checkpoint.glob("*.safetensors"))
        best = {"read": float("inf"), "load": float("inf")}
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            for file in files:
                file.read_bytes()
            best["read"] = min(best["read"], time.perf_counter() - begin)
            begin = time.perf_counter()
            model, _ = load(checkpoint, dtype=arguments.dtype)
            jax.block_until_ready(jax.tree.leaves(model))
            best["load"] = min(best["load"], time.perf_counter() - begin)
            del model
        command = [sys.executable, "-c", MEASURE, str(checkpoint), arguments.dtype]
        peak, held = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        record = {
            "size": arguments.size, "dtype": arguments.dtype, "file_bytes": sum(f.stat().st_size for f in files),
            "read_seconds": best["read"], "load_seconds": best["load"], "ratio": best["load"] / best["read"],
            "model_bytes": held, "peak_bytes": peak, "embedding_bytes": config.vocab_size * config.embed_size * 2,
        }  # fmt: skip
    if arguments.json:
        print(json.dumps(record))
    else:
        print(
            f"{record['size']} in {record['dtype']}: {record['file_bytes'] / 1e9:.2f} GB read in "
            f"{record['read_seconds']:.3f} s, loaded in {record['load_seconds']:.3f} s (ratio {record['ratio']:.2f}); "
            f"the model is {held / 1e9:.2f} GB, the peak beyond the process {peak / 1e9:.2f} GB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
