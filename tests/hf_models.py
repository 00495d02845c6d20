"""Small random models of transformers, of the three families: for parity, and for the checkpoints under
tests/interop/fixtures, which `make_fixtures.py` there writes."""

import importlib

import torch

FAMILIES = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
}
VOCABULARY, LAYERS, INTERVAL, EXPERTS = 61, 4, 2, 5
# all sizes differ, dk ≠ dv
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=LAYERS,
    layer_types=["full_attention" if (i + 1) % INTERVAL == 0 else "linear_attention" for i in range(LAYERS)],
    linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=10, linear_conv_kernel_dim=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip
DENSE = dict(intermediate_size=40)
SPARSE = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def hf_class(family: str, name: str):
    """A class of a family, by the module that it is in."""
    module = "configuration" if name.endswith("Config") else "modeling"
    return getattr(importlib.import_module(f"transformers.models.{family}.{module}_{family}"), name)


def hf_config(family: str, *, ratio: int = 2, tied: bool = False, **changes):
    """Of a small text model; `ratio` is value heads to key heads."""
    rope = ROPE if family == "qwen3_next" else {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sizes = SIZES | (DENSE if family == "qwen3_5" else SPARSE)
    config = hf_class(family, FAMILIES[family][1])(
        **sizes | changes, linear_num_value_heads=2 * ratio, tie_word_embeddings=tied, rope_parameters=rope
    )
    config._attn_implementation = "eager"
    return config


def randomise(model, seed: int = 0):
    """Weights that matter: N(0, 0.2²), the gated norms' around one, decay rates as trained models have them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("A_log"):
                parameter.copy_(torch.log(0.05 + 4 * torch.rand(parameter.shape, generator=generator)))
            elif name.endswith("linear_attn.norm.weight"):
                parameter.add_(1.0)
    return model.eval()


def hf_model(family: str, *, seed: int = 0, **options):
    """A causal language model with random weights, in float32; options of `hf_config`."""
    return randomise(hf_class(family, FAMILIES[family][0])(hf_config(family, **options)), seed)


def pack_experts(tensors: dict, module: str, count: int) -> dict:
    """Experts each by themselves (`{module}0.gate_proj.weight` and so on), as the two packed tensors."""
    rest = dict(tensors)

    def stack(name):
        return torch.stack([rest.pop(f"{module}{e}.{name}_proj.weight") for e in range(count)])

    rest[f"{module}gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
    rest[f"{module}down_proj"] = stack("down")
    return rest


def mtp_logits(family: str, config, tensors: dict, hidden, tokens, embedding, head):
    """What a head for one token further of `mtp.*` tensors gives for pairs of `hidden` [1 T D] and the `tokens` [1 T] after
    them: made of transformers' own modules, since its models have no such head."""
    stem = FAMILIES[family][0].removesuffix("ForCausalLM")
    layer = hf_class(family, f"{stem}DecoderLayer")(config, LAYERS - 1)
    own = {name.removeprefix("mtp.layers.0."): x for name, x in tensors.items() if name.startswith("mtp.layers.0.")}
    if family != "qwen3_5":
        own = pack_experts(own, "mlp.experts.", EXPERTS)
    layer.load_state_dict({name: x.float() for name, x in own.items()})

    def norm(name, x):
        module = hf_class(family, f"{stem}RMSNorm")(x.shape[-1], eps=config.rms_norm_eps)
        module.load_state_dict({"weight": tensors[f"mtp.{name}.weight"].float()})
        return module(x)

    rotary = "RotaryEmbedding" if family == "qwen3_next" else "TextRotaryEmbedding"
    pair = [norm("pre_fc_norm_embedding", embedding[tokens]), norm("pre_fc_norm_hidden", hidden)]
    x = torch.cat(pair, -1) @ tensors["mtp.fc.weight"].float().T
    positions = torch.arange(x.shape[1])[None]
    causal = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    angles = hf_class(family, f"{stem}{rotary}")(config)(
        x, positions if family == "qwen3_next" else positions[None].expand(3, 1, -1)
    )
    x = layer(x, position_embeddings=angles, attention_mask=causal, position_ids=positions)
    return norm("norm", x[0] if isinstance(x, tuple) else x) @ head.T
