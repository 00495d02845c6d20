"""Equinox layers, unbatched `T D`: map them over a batch with `jax.vmap`."""

from ._attention import GatedAttention as GatedAttention
from ._cache import KVCache as KVCache, KVSnapshots as KVSnapshots
from ._conv import CausalConv1d as CausalConv1d, ConvState as ConvState
from ._delta_net import (
    DeltaNetSnapshots as DeltaNetSnapshots,
    DeltaNetState as DeltaNetState,
    GatedDeltaNet as GatedDeltaNet,
)
from ._linear import apply_linear as apply_linear, linear as linear
from ._lora import (
    LoRALinear as LoRALinear,
    add_lora as add_lora,
    lora_filter as lora_filter,
    merge_lora as merge_lora,
)
from ._mlp import SwiGLU as SwiGLU
from ._moe import RouterStats as RouterStats, SparseMoE as SparseMoE, load_balance_loss as load_balance_loss
from ._norms import GatedRMSNorm as GatedRMSNorm, RMSNorm as RMSNorm
from ._rotary import RotaryEmbedding as RotaryEmbedding, apply_rotary as apply_rotary
from ._stack import Stack as Stack
