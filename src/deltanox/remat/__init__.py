"""What the backward pass finds saved: names of arrays, and policies that place each of them.

A layer marks the arrays that are worth saving with a name (`jax.ad_checkpoint.checkpoint_name`). A policy says for each
name whether the backward pass computes it again ("remat"), finds it on the device ("device"), or fetches it back from
the host's memory ("offload"):

    policy = remat.policy(gdn="device", attention="device", mlp="offload")
    model.hidden(tokens, remat=policy)                     # a stack of layers, period by period
    eqx.filter_checkpoint(layer, policy=policy)            # any function; jax.checkpoint takes it too
    remat.bytes_per_layer(policy, layer, x)                # what it will cost, before anything runs

What isn't given is computed again. Nothing is ignored in silence: what cannot be so is refused when the policy is made,
and what a function has no array for when a stack is traced, or by `check`. `print(remat.table())` lists the names.
"""

from ._check import Bytes as Bytes, bytes_per_layer as bytes_per_layer, check as check
from ._names import GROUPS as GROUPS, NAMES as NAMES, Place as Place, Residual as Residual, table as table
from ._policy import (
    READY as READY,
    Policy as Policy,
    everything as everything,
    kernels as kernels,
    minimal_offloaded as minimal_offloaded,
    nothing as nothing,
    policy as policy,
)
from ._trace import named_input as named_input
