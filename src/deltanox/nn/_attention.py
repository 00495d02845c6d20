"""Gated softmax attention with grouped heads and a key-value cache: every fourth mixer of the hybrid models."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..ops._segments import boundaries
from ..ops._validate import describe, require, require_arrays, require_kind, require_record, require_size, shapes
from ..ops.attention import NEVER, causal_attention
from ._cache import OVERFLOWED, KVCache, KVSnapshots, check_snapshots
from ._linear import apply_linear, linear
from ._norms import RMSNorm
from ._rotary import RotaryEmbedding, apply_rotary


class GatedAttention(eqx.Module):
    """Causal softmax attention whose output is gated: y = W_o (attention(q, k, v) · σ(gate)).

    [q_i | gate_i] = W_q x for each of n heads (query and gate side by side within a head), k and v for m heads; q and k
    pass a zero-centred norm over the head (shared by the heads), then the rotation of the head's first `rotary_size`
    features; query head i reads key head i // (n/m); scores are scaled by head_size^-0.5.

    Source: Qwen3-Next and Qwen3.5 (transformers 5.24); the output gate arXiv:2505.06708. Weights have Hugging Face's
    names and shapes.
    """

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    rotary: RotaryEmbedding
    embed_size: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_size: int = eqx.field(static=True)

    def __init__(
        self,
        embed_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary_size: int,
        rope_theta: float = 1e7,
        mrope_sections: tuple[int, int, int] | None = None,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.float32,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `embed_size`: D; `num_heads`: n query heads, a multiple of `num_kv_heads` (m); `head_size`: hd.
        - `rotary_size`: how many of a head's features are rotated, even (a quarter of the head in the releases).
        - `rope_theta`, `mrope_sections`: see `RotaryEmbedding`; sections are needed for positions [3 T].
        - `eps`: of the q and k norm; `dtype`: of the weights; `key`: for N(0, 0.02) weights.

        **Raises:** `ValueError` for heads that don't divide or a rotary size above the head's.
        """
        op = "GatedAttention"
        sizes = {
            "embed_size": embed_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size,
            "rotary_size": rotary_size,
        }  # fmt: skip
        for name, size in sizes.items():
            require_size(op, name, size)
        require(
            num_heads % num_kv_heads == 0,
            f"GatedAttention: `num_heads` must be a multiple of `num_kv_heads`, but they are {num_heads} and "
            f"{num_kv_heads}",
        )
        require(
            rotary_size <= head_size,
            f"GatedAttention: `rotary_size` must be at most head_size = {head_size}, but it is {rotary_size}",
        )
        keys = jax.random.split(key, 4)
        self.q_proj = linear(embed_size, num_heads * head_size * 2, dtype=dtype, key=keys[0])
        self.k_proj = linear(embed_size, num_kv_heads * head_size, dtype=dtype, key=keys[1])
        self.v_proj = linear(embed_size, num_kv_heads * head_size, dtype=dtype, key=keys[2])
        self.o_proj = linear(num_heads * head_size, embed_size, dtype=dtype, key=keys[3])
        self.q_norm = RMSNorm(head_size, eps=eps, dtype=dtype)
        self.k_norm = RMSNorm(head_size, eps=eps, dtype=dtype)
        self.rotary = RotaryEmbedding(rotary_size, theta=rope_theta, sections=mrope_sections)
        self.embed_size = embed_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size

    def init_state(self, capacity: int, *, dtype: DTypeLike | None = None) -> KVCache:
        """An empty cache with `capacity` slots, of the weights' dtype unless given (it should be the activations')."""
        capacity = require_size("GatedAttention.init_state", "capacity", capacity)
        slots = (capacity, self.num_kv_heads, self.head_size)
        dtype = self.k_proj.weight.dtype if dtype is None else dtype
        # an array of its own for each field: a state is donated, and no buffer can be donated twice
        key, value = jnp.zeros(slots, dtype), jnp.zeros(slots, dtype)
        length, position = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return KVCache(key, value, jnp.zeros((capacity,), bool), length, position)

    def __call__(
        self,
        x: Float[Array, "T D"],
        state: KVCache | None = None,
        *,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        snapshots: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "T D"], KVCache | KVSnapshots]:
        """Attend to the cached tokens and to the past of the new ones.

        **Arguments:**

        - `x`: tokens of one sequence; a batch goes through `jax.vmap`.
        - `state`: the cache, None for a sequence that begins (and a returned cache of exactly T slots: `resize` it to
            go on). The cached tokens belong to the first segment of the new ones.
        - `positions`: [T], or [3 T] with M-RoPE. None counts the real tokens of each segment, on from the cache's
            position.
        - `segment_ids`: packed documents; any change between neighbours is a border that attention doesn't cross.
            Borders are never inferred from positions.
        - `mask`: False at padding, anywhere: it is neither seen nor counted, and its own output is W_o · 0 = 0.
        - `snapshots`: numbers of the new tokens, increasing from 0 to T: the state comes as `KVSnapshots`, which can be
            cropped back to the cache after so many of them. Not with `positions` or `segment_ids`.

        **Returns:** outputs [T D] in x's dtype, and the cache. If the cache has too few slots the outputs are NaN, now
        and from then on: call `state.resize(capacity)` before it is full.

        **Raises:** `ValueError` for a wrong rank, width, length or dtype.
        """
        self._check(x, state, positions, segment_ids, mask)
        if snapshots is not None:
            check_snapshots("GatedAttention", snapshots, x.shape[0], positions=positions, segment_ids=segment_ids)
        T = x.shape[0]
        if mask is not None:
            x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
        where = _Places.of(T, state, positions, segment_ids, mask)

        query_gate = checkpoint_name(apply_linear(self.q_proj, x), "attention_query")
        query_gate = query_gate.reshape(T, self.num_heads, 2 * self.head_size)
        q, gate = query_gate[..., : self.head_size], query_gate[..., self.head_size :]
        k = checkpoint_name(apply_linear(self.k_proj, x), "attention_key")
        v = checkpoint_name(apply_linear(self.v_proj, x), "attention_value")
        k, v = (y.reshape(T, self.num_kv_heads, self.head_size) for y in (k, v))
        cos, sin = self.rotary(where.positions)
        q, k = apply_rotary(self.q_norm(q), cos, sin), apply_rotary(self.k_norm(k), cos, sin)

        segments = where.segments
        if state is None:
            offset, key_segments, length = 0, segments, jnp.asarray(T, jnp.int32)
            cache_k, cache_v = k, v
        else:
            offset, length = state.length, state.length + jnp.asarray(T, jnp.int32)
            # without packing all new tokens are in segment 0, as the cached ones are
            segments = jnp.zeros((T,), jnp.int32) if segments is None else segments
            key_segments = jnp.where(state.valid, 0, NEVER).astype(jnp.int32)
            key_segments = jax.lax.dynamic_update_slice_in_dim(key_segments, segments, state.length, 0)
            cache_k = jax.lax.dynamic_update_slice_in_dim(state.key, k.astype(state.key.dtype), state.length, 0)
            cache_v = jax.lax.dynamic_update_slice_in_dim(state.value, v.astype(state.value.dtype), state.length, 0)
            k, v = cache_k.astype(x.dtype), cache_v.astype(x.dtype)
        out = causal_attention(q, k, v, offset=offset, query_segments=segments, key_segments=key_segments)
        y = apply_linear(self.o_proj, (out * jax.nn.sigmoid(gate)).reshape(T, self.num_heads * self.head_size))
        if state is not None:
            overflow = length > state.capacity
            y = jnp.where(overflow, jnp.asarray(jnp.nan, y.dtype), y)
            length = jnp.where(overflow, OVERFLOWED, length)
        valid = jnp.ones((T,), bool) if key_segments is None else key_segments == where.last_segment
        cache = KVCache(cache_k, cache_v, valid, length, where.next_position)
        if snapshots is None:
            return y, cache
        counts = jnp.asarray(snapshots, jnp.int32)
        before = jnp.zeros((), jnp.int32) if state is None else state.position
        position = jnp.concatenate([before[None], where.positions + 1])[counts]
        return y, KVSnapshots(cache, length - T + counts, position)

    def _check(self, x, state, positions, segment_ids, mask) -> None:
        op = "GatedAttention"
        require_kind(op, "x", x, "T D")
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
        require(x.shape[0] >= 1, f"{op}: `x` must hold at least one token, but it is {describe(x)} [T, D]")
        T = x.shape[:1]
        require_arrays(op, positions=positions, segment_ids=segment_ids, mask=mask)
        received = shapes(x=x, positions=positions, segment_ids=segment_ids, mask=mask)
        require(
            positions is None or positions.shape in (T, (3, *T)),
            f"{op}: `positions` must be [T] or [3, T], one for each token of x [T, D], but received {received}",
        )
        for name, ids, kind in (("segment_ids", segment_ids, jnp.integer), ("mask", mask, jnp.bool_)):
            require(
                ids is None or (ids.shape == T and jnp.issubdtype(ids.dtype, kind)),
                f"{op}: `{name}` must be {'integers' if kind is jnp.integer else 'booleans'} [T], one for each token "
                "of x [T, D], "
                f"but received {received}: with a batch, map it together with x under jax.vmap",
            )
        if state is not None:
            require_record(op, "state", state, KVCache, remedy="take it from this layer's init_state")
            slots = (self.num_kv_heads, self.head_size)
            require(
                state.key.ndim == 3 and state.key.shape[1:] == slots and state.value.shape == state.key.shape,
                f"{op}: `state` must have keys and values [S, {slots[0]}, {slots[1]}] (slots, key heads, head size), "
                "but received "
                f"{shapes(key=state.key, value=state.value)}: take it from this layer's init_state, mapped with x "
                "under jax.vmap",
            )
            require(
                x.shape[0] <= state.capacity,
                f"{op}: `state` must have at least as many slots as there are new tokens, but received {shapes(x=x)} "
                "[T, D] and "
                f"{state.capacity} slots: call state.resize(capacity) first",
            )


