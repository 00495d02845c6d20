"""Hybrid linear-attention components for Equinox: the gated delta rule of Qwen3-Next and Qwen3.5, its layers and
models.

- `deltanox.ops`: pure functions of arrays, any leading batch axes.
- `deltanox.nn`: Equinox layers, unbatched under `jax.vmap`.
- `deltanox.models`: the hybrid block, the language model, Qwen3.5 and Qwen3-Next.
- `deltanox.remat`: what the backward pass finds saved, by names.
- `deltanox.generate`: prefill, decode, sampling.
- `deltanox.interop`: Hugging Face checkpoints in and out (`import deltanox.interop`; not loaded with the rest).
- `deltanox.train`: the training loop of the command line (`import deltanox.train`; it is not loaded with the rest).

Shapes are written in every signature and checked by nobody unless you ask: `jaxtyping.install_import_hook("deltanox",
"beartype.beartype")` before the import.
"""

from . import generate as generate, models as models, nn as nn, ops as ops, remat as remat
from .models import (
    QWEN3_5_SIZES as QWEN3_5_SIZES,
    QWEN3_NEXT_80B_A3B as QWEN3_NEXT_80B_A3B,
    HybridBlock as HybridBlock,
    HybridLM as HybridLM,
    HybridPeriod as HybridPeriod,
    HybridState as HybridState,
    MTPHead as MTPHead,
    Qwen3_5Config as Qwen3_5Config,
    Qwen3NextConfig as Qwen3NextConfig,
    qwen3_5 as qwen3_5,
    qwen3_next as qwen3_next,
)
from .nn import (
    CausalConv1d as CausalConv1d,
    DeltaNetState as DeltaNetState,
    GatedAttention as GatedAttention,
    GatedDeltaNet as GatedDeltaNet,
    GatedRMSNorm as GatedRMSNorm,
    KVCache as KVCache,
    RMSNorm as RMSNorm,
    RotaryEmbedding as RotaryEmbedding,
    RouterStats as RouterStats,
    SparseMoE as SparseMoE,
    Stack as Stack,
    SwiGLU as SwiGLU,
    load_balance_loss as load_balance_loss,
)
from .ops import (
    Residuals as Residuals,
    causal_conv1d as causal_conv1d,
    causal_conv1d_step as causal_conv1d_step,
    check_inputs as check_inputs,
    decay_and_beta as decay_and_beta,
    gated_delta_net as gated_delta_net,
    gated_delta_net_step as gated_delta_net_step,
    gated_delta_rule as gated_delta_rule,
    gated_delta_step as gated_delta_step,
)
from .precision import Precision as Precision

__version__ = "0.1.0"
