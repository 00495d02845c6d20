"""What is asked of the generation: prompts, and the checks of all arguments."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from ..models import HybridLM, HybridState
from ..nn import KVCache
from ..ops._validate import describe, require
from ._sampling import Sampler


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, side: str = "left"
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Rows of equal length, padded on the given side ("left" or "right"), and the mask that is False at the padding.

    **Raises:** `ValueError` for no prompts, an empty one, or another side.
    """
    require(side in ("left", "right"), f"pad_prompts: `side` must be 'left' or 'right', but it is {side!r}")
    rows = [_ids("pad_prompts", "every prompt", prompt, rank=1) for prompt in prompts]
    lengths = [len(row) for row in rows]
    require(
        min(lengths, default=0) >= 1,
        f"pad_prompts: there must be prompts of at least one token, but their lengths are {lengths}: begin an empty "
        f"prompt "
        "with the token that begins a document",
    )
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, (row, length) in enumerate(zip(rows, lengths)):
        place = slice(0, length) if side == "right" else slice(tokens.shape[1] - length, None)
        tokens[i, place] = row
        mask[i, place] = True
    return tokens, mask


def make_key(seed: int | PRNGKeyArray) -> PRNGKeyArray:
    """The key of a seed. Seeds are 32 bits: JAX would draw the same for 2^32 as for 0.

    **Raises:** `ValueError` for an integer outside [0, 2^32).
    """
    if isinstance(seed, jax.Array):
        return seed
    require(0 <= seed < 2**32, f"generate: the seed must be in [0, 2^32), but it is {seed}; give a smaller one")
    return jax.random.key(seed)


_LARGEST = 2**31 - 1


def _ids(op: str, name: str, values, *, rank: int | None = None) -> np.ndarray:
    """Token ids as int64, of an array or of lists. Numbers that are no integers are refused, not cut."""
    try:
        ids = np.asarray(values)
    except ValueError:  # lists of different lengths
        ids = None
    fits = ids is not None and rank in (None, ids.ndim)
    if fits and ids is not None and ids.size:
        fits = np.issubdtype(ids.dtype, np.integer) and -_LARGEST <= int(ids.min()) <= int(ids.max()) <= _LARGEST
    require(
        bool(fits),
        f"{op}: {name} must hold integers {'[T]' if rank == 1 else '[T] or [B T]'} of 32 bits, but it is "
        f"{describe(values if ids is None else ids)}: encode text with a tokenizer, and make rows of different lengths "
        "one array with pad_prompts",
    )
    assert ids is not None  # for the type checker
    return ids.astype(np.int64)


def _integer(name: str, value, least: int) -> int:
    require(
        isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least),
        f"stream: `{name}` must be an integer of at least {least}, but it is {value!r}",
    )
    return int(value)


class Request(NamedTuple):
    """The checked arguments of `stream`, with a batch of rows."""

    tokens: Int[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"] | None
    batched: bool
    max_new_tokens: int
    capacity: int
    sampler: Sampler
    stop_tokens: tuple[int, ...]
    state: HybridState | None
    drafts: int
    key: PRNGKeyArray | None


def check_request(
    model: HybridLM, prompt, mask, max_new_tokens, capacity, sampler, stop_tokens, state, drafts, key
) -> Request:  # fmt: skip
    """The arguments of `stream` as a `Request`. **Raises:** `ValueError`."""
    prompt = _ids("stream", "`prompt`", prompt)
    require(
        prompt.ndim in (1, 2) and prompt.size > 0,
        f"stream: `prompt` must hold integers [T] or [B T], at least one token a row, but it is {describe(prompt)}",
    )
    max_new_tokens = _integer("max_new_tokens", max_new_tokens, 1)
    drafts = _integer("drafts", drafts, 0)
    capacity = None if capacity is None else _integer("capacity", capacity, 1)
    stop_tokens = list(stop_tokens) if isinstance(stop_tokens, Iterable) else [stop_tokens]
    stop_tokens = _ids("stream", "`stop_tokens`", stop_tokens, rank=1)
    require(
        isinstance(sampler, Sampler),
        f"stream: `sampler` must be a Sampler, but it is a {type(sampler).__name__}: write Sampler(temperature=...)",
    )
    require(
        key is None or isinstance(key, jax.Array),
        f"stream: `key` must be one of JAX's, but it is a {type(key).__name__}: write jax.random.key(...)",
    )
    require(
        state is None or isinstance(state, HybridState),
        f"stream: `state` must be what `prefill` or `load_state` returned, but it is a {type(state).__name__}",
    )
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
    for name, ids in (("prompt", real), ("stop_tokens", stop_tokens)):
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
        require(
            wrong.size == 0,
            f"stream: `{name}` must hold ids in [0, {model.vocab_size}), the model's vocabulary, but there is "
            f"{wrong.ravel()[:1].tolist()}",
        )
    batched = prompt.ndim == 2
    tokens = (prompt if batched else prompt[None]).astype(np.int32)
    used = 0 if state is None else _slots_in_use(model, state, len(tokens))
    require(
        drafts == 0 or model.mtp is not None,
        f"stream: `drafts` = {drafts} needs a model with a multi-token prediction head, and this one has none: leave "
        "`drafts` out, or load a checkpoint that has `mtp.*` tensors with mtp=True",
    )
    # the last token drawn is never fed, drafts are, and those before it may all be wrong
    needed = used + tokens.shape[1] + max_new_tokens - 1 + drafts
    terms = ("the state's slots + " if state is not None else "") + "the prompt's length + max_new_tokens - 1"
    require(
        capacity is None or capacity >= needed,
        f"stream: `capacity` must be at least {terms}{' + drafts' if drafts else ''} = {needed}, but it is {capacity}: "
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
    if capacity is None:
        capacity = -(-needed // 64) * 64  # so that prompts of similar lengths share one compiled step
    return Request(
        tokens, mask if mask is None or batched else mask[None], batched, max_new_tokens, capacity, sampler,
        tuple(stop_tokens.tolist()), state, drafts, None if sampler.temperature == 0 else key,
    )  # fmt: skip


def _slots_in_use(model: HybridLM, state: HybridState, rows: int) -> int:
    """Slots of the attention caches that `state` fills, which must be a state of `model` for so many rows."""
    wanted = eqx.filter_eval_shape(model.init_state, state.capacity or 1)
    same = jax.tree.structure(wanted) == jax.tree.structure(state) and all(
        x.shape == (rows, *y.shape) and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(wanted))
    )
    require(
        same,
        f"stream: `state` must be one of this model, with the batch of {rows} rows in front: take it from `prefill` "
        "with the same model (unstacked or not) and as many rows",
    )
    return slots_in_use(state)


def slots_in_use(state: HybridState) -> int:
    """Slots of the attention caches that are filled, the most of all rows; 0 under `jit`, where that is not known."""
    lengths = [x.length for x in state.blocks if isinstance(x, KVCache) and not isinstance(x.length, jax.core.Tracer)]  # pyright: ignore[reportAttributeAccessIssue]
    return max((int(jnp.max(x)) for x in lengths), default=0)
