"""Qwen3.5: three gated delta-rule blocks, then one of gated attention, repeated."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._types import Implementation
from ..nn import GatedAttention, GatedDeltaNet, SparseMoE, SwiGLU
from ..ops import Residuals
from ..ops._validate import require, require_choice
from ._block import HybridBlock, HybridPeriod
from ._lm import HybridLM
from ._mtp import MTPHead


@dataclasses.dataclass(frozen=True)
class Qwen3_5Config:
    """Sizes of a Qwen3.5 text model. In brackets, the name in Hugging Face's `config.json` (`text_config`).

    The whole:

    - `vocab_size`: N [vocab_size].
    - `embed_size`: D [hidden_size].
    - `num_layers`: blocks, a multiple of the interval [num_hidden_layers].
    - `full_attention_interval`: every so many blocks one is attention, the last of its period
      [full_attention_interval].
    - `tied_head`: the embedding is the head too [tie_word_embeddings].
    - `mtp_head`: there is a head for one token further [mtp_num_hidden_layers, 1].
    - `eps`: of every norm [rms_norm_eps].

    Gated delta-rule blocks:

    - `num_key_heads`, `num_value_heads`: h and H, H a multiple of h [linear_num_key_heads, linear_num_value_heads].
    - `key_head_size`, `value_head_size`: K and V [linear_key_head_dim, linear_value_head_dim].
    - `conv_size`: W, tokens that the convolution sees [linear_conv_kernel_dim].
    - `output_gate`: activation of the gated norm, "silu" or "sigmoid" [output_gate_type].

    Attention blocks:

    - `num_heads`, `num_kv_heads`: query heads, a multiple of the key-value heads [num_attention_heads,
      num_key_value_heads].
    - `head_size`: [head_dim].
    - `rotary_fraction`: rotated share of a head; the rotated features must come out even
      [rope_parameters.partial_rotary_factor].
    - `rope_theta`: base of the rotary angles [rope_parameters.rope_theta].
    - `mrope_sections`: frequencies for time, height and width, for images; None is text alone, and text is the same
      with and without [rope_parameters.mrope_section].

    Feed-forward part, dense or, where `num_experts` isn't 0, a mixture of experts:

    - `mlp_size`: width of the dense part; 0 with experts [intermediate_size].
    - `num_experts`, `top_k`: E experts, and how many a token goes to [num_experts, num_experts_per_tok].
    - `expert_size`, `shared_size`: width of an expert and of the shared one [moe_intermediate_size,
      shared_expert_intermediate_size].

    **Raises**: `ValueError` naming the field, what must hold and what was received.
    """

    vocab_size: int
    embed_size: int
    num_layers: int
    num_key_heads: int
    num_value_heads: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int = 0
    key_head_size: int = 128
    value_head_size: int = 128
    conv_size: int = 4
    output_gate: Literal["silu", "sigmoid"] = "silu"
    head_size: int = 256
    rotary_fraction: float = 0.25
    rope_theta: float = 1e7
    mrope_sections: tuple[int, int, int] | None = None
    full_attention_interval: int = 4
    eps: float = 1e-6
    tied_head: bool = False
    mtp_head: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    shared_size: int = 0
    norm_topk_prob: ClassVar[bool] = True  # last, so that a subclass can make a field of it

    def __post_init__(self):
        name = type(self).__name__
        at_least_one = [
            "vocab_size", "embed_size", "num_layers", "num_key_heads", "num_value_heads", "num_heads", "num_kv_heads",
            "key_head_size", "value_head_size", "conv_size", "head_size", "full_attention_interval",
        ]  # fmt: skip
        sparse = self.num_experts != 0
        if not sparse:
            at_least_one.append("mlp_size")
            least_zero = ("num_experts", "top_k", "expert_size", "shared_size")
        else:
            at_least_one += ["num_experts", "top_k", "expert_size", "shared_size"]
            least_zero = ("mlp_size",)
        for least, fields in ((1, at_least_one), (0, least_zero)):
            for field in fields:
                value = getattr(self, field)
                require(
                    isinstance(value, int) and not isinstance(value, bool) and value >= least,
                    f"{name}: `{field}` must be an integer of at least {least}, but it is {value!r}",
                )
        for field in least_zero:
            require(
                getattr(self, field) == 0,
                f"{name}: `{field}` must be 0 in a model {'with' if sparse else 'without'} experts, but it is "
                f"{getattr(self, field)}: leave it out, or set `num_experts`{' to 0' if sparse else ''}",
            )
        for field in ("rotary_fraction", "rope_theta", "eps"):
            value = getattr(self, field)
            require(
                isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
                f"{name}: `{field}` must be a positive number, but it is {value!r}",
            )
            object.__setattr__(self, field, float(value))
        for field in ("tied_head", "mtp_head", "norm_topk_prob"):
            value = getattr(self, field)
            require(isinstance(value, bool), f"{name}: `{field}` must be true or false, but it is {value!r}")
        require_choice(name, "output_gate", self.output_gate, ("silu", "sigmoid"))
        for many, few in (("num_value_heads", "num_key_heads"), ("num_heads", "num_kv_heads")):
            a, b = getattr(self, many), getattr(self, few)
            require(
                a % b == 0,
                f"{name}: `{many}` must be a multiple of `{few}`, but they are {a} and {b}: heads share keys in equal "
                f"groups",
            )
        require(
            self.num_layers % self.full_attention_interval == 0,
            f"{name}: `num_layers` must be a multiple of `full_attention_interval`, since whole periods are repeated, "
            f"but they are {self.num_layers} and {self.full_attention_interval}",
        )
        require(
            self.top_k <= self.num_experts,
            f"{name}: `top_k` must be at most `num_experts`, but they are {self.top_k} and {self.num_experts}",
        )
        rotary = self.head_size * self.rotary_fraction
        require(
            self.rotary_fraction <= 1 and rotary == int(rotary) and int(rotary) % 2 == 0 and rotary >= 2,
            f"{name}: `head_size` times `rotary_fraction` must be an even number of features of the head, but "
            f"{self.head_size} times {self.rotary_fraction} is {rotary}",
        )
        if self.mrope_sections is not None:
            sections = self.mrope_sections
            require(
                isinstance(sections, list | tuple)
                and len(sections) == 3
                and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in sections)
                and sum(sections) == self.rotary_size // 2,
                f"{name}: `mrope_sections` must be three integers that add up to half of the rotated features, "
                f"{self.rotary_size // 2}, but it is {sections!r}: leave it out for a model of text",
            )
            object.__setattr__(self, "mrope_sections", tuple(sections))

    @property
    def rotary_size(self) -> int:
        """Rotated features of an attention head."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def num_periods(self) -> int:
        """Repetitions of (delta, ..., delta, attention)."""
        return self.num_layers // self.full_attention_interval


