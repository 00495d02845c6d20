"""Tokens a second of a training step, beside transformers' `Qwen3_5ForCausalLM` of the same sizes.

    deltanox bench train qwen3_5_nano

Each side runs in a process of its own, one after the other: forward, backward, clipping and AdamW in float32 on
batches of one shape. Ours is the program that `deltanox train` runs, packed documents and their boundaries included,
with as many steps a call as the config says; the peer, whose packing needs CUDA, gets rows without boundaries. Its
AdamW is PyTorch's fused one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._peer import require_peer
from ._rounds import spread


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one line a side and the ratio. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="a dense Qwen3.5: name of a ready config, or TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value of the config"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps that are timed, after a call or two that are not (default: 20)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that both sides run in turn; the best of each counts (default: 3)"
    )
    parser.add_argument("--side", choices=("both", "deltanox", "transformers"), default="both")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.in_process:
        side = _deltanox if arguments.side == "deltanox" else _transformers
        print(json.dumps(side(arguments)))
        return 0
    from deltanox.train import read_config

    read_config(arguments.config, arguments.set)  # what is wrong with it is said here, not in a process of its own
    sides = ("deltanox", "transformers") if arguments.side == "both" else (arguments.side,)
    if "transformers" in sides:
        require_peer("bench train", "--side deltanox")
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side in sides:
            result = _run(side, arguments)
            rates[side].append(result["tokens_per_second"])
            print(
                f"{side:12s} {result['tokens_per_second']:8.0f} tokens/s   {result['parameters'] / 1e6:.3f} M "
                f"parameters, batch {result['batch']} x {result['length']}, first step after {result['start']:.1f} s   "
                f"({result['versions']})",
                flush=True,
            )
    if len(sides) == 2:
        ratio = max(rates["deltanox"]) / max(rates["transformers"])
        spreads = ", ".join(f"{side} {spread(1 / rate for rate in rates[side])}" for side in sides)
        print(
            f"ratio        {ratio:8.2f}            deltanox / transformers, best of {arguments.rounds} rounds, "
            f"{os.cpu_count()} cores; slowest round above the fastest: {spreads}"
        )
    return 0


def _run(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "deltanox.tools.bench_train", arguments.config, "--side", side, "--in-process"]
    command += ["--steps", str(arguments.steps)] + [part for value in arguments.set for part in ("--set", value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(f"bench train: the process of {side} failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _time(call: Callable[[int], Any], wait: Callable[[Any], Any], steps: int, most: int) -> tuple[float, float]:
    """Seconds until the first step (compilation included) is done, and seconds a step, the first calls left out.

    `call(n)` does n ≤ `most` steps."""
    begin = time.perf_counter()
    wait(call(1))
    start = time.perf_counter() - begin
    wait(call(most))
    begin = time.perf_counter()
    for left in range(steps, 0, -most):
        result = call(min(most, left))
    wait(result)
    return start, (time.perf_counter() - begin) / steps


def _deltanox(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np

    from deltanox.train import (
        DataPosition,
        TrainingData,
        init_state,
        learning_rate_schedule,
        make_optimiser,
        make_step,
        read_config,
        repeat_step,
        split_documents,
        standard_library,
    )
    from deltanox.train._loop import _next, default_model

    config = read_config(arguments.config, arguments.set)
    rows, length = config.data.batch_size, config.data.row_length
    training, _ = split_documents(standard_library(), config.data.validation_fraction)
    data = TrainingData(training, length, rows, config.data.seed)
    model = config.precision.cast_parameters(default_model(config, jax.random.key(0)))
    state, static, optimiser = init_state(
        model, lambda p: make_optimiser(config.optimiser, config.train.steps, p), key=jax.random.key(1)
    )
    most = config.train.steps_per_call
    schedule = learning_rate_schedule(config.optimiser, config.train.steps)
    function = jax.jit(repeat_step(make_step(static, optimiser, schedule, config.precision), most), donate_argnums=0)
    size = sum(x.size for x in jax.tree.leaves(state.parameters))
    position = DataPosition()

    def call(count):
        nonlocal state, position
        batches, position = _next(data, position, 1, count, most)
        state, metrics = function(state, batches, np.int32(count))
        return metrics.loss

    start, seconds = _time(call, jax.block_until_ready, arguments.steps, most)
    versions = f"jax {jax.__version__}"
    return _result(rows, length, seconds, start, size, versions)


def _transformers(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from deltanox.train import read_config

    config = read_config(arguments.config, arguments.set)
    sizes, settings = config.model, config.optimiser
    if sizes.num_experts:
        raise ValueError("bench train: the peer is the dense Qwen3.5; give a config without experts")
    torch.manual_seed(0)
    peer = Qwen3_5TextConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.embed_size,
        intermediate_size=sizes.mlp_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_size,
        linear_conv_kernel_dim=sizes.conv_size,
        linear_key_head_dim=sizes.key_head_size,
        linear_value_head_dim=sizes.value_head_size,
        linear_num_key_heads=sizes.num_key_heads,
        linear_num_value_heads=sizes.num_value_heads,
        layer_types=[
            "linear_attention" if (i + 1) % sizes.full_attention_interval else "full_attention"
            for i in range(sizes.num_layers)
        ],
        rms_norm_eps=sizes.eps,
        tie_word_embeddings=sizes.tied_head,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "partial_rotary_factor": sizes.rotary_fraction,
            "mrope_section": list(sizes.mrope_sections or _sections(sizes.rotary_size // 2)),
            "mrope_interleaved": True,
        },
        use_cache=False,
    )
    model = Qwen3_5ForCausalLM(peer).float().train()
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    rows, length = config.data.batch_size, config.data.row_length
    generator = torch.Generator().manual_seed(0)

    def step(_):
        tokens = torch.randint(0, 257, (rows, length + 1), generator=generator)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or float("inf"))
        optimiser.step()
        return loss

    start, seconds = _time(step, lambda loss: loss.item(), arguments.steps, 1)
    size = sum(parameter.numel() for parameter in model.parameters())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return _result(rows, length, seconds, start, size, versions)


def _sections(half: int) -> tuple[int, int, int]:
    """Any split of the rotated frequencies among time, height and width: for text the three agree."""
    third = half // 3
    return half - 2 * third, third, third


def _result(rows: int, length: int, seconds: float, start: float, size: int, versions: str) -> dict[str, Any]:
    return {
        "tokens_per_second": rows * length / seconds,
        "parameters": size,
        "batch": rows,
        "length": length,
        "start": start,
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
