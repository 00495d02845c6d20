"""How a token is drawn from logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from ..ops._validate import is_number, require, require_kind

NO_TOKEN = -1
"""What a row of a batch yields after its stop token."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a token is drawn from logits: divided by `temperature`, cut to the `top_k` largest, cut to the smallest set
    that holds the probability `top_p`, then drawn in proportion to what is left.

    - `temperature`: 0 takes the most likely token (the lowest id of equal ones), 1 the model's own distribution.
    - `top_k`: tokens to choose from; None for all. Tokens as likely as the k-th stay in.
    - `top_p`: probability, in (0, 1], that the chosen set must reach; the most likely token always stays in. Tokens as
      likely as the last one needed stay in.

    **Raises**: `ValueError` for values out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        require(
            is_number(temperature) and bool(temperature >= 0),
            f"Sampler: `temperature` must be a finite number of at least 0, but it is {temperature!r}",
        )
        require(
            top_k is None or (is_number(top_k) and bool(top_k == int(top_k) and top_k >= 1)),
            f"Sampler: `top_k` must be an integer of at least 1, or None for all tokens, but it is {top_k!r}",
        )
        require(
            is_number(top_p) and bool(0 < top_p <= 1),
            f"Sampler: `top_p` must be above 0 and at most 1, but it is {top_p!r}",
        )
        object.__setattr__(self, "top_k", None if top_k is None else int(top_k))
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_k", None if top_k is None else int(top_k))
        object.__setattr__(self, "top_p", float(self.top_p))


GREEDY = Sampler(temperature=0.0)
"""Always the most likely token."""


def sample(logits: Float[Array, "*B N"], sampler: Sampler, *, key: PRNGKeyArray | None = None) -> Int[Array, "*B"]:
    """One token for each row of logits.

    **Arguments:** `logits`: of any scale, in float32; `sampler`: see `Sampler`; `key`: may be None only at temperature
    0. Every row is drawn with a key of its own, made of `key` and the row's number: a row's token doesn't depend on
    how many rows there are.

    **Returns:** int32 ids. A row that holds a NaN yields -1 (`NO_TOKEN`): there is no most likely token.

    **Raises:** `ValueError` if a key is missing, or `top_k` is above the vocabulary.
    """
    require_kind("sample", "logits", logits, "*B N")
    rows = logits.reshape(-1, logits.shape[-1])
    if sampler.temperature > 0 and key is None:
        raise ValueError(
            f"sample: a `key` is needed at temperature {sampler.temperature}: pass key=jax.random.key(...)"
        )
    keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows.shape[0]))
    return draw(rows, sampler, keys).reshape(logits.shape[:-1])


def draw(rows: Float[Array, "R N"], sampler: Sampler, keys: Key[Array, "R"] | None) -> Int[Array, "R"]:
    """As `sample`, with a key for each row; they may be None at temperature 0."""
    if sampler.temperature == 0:
        token = jnp.argmax(rows, axis=-1).astype(jnp.int32)
    else:
        kept = keep(_divided(rows, sampler.temperature), sampler)
        token = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)  # pyright: ignore[reportArgumentType]
    return jnp.where(jnp.any(jnp.isnan(rows), axis=-1), NO_TOKEN, token)


def _divided(rows: Float[Array, "R N"], temperature: float) -> Float[Array, "R N"]:
    """The logits less their maximum, over the temperature: a small temperature makes -inf of all but the maximum, where
    the plain quotient would overflow at the maximum too."""
    least = float(jnp.finfo(rows.dtype).tiny)  # what is below is zero on most devices
    peak = jnp.max(rows, axis=-1, keepdims=True)
    # the difference of two infinities is NaN: the maximum is named
    return jnp.where(rows == peak, 0, (rows - peak) / jnp.asarray(max(temperature, least), rows.dtype))


def keep(logits: Float[Array, "*B N"], sampler: Sampler) -> Float[Array, "*B N"]:
    """The logits with -inf at the tokens that `top_k` and `top_p` exclude (the temperature is already in them)."""
    size = logits.shape[-1]
    require(
        sampler.top_k is None or sampler.top_k <= size,
        f"sample: `top_k` must be at most the vocabulary, {size}, but it is {sampler.top_k}",
    )
    never = jnp.asarray(-jnp.inf, logits.dtype)
    if sampler.top_k is not None and sampler.top_k < size:
        least = jax.lax.top_k(logits, sampler.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, never, logits)
    if sampler.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probability = jax.nn.softmax(descending, axis=-1)
        # a token is needed if those before it don't reach p; the first always is
        before = jnp.cumsum(probability, axis=-1) - probability
        # (said of the first explicitly: a tiny p is zero in float32)
        first = jax.lax.broadcasted_iota(jnp.int32, before.shape, before.ndim - 1) == 0
        needed = first | (before < jnp.asarray(sampler.top_p, logits.dtype))
        least = jnp.min(jnp.where(needed, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, never, logits)
    return logits
