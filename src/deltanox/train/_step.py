"""One update of the parameters, as a pure function of the training state and of a batch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from deltanox.nn import lora_filter
from deltanox.precision import Precision
from deltanox.remat import Policy
from deltanox.train._data import Batch
from deltanox.train._loss import LossSums, further_labels, next_token_loss
from deltanox.train._vocabulary import BOUNDARY


class TrainState(NamedTuple):
    """All that a run carries on the device.

    - `parameters`: the model's floating arrays as they are stored and updated (None in place of everything else).
    - `optimiser_state`: Optax's.
    - `step`: updates done.
    - `key`: from which the text at the end is sampled.
    - `frozen`: floating arrays that are not trained, such as those under low-rank changes; None where all are.
    """

    parameters: Any
    optimiser_state: Any
    step: Int[Array, ""]
    key: PRNGKeyArray
    frozen: Any = None

    @property
    def arrays(self) -> Any:
        """All floating arrays of the model, trained or not."""
        return _join(self.parameters, self.frozen)


def _join(parameters: Any, frozen: Any) -> Any:
    return parameters if frozen is None else eqx.combine(parameters, frozen)


class Metrics(NamedTuple):
    """What a step reports, in float32.

    - `loss`: mean nats per label. `bits_per_byte`: all nats of the batch / ln 2 / its bytes.
    - `balance`: mean load-balance loss of sparse layers, 0 without them.
    - `further_loss`: mean nats per label of the head for one token further, 0 where it isn't trained.
    - `gradient_norm`: before clipping. `learning_rate`: of this update.
    """

    loss: Float[Array, ""]
    bits_per_byte: Float[Array, ""]
    balance: Float[Array, ""]
    further_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]


def init_state(
    model: Any, optimiser: Callable[[Any], optax.GradientTransformation], *, key: PRNGKeyArray
) -> tuple[TrainState, Any, optax.GradientTransformation]:
    """The state of step 0, the static rest of the model, and the optimiser that `optimiser(parameters)` makes.

    All floating arrays are trained, or, of a model with `LoRALinear`s, their `up` and `down` alone.
    """
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    parameters, frozen = arrays, None
    if any(jax.tree.leaves(lora_filter(model))):
        parameters, frozen = eqx.partition(arrays, lora_filter(arrays))
    transformation = optimiser(parameters)
    state = TrainState(parameters, transformation.init(parameters), jnp.zeros((), jnp.int32), key, frozen)
    return state, static, transformation


def make_step(
    static: Any,
    optimiser: optax.GradientTransformation,
    schedule: optax.Schedule,
    precision: Precision,
    *,
    balance_weight: float = 0.0,
    balance_loss: Callable[[Any], Float[Array, ""]] | None = None,
    further_weight: float = 0.0,
    remat: Policy | None = None,
    bytes_per_token: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A function `(state, batch) -> (state, metrics)` to be jitted, best with its first argument donated.

    The arrays of `batch` are [A B T]: the gradients of A batches of B rows are summed, and the update is that of one
    batch of A · B rows, in the memory of B. They are summed in `precision.accumulation`.
    Master parameters are cast to the compute dtype inside the loss.

    **Arguments**: `static`, the model without its parameters; `optimiser`; `schedule`, for the report; `precision`;
    `balance_weight` and `balance_loss`, applied to the router statistics of each batch where the model gives them;
    `further_weight`, of the loss of the head for one token further, which the model must have if it isn't 0;
    `remat`, what the backward pass finds saved (None: all that it needs); `bytes_per_token`, of the text, for bits per
    byte (None: tokens are bytes).

    A batch without labels (all of it masked) has the loss 0 and gradients of 0.
    """

    def loss_function(parameters, frozen, batch, counts, parts):
        model = precision.cast_compute(eqx.combine(_join(parameters, frozen), static))
        sums = next_token_loss(model, batch, further=further_weight > 0, remat=remat)
        loss = sums.nats / counts[0]
        further = jnp.zeros((), jnp.float32)
        if sums.further is not None:
            further = sums.further / counts[1]
            loss = loss + jnp.float32(further_weight) * further
        balance = jnp.zeros((), jnp.float32)
        if sums.router is not None and balance_loss is not None:
            balance = balance_loss(sums.router).astype(jnp.float32) / jnp.float32(parts)
            loss = loss + jnp.float32(balance_weight) * balance
        return loss, (sums.nats, balance, further)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        parts = batch.tokens.shape[0]
        real = jnp.ones(batch.labels.shape, bool) if batch.mask is None else batch.mask
        # a mean over no labels is zero, with no gradient: a batch of padding alone changes nothing but by weight decay
        count = jnp.maximum(real.sum(dtype=jnp.int32).astype(jnp.float32), jnp.float32(1))
        if bytes_per_token is None:
            num_bytes = (real & (batch.labels != BOUNDARY)).sum(dtype=jnp.int32).astype(jnp.float32)
            num_bytes = jnp.maximum(num_bytes, jnp.float32(1))
        else:
            num_bytes = jnp.float32(bytes_per_token) * count
        mask = None if batch.mask is None else jnp.asarray(batch.mask)
        _, there = further_labels(*map(jnp.asarray, (batch.labels, batch.segment_ids)), mask)
        counts = (count, jnp.maximum(there.sum(dtype=jnp.int32).astype(jnp.float32), jnp.float32(1)))
        gradient = jax.grad(loss_function, has_aux=True)
        if parts == 1:
            one = jax.tree.map(lambda x: x[0], batch)
            gradients, (nats, balance, further) = gradient(state.parameters, state.frozen, one, counts, parts)
        else:

            def accumulate(carry, one):
                new = gradient(state.parameters, state.frozen, one, counts, parts)
                return jax.tree.map(lambda total, x: total + x.astype(total.dtype), carry, new), None

            first = jax.tree.map(lambda x: x[0], batch)
            shapes = jax.eval_shape(
                lambda p, f, b: gradient(p, f, b, counts, parts), state.parameters, state.frozen, first
            )
            wide = precision.accumulation
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, max(x.dtype, wide, key=lambda dtype: dtype.itemsize)), shapes
            )
            (gradients, (nats, balance, further)), _ = jax.lax.scan(accumulate, zeros, batch)
            gradients = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, shapes[0])
            nats, balance, further = (x.astype(jnp.float32) for x in (nats, balance, further))
        # Optax mixes Python floats with integer counts: it needs JAX's usual promotion, whatever the caller has set.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, optimiser_state = optimiser.update(gradients, state.optimiser_state, state.parameters)
            parameters = optax.apply_updates(state.parameters, updates)
            learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
        metrics = Metrics(
            loss=nats / count,
            bits_per_byte=nats / (math.log(2) * num_bytes),
            balance=balance,
            further_loss=further,
            gradient_norm=jnp.sqrt(sum(jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(gradients))),
            learning_rate=learning_rate,
        )
        return TrainState(parameters, optimiser_state, state.step + 1, state.key, state.frozen), metrics

    return step


