"""Language models: the hybrid block, what it is repeated into, and the families."""

from ._block import HybridBlock as HybridBlock, HybridPeriod as HybridPeriod, HybridState as HybridState
from ._lm import HybridLM as HybridLM
from ._mtp import MTPHead as MTPHead
from ._qwen3_5 import QWEN3_5_SIZES as QWEN3_5_SIZES, Qwen3_5Config as Qwen3_5Config, qwen3_5 as qwen3_5
from ._qwen3_next import (
    QWEN3_NEXT_80B_A3B as QWEN3_NEXT_80B_A3B,
    Qwen3NextConfig as Qwen3NextConfig,
    qwen3_next as qwen3_next,
)
