"""Sparse mixture of experts with a shared expert, and the loss that keeps its load balanced."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ..ops._validate import describe, require, require_arrays, require_kind, require_record, require_size, shapes
from ..ops.moe import expert_mlp, route
from ._linear import apply_linear, linear, normal
from ._mlp import SwiGLU


class RouterStats(NamedTuple):
    """Sums over real tokens, float32, which add over layers and batches: `jax.tree.map(lambda x: x.sum(0), stats)`.

    `counts` [E]: how often each expert was among a token's top k; `probs` [E]: its summed probability; `rows`: number
    of tokens. Only `probs` carries a gradient.
    """

    counts: Float[Array, " E"]
    probs: Float[Array, " E"]
    rows: Float[Array, ""]


class SparseMoE(eqx.Module):
    """y = Σ_k w_k · expert_(e_k)(x) + σ(W_s x) · shared_expert(x), every expert a SwiGLU.

    The router softmaxes its logits in float32 over all experts, takes the top k (lower index first among equals),
    divides by their sum in float32 and rounds to the activations' dtype. No token is dropped, whatever the balance.

    `experts_gate_up` [E 2I D] holds each expert's gate rows, then its up rows. Source: Qwen3-Next, Qwen3.5-MoE
    (transformers 5.24).
    """

    gate: eqx.nn.Linear
    experts_gate_up: Float[Array, "E J D"]
    experts_down: Float[Array, "E D I"]
    shared_expert: SwiGLU
    shared_expert_gate: eqx.nn.Linear
    embed_size: int = eqx.field(static=True)
    num_experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    norm_topk_prob: bool = eqx.field(static=True)

    def __init__(
        self,
        embed_size: int,
        *,
        num_experts: int,
        top_k: int,
        expert_size: int,
        shared_size: int,
        norm_topk_prob: bool = True,
        dtype: DTypeLike = jnp.float32,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `embed_size`: D; `num_experts`: E; `top_k`: experts a token; `expert_size`: I; `shared_size`: width of the
            shared expert.
        - `norm_topk_prob`: divide the chosen probabilities by their sum.
        - `dtype`: of the weights; `key`: for N(0, 0.02) weights, router included.

        **Raises:** `ValueError` if `top_k` isn't in 1 ... E or a size is below 1.
        """
        sizes = {
            "embed_size": embed_size, "num_experts": num_experts, "top_k": top_k, "expert_size": expert_size,
            "shared_size": shared_size,
        }  # fmt: skip
        for name, size in sizes.items():
            require_size("SparseMoE", name, size)
        require(
            1 <= top_k <= num_experts,
            f"SparseMoE: `top_k` must lie in 1 ... num_experts = {num_experts}, but it is {top_k}",
        )
        keys = jax.random.split(key, 5)
        self.gate = linear(embed_size, num_experts, dtype=dtype, key=keys[0])
        self.experts_gate_up = normal((num_experts, 2 * expert_size, embed_size), dtype=dtype, key=keys[1])
        self.experts_down = normal((num_experts, embed_size, expert_size), dtype=dtype, key=keys[2])
        self.shared_expert = SwiGLU(embed_size, shared_size, dtype=dtype, key=keys[3])
        self.shared_expert_gate = linear(embed_size, 1, dtype=dtype, key=keys[4])
        self.embed_size = embed_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob

    def __call__(
        self, x: Float[Array, "T D"], *, mask: Bool[Array, "T"] | None = None
    ) -> tuple[Float[Array, "T D"], RouterStats]:
        """**Arguments:** `x`: tokens of one sequence, a batch goes through `jax.vmap`; `mask`: False at padding, whose
        output is zero and which no expert and no statistic sees.

        **Returns:** outputs [T D] in x's dtype, and `RouterStats`.

        **Raises:** `ValueError` for a wrong rank, width or mask.
        """
        op = "SparseMoE"
        require_kind(op, "x", x, "T D")
        require_arrays(op, mask=mask)
        require(
            x.ndim == 2,
            f"{op}: `x` must be one sequence [T, D], but it is {describe(x)}: "
            + ("wrap the layer in jax.vmap for a batch" if x.ndim > 2 else "add the axis of tokens, x[None]"),
        )
        require(
            x.shape[1] == self.embed_size,
            f"{op}: `x` must have D = {self.embed_size} features last, but it is {describe(x)} [T, D]: "
            f"build the layer with embed_size={x.shape[1]} or give it features of its own size",
        )
        require(
            mask is None or (mask.shape == x.shape[:1] and mask.dtype == jnp.bool_),
            f"{op}: `mask` must be booleans [T], one for each token of x [T, D], but received {shapes(x=x, mask=mask)}",
        )
        if mask is not None:
            x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
        logits = checkpoint_name(apply_linear(self.gate, x), "moe_logits")
        routing = route(logits, top_k=self.top_k, norm_topk_prob=self.norm_topk_prob)
        y = expert_mlp(x, routing.experts, routing.weights, self.experts_gate_up, self.experts_down, mask=mask)
        y = y + jax.nn.sigmoid(apply_linear(self.shared_expert_gate, x)) * self.shared_expert(x)

        chosen = (routing.experts[..., None] == jnp.arange(self.num_experts, dtype=jnp.int32)[None, None]).any(axis=1)
        real = jnp.ones(x.shape[:1], bool) if mask is None else mask
        wide = routing.probabilities.dtype
        counts = jnp.sum(chosen & real[:, None], axis=0, dtype=wide)
        probs = jnp.sum(jnp.where(real[:, None], routing.probabilities, jnp.zeros((), wide)), axis=0)
        return y, RouterStats(counts, probs, jnp.sum(real, dtype=wide))


def load_balance_loss(stats: RouterStats) -> Float[Array, ""]:
    """E Σ_e (counts_e / rows) (probs_e / rows): top_k for a perfect balance, more for any other.

    **Arguments:** `stats`: sums over all tokens of all layers and sequences (`RouterStats` add up); padding was left
    out of them.

    **Returns:** the loss, to be added with a coefficient (0.001 in the releases). Zero if no token was real.

    Source: Switch Transformer (arXiv:2101.03961, equations 4–6), as `load_balancing_loss_func` of transformers.
    """
    require_record("load_balance_loss", "stats", stats, RouterStats, remedy="pass what a model's `hidden` returns")
    require(
        stats.counts.ndim == 1 and stats.counts.shape == stats.probs.shape and stats.rows.ndim == 0,
        "load_balance_loss: `stats` must be sums over layers and batch, counts [E], probs [E] and rows [], but "
        "received "
        f"{shapes(counts=stats.counts, probs=stats.probs, rows=stats.rows)}: add them up with "
        "jax.tree.map(lambda x: x.sum(0), stats)",
    )
    rows = jnp.maximum(stats.rows, jnp.ones((), stats.rows.dtype))
    size = jnp.asarray(stats.counts.shape[0], stats.counts.dtype)
    return size * jnp.sum((stats.counts / rows) * (stats.probs / rows))
