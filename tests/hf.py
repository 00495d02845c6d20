"""What the parity tests share: they are skipped where torch or transformers is missing, and weights of transformers'
modules are copied into ours, numpy arrays in, `eqx.tree_at` out."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

torch, transformers = (
    pytest.importorskip(
        name, reason="parity with transformers needs torch and transformers: pip install torch transformers"
    )
    for name in ("torch", "transformers")
)
# what transformers and torch warn about is theirs to mend
MARKS = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


def arrays(module) -> dict[str, np.ndarray]:
    """The state dict of a torch module, as numpy arrays in float32."""
    return {name: x.detach().float().numpy() for name, x in module.state_dict().items()}


def numpy(x) -> np.ndarray:
    """A torch tensor as a numpy array, detached."""
    return x.detach().float().numpy()


def fill(layer, where, value: np.ndarray):
    """Replace the leaf that `where` finds; it must have the shape already, and keeps its dtype."""
    old = where(layer)
    assert old.shape == value.shape, f"the leaf is {old.shape}, the copied array {value.shape}"
    return eqx.tree_at(where, layer, jnp.asarray(value, old.dtype))


def copy_names(layer, weights: dict[str, np.ndarray], names: dict[str, str] | list[str]):
    """`weights[name]` into the leaf at the dotted path `names[name]` (the same path, for a list). Every array must be
    used."""
    names = {name: name for name in names} if isinstance(names, list) else names
    assert set(weights) == set(names), f"unused or missing: {set(weights) ^ set(names)}"

    def leaf(path):
        def where(tree):
            for part in path.split("."):
                tree = getattr(tree, part)
            return tree

        return where

    for name, path in names.items():
        layer = fill(layer, leaf(path), weights[name])
    return layer


def copy_norm(layer, module):
    """RMSNorm or GatedRMSNorm."""
    return copy_names(layer, arrays(module), ["weight"])


def copy_attention(layer, module):
    """GatedAttention from Qwen3NextAttention or Qwen3_5Attention."""
    names = [f"{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    return copy_names(layer, arrays(module), names)


def copy_mlp(layer, module):
    """SwiGLU from a transformers MLP with gate_proj, up_proj and down_proj."""
    return copy_names(layer, arrays(module), [f"{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")])


def copy_moe(layer, module):
    """SparseMoE from Qwen3NextSparseMoeBlock or Qwen3_5MoeSparseMoeBlock."""
    names = {"experts.gate_up_proj": "experts_gate_up", "experts.down_proj": "experts_down"}
    for name in (
        "gate",
        "shared_expert.gate_proj",
        "shared_expert.up_proj",
        "shared_expert.down_proj",
        "shared_expert_gate",
    ):
        names[f"{name}.weight"] = f"{name}.weight"
    return copy_names(layer, arrays(module), names)


def randomise(module, seed: int, scale: float = 0.5):
    """Draw every parameter of a torch module from N(0, scale²), norms' weights and empty ones included."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def split_projections(weights: dict[str, np.ndarray], h: int, H: int, K: int, V: int) -> dict[str, np.ndarray]:
    """Qwen3-Next's two fused projections, grouped by key head, as Qwen3.5's four. The other weights are left as they are."""
    weights = dict(weights)
    ratio = H // h
    grouped = weights.pop("in_proj_qkvz.weight").reshape(h, 2 * K + 2 * ratio * V, -1)
    q, k, v, z = (x.reshape(-1, x.shape[-1]) for x in np.split(grouped, np.cumsum([K, K, ratio * V]), axis=1))
    b, a = (x.reshape(H, -1) for x in np.split(weights.pop("in_proj_ba.weight").reshape(h, 2 * ratio, -1), 2, axis=1))
    weights["in_proj_qkv.weight"] = np.concatenate([q, k, v])
    return weights | {"in_proj_z.weight": z, "in_proj_b.weight": b, "in_proj_a.weight": a}


def copy_delta_net(layer, module, *, gradients: bool = False):
    """GatedDeltaNet from Qwen3_5GatedDeltaNet or Qwen3NextGatedDeltaNet: its weights, or the gradients of them."""
    weights = arrays(module)
    if gradients:
        weights = {name: numpy(x.grad) for name, x in module.named_parameters()}
    weights["conv1d.weight"] = weights["conv1d.weight"][:, 0]
    if "in_proj_qkvz.weight" in weights:
        weights = split_projections(
            weights, module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
        )
    names = {name: name for name in weights if name != "conv1d.weight"}
    return copy_names(layer, weights, names | {"conv1d.weight": "conv.weight"})
