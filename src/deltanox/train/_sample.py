"""Trained models as text: loading one from a run, and bytes as they are generated."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from deltanox.generate import Sampler, make_key, stream
from deltanox.models import HybridLM
from deltanox.nn import lora_filter, merge_lora
from deltanox.train._adapt import adapt
from deltanox.train._checkpoint import Checkpoint, find_checkpoint, load_arrays
from deltanox.train._config import config_from_dict
from deltanox.train._folder import load_frozen, run_vocabulary
from deltanox.train._loop import default_model
from deltanox.train._settings import Config
from deltanox.train._vocabulary import BOUNDARY, Vocabulary, encode


def load_model(directory: str | Path) -> HybridLM:
    """The model of a run's newest checkpoint (or of the checkpoint `directory` itself), in its compute dtype.

    **Raises**: `ValueError` where there is none, or it is damaged.
    """
    model, config = _load(find_checkpoint(directory))
    return merge_lora(config.precision.cast_compute(model))


def load_parameters(directory: str | Path) -> tuple[HybridLM, Config]:
    """As `load_model`, in the dtype that the parameters are stored in, and the run's config."""
    model, config = _load(find_checkpoint(directory))
    return merge_lora(model), config


def load_vocabulary(directory: str | Path) -> Vocabulary:
    """What the text of a run is made of."""
    checkpoint = find_checkpoint(directory)
    return run_vocabulary(config_from_dict(checkpoint.field("config", dict)), checkpoint)


def _load(checkpoint: Checkpoint) -> tuple[HybridLM, Config]:
    """The model as it was trained, low-rank changes beside the weights."""
    config = config_from_dict(checkpoint.field("config", dict))

    def make(key):
        return adapt(config.precision.cast_parameters(default_model(config, key)), config.lora, key=key)

    arrays, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), _is_floating)
    if config.lora is None:
        return eqx.combine(load_arrays(checkpoint, arrays, prefix=".parameters"), static), config
    trained, frozen = eqx.partition(arrays, lora_filter(arrays))
    trained = load_arrays(checkpoint, trained, prefix=".parameters")
    return eqx.combine(trained, load_frozen(checkpoint, frozen), static), config


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)


def stream_text(
    model: HybridLM,
    prompt: str,
    *,
    max_tokens: int,
    sampler: Sampler = Sampler(),  # noqa: B008 (frozen)
    seed: int | PRNGKeyArray = 0,
    drafts: int = 0,
) -> Iterator[str]:
    """Text that continues `prompt` as the beginning of a document: up to `max_tokens` bytes, or to the document's end.

    Bytes that are no UTF-8 come out as the replacement character U+FFFD.

    **Raises**: `ValueError` for wrong values, before anything is generated.
    """
    tokens = stream(
        model,
        encode(prompt),
        max_new_tokens=max_tokens,
        sampler=sampler,
        stop_tokens=(BOUNDARY,),
        drafts=drafts,
        key=make_key(seed),
    )
    return _decode(tokens)


def _decode(tokens: Iterator[Any]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in map(int, tokens):
        if token == BOUNDARY:
            break
        # A larger vocabulary than the bytes' has entries that stand for nothing: 0xFF never is UTF-8.
        if piece := decoder.decode(bytes([min(token, 255)])):
            yield piece
    if piece := decoder.decode(b"", final=True):
        yield piece


def sample_text(model: HybridLM, config: Config, vocabulary: Vocabulary, key: PRNGKeyArray) -> str:
    """The prompt and the text of a config's sample, as the loop prints it at the end."""
    settings = config.train
    prompt, tokens = settings.sample_prompt, settings.sample_tokens
    sampler = Sampler(temperature=settings.sample_temperature)
    run = stream_text if vocabulary.text is None else vocabulary.text.stream
    pieces = run(model, prompt, max_tokens=tokens, sampler=sampler, seed=key)
    return f"sample after {prompt!r}:\n{prompt}{''.join(pieces)}"
