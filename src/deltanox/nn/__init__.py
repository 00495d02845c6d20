"""Equinox layers, unbatched `T D`: map them over a batch with `jax.vmap`."""

from ._attention import GatedAttention as GatedAttention
from ._attention import KVCache as KVCache
from ._conv import CausalConv1d as CausalConv1d
from ._conv import ConvState as ConvState
from ._delta_net import DeltaNetState as DeltaNetState
from ._delta_net import GatedDeltaNet as GatedDeltaNet
from ._linear import apply_linear as apply_linear
from ._linear import linear as linear
from ._mlp import SwiGLU as SwiGLU
from ._moe import RouterStats as RouterStats
from ._moe import SparseMoE as SparseMoE
from ._moe import load_balance_loss as load_balance_loss
from ._norms import GatedRMSNorm as GatedRMSNorm
from ._norms import RMSNorm as RMSNorm
from ._rotary import RotaryEmbedding as RotaryEmbedding
from ._rotary import apply_rotary as apply_rotary
from ._stack import Stack as Stack
