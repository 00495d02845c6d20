"""Text from a model: prefill of the prompts in one pass, then one token at a time from the states.

    for token in stream(model, prompt, max_new_tokens=100, sampler=Sampler(temperature=0.7), key=key):
        ...                                             # one token, as soon as it is there

`stream` is the loop, `generate` collects it into an array, `prefill` and `decode` are its two compiled parts for loops
of one's own, and `sample` picks a token from logits. Batches may be ragged: `pad_prompts` makes rows and mask of lists.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .models import HybridLM, HybridState
from .ops._validate import describe, require

NO_TOKEN = -1
"""What a row of a batch yields after its stop token."""


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
            _is_number(temperature) and 0 <= temperature < float("inf"),
            f"Sampler: `temperature` must be a number of at least 0, but it is {temperature!r}",
        )
        require(
            top_k is None or (_is_number(top_k) and top_k == int(top_k) and top_k >= 1),
            f"Sampler: `top_k` must be an integer of at least 1, or None for all tokens, but it is {top_k!r}",
        )
        require(
            _is_number(top_p) and 0 < top_p <= 1,
            f"Sampler: `top_p` must be above 0 and at most 1, but it is {top_p!r}",
        )
        object.__setattr__(self, "temperature", float(self.temperature))
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
    rows = logits.reshape(-1, logits.shape[-1])
    if sampler.temperature == 0:
        token = jnp.argmax(rows, axis=-1).astype(jnp.int32)
    else:
        if key is None:
            raise ValueError(
                f"sample: a `key` is needed at temperature {sampler.temperature}: pass key=jax.random.key(...)"
            )
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows.shape[0]))
        kept = keep(rows / jnp.asarray(sampler.temperature, rows.dtype), sampler)
        token = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    token = jnp.where(jnp.any(jnp.isnan(rows), axis=-1), NO_TOKEN, token)
    return token.reshape(logits.shape[:-1])


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
        needed = before < jnp.asarray(sampler.top_p, logits.dtype)
        least = jnp.min(jnp.where(needed, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, never, logits)
    return logits


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, side: str = "left"
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Rows of equal length, padded on the given side ("left" or "right"), and the mask that is False at the padding.

    **Raises:** `ValueError` for no prompts, an empty one, or another side.
    """
    require(side in ("left", "right"), f"pad_prompts: `side` must be 'left' or 'right', but it is {side!r}")
    lengths = [len(prompt) for prompt in prompts]
    require(
        min(lengths, default=0) >= 1,
        f"pad_prompts: there must be prompts of at least one token, but their lengths are {lengths}: begin an empty "
        f"prompt "
        "with the token that begins a document",
    )
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        place = slice(0, length) if side == "right" else slice(tokens.shape[1] - length, None)
        tokens[i, place] = np.asarray(prompt)
        mask[i, place] = True
    return tokens, mask


@eqx.filter_jit
def prefill(
    model: HybridLM, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None, *, capacity: int
) -> tuple[Float[Array, "B N"], HybridState]:
    """Read prompts in one pass; compiled for each shape and capacity.

    **Arguments:** `model`; `tokens`: prompts; `mask`: False at padding, on either side; `capacity`: room in the
    attention caches, padding and the tokens to come included.

    **Returns:** `(logits, state)`: logits after each row's last real token, and the states, with the batch in front.
    """
    require(
        capacity >= tokens.shape[1],
        f"prefill: `capacity` must be at least the prompts' length, {tokens.shape[1]}, but it is {capacity}",
    )
    T = tokens.shape[1]
    last = jnp.full(tokens.shape[:1], T - 1) if mask is None else T - 1 - jnp.argmax(mask[:, ::-1], axis=1)

    def one(tokens, mask, last):
        hidden, state, _ = model.hidden(tokens, model.init_state(capacity), mask=mask)
        return model.logits(jax.lax.dynamic_index_in_dim(hidden, last, keepdims=False)), state

    return jax.vmap(one)(tokens, mask, last)


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


# Token and states are the loop's own: their memory is used again for the new ones
@eqx.filter_jit(donate="all-except-first")
def _next(fixed, token, state):
    """Feed `token`, draw the next. Rows that are done feed token 0, and what they yield is dropped."""
    model, sampler, key, done = fixed
    logits, state = _decode(model, jnp.where(done, 0, token), state)
    return sample(logits, sampler, key=key), state


_first = eqx.filter_jit(sample)


