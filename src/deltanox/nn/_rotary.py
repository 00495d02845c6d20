"""Rotary positions on part of a head, with explicit positions, for text and (interleaved M-RoPE) for images."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..ops._dtypes import accumulator
from ..ops._validate import describe, require, require_array, require_kind, require_number, require_size


class RotaryEmbedding(eqx.Module):
    """Cosines and sines of the angles p_j · θ^(-2j/size), j = 0 ... size/2 - 1.

    `size` is the number of rotated features of a head (`head_size · partial_rotary_factor`, 64 of 256 in the releases),
    and the exponent runs over it, not over the head. Text has one position a token. With `sections` (sT, sH, sW) a
    token has three (time, height, width), interleaved over the frequencies: frequency j reads H at j = 1, 4, 7 ... (sH
    of them), W at j = 2, 5, 8 ... (sW of them), and T everywhere else. Three equal positions give text's angles, bit
    for bit.

    There is no table and no cache: positions are arguments. Source: RoFormer (arXiv:2104.09864), Qwen3.5's M-RoPE.
    """

    size: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    sections: tuple[int, int, int] | None = eqx.field(static=True)

    def __init__(self, size: int, *, theta: float = 1e7, sections: tuple[int, int, int] | None = None):
        """**Arguments:** `size`: rotated features, even; `theta`: base; `sections`: frequencies for T, H and W, None
        for text only.

        **Raises:** `ValueError` for an odd size, a base that isn't positive, or sections that don't fill size/2
        interleaved.
        """
        size, theta = (
            require_size("RotaryEmbedding", "size", size, least=-(2**31)),
            require_number("RotaryEmbedding", "theta", theta),
        )
        require(size >= 2 and size % 2 == 0, f"RotaryEmbedding: `size` must be even and at least 2, but it is {size}")
        require(theta > 0, f"RotaryEmbedding: `theta` must be positive, but it is {theta}")
        if sections is not None:
            half, (_, height, width) = size // 2, sections
            fits = min(sections) >= 0 and 3 * height - 2 < half and 3 * width - 1 < half
            require(
                sum(sections) == half and fits,
                f"RotaryEmbedding: `sections` must add up to size/2 = {half} frequencies and leave room for every "
                "third one to be "
                f"H or W, but they are {sections}: give sections in the proportions of (11, 11, 10) for 32, or None "
                "for text only",
            )
        self.size = size
        self.theta = theta
        self.sections = sections

    def __call__(
        self, positions: Int[Array, "T"] | Int[Array, "3 T"]
    ) -> tuple[Float[Array, "T size"], Float[Array, "T size"]]:
        """**Arguments:** `positions`: [T], or [3 T] (time, height, width) where `sections` were given; integers.

        **Returns:** (cos, sin), float32 [T size]; the second half of the features repeats the first.

        **Raises:** `ValueError` for any other shape or for positions that aren't integers.
        """
        require_array("RotaryEmbedding", "positions", positions, "*3 T", kind="integer")
        require(
            positions.ndim == 1 or (positions.ndim == 2 and positions.shape[0] == 3),
            "RotaryEmbedding: `positions` must be [T] or [3, T] (time, height, width), but it is "
            f"{describe(positions)}: "
            "wrap the layer in jax.vmap for a batch",
        )
        require(
            positions.ndim == 1 or self.sections is not None,
            f"RotaryEmbedding: `positions` is {describe(positions)}, three a token, but the layer has no sections for "
            "them: "
            "build it with sections=(11, 11, 10) or the like, or give positions [T]",
        )
        half = self.size // 2
        # in float64, then rounded once: the angle at position 10^5 keeps the error of one float32 rounding
        frequency = jnp.asarray(self.theta ** (-2 * np.arange(half, dtype=np.float64) / self.size), jnp.float32)
        p = positions.astype(jnp.float32)
        if positions.ndim == 2 and self.sections is not None:
            j = np.arange(half)
            axis = np.zeros(half, np.int32)
            axis[(j % 3 == 1) & (j < 3 * self.sections[1])] = 1
            axis[(j % 3 == 2) & (j < 3 * self.sections[2])] = 2
            angle = p[axis].T * frequency[None]
        else:
            angle = p[:, None] * frequency[None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1)


def apply_rotary(
    x: Float[Array, "T n hd"], cos: Float[Array, "T size"], sin: Float[Array, "T size"]
) -> Float[Array, "T n hd"]:
    """Rotate the first `size` features of every head: pairs (i, i + size/2), the others pass unchanged.

    y_i = x_i cos_i - x_(i+size/2) sin_i,   y_(i+size/2) = x_(i+size/2) cos_i + x_i sin_i

    **Arguments:** `x`: heads [T n hd]; `cos`, `sin`: from `RotaryEmbedding`, [T size] with size ≤ hd.

    **Returns:** x's shape and dtype; the rotation is evaluated in float32 and rounded once.

    **Raises:** `ValueError` if the angles have more features than a head or another number of tokens.
    """
    for name, y, axes in (("x", x, "T n hd"), ("cos", cos, "T size"), ("sin", sin, "T size")):
        require_kind("apply_rotary", name, y, axes)
    size = cos.shape[-1] if cos.ndim else 0
    require(
        x.ndim == 3 and cos.shape == sin.shape and cos.ndim == 2 and cos.shape[0] == x.shape[0] and size <= x.shape[-1],
        "apply_rotary: `x` must be [T, heads, head_size] and `cos`, `sin` [T, size] with size ≤ head_size, but x is "
        f"{describe(x)}, cos {describe(cos)}, sin {describe(sin)}: wrap the call in jax.vmap for a batch",
    )
    half = size // 2
    wide = accumulator(x.dtype)
    # the second half of the angles repeats the first: only one of them is read
    cos, sin = cos[:, None, :half].astype(wide), sin[:, None, :half].astype(wide)
    first, second = x[..., :half].astype(wide), x[..., half:size].astype(wide)
    rotated = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., size:]], axis=-1)
