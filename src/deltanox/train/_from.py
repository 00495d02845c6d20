"""Fine-tuning: a run that begins with the weights of a checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from deltanox._read import member
from deltanox.interop import TOKENIZER, config_from_hf, load, read_json
from deltanox.interop._files import Checkpoint
from deltanox.interop._names import Names
from deltanox.models import Qwen3NextConfig
from deltanox.train._settings import Config
from deltanox.train._vocabulary import check_is_bytes


def start_from(folder: str | Path, config: Config) -> tuple[Config, Callable[[Config, jax.Array], Any]]:
    """A run's config with the sizes of the Hugging Face checkpoint in `folder`, and what makes its model: for `train`.

    The checkpoint's tokenizer, if it has one, takes the place of the config's. The head for one token further is
    loaded and trained if `train.further_weight` is above 0; else it is left out.

    **Raises:** `ValueError` for a checkpoint that `load` refuses, one of tokens without a tokenizer, or one without the
    head where `train.further_weight` is above 0.
    """
    folder = Path(folder)
    raw = read_json(folder)
    further = config.train.further_weight > 0
    if further:
        tensors = Checkpoint(folder).tensors
        if not any(map(Names.of(tensors, folder).is_mtp, tensors)):
            raise ValueError(
                f"train: `{folder}` must have a head for one token further (tensors `mtp.*`) to be trained with "
                f"train.further_weight = {config.train.further_weight}, but it has none: set train.further_weight = 0, "
                "or give a checkpoint with the head"
            )
    sizes = config_from_hf(raw, mtp_head=further)
    data = config.data
    if (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(member(folder, TOKENIZER)))
    elif not data.tokenizer:
        check_is_bytes(folder, sizes.vocab_size, remedy=", or set data.tokenizer")
    family = "qwen3_next" if isinstance(sizes, Qwen3NextConfig) else "qwen3_5"

    def make_model(config: Config, key: jax.Array) -> Any:
        del key
        model, _ = load(
            folder, mtp=further, dtype=config.precision.parameter, implementation=config.implementation,
            state_dtype=config.precision.state, decay_dtype=config.precision.decay,
            strict_hf_rounding=config.precision.strict_hf_rounding,
            residuals=config.residuals, unroll=config.train.unroll,
        )  # fmt: skip
        return model

    return dataclasses.replace(config, model=sizes, family=family, data=data), make_model