def stream(
    model: HybridLM,
    prompt: Int[Array | np.ndarray, "*B T"] | Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    stop_tokens: Sequence[int] = (),
    mask: Bool[Array | np.ndarray, "*B T"] | None = None,
    capacity: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Iterator[Int[np.ndarray, "*B"]]:
    """Generate, one token a row at a time.

    The arguments are checked at the call, before anything is compiled; then each step is one dispatch of one compiled
    function. The next step is dispatched before a token is handed out, so the device isn't kept waiting by the reader.

    **Arguments:**

    - `model`: weights as they are to compute with (`Precision.cast_compute`).
    - `prompt`: tokens [T], or [B T] for a batch; ragged ones with `mask` (see `pad_prompts`).
    - `max_new_tokens`: at most so many.
    - `sampler`: how tokens are drawn; greedy by default.
    - `stop_tokens`: a row ends with the first of these that it draws; it yields -1 from then on, and generation ends
      with the last row.
    - `mask`: False at padding, left or right.
    - `capacity`: slots of the attention caches; by default what is needed, rounded up to a multiple of 64. Prompts of
      different lengths with one capacity share one compiled step.
    - `key`: for sampling. The tokens are a function of key, prompt and model; a row's don't depend on the rows beside
      it.

    **Returns:** an iterator of int32 arrays: [] for a prompt [T], [B] for a batch.

    **Raises:** `ValueError` for a prompt that is empty or holds ids outside the vocabulary, a mask that doesn't fit, a
    capacity that is too small, or a missing key; `FloatingPointError` where the logits are NaN.
    """
    prompt, mask, capacity = _check_request(model, prompt, mask, max_new_tokens, capacity, sampler, stop_tokens, key)
    return _stream(model, prompt, mask, capacity, max_new_tokens, sampler, tuple(stop_tokens), key)


def _stream(model, prompt, mask, capacity, max_new_tokens, sampler, stop_tokens, key):
    batched = prompt.ndim == 2
    tokens = jnp.asarray(prompt if batched else prompt[None])
    mask = None if mask is None else jnp.asarray(mask if batched else mask[None])

    def key_of(i):
        return None if sampler.temperature == 0 else jax.random.fold_in(key, i)

    logits, state = prefill(model, tokens, mask, capacity=capacity)
    token = _first(logits, sampler, key=key_of(0))
    done = np.zeros(tokens.shape[0], bool)
    for i in range(max_new_tokens):
        drawn = token
        if i + 1 < max_new_tokens:
            # `drawn` is still to be read here, so a copy of it is donated
            token, state = _next((model, sampler, key_of(i + 1), jnp.asarray(done)), jnp.copy(drawn), state)
        drawn = np.asarray(drawn)
        bad = (drawn == NO_TOKEN) & ~done
        if bad.any():
            raise FloatingPointError(
                f"stream: the logits of row {int(np.argmax(bad))} are NaN at new token {i}: the weights hold NaN or "
                f"infinity, or "
                "overflow in the compute dtype; try Precision(compute='float32')"
            )
        out = np.where(done, NO_TOKEN, drawn).astype(np.int32)
        done = done | np.isin(out, stop_tokens)
        yield out if batched else out.reshape(())
        if done.all():
            return


def generate(
    model: HybridLM,
    prompt: Int[Array | np.ndarray, "*B T"] | Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    stop_tokens: Sequence[int] = (),
    mask: Bool[Array | np.ndarray, "*B T"] | None = None,
    capacity: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Int[np.ndarray, "*B new"]:
    """All new tokens of `stream`, which has the same arguments, as one array: at most `max_new_tokens` long, -1 after
    a row's stop token."""
    tokens = stream(
        model, prompt, max_new_tokens=max_new_tokens, sampler=sampler, stop_tokens=stop_tokens, mask=mask,
        capacity=capacity, key=key
    )  # fmt: skip
    return np.stack(list(tokens), axis=-1)


def _check_request(model, prompt, mask, max_new_tokens, capacity, sampler, stop_tokens, key):
    prompt = np.asarray(prompt)
    require(
        prompt.ndim in (1, 2) and prompt.size > 0 and np.issubdtype(prompt.dtype, np.integer),
        f"stream: `prompt` must hold integers [T] or [B T], at least one token a row, but it is {describe(prompt)}",
    )
    require(max_new_tokens >= 1, f"stream: `max_new_tokens` must be at least 1, but it is {max_new_tokens}")
    if mask is not None:
        mask = np.asarray(mask)
        require(
            mask.shape == prompt.shape and mask.dtype == bool,
            f"stream: `mask` must be booleans of the prompt's shape {prompt.shape}, but it is {describe(mask)}",
        )
        require(
            bool(mask.any(-1).all()),
            "stream: every row of the prompt must have a real token, but `mask` is False along a whole row",
        )
    real = prompt if mask is None else prompt[mask]
    for name, ids in (("prompt", real), ("stop_tokens", np.asarray(tuple(stop_tokens), np.int64))):
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
        require(
            wrong.size == 0,
            f"stream: `{name}` must hold ids in [0, {model.vocab_size}), the model's vocabulary, but there is "
            f"{wrong.ravel()[:1].tolist()}",
        )
    # the last token drawn is never fed
    needed = prompt.shape[-1] + max_new_tokens - 1
    require(
        capacity is None or capacity >= needed,
        f"stream: `capacity` must be at least the prompt's length + max_new_tokens - 1 = {needed}, but it is "
        f"{capacity}: "
        "raise it, or ask for fewer tokens",
    )
    require(
        sampler.temperature == 0 or key is not None,
        f"stream: a `key` is needed at temperature {sampler.temperature}: pass key=jax.random.key(...)",
    )
    require(
        sampler.top_k is None or sampler.top_k <= model.vocab_size,
        f"stream: `top_k` must be at most the vocabulary, {model.vocab_size}, but it is {sampler.top_k}",
    )
    # rounded up, so that prompts of similar lengths share one compiled step
    return prompt.astype(np.int32), mask, -(-needed // 64) * 64 if capacity is None else capacity
