"""The block that every model of the family repeats, the period of blocks that the depth consists of, and its state."""

import inspect
from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..nn import DeltaNetState, KVCache, RMSNorm
from ..ops._validate import require
from ..remat import named_input


class HybridBlock(eqx.Module):
    """Two residual steps around a token mixer and a feed-forward part, each behind its own norm:

        h ← h + mixer(input_norm(h))          h ← h + mlp(post_attention_norm(h))

    The mixer is anything that is called as `mixer(x, state, segment_ids=, mask=) -> (y, state)`, here `GatedDeltaNet`
    or `GatedAttention`; if it also takes `positions`, it gets them, and it gets `snapshots` where a call asks for them.
    The feed-forward part is called as `mlp(x) -> y`; if it takes `mask`, as a mixture of experts does, then as
    `mlp(x, mask=) -> (y, stats)`.

    Source: Qwen3-Next and Qwen3.5 (decoder layer).
    """

    mixer: PyTree
    mlp: PyTree
    input_norm: RMSNorm
    post_attention_norm: RMSNorm
    takes_positions: bool = eqx.field(static=True)
    has_router: bool = eqx.field(static=True)

    def __init__(self, mixer: PyTree, mlp: PyTree, *, embed_size: int, eps: float = 1e-6, dtype: DTypeLike):
        """**Arguments:** `mixer`, `mlp`: see above; `embed_size`: D; `eps`: of the norms; `dtype`: of the norms'
        weights."""
        self.mixer = mixer
        self.mlp = mlp
        self.input_norm = RMSNorm(embed_size, eps=eps, dtype=dtype)
        self.post_attention_norm = RMSNorm(embed_size, eps=eps, dtype=dtype)
        self.takes_positions = "positions" in inspect.signature(mixer).parameters
        self.has_router = "mask" in inspect.signature(mlp).parameters

    def init_state(self, capacity: int) -> PyTree:
        """The mixer's empty state; `capacity`, the tokens that attention can hold, is nothing to a recurrence."""
        return self.mixer.init_state(capacity) if self.takes_positions else self.mixer.init_state()

    def __call__(
        self,
        x: Float[Array, "T D"],
        state: PyTree | None = None,
        *,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
        snapshots: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "T D"], PyTree, PyTree | None]:
        """**Returns:** `(y, state, stats)`: y of x's shape and dtype, the mixer's new state (its snapshots, if asked
        for), and the router's sums (None for a dense block).

        **Raises:** `ValueError` of the mixer, for shapes that don't fit.
        """
        extra: dict[str, Any] = {"positions": positions} if self.takes_positions else {}
        if snapshots is not None:
            extra["snapshots"] = snapshots
        y, state = self.mixer(self.input_norm(x), state, segment_ids=segment_ids, mask=mask, **extra)
        x = x + y
        normed = self.post_attention_norm(x)
        y, stats = self.mlp(normed, mask=mask) if self.has_router else (self.mlp(normed), None)
        return x + y, state, stats


class HybridState(eqx.Module):
    """What a model remembers of the tokens that it has read.

    - `blocks`: one entry for each block of the period, `DeltaNetState` or `KVCache`; in a model each array has a
      leading axis, the period (not in one that is unstacked). After a call with `snapshots`: `DeltaNetSnapshots` or
      `KVSnapshots`.
    """

    blocks: tuple[PyTree, ...]

    @property
    def capacity(self) -> int | None:
        """Tokens that the attention caches can hold; None if no block has one."""
        sizes = [block.capacity for block in self.blocks if isinstance(block, KVCache)]
        return min(sizes) if sizes else None

    def crop(self, index: int | Int[Array, ""]) -> "HybridState":
        """After a call with `snapshots`: the state at snapshot number `index`, as if the tokens after it had not been
        read. Each row of a batch takes its own by `jax.vmap(HybridState.crop)(state, index)`.

        **Raises:** `ValueError` for a state without snapshots.
        """
        require(
            not any(isinstance(block, KVCache | DeltaNetState) for block in self.blocks),
            "HybridState.crop: the state has no snapshots: ask the call that makes it for some, as in "
            "model(tokens, state, snapshots=(1, 2))",
        )
        return HybridState(tuple(block.crop(index) for block in self.blocks))

    def unstack(self) -> "HybridState":
        """The state for the same model unstacked (`HybridLM.unstack`): an entry for each block of each period, without
        the leading axis. A batch goes through `jax.vmap`."""
        periods = jax.tree.leaves(self)[0].shape[0]
        return HybridState(
            tuple(jax.tree.map(lambda x, i=i: x[i], block) for i in range(periods) for block in self.blocks)
        )

    def resize(self, capacity: int) -> "HybridState":
        """The same memory with room for `capacity` tokens in the attention caches; any leading axes (periods, a batch)
        stay.

        **Raises:** outside jit, `ValueError` if tokens that are held would be lost.
        """
        return HybridState(
            tuple(block.resize(capacity) if isinstance(block, KVCache) else block for block in self.blocks)
        )


class HybridPeriod(eqx.Module):
    """Blocks one after the other, unlike each other: what a stack repeats (in Qwen3.5 three delta-rule blocks and one
    of attention)."""

    blocks: tuple[HybridBlock, ...]

    def init_state(self, capacity: int) -> HybridState:
        """The empty state of each block."""
        return HybridState(tuple(block.init_state(capacity) for block in self.blocks))

    def __call__(
        self, x: Float[Array, "T D"], state: HybridState | None = None, **kwargs: Any
    ) -> tuple[Float[Array, "T D"], HybridState, PyTree | None]:
        """As a block, with `kwargs` for each; the routers' sums are added up."""
        states, sums = [], None
        for i, block in enumerate(self.blocks):
            x = named_input(x) if i else x  # the first block's is the stack's
            x, new, stats = block(x, None if state is None else state.blocks[i], **kwargs)
            states.append(new)
            sums = stats if sums is None else sums if stats is None else jax.tree.map(lambda a, b: a + b, sums, stats)
        return x, HybridState(tuple(states)), sums
