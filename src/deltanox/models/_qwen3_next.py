"""Qwen3-Next: Qwen3.5's blocks with experts, in a checkpoint of another layout."""

import dataclasses
from typing import Any

from jaxtyping import PRNGKeyArray

from ..ops._validate import require
from ._lm import HybridLM
from ._qwen3_5 import Qwen3_5Config, qwen3_5


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(Qwen3_5Config):
    """Sizes of a Qwen3-Next model: the fields of `Qwen3_5Config`, experts in every block, and

    - `norm_topk_prob`: divide the chosen experts' probabilities by their sum, as the release does [norm_topk_prob].

    **Raises**: `ValueError` naming the field, what must hold and what was received.
    """

    norm_topk_prob: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        super().__post_init__()
        require(
            self.num_experts > 0,
            "Qwen3NextConfig: `num_experts` must be at least 1, but it is 0: a dense model is a Qwen3_5Config",
        )


def qwen3_next(config: Qwen3NextConfig, *, key: PRNGKeyArray, **options: Any) -> HybridLM:
    """A Qwen3-Next model with fresh weights. Its projections are Qwen3.5's four; `deltanox.interop` cuts the fused two
    of a checkpoint into them and joins them again.

    **Arguments:** `config`: the sizes; `key`: for the weights; `options`: those of `qwen3_5`.

    Source: transformers' `Qwen3NextForCausalLM`.
    """
    return qwen3_5(config, key=key, **options)


QWEN3_NEXT_80B_A3B = Qwen3NextConfig(
    vocab_size=151_936, embed_size=2048, num_layers=48, num_heads=16, num_kv_heads=2, num_key_heads=16,
    num_value_heads=32, num_experts=512, top_k=10, expert_size=512, shared_size=512,
)  # fmt: skip
"""The released model; the count of its parameters is a test."""