class _Places(eqx.Module):
    """Where the tokens of one call are: rotary positions, segment numbers (None for one unpadded segment), and what
    comes next."""

    positions: Int[Array, "T"] | Int[Array, "3 T"]
    segments: Int[Array, "T"] | None
    last_segment: Int[Array, ""]
    next_position: Int[Array, ""]

    @staticmethod
    def of(T, state, positions, segment_ids, mask) -> "_Places":
        zero = jnp.zeros((), jnp.int32)
        before = zero if state is None else state.position
        # index of each token among the real ones, that of the last real one at padding
        if mask is None:
            index = jnp.arange(T, dtype=jnp.int32)
        else:
            index = jnp.cumsum(mask.astype(jnp.int32)) - 1
        starts = boundaries(segment_ids, mask)
        if starts is None:
            number, first = jnp.zeros((T,), jnp.int32), jnp.zeros((T,), jnp.int32)
        else:
            number = jnp.cumsum(starts.astype(jnp.int32))
            first = jax.lax.cummax(jnp.where(starts, index, 0))
        counted = index - first + jnp.where(number == 0, before, 0)
        last = number[-1]
        if positions is None:
            positions, following = counted, counted[-1] + 1
        else:
            # one past the largest position of the last segment on any axis, as for text that follows an image
            own = number == last if mask is None else (number == last) & mask
            largest = jnp.max(jnp.where(own, jnp.max(positions.reshape(-1, T).astype(jnp.int32), axis=0), -1))
            following = jnp.maximum(largest + 1, jnp.where(last == 0, before, 0))
        if mask is not None:
            segments = jnp.where(mask, number, NEVER)
        else:
            segments = None if starts is None else number
        return _Places(positions, segments, last, following)
