"""The backward TPU kernel of the gated delta rule, in the notation of `tpu_forward.py` and `backward.py`.

It runs the tiles in reverse. In each, the chunks run forward once more from the saved states, which gives every
chunk's S, U and Ñ; then they run backward with dS', the cotangent of the state after each. With X = −dR Ñᵀ below the
diagonal, Y = dO Ñᵀ on and below it, W = Γ ∘ K Kᵀ, A = Γ ∘ Q Kᵀ:

    dÑ = (A diag(β))ᵀ dO + diag(d β) K dS'         dR = Uᵀ dÑ = dV
    dS = c_C dS' − Kᵀ diag(c) dR + Qᵀ diag(c) dO
    dK = −diag(c) dR Sᵀ + diag(d β) Ñ dS'ᵀ + (E + Eᵀ) K + Fᵀ Q          E = Γ ∘ X diag(β), F = Γ ∘ Y diag(β)
    dQ = diag(c) dO Sᵀ + F K
    Z = X ∘ W + Y ∘ A          dβ_j = Σ_i Z_ij + d_j Ñ_j·(K dS')_j

and dg from the pairs Z diag(β) below the diagonal, from c and from d, as in `backward.py`.

q, k and v that are columns of one array get their cotangents in the columns of one array, which may be theirs: then
the kernel moves its columns itself (`tpu_columns.py`), since the pipeline of Pallas writes one block an output.
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
from .tpu_columns import Moves, in_one_array
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
    split,
    triangles,
)


def _kernel(
    q_ref, k_ref, v_ref, g_ref, rate_ref, states_ref, out_bar_ref, final_bar_ref,
    q_bar_ref, k_bar_ref, v_bar_ref, g_bar_ref, rate_bar_ref, state_bar_ref,
    carry, running, all_states, all_u, all_new,
    *, tiling: Tiling, ratio: int, length: int, scale: float, eps: float | None, precision: str, every: int,
    valid: bool,
    inverted: bool,
):  # fmt: skip
    """A tile of tokens for some key heads. q, k, v, their cotangents and the output's are [tokens, heads · size];
    `all_u` is U, of the record (`inverted`) or the scratch for it."""
    size, chunks, key_count = CHUNK, tiling.chunks, tiling.key_heads
    heads, key_size, value_size = carry.shape
    of = range(heads)
    parts = PARTS[precision]
    tile = pl.num_programs(2) - 1 - pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _():
        carry[...] = final_bar_ref[0]

    def load(ref, i, head, width):
        rows = pl.ds(i * size, size)
        x = ref[rows, head * width : (head + 1) * width]
        if valid:
            return x
        left = length - tile * tiling.tile - i * size
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < left, x, jnp.zeros_like(x))

    def over_heads(xs):
        """The sums over each key head's value heads."""
        return [functools.reduce(jnp.add, xs[j * ratio : (j + 1) * ratio]) for j in range(key_count)]

    def local(i, tri):
        """What the tokens of chunk i give."""
        rows = pl.ds(i * size, size)
        gate = gates(g_ref[0, 0, :, rows], rate_ref[0, 0, :, rows], tri)
        ks, qs = ([load(ref, i, j, key_size) for j in range(key_count)] for ref in (k_ref, q_ref))
        keys = key_heads(ks, qs, tri, eps=eps, scale=scale, parts=parts.keys)
        return gate, keys, [pair_decays(gate, h, tri, parts.gates or 3) for h in of]

    def forward(i, _):
        tri = triangles(size)
        gate, keys, pairs = local(i, tri)
        start, written = gate.start.T, (gate.end * gate.rate).T
        keys_t = [split(x.k.T, parts.keys) for x in keys]

        @pl.when(jax.lax.rem(i, every) == 0)
        def _():
            for h in of:
                running[h] = states_ref[0, jax.lax.div(i, every), h].astype(jnp.float32)

        state = [running[h] for h in of]
        met = [product(keys[h // ratio].keys, split(state[h], parts.state)) for h in of]
        rest = [load(v_ref, i, h, value_size).astype(jnp.float32) - start[:, h : h + 1] * met[h] for h in of]
        if inverted:
            us = [all_u[i, h] for h in of]
        else:
            us = inverse([pairs[h] * gate.rate[h : h + 1] * keys[h // ratio].gram for h in of], parts.inverse)
        new = [product(split(us[h], parts.inverse), split(rest[h], parts.inverse)) for h in of]
        for h in of:
            all_states[i, h] = state[h]
            if not inverted:
                all_u[i, h] = us[h].astype(all_u.dtype)
            all_new[i, h] = new[h].astype(all_new.dtype)
        if every > 1:
            for h in of:
                ended = split(written[:, h : h + 1] * new[h], parts.new)
                after = gate.start[h : h + 1, size - 1 : size] * state[h] + product(keys_t[h // ratio], ended)
                running[h] = after.astype(states_ref.dtype).astype(jnp.float32)
        return 0

    jax.lax.fori_loop(0, chunks, forward, 0)

    def backward(step, _):
        i = chunks - 1 - step
        tri = triangles(size)
        gate, keys, pairs = local(i, tri)
        start, written = gate.start.T, (gate.end * gate.rate).T
        rows = pl.ds(i * size, size)
        of_key = [keys[h // ratio] for h in of]
        state, new, after = ([x[h] for h in of] for x in (all_states.at[i], all_new.at[i], carry))
        new = [x.astype(jnp.float32) for x in new]
        out_bar = [load(out_bar_ref, i, h, value_size) for h in of]
        out_bars = [split(x, parts.new) for x in out_bar]
        reads = [split(pairs[h] * of_key[h].read * gate.rate[h : h + 1], parts.new) for h in of]
        afters = [split(x, parts.state) for x in after]
        ahead = [product(of_key[h].keys, afters[h]) for h in of]  # K dS'
        new_bar = [product(reads[h], out_bars[h], (0, 0)) + written[:, h : h + 1] * ahead[h] for h in of]
        with_rate = [pairs[h] * gate.rate[h : h + 1] for h in of]
        rest_bar = [product(split(all_u[i, h], parts.inverse), split(new_bar[h], parts.inverse), (0, 0)) for h in of]
        for h in of:
            v_bar_ref[rows, h * value_size : (h + 1) * value_size] = rest_bar[h].astype(v_bar_ref.dtype)

        # the pairs within the chunk
        news = [split(x, parts.new) for x in new]
        xs = [-product(split(rest_bar[h], parts.new), news[h], (1, 1)) for h in of]
        ys = [product(out_bars[h], news[h], (1, 1)) for h in of]
        z = [pairs[h] * (xs[h] * of_key[h].gram + ys[h] * of_key[h].read) for h in of]
        gram_bar = [jnp.where(tri.strict, x, 0.0) for x in over_heads([a * b for a, b in zip(with_rate, xs)])]
        read_bar = over_heads([a * b for a, b in zip(with_rate, ys)])
        read_bar = [split(jnp.where(tri.lower, x, 0.0), parts.new) for x in read_bar]

        # the state
        met = [product(of_key[h].both, split(state[h], parts.state)) for h in of]
        met_bar = [
            jnp.concatenate([-rest_bar[h], out_bar[h].astype(jnp.float32)], axis=0)
            * jnp.concatenate([start[:, h : h + 1]] * 2, axis=0)
            for h in of
        ]
        met_bars = [split(x, parts.new) for x in met_bar]
        for h in of:
            whole = gate.start[h : h + 1, size - 1 : size]
            carry[h] = whole * after[h] + product(of_key[h].both, met_bars[h], (0, 0))

        # keys and queries
        ended = [split(written[:, h : h + 1] * new[h], parts.new) for h in of]
        both_bar = over_heads([product(met_bars[h], split(state[h], parts.state), (1, 1)) for h in of])
        ended_bar = over_heads([product(ended[h], afters[h], (1, 1)) for h in of])
        for j in range(key_count):
            total, more, key = both_bar[j], ended_bar[j], keys[j]
            queries = split(key.q, parts.keys)
            symmetric = split(gram_bar[j] + gram_bar[j].T, parts.new)
            k_bar = total[:size] + more + product(symmetric, key.keys) + product(read_bar[j], queries, (0, 0))
            q_bar = (total[size:] + product(read_bar[j], key.keys)) * scale
            if key.k_norm is not None and key.q_norm is not None:
                unit = key.q * (1.0 / scale)
                k_bar = key.k_norm * (k_bar - key.k * jnp.sum(key.k * k_bar, axis=1, keepdims=True))
                q_bar = key.q_norm * (q_bar - unit * jnp.sum(unit * q_bar, axis=1, keepdims=True))
            for ref, x in ((k_bar_ref, k_bar), (q_bar_ref, q_bar)):
                ref[rows, j * key_size : (j + 1) * key_size] = x.astype(ref.dtype)

        # gates, as rows
        exact = 2 if precision == "default" else 3
        ones = (jnp.ones((8, value_size), jnp.bfloat16),)
        met_dot = [met_bar[h] * met[h] for h in of]
        start_bar = [product(ones, split(met_dot[h][:size] + met_dot[h][size:], exact), (1, 1))[:1] for h in of]
        end_bar = [product(ones, split(new[h] * ahead[h], exact), (1, 1))[:1] * gate.end[h : h + 1] for h in of]
        whole_bar = [
            jnp.sum(state[h] * after[h], keepdims=True).reshape(1, 1) * gate.start[h : h + 1, size - 1 : size]
            for h in of
        ]
        rate_bar = [jnp.sum(jnp.where(tri.lower, z[h], 0.0), axis=0, keepdims=True) + end_bar[h] for h in of]
        if precision != "default":
            # dR is β (Aᵀ dO + diag(d) K dS' − Wᵀ dR): where β isn't zero, dβ is a single sum in which nothing cancels
            direct = [product(ones, split(new[h] * rest_bar[h], exact), (1, 1))[:1] for h in of]
            rate = [gate.rate[h : h + 1] for h in of]
            rate_bar = [jnp.where(r == 0, x, y / jnp.where(r == 0, 1.0, r)) for r, x, y in zip(rate, rate_bar, direct)]
        p = [split(jnp.where(tri.strict, z[h], 0.0) * gate.rate[h : h + 1], exact) for h in of]
        before_ones = (tri.strict_ones.T,)  # j < l
        before = [product(x, before_ones) for x in p]
        inside = [jnp.sum(jnp.where(tri.lower, x, 0.0), axis=0, keepdims=True) for x in before]
        stack = lambda rows: jnp.concatenate(rows, axis=0)  # noqa: E731
        outside = product(split(stack(start_bar), 3), (tri.upper_ones.T,))
        outside += product(split(stack(end_bar) * gate.rate, 3), before_ones)
        g_bar_ref[0, 0, :, rows] = stack(inside) + outside + stack(whole_bar)
        rate_bar_ref[0, 0, :, rows] = stack(rate_bar)
        return 0

    jax.lax.fori_loop(0, chunks, backward, 0)

    @pl.when(tile == 0)
    def _():
        state_bar_ref[0] = carry[...]


def backward(
    q: Columns,
    k: Columns,
    v: Columns,
    g: Float[Array, "B H T"],
    rate: Float[Array, "B H T"],
    states: Float[Array, "B N H K V"],
    u: Float[Array, "B M H C C"] | None,
    out_bar: Float[Array, "B T HV"],
    final_bar: Float[Array, "B H K V"],
    *,
    tiling: Tiling,
    scale: float,
    eps: float | None,
    precision: str,
    every: int,
    overwrite: bool,
    vmem: int,
    interpret: Any,
) -> tuple:
    """Cotangents: a tuple of those of q, k and v [B, T, heads · size] in their dtype, or of the one of an array that
    has them side by side; of g and rate [B, H, T]; of the initial state. `overwrite`: that one array may become its
    cotangent."""
    batch, length = q.array.shape[:2]
    ratio = v.heads // q.heads
    heads = tiling.key_heads * ratio
    tiles = -(-length // tiling.tile)
    pad = tiles * tiling.tile - length
    steps = q.heads // tiling.key_heads
    assert tiling.chunks % every == 0
    g, rate = as_rows(g, steps, pad), as_rows(rate, steps, pad)
    dtype, narrow = q.array.dtype, jnp.bfloat16 if PARTS[precision].inverse == 1 else jnp.float32
    body = functools.partial(
        _kernel, tiling=tiling, ratio=ratio, length=length, scale=scale, eps=eps, precision=precision, every=every,
        valid=pad == 0, inverted=u is not None,
    )  # fmt: skip

    def columns(x: Columns, count: int):
        return column_block(x, count, tiling.tile, pad, lambda t: tiles - 1 - t)

    def tokens(width: int):
        return pl.BlockSpec((1, tiling.tile, width), lambda b, j, t: (b, tiles - 1 - t, j))

    def chunks(count: int, *shape: int):
        return pl.BlockSpec((1, count, heads, *shape), lambda b, j, t: (b, tiles - 1 - t, j, 0, 0))

    row = pl.BlockSpec((1, 1, heads, tiling.tile), lambda b, j, t: (b, j, 0, tiles - 1 - t))
    whole = pl.BlockSpec((1, heads, q.size, v.size), lambda b, j, t: (b, j, 0, 0))
    parts = tuple(zip((q, k, v), (tiling.key_heads, tiling.key_heads, heads)))
    scratch = [
        pltpu.VMEM((heads, q.size, v.size), jnp.float32),
        pltpu.VMEM((heads, q.size, v.size), jnp.float32),
        pltpu.VMEM((tiling.chunks, heads, q.size, v.size), jnp.float32),
        pltpu.VMEM((tiling.chunks, heads, CHUNK, v.size), jnp.float32),
    ]
    if u is None:
        scratch.append(pltpu.VMEM((tiling.chunks, heads, CHUNK, CHUNK), narrow))
    merged = in_one_array(parts, length)
    if merged:
        moves = Moves(parts, tiling.tile, length)
        arrays, specs = [q.array], [pl.BlockSpec(memory_space=pl.ANY)]
        shapes, out_specs = [result(q.array.shape, dtype, q.array)], [pl.BlockSpec(memory_space=pl.ANY)]
        scratch += moves.scratch(dtype)
    else:
        arrays, specs = [x.array for x, _ in parts], [columns(*x) for x in parts]
        shapes = [result((batch, length, x.heads * x.size), dtype, x.array) for x, _ in parts]
        out_specs = [tokens(count * x.size) for x, count in parts]
    count = len(arrays)

    def kernel(*refs):
        xs, (g_ref, rate_ref, states_ref), refs = refs[:count], refs[count : count + 3], list(refs[count + 3 :])
        u_ref = None if u is None else refs.pop(0).at[0]
        (out_bar_ref, final_bar_ref), x_bars, refs = refs[:2], refs[2 : 2 + count], refs[2 + count :]
        (g_bar_ref, rate_bar_ref, state_bar_ref), refs = refs[:3], refs[3:]
        carry, running, all_states, all_new, *refs = refs
        all_u = refs.pop(0) if u_ref is None else u_ref

        def run(xs, x_bars):
            body(
                *xs, g_ref, rate_ref, states_ref, out_bar_ref.at[0], final_bar_ref, *x_bars, g_bar_ref, rate_bar_ref,
                state_bar_ref, carry, running, all_states, all_u, all_new,
            )  # fmt: skip

        if merged:
            moves.run(run, xs[0], x_bars[0], refs)
        else:
            run([x.at[0] for x in xs], [x.at[0] for x in x_bars])

    gate = result(g.shape, jnp.float32, g)
    *x_bars, g_bar, rate_bar, state_bar = launch(
        kernel,
        grid=(batch, steps, tiles),
        in_specs=[
            *specs, row, row, chunks(tiling.chunks // every, q.size, v.size),
            *([] if u is None else [chunks(tiling.chunks, CHUNK, CHUNK)]),
            columns(Columns(out_bar, 0, v.heads, v.size), heads), whole,
        ],
        out_specs=[*out_specs, row, row, whole],
        out_shape=[*shapes, gate, gate, result(final_bar.shape, jnp.float32, final_bar)],
        scratch_shapes=scratch,
        # the interpreter cannot alias where blocks reach over the edge
        input_output_aliases={0: 0} if merged and overwrite and not (interpret and pad) else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
        name="gdn_backward",
    )(*arrays, g, rate, states, *([] if u is None else [u]), out_bar, final_bar)  # fmt: skip
    g_bar, rate_bar = (x.reshape(batch, v.heads, -1)[..., :length] for x in (g_bar, rate_bar))
    return tuple(x_bars), g_bar, rate_bar, state_bar
