"""The configuration of a training run: a TOML file read into frozen dataclasses, each value checked.

    family = "qwen3_5"            # or "qwen3_next"
    implementation = "auto"       # engine of the delta rule and the convolution
    [model]                       # the fields of the model's own config
    [precision]                   # Precision: dtypes by what they are for
    [data]                        # DataConfig
    [optimiser]                   # OptimiserConfig
    [train]                       # TrainConfig
    [remat]                       # places of groups and names of `deltanox.remat`, mlp = "offload", on top of a ready
                                  # policy = "kernels"; without the table the backward pass finds all it needs saved
    [residuals]                   # deltanox.ops.Residuals: what the delta rule's record holds, states_every = 8
    [lora]                        # LoraConfig; without the table all weights are trained

What is left out has its default. What is unknown is an error that names the nearest known key.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltanox._read import read_toml, shown
from deltanox._types import Implementation
from deltanox.ops import Residuals
from deltanox.precision import Precision
from deltanox.remat import Policy, policy
from deltanox.train._ready import find_config
from deltanox.train._settings import Config, DataConfig, Family, LoraConfig, OptimiserConfig, TrainConfig

_SECTIONS = {
    "precision": Precision,
    "data": DataConfig,
    "optimiser": OptimiserConfig,
    "train": TrainConfig,
    "residuals": Residuals,
    "lora": LoraConfig,
}
_OFTEN = ("data", "optimiser", "train", "residuals")  # sections of every run
_CHOICES = {"family": Family, "implementation": Implementation}


def read_config(path: str | Path, overrides: Sequence[str] = (), *, model_type: type | None = None) -> Config:
    """The TOML file at `path`, or the ready config of that name, with `overrides` such as "model.num_layers=4" or
    "data.seed=1" on top of it.

    The value of an override is written as in TOML; what is not TOML is taken as a string. `model_type` is the
    dataclass of the section [model], that of `family` where it is None.

    **Raises**: `ValueError` for a file that is missing or no TOML, unknown sections and keys, and wrong values.
    """
    path = find_config(path)
    return config_from_dict(apply_overrides(read_toml(path), overrides), model_type=model_type)


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of nested tables with `overrides` on top of them, as in `read_config`."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}
    for override in overrides:
        _override(result, override)
    return result


def config_from_dict(table: Mapping[str, Any], *, model_type: type | None = None) -> Config:
    """A `Config` from nested tables, as `read_config` finds them in a file and `config_to_dict` makes them."""
    if model_type is None:
        from deltanox.models import Qwen3_5Config, Qwen3NextConfig

        family = _convert("family", table.get("family", "qwen3_5"), Family)
        model_type = Qwen3NextConfig if family == "qwen3_next" else Qwen3_5Config
    sections = {"model": model_type, **_SECTIONS}
    known = {f"{section}.{field.name}" for section, t in sections.items() for field in dataclasses.fields(t)}
    values = {}
    for name, value in table.items():
        if name in _CHOICES:
            values[name] = _convert(name, value, _CHOICES[name])
        elif name in sections:
            if not isinstance(value, Mapping):
                raise ValueError(f"config: `{name}` is a section, write it as [{name}], but it is {value!r}")
            values[name] = _record(sections[name], name, value, known)
        elif name == "remat":
            if not isinstance(value, Mapping):
                raise ValueError(f"config: `remat` is a section, write it as [remat], but it is {value!r}")
            places = dict(value)
            values[name] = policy(places.pop("policy", "nothing"), **places)
        else:
            raise ValueError(_unknown(name, name, [*sections, *_CHOICES, "remat"], known))
    if "model" not in values:
        raise ValueError("config: there is no section [model]; add one with the sizes of the model")
    return Config(**values)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested tables of plain values, which JSON can hold and `config_from_dict` reads."""

    def plain(value: Any) -> Any:
        if isinstance(value, Policy):
            return value.table()
        if hasattr(value, "__dataclass_fields__"):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return str(value.name)  # a dtype

    absent = {name for name in ("remat", "lora") if getattr(config, name) is None}
    return {name: value for name, value in plain(config).items() if name not in absent}


# What may change between a run and its resumption: it has no influence on the parameters.
_FREE = frozenset(
    f"train.{name}"
    for name in [
        "directory",
        "checkpoint_every",
        "keep_checkpoints",
        "validate_every",
        "validation_batches",
        "sample_tokens",
        "sample_prompt",
        "sample_temperature",
    ]
) | {"data.validation_bytes"}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ between two results of `config_to_dict` and matter to the parameters, as sentences."""
    # a run of an earlier version lacks the settings that came later
    added = {f"{name}.{field.name}": field.default for name in _OFTEN for field in dataclasses.fields(_SECTIONS[name])}
    a, b = added | dict(_flatten(old)), dict(_flatten(new))
    missing = object()
    return [
        f"{name} was {a.get(name, 'missing')!r} and is {b.get(name, 'missing')!r}"
        for name in sorted(a.keys() | b.keys())
        if name not in _FREE and a.get(name, missing) != b.get(name, missing)
    ]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _override(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys) or len(keys) > 2:
        raise ValueError(f"--set: write section.key=value, such as train.steps=100, but it is `{override}`")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    if len(keys) == 2:
        table = table.setdefault(keys[0], {})
        if not isinstance(table, dict):
            raise ValueError(f"--set: `{keys[0]}` has no keys of its own; write {keys[0]}=value, not `{override}`")
    table[keys[-1]] = value


def _unknown(name: str, shown: str, candidates: Sequence[str], known: set[str]) -> str:
    near = difflib.get_close_matches(name, candidates, 1)
    if not near:
        # The right key in the wrong section.
        near = [key for key in sorted(known) if key.partition(".")[2] == name]
        near = near or difflib.get_close_matches(name, [key.partition(".")[2] for key in sorted(known)], 1)
    hint = f"did you mean `{near[0]}`?" if near else "known are " + ", ".join(sorted(candidates))
    return f"config: there is no `{shown}`; {hint}"


def _record(kind: type, section: str, table: Mapping[str, Any], known: set[str]) -> Any:
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in table.items():
        if name not in fields:
            raise ValueError(_unknown(name, f"{section}.{name}", fields, known))
        values[name] = _convert(f"{section}.{name}", value, hints[name])
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    absent = [name for name in required if name not in values]
    if absent:
        raise ValueError(f"config: section [{section}] needs {', '.join(absent)}")
    return kind(**values)


_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it: numbers may be written as integers, tuples are written as lists, and that is all."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        errors = []
        for option in options:
            if option is not type(None):
                try:
                    return _convert(name, value, option)
                except ValueError as error:
                    errors.append(error)
        raise errors[0]
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], 1)
        hint_text = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"config: {name} must be one of {', '.join(map(repr, choices))}, but it is {value!r}{hint_text}"
        )
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"config: {name} must be a list, but it is {value!r}")
        inner = typing.get_args(hint)
        if inner[-1:] == (Ellipsis,):
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            raise ValueError(f"config: {name} must be a list of {len(inner)} values, but it is {value!r}")
        return tuple(_convert(name, item, kind) for item, kind in zip(value, inner))
    if hint in (int, float) and type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"config: {name} must be {_KINDS[hint]} of 64 bits, but it is {shown(value)}")
    if hint is float and type(value) is int:
        return float(value)
    if hint in _KINDS and type(value) is not hint:
        raise ValueError(f"config: {name} must be {_KINDS[hint]}, but it is {value!r}")
    return value
