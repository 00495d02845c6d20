"""A small model with the interface that the loop needs: a decaying sum of embeddings, and one linear layer on it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    vocab_size: int = 257
    width: int = 8
    rates: tuple[float, float] = (0.5, 0.9)
    tied: bool = False
    bias: bool = True


class TinyModel(eqx.Module):
    embedding: Array
    mix: eqx.nn.Linear
    head: Array | None
    config: TinyConfig = eqx.field(static=True)

    def __init__(self, config, *, key):
        keys = jax.random.split(key, 3)
        self.embedding = 0.02 * jax.random.normal(keys[0], (config.vocab_size, config.width))
        self.mix = eqx.nn.Linear(2 * config.width, config.width, use_bias=config.bias, key=keys[1])
        self.head = None if config.tied else 0.02 * jax.random.normal(keys[2], (config.vocab_size, config.width))
        self.config = config

    @property
    def head_weight(self):
        return self.embedding if self.head is None else self.head

    def hidden(self, tokens, state=None, *, segment_ids=None, mask=None, positions=None):
        x = self.embedding[tokens]
        starts = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])

        def step(sums, inputs):
            x, start = inputs
            rates = jnp.asarray(self.config.rates, x.dtype)
            sums = rates[:, None] * jnp.where(start, jnp.zeros((), x.dtype), sums) + x[None]
            return sums, sums.reshape(-1)

        _, features = jax.lax.scan(step, jnp.zeros((2, x.shape[1]), x.dtype), (x, starts))
        y = features @ self.mix.weight.T
        return jnp.tanh(y + self.mix.bias[None] if self.config.bias else y), None, None


def make_tiny(config, key):
    return TinyModel(config.model, key=key)
