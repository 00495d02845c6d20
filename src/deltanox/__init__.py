"""Hybrid linear-attention components for Equinox: the gated delta rule of Qwen3-Next and Qwen3.5, its layers and
models.

- `deltanox.ops`: pure functions of arrays, any leading batch axes.
- `deltanox.nn`: Equinox layers, unbatched under `jax.vmap`.
- `deltanox.models`: the hybrid block, the language model, Qwen3.5.
- `deltanox.generate`: prefill, decode, sampling.
- `deltanox.train`: the training loop of the command line (`import deltanox.train`; it is not loaded with the rest).

Shapes are written in every signature and checked by nobody unless you ask: `jaxtyping.install_import_hook("deltanox",
"beartype.beartype")` before the import.
"""

from . import generate as generate
from . import models as models
from . import nn as nn
from . import ops as ops
from .models import QWEN3_5_SIZES as QWEN3_5_SIZES
from .models import HybridBlock as HybridBlock
from .models import HybridLM as HybridLM
from .models import HybridPeriod as HybridPeriod
from .models import HybridState as HybridState
from .models import Qwen3_5Config as Qwen3_5Config
from .models import qwen3_5 as qwen3_5
from .nn import CausalConv1d as CausalConv1d
from .nn import DeltaNetState as DeltaNetState
from .nn import GatedAttention as GatedAttention
from .nn import GatedDeltaNet as GatedDeltaNet
from .nn import GatedRMSNorm as GatedRMSNorm
from .nn import KVCache as KVCache
from .nn import RMSNorm as RMSNorm
from .nn import RotaryEmbedding as RotaryEmbedding
from .nn import RouterStats as RouterStats
from .nn import SparseMoE as SparseMoE
from .nn import Stack as Stack
from .nn import SwiGLU as SwiGLU
from .nn import load_balance_loss as load_balance_loss
from .ops import Residuals as Residuals
from .ops import causal_conv1d as causal_conv1d
from .ops import causal_conv1d_step as causal_conv1d_step
from .ops import check_inputs as check_inputs
from .ops import decay_and_beta as decay_and_beta
from .ops import gated_delta_net as gated_delta_net
from .ops import gated_delta_net_step as gated_delta_net_step
from .ops import gated_delta_rule as gated_delta_rule
from .ops import gated_delta_step as gated_delta_step
from .precision import Precision as Precision

__version__ = "0.1.0"
