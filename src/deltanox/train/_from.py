"""Fine-tuning: a run that begins with the weights of a checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from deltanox.interop import config_from_hf, load, read_json
from deltanox.models import Qwen3NextConfig
from deltanox.train._config import Config


def start_from(folder: str | Path, config: Config) -> tuple[Config, Callable[[Config, jax.Array], Any]]:
    """A run's config with the sizes of the Hugging Face checkpoint in `folder`, and what makes its model: for `train`.

    All weights are trained; the head for one token further, which the loss doesn't reach, is left out.

    **Raises:** `ValueError` for a checkpoint that `load` refuses, or one with a tokenizer: a run's text is bytes, which
    mean other tokens to such a model.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"train: `{folder}` has a tokenizer.json, but text is read as bytes yet: give a model of bytes, such as a "
            "run of `deltanox train` after `deltanox convert`"
        )
    sizes = config_from_hf(read_json(folder))
    family = "qwen3_next" if isinstance(sizes, Qwen3NextConfig) else "qwen3_5"

    def make_model(config: Config, key: jax.Array) -> Any:
        del key
        model, _ = load(
            folder, mtp=False, dtype=config.precision.parameter, implementation=config.implementation,
            state_dtype=config.precision.state, unroll=config.train.unroll,
        )  # fmt: skip
        return model

    return dataclasses.replace(config, model=sizes, family=family), make_model
