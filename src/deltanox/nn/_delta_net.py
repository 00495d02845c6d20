"""The gated DeltaNet mixer, and the state that it carries."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._types import Implementation, Precision
from ..ops import Residuals
from ..ops._compiled import compiled
from ..ops._derivatives import together
from ..ops._dtypes import accumulator, inverse_root
from ..ops._validate import require, require_record, require_size
from ..ops.delta_net import convolve, gated_delta_net, gated_delta_net_step
from ..ops.delta_rule.inputs import check_options
from ..ops.gated_norm import gated_norm_projection, takes
from ._cache import check_snapshots
from ._conv import CausalConv1d, check_tokens
from ._linear import apply_linear, linear
from ._lora import LoRALinear
from ._norms import GatedRMSNorm


class DeltaNetState(eqx.Module):
    """All that the mixer remembers of the tokens before: constant in their number.

    - `conv`: the last W − 1 rows of the merged projection [Q | K | V], oldest first, in the activations' dtype.
    - `recurrent`: a K × V matrix for each value head, float32 (float64 for float64 activations).

    Outside `jax.vmap`, both have a batch in front.
    """

    conv: Float[Array, "*B past C"]
    recurrent: Float[Array, "*B H K V"]


class DeltaNetSnapshots(eqx.Module):
    """The mixer's state after each of S numbers of a call's tokens."""

    conv: Float[Array, "*B S past C"]
    recurrent: Float[Array, "*B S H K V"]

    def crop(self, index: int | Int[Array, ""]) -> DeltaNetState:
        """The state at snapshot `index`; a batch goes through `jax.vmap`."""

        def take(x, axis):
            return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)

        return DeltaNetState(take(self.conv, -3), take(self.recurrent, -4))


class GatedDeltaNet(eqx.Module):
    r"""Token mixer of Qwen3-Next and Qwen3.5: linear attention with the gated delta rule. For a sequence x [T D]:

        q, k, v = split(silu(conv(x W_qkv)))                 h key heads of size K, H value heads of size V
        g = −exp(A_log) softplus(x W_a + dt_bias)            log-decay of each value head,   β = sigmoid(x W_b)
        o = gated_delta_rule(q / ‖q‖, k / ‖k‖, v, g, β)      `deltanox.ops.gated_delta_rule`
        y = (RMSNorm(o) ∘ weight ∘ silu(x W_z)) W_out        the norm over each head

    The fields bear Hugging Face's names, in Qwen3.5's layout (`in_proj_qkv` is [all Q | all K | all V]). `A_log`,
    `dt_bias` and the norm's weight stay float32 under every cast. Initialisation is Qwen's: N(0, 0.02) for the
    projections and the convolution, A from U(0.01, 16) drawn in float32, `dt_bias` and the norm's weight ones.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; Qwen3-Next and Qwen3.5.
    """

    keep_float32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    in_proj_qkv: eqx.nn.Linear
    in_proj_z: eqx.nn.Linear
    in_proj_b: eqx.nn.Linear
    in_proj_a: eqx.nn.Linear
    conv: CausalConv1d
    A_log: Float[Array, " H"]
    dt_bias: Float[Array, " H"]
    norm: GatedRMSNorm
    out_proj: eqx.nn.Linear
    embed_size: int = eqx.field(static=True)
    num_key_heads: int = eqx.field(static=True)
    num_value_heads: int = eqx.field(static=True)
    key_head_size: int = eqx.field(static=True)
    value_head_size: int = eqx.field(static=True)
    chunk_size: int = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)
    precision: Precision | None = eqx.field(static=True)
    state_dtype: Any = eqx.field(static=True)
    decay_dtype: Any = eqx.field(static=True)
    residuals: Residuals = eqx.field(static=True)
    strict_hf_rounding: bool = eqx.field(static=True)

    def __init__(
        self,
        embed_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_head_size: int,
        value_head_size: int,
        conv_size: int = 4,
        gate: Literal["silu", "sigmoid"] = "silu",
        eps: float = 1e-6,
        chunk_size: int = 64,
        implementation: Implementation = "auto",
        precision: Precision | None = None,
        state_dtype: DTypeLike = jnp.float32,
        decay_dtype: DTypeLike = jnp.float32,
        residuals: Residuals = Residuals(),  # noqa: B008 (frozen)
        strict_hf_rounding: bool = False,
        dtype: DTypeLike = jnp.float32,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `embed_size`: D.
        - `num_key_heads`, `num_value_heads`: h and H, a multiple of h; value head i reads key head i // (H / h).
        - `key_head_size`, `value_head_size`: K and V.
        - `conv_size`: W, the width of the convolution; 1 looks at the current token only.
        - `gate`: activation of the output's gate.
        - `eps`: ε of the output norm (the L2 norm of q and k has its own, 1e-6).
        - `chunk_size`, `implementation`, `precision`, `state_dtype`, `decay_dtype`, `residuals`: as in
          `deltanox.ops.gated_delta_rule`.
        - `strict_hf_rounding`: round where Hugging Face's model rounds in bfloat16 (convolution before SiLU, β, norm
          before its weight); no difference in float32.
        - `dtype`: of the weights; `A_log`, `dt_bias` and the norm's weight are float32.

        **Raises:** `ValueError` for sizes and options that don't fit.
        """
        op = "GatedDeltaNet"
        sizes = {
            "embed_size": embed_size, "num_key_heads": num_key_heads, "num_value_heads": num_value_heads,
            "key_head_size": key_head_size, "value_head_size": value_head_size, "conv_size": conv_size,
        }  # fmt: skip
        for name, size in sizes.items():
            require_size(op, name, size)
        require(
            num_value_heads % num_key_heads == 0,
            f"{op}: num_value_heads = {num_value_heads} must be a multiple of num_key_heads = {num_key_heads}: each "
            f"key head serves equally many value heads",
        )
        check_options(
            op, chunk_size=chunk_size, implementation=implementation, precision=precision, state_dtype=state_dtype,
            decay_dtype=decay_dtype, residuals=residuals,
        )  # fmt: skip
        key_size, value_size = num_key_heads * key_head_size, num_value_heads * value_head_size
        qkv_key, z_key, b_key, a_key, conv_key, decay_key, out_key = jax.random.split(key, 7)
        self.in_proj_qkv = linear(embed_size, 2 * key_size + value_size, dtype=dtype, key=qkv_key)
        self.in_proj_z = linear(embed_size, value_size, dtype=dtype, key=z_key)
        self.in_proj_b = linear(embed_size, num_value_heads, dtype=dtype, key=b_key)
        self.in_proj_a = linear(embed_size, num_value_heads, dtype=dtype, key=a_key)
        self.conv = CausalConv1d(
            2 * key_size + value_size, conv_size, implementation=implementation, dtype=dtype, key=conv_key
        )
        # drawn in float32: eight bits would draw an A of 0 now and then, whose logarithm kills the head
        self.A_log = jnp.log(jax.random.uniform(decay_key, (num_value_heads,), jnp.float32, minval=0.01, maxval=16.0))
        self.dt_bias = jnp.ones((num_value_heads,), jnp.float32)
        self.norm = GatedRMSNorm(value_head_size, eps=eps, gate=gate)
        self.out_proj = linear(value_size, embed_size, dtype=dtype, key=out_key)
        self.embed_size = embed_size
        self.num_key_heads = num_key_heads
        self.num_value_heads = num_value_heads
        self.key_head_size = key_head_size
        self.value_head_size = value_head_size
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.precision = precision
        self.state_dtype = jnp.dtype(state_dtype)
        self.decay_dtype = jnp.dtype(decay_dtype)
        self.residuals = residuals
        self.strict_hf_rounding = strict_hf_rounding

    def init_state(self, *, dtype: Any = None) -> DeltaNetState:
        """Zeros, as before a document's first token. `dtype`: the activations', by default the projections'."""
        dtype = jnp.dtype(self.in_proj_qkv.weight.dtype if dtype is None else dtype)
        shape = (self.num_value_heads, self.key_head_size, self.value_head_size)
        return DeltaNetState(self.conv.init_state(dtype=dtype).inputs, jnp.zeros(shape, accumulator(dtype)))

    def __call__(
        self,
        x: Float[Array, "T D"],
        state: DeltaNetState | None = None,
        *,
        segment_ids: Int[Array, " T"] | None = None,
        mask: Bool[Array, " T"] | None = None,
        snapshots: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "T D"], DeltaNetState | DeltaNetSnapshots]:
        """Mix the tokens of a sequence, or of the next part of one: any split gives the values of one pass.

        **Arguments:**

        - `x`: embeddings, one row a token.
        - `state`: what the last call returned; None is the start of a document. It belongs to the first segment.
        - `segment_ids`: packed documents: tokens on the two sides of a change of the id never meet.
        - `mask`: False at padding, left or right: the state goes past it unchanged, its output is zero, its values
          (NaN included) are not looked at.
        - `snapshots`: numbers of the new tokens, increasing from 0 to T: the state comes as `DeltaNetSnapshots`, the
          states after so many of them. The recurrence runs from one to the next. Not with `segment_ids`.

        **Returns:** `(y, state)`: y in x's dtype, and the state after the last real token.

        **Raises:** `ValueError` where the shapes don't fit.
        """
        check_tokens("GatedDeltaNet", x, self.embed_size, "embed_size", segment_ids=segment_ids, mask=mask)
        if state is not None:
            require_record(
                "GatedDeltaNet", "state", state, DeltaNetState, remedy="take it from this layer's init_state"
            )
        if mask is not None:
            x = jnp.where(mask[:, None], x, 0)
        if snapshots is not None:
            check_snapshots("GatedDeltaNet", snapshots, x.shape[0], segment_ids=segment_ids)
        b, a = apply_linear(self.in_proj_b, x), apply_linear(self.in_proj_a, x)
        if self.residuals.qkv == "recompute" and snapshots is None and x.shape[0] > 1:
            return self._projecting_twice(x, a, b, state, segment_ids, mask)
        qkv, z = apply_linear(self.in_proj_qkv, x), apply_linear(self.in_proj_z, x)
        if snapshots is None:
            out, new = self._core(qkv, a, b, state, segment_ids, mask)
        else:
            out, new = self._from_one_to_the_next(qkv, a, b, state, mask, snapshots)
        return self._output(out, z), new

    def _from_one_to_the_next(self, qkv, a, b, state: DeltaNetState | None, mask, snapshots: tuple[int, ...]):
        state = self.init_state(dtype=qkv.dtype) if state is None else state
        states, outs = {0: state}, []
        ends = sorted({*snapshots, qkv.shape[0]} - {0})
        for begin, end in zip([0, *ends], ends):
            here = slice(begin, end)
            real = None if mask is None else mask[here]
            out, state = self._core(qkv[here], a[here], b[here], state, None, real)
            states[end] = state
            outs.append(out)
        kept = [states[count] for count in snapshots]
        conv, recurrent = (jnp.stack([getattr(s, name) for s in kept]) for name in ("conv", "recurrent"))
        return jnp.concatenate(outs), DeltaNetSnapshots(conv, recurrent)

    def _core(self, qkv, a, b, state: DeltaNetState | None, segment_ids, mask) -> tuple[Array, DeltaNetState]:
        weights = (self.A_log, self.dt_bias, self.conv.weight, self.conv.bias)
        conv, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        if state is not None and qkv.shape[0] == 1 and mask is None:
            out, conv, recurrent = gated_delta_net_step(
                qkv[0], a[0], b[0], *weights, conv_state=conv, initial_state=recurrent, **self._step_options
            )
            return out[None], DeltaNetState(conv, recurrent)
        out, conv, recurrent = gated_delta_net(
            qkv, a, b, *weights, conv_state=conv, initial_state=recurrent, segment_ids=segment_ids, mask=mask,
            **self._options,
        )  # fmt: skip
        return out, DeltaNetState(conv, recurrent)

    @property
    def _step_options(self) -> dict[str, Any]:
        return dict(
            num_key_heads=self.num_key_heads, key_head_size=self.key_head_size, activation=self.conv.activation,
            strict_hf_rounding=self.strict_hf_rounding,
        )  # fmt: skip

    @property
    def _options(self) -> dict[str, Any]:
        return self._step_options | dict(
            chunk_size=self.chunk_size, implementation=self.implementation, precision=self.precision,
            state_dtype=self.state_dtype, decay_dtype=self.decay_dtype, residuals=self.residuals,
        )  # fmt: skip

    def _projecting_twice(self, x, a, b, state: DeltaNetState | None, segment_ids, mask):
        """The whole call, in which projection and convolution keep nothing but x: they run again after the rule's
        gradients."""

        past, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        qkv, past = _projected_and_convolved(
            x, self.in_proj_qkv, self.conv.weight, self.conv.bias, past, segment_ids, mask,
            activation=self.conv.activation, implementation=self.implementation,
            strict_hf_rounding=self.strict_hf_rounding,
        )  # fmt: skip
        out, _, recurrent = gated_delta_net(
            qkv, a, b, self.A_log, self.dt_bias, None, initial_state=recurrent, segment_ids=segment_ids, mask=mask,
            **self._options,
        )  # fmt: skip
        # z's own gradients come before the rule's, so that its cotangent is free by then
        out, x, *arrays = together(out, x, *_trained(self.in_proj_z))
        z = apply_linear(eqx.tree_at(_trained, self.in_proj_z, tuple(arrays)), x)
        return self._output(out, z), DeltaNetState(past, recurrent)

    def _output(self, x: Float[Array, "T HV"], z: Float[Array, "T HV"]) -> Float[Array, "T D"]:
        z = checkpoint_name(z, "gdn_z")
        kernel = self.implementation if self.implementation in ("auto", "pallas") else None
        if isinstance(self.out_proj, LoRALinear):
            kernel = None  # its change is a product of its own, with the norm's result, which the kernel never writes
        if kernel and x.shape[0] > 1 and not self.strict_hf_rounding and takes(x, self.value_head_size):
            return gated_norm_projection(
                x, z, self.norm.weight, self.out_proj.weight, eps=self.norm.eps, gate=self.norm.gate,
                implementation=kernel,
            )  # fmt: skip
        heads = (x.shape[0], self.num_value_heads, self.value_head_size)
        norm = _rounded_norm if self.strict_hf_rounding else GatedRMSNorm.__call__
        return apply_linear(self.out_proj, norm(self.norm, x.reshape(heads), z.reshape(heads)).reshape(x.shape))


