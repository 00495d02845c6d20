"""Fine-tuning: a run that begins with the weights of a checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from deltanox.interop import TOKENIZER, config_from_hf, load, read_json
from deltanox.models import Qwen3NextConfig
from deltanox.train._settings import Config
from deltanox.train._vocabulary import check_is_bytes


def start_from(folder: str | Path, config: Config) -> tuple[Config, Callable[[Config, jax.Array], Any]]:
    """A run's config with the sizes of the Hugging Face checkpoint in `folder`, and what makes its model: for `train`.

    The checkpoint's tokenizer, if it has one, takes the place of the config's. The head for one token further, which
    the loss doesn't reach, is left out.

    **Raises:** `ValueError` for a checkpoint that `load` refuses, or one of tokens without a tokenizer.
    """
    folder = Path(folder)
    sizes = config_from_hf(read_json(folder))
    data = config.data
    if (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))
    elif not data.tokenizer:
        check_is_bytes(folder, sizes.vocab_size, remedy=", or set data.tokenizer")
    family = "qwen3_next" if isinstance(sizes, Qwen3NextConfig) else "qwen3_5"

    def make_model(config: Config, key: jax.Array) -> Any:
        del key
        model, _ = load(
            folder, mtp=False, dtype=config.precision.parameter, implementation=config.implementation,
            state_dtype=config.precision.state, decay_dtype=config.precision.decay,
            strict_hf_rounding=config.precision.strict_hf_rounding,
            residuals=config.residuals, unroll=config.train.unroll,
        )  # fmt: skip
        return model

    return dataclasses.replace(config, model=sizes, family=family, data=data), make_model
