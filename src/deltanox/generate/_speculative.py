"""Self-speculative decoding: the multi-token prediction head drafts, the model checks all drafts in one pass."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ..models import HybridLM
from ..nn import KVCache
from ._request import Request
from ._sampling import draw
from ._steps import at, padded, read


class Carry(eqx.Module):
    """What a step hands to the next, for each row: the last token drawn, which no state has read yet; the drafts of the
    tokens after it; how many tokens were drawn; the model's states; the head's cache, of all pairs of a hidden feature
    and the token after it."""

    token: Int[Array, "B"]
    drafts: Int[Array, "B k"]
    count: Int[Array, "B"]
    state: PyTree
    head: KVCache


class Speculative:
    """Up to k + 1 tokens a step, the same as `Plain` draws. `first` and `step` return what was drawn, [B m], and how
    many of each row count."""

    def __init__(self, model: HybridLM, request: Request):
        self.model, self.request = model, request

    def first(self):
        r = self.request
        fixed: Any = (self.model, r.sampler, r.key, *padded(r.tokens, r.mask), r.state, np.int32(r.tokens.shape[1]))
        self.carry = _start(fixed, r.capacity, r.drafts)
        return self.carry.token[:, None] + 0, np.ones(len(r.tokens), int)

    def step(self, done: np.ndarray):
        drawn, count, self.carry = _check_drafts((self.model, self.request.sampler, self.request.key, done), self.carry)
        return drawn, count


def _draw(logits, sampler, key, index):
    """Tokens number `index` [B m] of each row, from logits [B m N], with the keys that `Plain` has for them."""
    rows = jnp.broadcast_to(jnp.arange(logits.shape[0])[:, None], index.shape)
    keys = None
    if key is not None:
        fold = jax.vmap(lambda i, row: jax.random.fold_in(jax.random.fold_in(key, i), row))
        keys = fold(index.reshape(-1), rows.reshape(-1))
    return draw(logits.reshape(-1, logits.shape[-1]), sampler, keys).reshape(index.shape)


def _pairs(model: HybridLM, hidden, following, head, mask=None):
    """The head on hidden features [B T D] and the tokens after them [B T]: its features, and its cache."""

    def row(hidden, following, head, mask):
        return model.mtp(model.embed(following, mask), hidden, head, mask=mask)  # pyright: ignore[reportOptionalCall]

    return jax.vmap(row)(hidden, following, head, mask)


def _draft(model: HybridLM, y, head: KVCache, count: int):
    """`count` drafts of each row: the first from the head's features y [B D], each further one from the head's features
    for the draft before it. What the head remembers of drafts is forgotten again."""
    drafts, length, position = [], head.length, head.position
    for i in range(count):
        # a NaN has no largest; token 0 is as good a draft as any
        drafts.append(jnp.argmax(model.logits(y), axis=-1).astype(jnp.int32))
        if i + 1 < count:
            y, head = _pairs(model, y[:, None], drafts[-1][:, None], head)
            y = y[:, 0]
    return jnp.stack(drafts, axis=1), head.crop(length, position)


@eqx.filter_jit
def _start(fixed, capacity: int, drafts: int) -> Carry:
    """Prefill of model and head, the first token, and drafts of those after it."""
    model, sampler, key, tokens, mask, state, length = fixed
    hidden, state, last = read(model, tokens, mask, state, length, capacity)
    size = tokens.shape[1]
    zero = jnp.zeros(tokens.shape[:1], jnp.int32)
    token = _draw(model.logits(at(hidden, last))[:, None], sampler, key, zero[:, None])[:, 0]
    following = jnp.roll(tokens, -1, axis=1)
    following = jnp.where(jnp.arange(size)[None] == last[:, None], jnp.maximum(token, 0)[:, None], following)
    head = jax.vmap(lambda _: model.mtp.init_state(max(capacity, size)))(zero)
    y, head = _pairs(model, hidden, following, head, mask)
    head = head.crop(head.length - (size - length), head.position).resize(capacity)
    guesses, head = _draft(model, at(y, last), head, drafts)
    return Carry(token, guesses, zero + 1, state, head)


@eqx.filter_jit(donate="all-except-first")
def _check_drafts(fixed, carry: Carry):
    """Read the last token and its drafts in one pass and draw after each of them: a draft that was drawn is accepted,
    up to the first that was not. The states go back to the last accepted one. Rows that are done compute what nobody
    reads."""
    model, sampler, key, done = fixed
    token = jnp.where(done, 0, carry.token)
    tokens = jnp.concatenate([token[:, None], carry.drafts], axis=1)
    size = tokens.shape[1]

    def row(tokens, state):
        hidden, snapshots, _ = model.hidden(tokens, state, snapshots=tuple(range(1, size + 1)))
        return hidden, snapshots

    hidden, snapshots = jax.vmap(row)(tokens, carry.state)
    index = carry.count[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    drawn = _draw(model.logits(hidden), sampler, key, index)
    right = (drawn[:, :-1] == carry.drafts).astype(jnp.int32)
    accepted = jnp.sum(jnp.cumprod(right, axis=1), axis=1, dtype=jnp.int32)
    state = jax.vmap(lambda snapshots, i: snapshots.crop(i))(snapshots, accepted)

    y, head = _pairs(model, hidden, jnp.maximum(drawn, 0), carry.head)
    head = head.crop(carry.head.length + accepted + 1, carry.head.position + accepted + 1)
    drafts, head = _draft(model, at(y, accepted), head, carry.drafts.shape[1])
    count = accepted + 1
    return drawn, count, Carry(at(drawn, accepted), drafts, carry.count + count, state, head)
