"""The settings of a training run, as frozen dataclasses that check their values."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from deltanox._types import Implementation
from deltanox.ops import Residuals
from deltanox.precision import Precision
from deltanox.remat import Policy
from deltanox.train._vocabulary import VOCABULARY_SIZE

Family = typing.Literal["qwen3_5", "qwen3_next"]


def check_trainable(precision: Precision) -> None:
    """**Raises**: `ValueError` for dtypes that a model cannot be trained in, on this machine or at all."""
    for name in ("parameter", "compute", "state"):
        if getattr(precision, name).name == "float16":
            raise ValueError(
                f"config: precision.{name} must be float32, bfloat16 or float64 for training, but it is float16: "
                "gradients and AdamW's second moments fall below its smallest number, and there is no loss scale; "
                "give bfloat16"
            )
    precision.require_available()


def _check(section: str, values: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    for name, (holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"config: {section}.{name} must be {rule}, but it is {getattr(values, name)!r}")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How text becomes batches.

    - `tokenizer`: a tokenizer.json, or a folder with one, whose tokens the text is cut into, special ones that stand in
      the text included; "" for bytes.
    - `end_token`: the token that ends a document, as the tokenizer writes it; "" for the one that the files beside the
      tokenizer name.
    - `row_length`: tokens in a row, T.
    - `batch_size`: rows that are in memory together, B. A step of the optimiser sees B · train.accumulation rows.
    - `validation_fraction`: part of the files that is held out, by a hash of their names.
    - `validation_bytes`: bytes of them that are evaluated at most; 0 for all.
    - `seed`: of the order of the data.
    """

    tokenizer: str = ""
    end_token: str = ""
    row_length: int = 512
    batch_size: int = 4
    validation_fraction: float = 0.02
    validation_bytes: int = 200_000
    seed: int = 0

    def __post_init__(self):
        _check(
            "data",
            self,
            {
                "end_token": (not self.end_token or bool(self.tokenizer), "empty without data.tokenizer"),
                "row_length": (self.row_length >= 2, "at least 2 tokens"),
                "batch_size": (self.batch_size >= 1, "at least 1 row"),
                "validation_fraction": (0 < self.validation_fraction < 1, "between 0 and 1, both excluded"),
                "validation_bytes": (self.validation_bytes >= 0, "0 (all) or a number of bytes"),
                "seed": (self.seed >= 0, "0 or more"),
            },
        )


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with a linear warm-up, a cosine and clipping by the global norm.

    - `learning_rate`: its peak, reached after `warmup_steps` steps.
    - `final_learning_rate`: the rate at the end of the cosine, as a fraction of the peak.
    - `weight_decay`: per unit of learning rate, for matrices only (see `decay_mask`).
    - `beta1`, `beta2`, `epsilon`: Adam's.
    - `clip_norm`: largest global norm of the gradient; 0 for none.
    """

    learning_rate: float = 1e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self):
        _check(
            "optimiser",
            self,
            {
                "learning_rate": (0 < self.learning_rate < math.inf, "above 0"),
                "final_learning_rate": (0 <= self.final_learning_rate <= 1, "between 0 and 1"),
                "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
                "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
                "beta1": (0 <= self.beta1 < 1, "in [0, 1)"),
                "beta2": (0 <= self.beta2 < 1, "in [0, 1)"),
                "epsilon": (0 < self.epsilon < math.inf, "above 0"),
                "clip_norm": (0 <= self.clip_norm < math.inf, "0 (no clipping) or above 0"),
            },
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop.

    - `steps`: updates of the parameters.
    - `accumulation`: batches whose gradients are summed for one update.
    - `steps_per_call`: updates done by one call of the compiled program. More than one keep the program's memory
      between them, which on a CPU is a sixth of the time, and losses are reported so many at a time.
    - `unroll`: periods of the model that one turn of the loop over its depth runs. More copy less and compile longer.
    - `balance_weight`: weight of the load-balance loss of sparse layers.
    - `further_weight`: weight of the loss of the head for one token further (`model.mtp_head`), such as 0.1; 0 leaves
      the head as it is but for weight decay.
    - `seed`: of the initial parameters and of sampled text.
    - `directory`: where the log, the picture and the checkpoints go; "" for a new folder `runs/<name of the config>`.
    - `checkpoint_every`: steps between checkpoints (one more is written at the end); 0 for the end only.
    - `keep_checkpoints`: how many are kept.
    - `validate_every`, `validation_batches`: steps between short validations, and their number of batches; 0 for
      none. The validation at the end always takes the whole validation text.
    - `sample_tokens`, `sample_prompt`, `sample_temperature`: the text generated at the end; 0 tokens for none.
    """

    steps: int = 1000
    accumulation: int = 1
    steps_per_call: int = 1
    unroll: int = 1
    balance_weight: float = 0.001
    further_weight: float = 0.0
    seed: int = 0
    directory: str = ""
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    validate_every: int = 0
    validation_batches: int = 4
    sample_tokens: int = 300
    sample_prompt: str = "def "
    sample_temperature: float = 0.7

    def __post_init__(self):
        _check(
            "train",
            self,
            {
                "steps": (self.steps >= 1, "at least 1"),
                "accumulation": (self.accumulation >= 1, "at least 1"),
                "steps_per_call": (self.steps_per_call >= 1, "at least 1"),
                "unroll": (self.unroll >= 1, "at least 1"),
                "balance_weight": (0 <= self.balance_weight < math.inf, "0 or more"),
                "further_weight": (0 <= self.further_weight < math.inf, "0 or more"),
                "seed": (0 <= self.seed < 2**31, "between 0 and 2^31 - 1"),
                "checkpoint_every": (self.checkpoint_every >= 0, "0 (at the end only) or a number of steps"),
                "keep_checkpoints": (self.keep_checkpoints >= 1, "at least 1"),
                "validate_every": (self.validate_every >= 0, "0 (at the end only) or a number of steps"),
                "validation_batches": (self.validation_batches >= 1, "at least 1"),
                "sample_tokens": (self.sample_tokens >= 0, "0 (no sample) or a number of tokens"),
                "sample_temperature": (0 <= self.sample_temperature < math.inf, "0 (most likely token) or above"),
            },
        )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank changes of linear layers (`deltanox.nn.add_lora`), which are trained in place of the model's weights.

    - `rank`: of a change. `alpha`: it is scaled by alpha / rank; 0 for alpha = rank.
    - `targets`: names of the linear layers, such as "in_proj_qkv" or "o_proj"; none for all but routers and gates of
      shared experts.
    """

    rank: int = 8
    alpha: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self):
        _check(
            "lora",
            self,
            {
                "rank": (self.rank >= 1, "at least 1"),
                "alpha": (0 <= self.alpha < math.inf, "0 (as the rank) or above"),
            },
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. `model` is the model's own config, a frozen dataclass with a field `vocab_size`; `family` says
    which one. `lora` is None where all weights are trained."""

    model: Any
    precision: Precision = Precision()  # noqa: RUF009 (frozen)
    family: Family = "qwen3_5"
    implementation: Implementation = "auto"
    data: DataConfig = DataConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    train: TrainConfig = TrainConfig()
    remat: Policy | None = None
    residuals: Residuals = Residuals()  # noqa: RUF009 (frozen)
    lora: LoraConfig | None = None

    def __post_init__(self):
        if not self.data.tokenizer and self.model.vocab_size < VOCABULARY_SIZE:
            raise ValueError(
                f"config: model.vocab_size must be at least {VOCABULARY_SIZE} (the bytes and a boundary), but "
                f"it is {self.model.vocab_size}"
            )
        if self.train.further_weight > 0 and not getattr(self.model, "mtp_head", False):
            raise ValueError(
                f"config: train.further_weight must be 0 for a model without a head for one token further, but it is "
                f"{self.train.further_weight}: set model.mtp_head = true (with --from too, where the head is the "
                "checkpoint's)"
            )
        if self.implementation == "reference":
            raise ValueError(
                "config: implementation must be one that trains, but it is 'reference', the definition in float64 for "
                "checks: take 'auto', or 'chunked', which JAX differentiates"
            )
        if self.optimiser.warmup_steps >= self.train.steps:
            raise ValueError(
                f"config: optimiser.warmup_steps must be below train.steps, but they are "
                f"{self.optimiser.warmup_steps} and {self.train.steps}"
            )
