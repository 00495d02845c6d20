"""The language model that the family shares: embedding, a stack of periods, final norm, head."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from ..nn import KVCache, RMSNorm, Stack
from ..nn._linear import normal
from ..ops._dtypes import accumulator
from ..ops._embedding import embedding_rows
from ..ops._validate import (
    describe,
    require,
    require_arrays,
    require_kind,
    require_record,
    require_size,
    require_tokens,
)
from ._block import HybridPeriod, HybridState
from ._mtp import MTPHead


class HybridLM(eqx.Module):
    """Tokens to logits: x = embedding[tokens];  x ← period_i(x) for each period;  logits = norm(x) headᵀ.

    The model is unbatched: `jax.vmap(model)(tokens)` runs a batch, with states, segment ids, masks and positions
    mapped along. It computes in its embedding's dtype (cast it with `Precision.cast_compute`), and returns logits in
    float32.

    - `embedding`: [N D].
    - `layers`: the stack of periods; `model.layers[i].blocks[j]` is block j of period i. Unstacked, one period of all
      blocks.
    - `norm`: the final norm.
    - `head`: [N D], or None where the embedding serves as head too (tied).
    - `mtp`: the head for one token further, or None; `mtp_logits` runs it.

    **Example**

        model = qwen3_5(config, dtype=jnp.float32, key=key)
        logits, state = model(tokens)                                    # one pass over tokens [T]
        logits, state = model(tokens, model.init_state(1024))            # the same, with room for 1,024 tokens
        logits, state = model(next_token[None], state)                   # and one more
    """

    embedding: Float[Array, "N D"]
    layers: Stack | HybridPeriod
    norm: RMSNorm
    head: Float[Array, "N D"] | None
    mtp: MTPHead | None

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        make_period: Callable[[PRNGKeyArray], HybridPeriod],
        num_periods: int,
        *,
        eps: float = 1e-6,
        tied_head: bool,
        make_mtp: Callable[[PRNGKeyArray], MTPHead] | None = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int = 1,
        dtype: DTypeLike,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `vocab_size`, `embed_size`: N and D.
        - `make_period`: a period of blocks from a key, all of one structure.
        - `num_periods`: how many.
        - `eps`: of the final norm.
        - `tied_head`: use the embedding as head.
        - `make_mtp`: the head for one token further from a key; None for none.
        - `remat`: what the backward pass finds saved of each period, unless a call says otherwise (see `Stack`).
        - `unroll`: periods that one turn of the loop over the depth runs (see `Stack`).
        - `dtype`: of embedding, norm and head; `make_period` chooses its own.
        - `key`: for N(0, 0.02) embedding and head, and for the periods.

        **Raises:** `ValueError` for sizes below 1.
        """
        vocab_size = require_size("HybridLM", "vocab_size", vocab_size)
        embed_size = require_size("HybridLM", "embed_size", embed_size)
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        self.embedding = normal((vocab_size, embed_size), dtype=dtype, key=embedding_key)
        self.layers = Stack(make_period, num_periods, remat=remat, unroll=unroll, key=layers_key)
        self.norm = RMSNorm(embed_size, eps=eps, dtype=dtype)
        self.head = None if tied_head else normal((vocab_size, embed_size), dtype=dtype, key=head_key)
        self.mtp = None if make_mtp is None else make_mtp(jax.random.fold_in(key, 3))

    @property
    def vocab_size(self) -> int:
        """N."""
        return self.embedding.shape[0]

    @property
    def head_weight(self) -> Float[Array, "N D"]:
        """What logits are made with: the head, or the embedding if they are tied."""
        return self.embedding if self.head is None else self.head

    def init_state(self, capacity: int) -> HybridState:
        """The state before the first token, with room for `capacity` tokens in the attention caches.

        **Raises:** `ValueError` for a capacity below 1.
        """
        return self.layers.init_state(require_size("HybridLM.init_state", "capacity", capacity))

    def unstack(self) -> "HybridLM":
        """The same model with every block's arrays by themselves, instead of stacked over the periods.

        Where one token is read at a time, on a CPU, a loop over stacked layers spends up to half of its time on copies
        of weights and states; unstacked there are none, and a program compiles in proportion to the depth. It is for
        decoding: `remat`, `deltanox.interop.save` and the optimiser want the stacked one. Weights are copied once.
        """
        if not isinstance(self.layers, Stack):
            return self
        periods = [self.layers[i] for i in range(len(self.layers))]
        layers = HybridPeriod(tuple(block for period in periods for block in period.blocks))
        return eqx.tree_at(lambda model: model.layers, self, layers)

    def embed(self, tokens: Int[Array, "T"], mask: Bool[Array, "T"] | None = None) -> Float[Array, "T D"]:
        """Rows of the embedding: zero at masked tokens, whatever their id, and NaN for an id outside the vocabulary."""
        require_kind("HybridLM", "tokens", tokens, "T", kind="integer")
        x = embedding_rows(self.embedding, tokens)
        return x if mask is None else jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))

    def hidden(
        self,
        tokens: Int[Array, "T"],
        state: HybridState | None = None,
        *,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
        snapshots: tuple[int, ...] | None = None,
        remat: bool | Callable[..., Any] | None = None,
    ) -> tuple[Float[Array, "T D"], HybridState, PyTree | None]:
        """All of the model but the head, for losses that never hold all logits at once.

        **Arguments:** as `__call__`.

        **Returns:** `(hidden, state, stats)`: the final norm's output in the activations' dtype, the new state, and
        the routers' sums over all layers and real tokens (`RouterStats`, None for a dense model).
        """
        require_arrays("HybridLM", tokens=tokens)
        require(
            tokens is not None and tokens.ndim == 1 and jnp.issubdtype(tokens.dtype, jnp.integer),
            f"HybridLM: `tokens` must be integers [T], but it is {describe(tokens)}: map a batch with "
            f"jax.vmap(model)(tokens), "
            "and cast with .astype(jnp.int32)",
        )
        require_tokens("HybridLM", positions=positions, segment_ids=segment_ids, mask=mask)
        if state is not None:
            require_record("HybridLM", "state", state, HybridState, remedy="take it from model.init_state(capacity)")
        for name, x in (("segment_ids", segment_ids), ("mask", mask)):
            require(
                x is None or x.shape == tokens.shape,
                f"HybridLM: `{name}` must be [T] like tokens: {describe(tokens)}, but it is {describe(x)}",
            )
        require(
            positions is None or positions.shape in (tokens.shape, (3, *tokens.shape)),
            f"HybridLM: `positions` must be [T] or [3 T] (time, height, width) for tokens: {describe(tokens)}, "
            f"but it is {describe(positions)}",
        )
        options: dict[str, Any] = dict(segment_ids=segment_ids, mask=mask, positions=positions)
        if snapshots is not None:
            options["snapshots"] = snapshots
        if isinstance(self.layers, Stack):
            options["remat"] = remat
        else:
            require(
                remat is None,
                "HybridLM: `remat` is for a model with stacked layers, and this one is unstacked: leave it out",
            )
        x, new_state, stats = self.layers(self.embed(tokens, mask), state, **options)
        return self.norm(x), new_state, stats

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B N"]:
        """hidden headᵀ, products in hidden's dtype, summed and returned in float32 (float64 for float64)."""
        require_kind("HybridLM.logits", "hidden", hidden, "*B D")
        logits = jax.lax.dot_general(
            hidden,
            self.head_weight.astype(hidden.dtype),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=accumulator(hidden.dtype),
        )
        return checkpoint_name(logits, "logits")

    def __call__(
        self,
        tokens: Int[Array, "T"],
        state: HybridState | None = None,
        *,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
        snapshots: tuple[int, ...] | None = None,
        remat: bool | Callable[..., Any] | None = None,
    ) -> tuple[Float[Array, "T N"], HybridState]:
        """Logits for the token after each token.

        **Arguments:**

        - `tokens`: ids in [0, N); any other id gives NaN, at the tokens after it too and, within its chunk, before it.
        - `state`: of `init_state` or of an earlier call: the tokens continue where it ended, one or many at a time.
          None is the empty state; the state returned then has no room for more tokens in its attention caches (make
          some with `state.resize`).
        - `segment_ids`: documents packed in a row: any change between neighbours is a boundary that nothing crosses.
        - `mask`: False at padding, left, right or between. Logits at padding are finite and mean nothing.
        - `positions`: rotary positions, [T] or [3 T]; by default real tokens are counted from the segment's beginning
          on.
        - `snapshots`: numbers of tokens, increasing from 0 to T: the state comes with those after so many of the new
          tokens, one of which `state.crop(index)` goes back to. Not with `positions` or `segment_ids`.
        - `remat`: what the backward pass finds saved of each period, a policy of `deltanox.remat`, True (nothing) or
          False (all that it needs); None is what the model was built with.

        **Returns:** `(logits, state)`: float32 logits, and the state after the last real token.

        **Raises:** `ValueError` for shapes and dtypes that don't fit, and for a policy that the layers cannot follow.
        """
        hidden, state, _ = self.hidden(
            tokens, state, segment_ids=segment_ids, mask=mask, positions=positions, snapshots=snapshots, remat=remat
        )
        return self.logits(hidden), state

    def mtp_logits(
        self,
        hidden: Float[Array, "T D"],
        next_tokens: Int[Array, "T"],
        state: KVCache | None = None,
        *,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
    ) -> tuple[Float[Array, "T N"], PyTree]:
        """Logits for the token after the next one, of the multi-token prediction head (`MTPHead`).

        **Arguments:** `hidden`: what the method of that name returns, at tokens t; `next_tokens`: tokens t + 1;
        `state`: of `model.mtp.init_state` or of an earlier call; the others as in a call, those of tokens t. Where t
        is a document's last token the logits mean nothing, and nothing of its document sees them.

        **Returns:** `(logits, state)`: float32 logits for tokens t + 2, and the head's cache.

        **Raises:** `ValueError` if the model has no such head, or for shapes that don't fit.
        """
        if self.mtp is None:
            raise ValueError(
                "HybridLM.mtp_logits: the model has no head for one token further: make it with a config whose "
                "`mtp_head` is true, or load a checkpoint that has `mtp.*` tensors"
            )
        require_kind("HybridLM.mtp_logits", "hidden", hidden, "T D")
        require_kind("HybridLM.mtp_logits", "next_tokens", next_tokens, "T", kind="integer")
        y, state = self.mtp(
            self.embed(next_tokens, mask), hidden, state, segment_ids=segment_ids, mask=mask, positions=positions
        )
        return self.logits(y), state
