"""What attention remembers, and how it is cropped back to an earlier token."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..ops._validate import describe_value, require, require_size

OVERFLOWED = 2**30
"""The `length` of a cache that was fed more tokens than it has slots: no `resize` brings the lost ones back."""


class KVCache(eqx.Module):
    """What attention remembers: S slots of rotated keys and of values, the first `length` of them in use.

    Every token that was fed takes a slot, padding too; `valid` says which slots the next tokens may see (not padding,
    and of the last segment); `position` is the next token's rotary position. Outside `jax.vmap`, every field of a batch
    has it in front.
    """

    key: Float[Array, "*B S m hd"]
    value: Float[Array, "*B S m hd"]
    valid: Bool[Array, "*B S"]
    length: Int[Array, "*B"]
    position: Int[Array, "*B"]

    @property
    def capacity(self) -> int:
        """S, the number of slots."""
        return self.key.shape[-3]

    def crop(self, length: Int[Array, "*B"], position: Int[Array, "*B"]) -> "KVCache":
        """The cache as it was when it held `length` slots, at most as many as now, and the next token's rotary position
        was `position`: what came later is forgotten, and its slots are free. One that has overflowed stays so."""
        length = jnp.where(self.length < OVERFLOWED, length, self.length)
        slot = jax.lax.broadcasted_iota(length.dtype, self.valid.shape, self.valid.ndim - 1)
        valid = self.valid & (slot < length[..., None])
        return KVCache(self.key, self.value, valid, length, position)

    def resize(self, capacity: int) -> "KVCache":
        """The same cache with `capacity` slots.

        Shrinking drops slots from the end, which must not be in use: outside jit this is checked (`ValueError`), inside
        jit the cache counts as overflowed from then on, and every later call's outputs are NaN. A cache that has
        overflowed is refused likewise: its tokens are lost.
        """
        capacity = require_size("KVCache.resize", "capacity", capacity)
        if not isinstance(self.length, Tracer):
            used = int(jnp.max(self.length))
            require(
                used < OVERFLOWED,
                "KVCache.resize: the cache was fed more tokens than it has slots, which are lost: prefill again",
            )
            require(
                capacity >= used, f"KVCache.resize: `capacity` = {capacity} must not be below the {used} slots in use"
            )
        axis = self.valid.ndim - 1
        more = max(capacity - self.capacity, 0)

        def fit(x):
            width = [(0, 0)] * x.ndim
            width[axis] = (0, more)
            return jax.lax.slice_in_dim(jnp.pad(x, width), 0, capacity, axis=axis)

        length = self.length
        if capacity < self.capacity:  # a later, larger cache must not hide that tokens were dropped
            length = jnp.where(length > capacity, OVERFLOWED, length)
        return KVCache(fit(self.key), fit(self.value), fit(self.valid), length, self.position)


class KVSnapshots(eqx.Module):
    """A cache after a call, and how far it was filled after each of S numbers of its tokens.

    - `cache`: after the call.
    - `length`, `position`: the cache's fields after each of the numbers.
    """

    cache: KVCache
    length: Int[Array, "*B S"]
    position: Int[Array, "*B S"]

    def crop(self, index: int | Int[Array, ""]) -> KVCache:
        """The cache at snapshot `index`; a batch goes through `jax.vmap`."""
        length, position = (
            jax.lax.dynamic_index_in_dim(x, index, -1, keepdims=False) for x in (self.length, self.position)
        )
        return self.cache.crop(length, position)


def check_snapshots(op: str, snapshots: tuple[int, ...], tokens: int, **others: object) -> None:
    """`snapshots` must be numbers of tokens, increasing, from 0 up to `tokens`; the `others` must be None."""
    counted = isinstance(snapshots, tuple | list) and all(type(n) is int for n in snapshots)
    require(
        counted,
        f"{op}: `snapshots` must be a tuple of ints, as in (1, 2), but it is {describe_value(snapshots)}",
    )
    require(
        len(snapshots) > 0
        and list(snapshots) == sorted(set(snapshots))
        and snapshots[0] >= 0
        and snapshots[-1] <= tokens,
        f"{op}: `snapshots` must be increasing numbers of tokens from 0 to T = {tokens}, but it is {snapshots}",
    )
    for name, value in others.items():
        require(
            value is None,
            f"{op}: `snapshots` are of one document with counted positions, but `{name}` is given: leave one of "
            "them out",
        )