@compiled("activation", "implementation", "strict_hf_rounding")
def _projected_and_convolved(x, projection, weight, bias, past, segment_ids, mask, **options):
    """The convolution of the projection, both of which run again in the backward pass: only x is kept."""

    @jax.checkpoint
    def convolved(x, projection, weight, bias, past):
        return convolve(apply_linear(projection, x), weight, bias, past, segment_ids, mask, **options)

    return convolved(x, projection, weight, bias, past)


def _trained(layer: eqx.nn.Linear | LoRALinear) -> tuple[Any, ...]:
    """The arrays of a linear layer that gradients reach."""
    return (layer.up, layer.down) if isinstance(layer, LoRALinear) else (layer.weight,)


def _rounded_norm(norm: GatedRMSNorm, x, z):
    """`norm` with Hugging Face's roundings: to the activations' dtype after the normalisation and after the weight."""
    wide = accumulator(x.dtype)
    y, gate = x.astype(wide), z.astype(wide)
    y = (y * inverse_root(jnp.mean(y * y, axis=-1, keepdims=True), norm.eps)).astype(x.dtype)
    y = (y * norm.weight.astype(x.dtype)[(None,) * (x.ndim - 1)]).astype(wide)
    act = jax.nn.sigmoid(gate)
    return (y * (gate * act if norm.gate == "silu" else act)).astype(x.dtype)
