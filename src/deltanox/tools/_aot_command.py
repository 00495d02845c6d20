"""The command `deltanox aot`: the training step or the loss of a config, compiled for a TPU that is not there."""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from deltanox.train import Batch, init_state, learning_rate_schedule, make_optimiser, make_step, read_config
from deltanox.train._adapt import adapt
from deltanox.train._loop import default_model
from deltanox.train._settings import Config
from deltanox.train._step import make_evaluation

from . import aot

WHAT = ("step", "forward")


def run(arguments: argparse.Namespace) -> int:
    """Print the report of the command line's config. Returns the exit status; wrong use is a ValueError."""
    config = read_config(arguments.config, arguments.set)
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        # nothing runs here, and libtpu would look for a TPU
        jax.config.update("jax_platforms", "cpu")
    aot.parse_topology(arguments.topology)
    aot.prepare()
    try:
        report = compile_config(config, topology=arguments.topology, what=arguments.what)
    except jax.errors.JaxRuntimeError as error:
        sentence = " ".join(str(error).split())[:600]
        raise ValueError(
            f"aot: XLA does not compile `{arguments.config}` for {arguments.topology}: {sentence}"
        ) from None
    print(report.to_json() if arguments.json else report)
    return 0


def compile_config(config: Config, *, topology: str = "tpu7x", what: str = "step") -> aot.Report:
    """The report of one update of the training state ("step", with the state donated), or of the loss ("forward")."""
    fn, args, donate = program(config, what=what)
    return aot.compile(fn, *args, topology=topology, donate_argnums=donate)


def program(config: Config, *, what: str = "step") -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """A function, its arguments (arrays as structs), and which of these it may overwrite."""

    def state(key):
        model = adapt(config.precision.cast_parameters(default_model(config, key)), config.lora, key=key)
        return init_state(model, lambda p: make_optimiser(config.optimiser, config.train.steps, p), key=key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    state, static, optimiser = eqx.filter_eval_shape(state, key)
    rows, length = config.data.batch_size, config.data.row_length

    def batch(*lead: int) -> Batch:
        tokens: Any = jax.ShapeDtypeStruct((*lead, rows, length), jnp.int32)
        return Batch(tokens, labels=tokens, segment_ids=tokens)

    if what == "forward":

        def forward(parameters: Any, static: Any, batch: Batch) -> Any:
            return make_evaluation(static, config.precision)(parameters, batch)

        return forward, (state.arrays, static, batch()), ()

    schedule = learning_rate_schedule(config.optimiser, config.train.steps)

    def step(state: Any, static: Any, batch: Batch) -> Any:
        from deltanox.nn import load_balance_loss

        update = make_step(
            static,
            optimiser,
            schedule,
            config.precision,
            balance_weight=config.train.balance_weight,
            balance_loss=load_balance_loss,
            remat=config.remat,
        )
        return update(state, batch)

    return step, (state, static, batch(config.train.accumulation)), (0,)
