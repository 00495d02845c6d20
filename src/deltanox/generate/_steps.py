"""The compiled parts of generation: prompts in, one token in and out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..models import HybridLM, HybridState
from ..nn import KVCache
from ..nn._cache import OVERFLOWED
from ..ops._validate import describe, require, require_array, require_record, require_size, shapes
from ._request import Request, slots_in_use
from ._sampling import sample

SMALLEST, LARGEST = 64, 2048
"""Prompts are padded to the next power of two from `SMALLEST` to `LARGEST`, beyond it to a multiple of it."""


def bucket(length: int) -> int:
    """The length that a prompt is padded to, so that prompts of many lengths share one compiled program."""
    return max(SMALLEST, 1 << (length - 1).bit_length()) if length <= LARGEST else -(-length // LARGEST) * LARGEST


def prefill(
    model: HybridLM,
    tokens: Int[Array | np.ndarray, "B T"],
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
    *,
    capacity: int,
    state: HybridState | None = None,
) -> tuple[Float[Array, "B N"], HybridState]:
    """Read prompts in one pass; compiled once for all lengths T of a bucket (see `bucket`), a batch size and a
    capacity.

    **Arguments:** `model`; `tokens`: prompts; `mask`: False at padding, on either side; `capacity`: room in the
    attention caches, padding and the tokens to come included; `state`: of an earlier call, with the batch in front,
    which the tokens go on from.

    **Returns:** `(logits, state)`: logits after each row's last real token, and the states, with the batch in front.

    **Raises:** `ValueError` for a capacity below the slots that `state` has in use and T together, for tokens that are
    not integers [B T] and a mask of another shape. Inside `jit`, where the slots in use are not known, a state that
    does not fit counts as overflowed: every later call's logits are NaN.
    """
    require_array("prefill", "tokens", tokens, "B T", kind="integer")
    if mask is not None:
        require_array("prefill", "mask", mask, "B T", kind="bool")
        require(
            mask.shape == tokens.shape,
            f"prefill: `mask` must have the shape of `tokens`, but received {shapes(tokens=tokens, mask=mask)}",
        )
    T, capacity = tokens.shape[1], require_size("prefill", "capacity", capacity)
    require(T >= 1, f"prefill: `tokens` must hold at least one token a row, but it is {describe(tokens)} [B T]")
    used = 0
    if state is not None:
        require_record("prefill", "state", state, HybridState, remedy="take it from an earlier prefill or decode")
        used = slots_in_use(state)
    require(
        used < OVERFLOWED,
        "prefill: `state` was fed more tokens than it has slots, and they are lost: prefill again from the start",
    )
    require(
        capacity >= used + T,
        f"prefill: `capacity` must be at least {used} + {T} = {used + T}, the slots that `state` has in use and the "
        f"prompts' length, but it is {capacity}: raise it, and leave room for the tokens to come",
    )
    return _prefill(model, *padded(tokens, mask), state, np.int32(T), capacity)


def padded(tokens, mask):
    """Prompts and mask filled up to the length of their bucket, on the right."""
    width = [(0, 0), (0, bucket(tokens.shape[1]) - tokens.shape[1])]
    mask = np.ones(tokens.shape, bool) if mask is None else mask
    return tuple((np if isinstance(x, np.ndarray) else jnp).pad(x, width) for x in (tokens, mask))


def read(model, tokens, mask, state, length, capacity):
    """Hidden features of padded prompts, the index of each row's last real token, and the states after it, of whose
    slots the padding beyond `length` takes none."""
    size = tokens.shape[1]
    room = max(capacity, size) if state is None else capacity + size

    def row(tokens, mask, state):
        state = model.init_state(room) if state is None else state.resize(room)
        hidden, state, _ = model.hidden(tokens, state, mask=mask)
        return hidden, without_padding(state, size - length).resize(capacity)

    last = size - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return *jax.vmap(row)(tokens, mask, state), last


def without_padding(state: HybridState, count) -> HybridState:
    """The state whose attention caches have forgotten the last `count` slots, which held padding."""
    return HybridState(
        tuple(x.crop(x.length - count, x.position) if isinstance(x, KVCache) else x for x in state.blocks)
    )


def at(x: Array, index: Int[Array, "B"]) -> Array:
    """Of x [B T ...], element `index` along T in each row."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False))(x, index)


@eqx.filter_jit
def _prefill(model, tokens, mask, state, length, capacity):
    hidden, state, last = read(model, tokens, mask, state, length, capacity)
    return model.logits(at(hidden, last)), state


def _decode(model, token, state):
    def one(token, state):
        logits, state = model(token[None], state)
        return logits[0], state

    return jax.vmap(one)(token, state)


@eqx.filter_jit
def decode(model: HybridLM, token: Int[Array, "B"], state: HybridState) -> tuple[Float[Array, "B N"], HybridState]:
    """Read one more token in each row; compiled once for a batch size and capacity.

    **Returns:** `(logits, state)` after it. Logits are NaN where the caches are full.
    """
    return _decode(model, token, state)


# The states are the loop's own: their memory is used again for the new ones
@eqx.filter_jit(donate="all-except-first")
def _next(fixed, state):
    """Feed `token`, draw the next. Rows that are done feed token 0, and what they yield is dropped."""
    model, sampler, key, index, done, token = fixed
    logits, state = _decode(model, jnp.where(done, 0, token), state)
    return sample(logits, sampler, key=None if key is None else jax.random.fold_in(key, index)), state


_first = eqx.filter_jit(sample)


class Plain:
    """One token a step. `first` and `step` return what was drawn, [B 1], and None: all of it counts."""

    def __init__(self, model: HybridLM, request: Request):
        self.model, self.request = model, request
        self.index = 0

    def first(self):
        request = self.request
        logits, self.state = prefill(
            self.model, request.tokens, request.mask, capacity=request.capacity, state=request.state
        )
        key = None if request.key is None else jax.random.fold_in(request.key, 0)
        self.token = _first(logits, request.sampler, key=key)
        return self.token, None

    def step(self, done: np.ndarray):
        self.index += 1
        fixed = (self.model, self.request.sampler, self.request.key, np.int32(self.index), done, self.token)
        self.token, self.state = _next(fixed, self.state)
        return self.token, None