def repeat_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]], most: int
) -> Callable[[TrainState, Batch, Int[Array, ""]], tuple[TrainState, Metrics]]:
    """Up to `most` updates in one function `(state, batches, count) -> (state, metrics)`, to be jitted in step's place.

    The arrays of `batches` are [most A B T], those of `metrics` [most]; only the first `count` are read and written,
    so that one compiled program serves every count, with the same values. What a step needs besides the state is
    allocated once a call instead of once a step.
    """
    if most == 1:

        def single(state, batches, count):
            del count
            state, metrics = step(state, jax.tree.map(lambda x: x[0], batches))
            return state, jax.tree.map(lambda x: x[None], metrics)

        return single

    def repeated(state, batches, count):
        def body(i, carry):
            state, all_metrics = carry
            state, metrics = step(state, jax.tree.map(lambda x: x[i], batches))
            return state, jax.tree.map(lambda all_, x: all_.at[i].set(x), all_metrics, metrics)

        first = jax.tree.map(lambda x: x[0], batches)
        _, shapes = jax.eval_shape(step, state, first)
        zeros = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, count, body, (state, zeros))

    return repeated


def make_evaluation(static: Any, precision: Precision) -> Callable[[Any, Batch], LossSums]:
    """A function `(parameters, batch [B T]) -> LossSums`, to be jitted."""

    def evaluate(parameters: Any, batch: Batch) -> LossSums:
        return next_token_loss(precision.cast_compute(eqx.combine(parameters, static)), batch)

    return evaluate