def qwen3_5(
    config: Qwen3_5Config,
    *,
    implementation: Implementation = "auto",
    remat: bool | Callable[..., Any] = False,
    unroll: int = 1,
    state_dtype: DTypeLike = jnp.float32,
    decay_dtype: DTypeLike = jnp.float32,
    strict_hf_rounding: bool = False,
    residuals: Residuals = Residuals(),  # noqa: B008 (frozen)
    dtype: DTypeLike = jnp.float32,
    key: PRNGKeyArray,
) -> HybridLM:
    """A Qwen3.5 text model with fresh weights.

    **Arguments:**

    - `config`: the sizes.
    - `implementation`: engine of the delta rule and the convolution (see `deltanox.ops.gated_delta_rule`).
    - `remat`: what the backward pass finds saved of each period, unless a call says otherwise: False (all that it
      needs), True (nothing), or a policy of `deltanox.remat` or `jax.checkpoint_policies`.
    - `unroll`: periods that one turn of the loop over the depth runs: more copy less and compile longer.
    - `state_dtype`: of the recurrence's states between its chunks, for the backward pass (`Precision.state`).
    - `decay_dtype`, `strict_hf_rounding`: see `GatedDeltaNet` (`Precision.decay`, `Precision.strict_hf_rounding`).
    - `residuals`: what the delta rule keeps for the backward pass, see `deltanox.ops.Residuals`; with T^-1 kept its
      chunks have the 128 tokens that the TPU kernels ask for.
    - `dtype`: of the weights; decay rates and gated norms are float32 whatever it is.
    - `key`: for the weights: N(0, 0.02), decay rates from U(0.01, 16), norms neutral.

    **Returns:** the model; `equinox.filter_eval_shape(qwen3_5, config, key=key)` gives its shapes without its memory.

    Source: transformers' `Qwen3_5ForCausalLM` and, with experts, `Qwen3_5MoeForCausalLM`.
    """

    def make_block(mixer, key):
        if config.num_experts:
            mlp = SparseMoE(
                config.embed_size, num_experts=config.num_experts, top_k=config.top_k, expert_size=config.expert_size,
                shared_size=config.shared_size, norm_topk_prob=config.norm_topk_prob, dtype=dtype, key=key,
            )  # fmt: skip
        else:
            mlp = SwiGLU(config.embed_size, config.mlp_size, dtype=dtype, key=key)
        return HybridBlock(mixer, mlp, embed_size=config.embed_size, eps=config.eps, dtype=dtype)

    def make_attention(key):
        return GatedAttention(
            config.embed_size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_size=config.head_size, rotary_size=config.rotary_size, rope_theta=config.rope_theta,
            mrope_sections=config.mrope_sections, eps=config.eps, dtype=dtype, key=key,
        )  # fmt: skip

    def make_mtp(key):
        mixer_key, mlp_key, fc_key = jax.random.split(key, 3)
        block = make_block(make_attention(mixer_key), mlp_key)
        return MTPHead(block, embed_size=config.embed_size, eps=config.eps, dtype=dtype, key=fc_key)

    def make_period(key):
        blocks = []
        for i, block_key in enumerate(jax.random.split(key, config.full_attention_interval)):
            mixer_key, mlp_key = jax.random.split(block_key)
            if i + 1 < config.full_attention_interval:
                mixer = GatedDeltaNet(
                    config.embed_size, num_key_heads=config.num_key_heads, num_value_heads=config.num_value_heads,
                    key_head_size=config.key_head_size, value_head_size=config.value_head_size,
                    conv_size=config.conv_size,
                    gate=config.output_gate, eps=config.eps, implementation=implementation, state_dtype=state_dtype,
                    decay_dtype=decay_dtype, strict_hf_rounding=strict_hf_rounding, residuals=residuals,
                    chunk_size=128 if residuals.t_inv == "save" else 64, dtype=dtype, key=mixer_key,
                )  # fmt: skip
            else:
                mixer = make_attention(mixer_key)
            blocks.append(make_block(mixer, mlp_key))
        return HybridPeriod(tuple(blocks))

    return HybridLM(
        config.vocab_size, config.embed_size, make_period, config.num_periods, eps=config.eps,
        tied_head=config.tied_head, make_mtp=make_mtp if config.mtp_head else None, remat=remat, unroll=unroll,
        dtype=dtype, key=key,
    )  # fmt: skip


