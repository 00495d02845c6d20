"""Tokens a second of greedy generation, beside transformers' `generate` on the same weights, in one process.

    deltanox bench decode qwen3_5_nano qwen3_5_tiny

Random weights in float32 are saved as a Hugging Face checkpoint, which transformers loads; both sides get the same
prompts and a warm-up, then take turns, PyTorch with each number of `--threads`. Prefill counts. Printed are the best
of all rounds and how far the slowest is above it, the ratio of the best, and the share of equal tokens. With
`--drafts K` a multi-token prediction head of random weights drafts K tokens a step: once where its drafts are as good
as wrong, once where all are right (the norms before the heads are zero there, and the text one token), which bounds
what a trained head gives.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ._peer import require_peer
from ._rounds import in_turn, spread

OURS, PEER = "deltanox", "transformers"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="deltanox bench decode", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", nargs="+", metavar="CONFIG", help="names of ready configs, or TOML files")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows (default: 1 8)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--new", type=int, default=64, help="tokens generated a row (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every side (default: 5)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts a step, beside decoding without (default: 0)")
    threads = sorted({1, os.cpu_count() or 1})
    parser.add_argument(
        "--threads", type=int, nargs="+", default=threads, help="of PyTorch, one or several (default: 1, and all cores)"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each batch")
    arguments = parser.parse_args(argv)
    if not arguments.no_peer:
        require_peer("bench decode", "--no-peer")
    for name in arguments.config:
        for record in _bench(name, arguments):
            print(json.dumps(record) if arguments.json else "\n".join(lines(record)), flush=True)
    return 0


def lines(record: dict[str, Any]) -> list[str]:
    """A table of one batch size."""
    head = "{config}, batch {batch}: prompt of {prompt}, {new} new tokens a row, best of {rounds} rounds, spread"
    table = [head.format(**record)]
    for name, side in record["sides"].items():
        extra = ""
        if side["equal"] is not None:
            extra = f"   {OURS} is {side['ratio']:.2f} times as fast   {side['equal']:.1%} of the tokens equal"
        if side["accepted"] is not None:
            extra = f"   {1 / side['ratio']:.2f} times as fast as without   {side['accepted']:.2f} accepted a step"
        table.append(f"  {name:24s} {side['tokens_per_second']:8.1f} tokens/s {side['spread']:>7}{extra}")
    return table


def _bench(name: str, arguments: argparse.Namespace):
    import jax

    from deltanox.models import Qwen3NextConfig, qwen3_5, qwen3_next
    from deltanox.train import find_config, read_config

    sizes = dataclasses.replace(read_config(name, []).model, mtp_head=arguments.drafts > 0)
    make = qwen3_next if isinstance(sizes, Qwen3NextConfig) else qwen3_5
    model = jax.jit(lambda key: make(sizes, key=key))(jax.random.key(0))
    peer = None if arguments.no_peer else _transformers(model, sizes)
    model = model.unstack()
    rng = np.random.default_rng(0)
    for batch in arguments.batch:
        tokens = rng.integers(0, min(sizes.vocab_size, 257), (batch, arguments.prompt))
        sides = _sides(model, peer, tokens, arguments)
        texts = {side: run() for side, (run, _) in sides.items()}  # the warm-up
        seconds = in_turn({side: partial(_seconds, run) for side, (run, _) in sides.items()}, arguments.rounds)
        found = {}
        for side, (_, streamed) in sides.items():
            ratio = min(seconds[side]) / min(seconds[OURS])
            counts = streamed[-1].statistics if streamed else None
            found[side] = {
                "tokens_per_second": batch * arguments.new / min(seconds[side]),
                "spread": spread(seconds[side]),
                "ratio": None if side == OURS else ratio,
                "equal": float(np.mean(texts[side] == texts[OURS])) if side.startswith(PEER) else None,
                "accepted": counts.accepted_per_step if counts and counts.drafted else None,
            }
        yield {
            "config": find_config(name).stem, "batch": batch, "prompt": arguments.prompt, "new": arguments.new,
            "rounds": arguments.rounds, "drafts": arguments.drafts, "sides": found,
        }  # fmt: skip


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _sides(model: Any, peer: Callable | None, tokens: np.ndarray, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each side what is timed, and the streams that it made."""
    import equinox as eqx

    from deltanox.generate import stream

    def ours(model, drafts):
        made: list[Any] = []

        def run():
            made.append(stream(model, tokens, max_new_tokens=arguments.new, drafts=drafts))
            return np.stack(list(made[-1]), axis=-1)

        return run, made

    sides: dict[str, Any] = {OURS: ours(model, 0)}
    if peer is not None:
        for threads in arguments.threads:
            name = f"{PEER}, {threads} thread{'s' if threads > 1 else ''}"
            sides[name] = (lambda threads=threads: peer(tokens, arguments.new, threads), [])
    if arguments.drafts:
        # 1 + weight is the factor: the head's logits are all zero, and it drafts token 0
        wrong = eqx.tree_at(lambda m: m.mtp.norm.weight, model, 0 * model.mtp.norm.weight - 1)
        right = eqx.tree_at(lambda m: m.norm.weight, wrong, 0 * model.norm.weight - 1)
        sides[f"{arguments.drafts} drafts, all wrong"] = ours(wrong, arguments.drafts)
        sides[f"{arguments.drafts} drafts, all right"] = ours(right, arguments.drafts)
    return sides


def _transformers(model: Any, sizes: Any) -> Callable[[np.ndarray, int, int], np.ndarray]:
    """Its greedy generation with the model's weights, by way of a checkpoint."""
    import torch
    import transformers

    from deltanox.interop import save

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save(model, sizes, Path(folder, "checkpoint"))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(Path(folder, "checkpoint"), dtype=torch.float32)

    def run(tokens, new, threads):
        torch.set_num_threads(threads)
        prompt = torch.tensor(tokens)
        text = loaded.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, use_cache=True,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return text[:, tokens.shape[1] :].numpy()

    return run
