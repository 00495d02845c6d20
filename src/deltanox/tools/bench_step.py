"""Whole training steps of configs: latency on the TPU or GPU that is attached, or what a TPU that is not would take.

    deltanox bench step qwen3_5_0.8b --topology v6e --set data.row_length=8192

As `deltanox bench gdn`: on an attached device the step is timed (median, warm), elsewhere it is compiled for the
topology and nothing is measured; `static` is the kernels' bundles over the clock and XLA's own products at the chip's
peak. Memory is the compiled program's, with the training state; `forward` is the loss without gradients.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from deltanox.tools import _measure
from deltanox.tools._measure import gigabytes, milliseconds

HEAD = ("config", "tokens", "run", "measured ms", "static ms", "kernels ms", "roofline ms", "peak GB", "host GB", "")
WIDTHS = (24, 8, 8, 11, 9, 10, 11, 7, 7)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a config and pass. Returns the exit status; wrong use is a ValueError."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench step", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", nargs="+", metavar="CONFIG", help="names of ready configs, or TOML files")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value of every config"
    )
    parser.add_argument(
        "--run", choices=("forward", "step"), nargs="+", default=("forward", "step"), help="(default: both)"
    )
    _measure.add_arguments(parser)
    arguments = parser.parse_args(argv)

    from deltanox.tools._aot_command import program
    from deltanox.train import find_config, read_config

    configs = [read_config(path, arguments.set) for path in arguments.config]
    if not arguments.json:
        print(_measure.table([HEAD], WIDTHS), flush=True)
    for path, config in zip(arguments.config, configs):
        for run in arguments.run:
            fn, args, donate = program(config, what=run)
            record = _measure.figures(arguments, fn, *args, donate=donate)
            rows = config.data.batch_size * (config.train.accumulation if run == "step" else 1)
            record = {"config": find_config(path).stem, "run": run, "tokens": rows * config.data.row_length, **record}
            if arguments.json:
                print(json.dumps(record), flush=True)
                continue
            times = (record.get(f"{name}_seconds") for name in ("static", "kernel", "roofline"))
            cells = (
                record["config"], str(record["tokens"]), run, milliseconds(record["seconds"]),
                *map(milliseconds, times), gigabytes(record.get("peak_bytes")), gigabytes(record.get("host_bytes")),
                record.get("refused", ""),
            )  # fmt: skip
            print(_measure.table([cells], WIDTHS), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
