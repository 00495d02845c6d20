"""The mixer's core in float64, one document at a time: what packed, padded and split calls of the ops are held against.

Documents are cut out and padding is dropped before anything is computed, so that no mask and no boundary enters the mathematics.
Differentiable by JAX; call it under `jax.enable_x64(True)`, as `oracle` does.
"""

import jax
import jax.numpy as jnp
import numpy as np

ARRAYS = ("qkv", "a", "b", "A_log", "dt_bias", "conv_weight", "conv_state", "initial_state")


def spans(ids, mask):
    """The documents of a row: a list of [indices of its real tokens]; the first may be empty."""
    real = np.flatnonzero(mask)
    if not len(real):
        return [real]
    cuts = np.flatnonzero(np.diff(np.asarray(ids)[real])) + 1
    return np.split(real, cuts)


def document(qkv, a, b, A_log, dt_bias, conv_weight, past, state, index, h, K):
    """One document's real tokens `index`: outputs [n HV], and both states after it. Tokens between them count as zero for the taps."""
    (C, W), H = conv_weight.shape, A_log.shape[0]
    V = (C - 2 * h * K) // H
    if not len(index):
        return jnp.zeros((0, H * V)), past, state
    first, last = index[0], index[-1]
    holes = np.setdiff1d(np.arange(first, last + 1), index) - first
    seen = jnp.concatenate([past, qkv[first : last + 1].at[holes].set(0)])
    pre = sum(seen[w : w + last + 1 - first] * conv_weight[:, w] for w in range(W))[index - first]
    x = pre / (1 + jnp.exp(-pre))
    q, k, v = (
        x[:, : h * K].reshape(-1, h, K),
        x[:, h * K : 2 * h * K].reshape(-1, h, K),
        x[:, 2 * h * K :].reshape(-1, H, V),
    )
    q, k = (jnp.repeat(y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6), H // h, axis=1) for y in (q, k))
    decay = jnp.exp(-jnp.exp(A_log) * jnp.log1p(jnp.exp(a[index] + dt_bias)))
    beta = 1 / (1 + jnp.exp(-b[index]))

    def token(S, inputs):
        q, k, v, decay, beta = inputs
        S = S * decay[:, None, None]
        S = S + k[:, :, None] * (beta[:, None] * (v - (S * k[:, :, None]).sum(1)))[:, None, :]
        return S, (S * q[:, :, None]).sum(1) / K**0.5

    state, out = jax.lax.scan(token, state, (q, k, v, decay, beta))
    rows = jnp.concatenate([past, qkv[index]])
    return out.reshape(-1, H * V), rows[len(rows) - (W - 1) :], state


def row(qkv, a, b, A_log, dt_bias, conv_weight, past, state, ids, mask, h, K):
    """One row: (out [T HV], conv state, recurrent state)."""
    total = jnp.zeros((qkv.shape[0], qkv.shape[1] - 2 * h * K))
    for i, index in enumerate(spans(ids, mask)):
        if i:
            past, state = jnp.zeros_like(past), jnp.zeros_like(state)
        out, past, state = document(qkv, a, b, A_log, dt_bias, conv_weight, past, state, index, h, K)
        total = total.at[index].set(out)
    return total, past, state


def oracle(arrays, cotangents, *, h, K, segment_ids=None, mask=None):
    """Values of a batch [B T ...] and the gradients of all of `ARRAYS`, as float64 numpy arrays."""
    B, T = arrays[0].shape[:2]
    ids = np.zeros((B, T)) if segment_ids is None else np.asarray(segment_ids)
    real = np.ones((B, T), bool) if mask is None else np.asarray(mask)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]

        def batch(qkv, a, b, A_log, dt_bias, conv_weight, past, state):
            rows = [
                row(qkv[i], a[i], b[i], A_log, dt_bias, conv_weight, past[i], state[i], ids[i], real[i], h, K)
                for i in range(B)
            ]
            return tuple(jnp.stack(x) for x in zip(*rows))

        @jax.jit
        def both(wide, cotangents):
            values, pull = jax.vjp(batch, *wide)
            return values, pull(cotangents)

        values, gradients = both(wide, tuple(jnp.asarray(np.asarray(x, np.float64)) for x in cotangents))
        return [np.asarray(x) for x in values], [np.asarray(x) for x in gradients]


def draw(getkey, B, T, h, H, K, V, W, *, A=None, dtype=np.float32):
    """Inputs in the order of `ARRAYS`, and cotangents of the three results, by numpy. `A`: the decay rate, by default as Qwen draws it."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    C = 2 * h * K + H * V

    def normal(*shape):
        return random.normal(size=shape)

    rate = random.uniform(0.01, 16, H) if A is None else np.full(H, A)
    arrays = [normal(B, T, C), normal(B, T, H), normal(B, T, H), np.log(rate), normal(H), normal(C, W) / W**0.5, normal(B, W - 1, C),
              normal(B, H, K, V)]  # fmt: skip
    cotangents = normal(B, T, H * V), normal(B, W - 1, C), normal(B, H, K, V)
    return [x.astype(dtype) for x in arrays], tuple(x.astype(dtype) for x in cotangents)