def _release(embed_size, num_layers, mlp_size, heads, value_heads, **kwargs) -> Qwen3_5Config:
    return Qwen3_5Config(
        vocab_size=248_320, embed_size=embed_size, num_layers=num_layers, mlp_size=mlp_size, num_heads=heads[0],
        num_kv_heads=heads[1], num_key_heads=16, num_value_heads=value_heads, mrope_sections=(11, 11, 10), **kwargs,
    )  # fmt: skip


QWEN3_5_SIZES: Mapping[str, Qwen3_5Config] = MappingProxyType(
    {
        "0.8B": _release(1024, 24, 3584, (8, 2), 16, tied_head=True),
        "2B": _release(2048, 24, 6144, (8, 2), 16, tied_head=True),
        "4B": _release(2560, 32, 9216, (16, 4), 32, tied_head=True),
        "9B": _release(4096, 32, 12288, (16, 4), 32),
        "27B": _release(5120, 64, 17408, (24, 4), 48),
        "35B-A3B": _release(2048, 40, 0, (16, 2), 32, num_experts=256, top_k=8, expert_size=512, shared_size=512),
        "122B-A10B": _release(3072, 48, 0, (32, 2), 64, num_experts=256, top_k=8, expert_size=1024, shared_size=1024),
        "397B-A17B": _release(4096, 60, 0, (32, 2), 64, num_experts=512, top_k=10, expert_size=1024, shared_size=1024),
    }
)
"""The released text models by the names of their checkpoints; the counts of their parameters are tests."""
