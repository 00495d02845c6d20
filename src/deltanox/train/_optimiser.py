"""AdamW as language models are trained with it."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from deltanox.train._settings import OptimiserConfig

Tree = TypeVar("Tree")

# Matrices outside of `eqx.nn.Linear` that decay: the head (not a tied embedding) and the experts.
_DECAYED_FIELDS = frozenset({"head", "experts_gate_up", "experts_down"})


def learning_rate_schedule(config: OptimiserConfig, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over `warmup_steps`, then a cosine to `final_learning_rate` times the peak at `steps`.

    The first update has the rate peak / (warmup_steps + 1), not 0: no step is lost.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup) if warmup else optax.constant_schedule(peak)
    fall = optax.cosine_decay_schedule(peak, max(steps - warmup - 1, 1), alpha=config.final_learning_rate)
    return optax.join_schedules([rise, fall], [warmup])


def decay_mask(model: Tree) -> Tree:
    """True for the arrays of `model` that weight decay applies to, False for the others.

    | decays | does not |
    |---|---|
    | weights of linear layers (projections, MLP, router) | biases |
    | weights of experts | weights of norms, gated or not |
    | an untied head | the embedding, tied or not |
    | | taps of the convolution |
    | | `A_log` and `dt_bias`: decay would pull every head to one memory |

    The rule goes by the type of the layer and not by the number of axes: in a stack of layers a norm's weight is a
    matrix. Taps (four a channel) and embeddings (rows of rare tokens have gradients in few steps, and would shrink in
    all others) are left out on purpose. An array of a type unknown here doesn't decay.
    """

    def inside(path, node):
        if isinstance(node, eqx.nn.Linear):
            return jax.tree_util.tree_map_with_path(lambda p, _: getattr(p[-1], "name", "") == "weight", node)
        return bool(path) and getattr(path[-1], "name", "") in _DECAYED_FIELDS

    return jax.tree_util.tree_map_with_path(inside, model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))


def make_optimiser(config: OptimiserConfig, steps: int, parameters: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW. `parameters` is the tree of arrays that will be updated.

    The moments have the dtype of the parameters.

    **Raises**: `ValueError` where `epsilon` is 0 in that dtype, as 1e-8 is in float16: updates would divide by zero.
    """
    dtypes = {x.dtype for x in jax.tree.leaves(parameters) if hasattr(x, "dtype")}
    for dtype in (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)):
        if np.asarray(config.epsilon).astype(dtype) == 0:
            raise ValueError(
                f"optimiser.epsilon must be above 0 in the dtype of the parameters, but {config.epsilon} is 0 in "
                f"{dtype.name}: store the parameters in float32 or bfloat16, or give a larger one"
            )
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask(parameters),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw
