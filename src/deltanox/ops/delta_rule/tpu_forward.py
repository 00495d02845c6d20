"""The forward TPU kernel of the gated delta rule; mathematics in `chunked.py`, what kernels share in `tpu_common.py`.

With U = (I + strict(Γ ∘ K Kᵀ) diag(β))^-1, so that T diag(β) = diag(β) U, for one value head and chunk:

    Ñ = U (V − diag(c) K S)                        N = diag(β) Ñ
    O = diag(c) Q S + (lower(Γ ∘ Q Kᵀ) diag(β)) Ñ
    S' = c_C S + Kᵀ diag(d β) Ñ
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .._kernels import launch
from .._manual import result
from .tiling import CHUNK, Tiling
from .tpu_common import (
    PARTS,
    Columns,
    as_rows,
    column_block,
    gates,
    inverse,
    key_heads,
    pair_decays,
    product,
    solve,
    split,
    triangles,
)


def _kernel(
    q_ref, k_ref, v_ref, g_ref, rate_ref, state_ref, out_ref, final_ref, states_ref, u_ref, carry,
    *, tiling: Tiling, ratio: int, length: int, scale: float, eps: float | None, precision: str, every: int,
    valid: bool,
    kept_dtype,
):  # fmt: skip
    """A tile of tokens for some key heads. `carry` [heads, K, V] is the state, kept from tile to tile."""
    size, chunks, key_count = CHUNK, tiling.chunks, tiling.key_heads
    heads, key_size, value_size = carry.shape
    parts = PARTS[precision]
    tile = pl.program_id(2)

    @pl.when(tile == 0)
    def _():
        carry[...] = state_ref[0]

    def chunk(i, _):
        rows = pl.ds(i * size, size)
        tri = triangles(size)
        gate = gates(g_ref[0, 0, :, rows], rate_ref[0, 0, :, rows], tri)
        start = gate.start.T  # [C, heads]
        written = (gate.end * gate.rate).T

        def load(ref, head, width):
            x = ref[0, rows, head * width : (head + 1) * width]
            if valid:
                return x
            left = length - tile * tiling.tile - i * size
            return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < left, x, jnp.zeros_like(x))

        # once a key head
        ks, qs = ([load(ref, j, key_size) for j in range(key_count)] for ref in (k_ref, q_ref))
        keys = key_heads(ks, qs, tri, eps=eps, scale=scale, parts=parts.keys)

        # once a value head
        of = range(heads)
        pairs = [pair_decays(gate, h, tri, parts.gates or 3) * gate.rate[h : h + 1] for h in of]
        m = [pairs[h] * keys[h // ratio].gram for h in of]
        a = [split(pairs[h] * keys[h // ratio].read, parts.new) for h in of]
        state = [carry[h] for h in of]
        met = [product(keys[h // ratio].both, split(state[h], parts.state)) for h in of]
        rest = [load(v_ref, h, value_size).astype(jnp.float32) - start[:, h : h + 1] * met[h][:size] for h in of]
        if u_ref is None:
            new = solve(m, rest, parts.inverse)
        else:
            inverses = inverse(m, parts.inverse)
            new = [product(split(x, parts.inverse), split(y, parts.inverse)) for x, y in zip(inverses, rest)]
            for h in of:
                u_ref[0, i, h] = inverses[h].astype(u_ref.dtype)
        if states_ref is not None:

            @pl.when(jax.lax.rem(tile * chunks + i, every) == 0)
            def _():
                for h in of:
                    states_ref[0, jax.lax.div(i, every), h] = state[h].astype(states_ref.dtype)

        keys_t = [split(x.k.T, parts.keys) for x in keys]
        for h in of:
            ended = split(written[:, h : h + 1] * new[h], parts.new)
            whole = gate.start[h : h + 1, size - 1 : size]
            after = whole * state[h] + product(keys_t[h // ratio], ended)
            carry[h] = after.astype(kept_dtype).astype(jnp.float32)
        for h in of:
            out = start[:, h : h + 1] * met[h][size:] + product(a[h], split(new[h], parts.new))
            out_ref[0, rows, h * value_size : (h + 1) * value_size] = out.astype(out_ref.dtype)
        return 0

    jax.lax.fori_loop(0, chunks, chunk, 0)

    @pl.when(tile == pl.num_programs(2) - 1)
    def _():
        final_ref[0] = carry[...]


def forward(
    q: Columns,
    k: Columns,
    v: Columns,
    g: Float[Array, "B H T"],
    rate: Float[Array, "B H T"],
    state: Float[Array, "B H K V"],
    *,
    tiling: Tiling,
    scale: float,
    eps: float | None,
    precision: str,
    every: int,
    keep: bool,
    keep_u: bool,
    kept_dtype,
    vmem: int,
    interpret: Any,
) -> tuple[
    Float[Array, "B T HV"], Float[Array, "B H K V"], Float[Array, "B N H K V"] | None, Float[Array, "B M H C C"] | None
]:
    """Output, final state; with `keep`, the states before every n-th chunk in `kept_dtype`; with `keep_u`, U of every
    chunk."""
    batch, length = q.array.shape[:2]
    ratio = v.heads // q.heads
    heads = tiling.key_heads * ratio
    tiles = -(-length // tiling.tile)
    pad = tiles * tiling.tile - length
    steps = q.heads // tiling.key_heads
    g, rate = as_rows(g, steps, pad), as_rows(rate, steps, pad)

    def columns(x: Columns, count: int):
        return column_block(x, count, tiling.tile, pad, lambda t: t)

    row = pl.BlockSpec((1, 1, heads, tiling.tile), lambda b, j, t: (b, j, 0, t))
    whole = pl.BlockSpec((1, heads, q.size, v.size), lambda b, j, t: (b, j, 0, 0))
    out_specs = [pl.BlockSpec((1, tiling.tile, heads * v.size), lambda b, j, t: (b, t, j)), whole]
    out_shape = [
        result((batch, length, v.heads * v.size), v.array.dtype, state),
        result(state.shape, jnp.float32, state),
    ]
    if keep:
        assert tiling.chunks % every == 0 or every % tiling.chunks == 0
        chunks = -(-length // CHUNK)
        count = max(tiling.chunks // every, 1)
        repeat = max(every // tiling.chunks, 1)
        out_specs.append(
            pl.BlockSpec((1, count, heads, q.size, v.size), lambda b, j, t: (b, jax.lax.div(t, repeat), j, 0, 0))
        )
        out_shape.append(result((batch, -(-chunks // every), v.heads, q.size, v.size), kept_dtype, state))
    if keep_u:
        out_specs.append(
            pl.BlockSpec((1, tiling.chunks, heads, CHUNK, CHUNK), lambda b, j, t: (b, t, j, 0, 0)),
        )
        narrow = jnp.bfloat16 if PARTS[precision].inverse == 1 else jnp.float32
        out_shape.append(result((batch, -(-length // CHUNK), v.heads, CHUNK, CHUNK), narrow, state))
    body = functools.partial(
        _kernel, tiling=tiling, ratio=ratio, length=length, scale=scale, eps=eps, precision=precision, every=every,
        valid=pad == 0, kept_dtype=kept_dtype,
    )  # fmt: skip

    def kernel(*refs):
        *refs, carry = refs
        kept = iter(refs[8:])
        body(*refs[:8], next(kept) if keep else None, next(kept) if keep_u else None, carry)

    out, final, *kept = launch(
        kernel,
        grid=(batch, steps, tiles),
        in_specs=[columns(q, tiling.key_heads), columns(k, tiling.key_heads), columns(v, heads), row, row, whole],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((heads, q.size, v.size), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
        name="gdn_forward",
    )(q.array, k.array, v.array, g, rate, state)
    return out, final, kept.pop(0) if keep else None, kept.pop(0) if keep_u else None
