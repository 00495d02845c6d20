"""Sentences for wrong arguments: what must hold, what was received, what to do."""

import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim


def describe(x: Any) -> str:
    """`float32[2, 7, 3]` for an array, the type's name for anything else."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__


def shapes(**arrays: Any) -> str:
    """`q: float32[2, 7, 3], k: float32[2, 7, 3]`, without the arguments that are None."""
    return ", ".join(f"{name}: {describe(x)}" for name, x in arrays.items() if x is not None)


def require(condition: bool, sentence: str) -> None:
    """Raise `ValueError(sentence)` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number, Python's or NumPy's (an int, a float or a scalar; not a bool)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(math.isfinite(value))


def require_number(op: str, name: str, value: Any, *, least: float = -math.inf) -> float:
    """`value` as a float; ValueError unless it is a finite number of at least `least`."""
    bound = "" if least == -math.inf else f" of at least {least:g}"
    require(
        is_number(value) and bool(value >= least),
        f"{op}: `{name}` must be a finite number{bound}, but it is {describe_value(value)}: pass a Python or NumPy "
        "number, which is compiled in",
    )
    return float(value)


def require_size(op: str, name: str, value: Any, *, least: int = 1) -> int:
    """`value` as an int; ValueError unless it is an integer (Python's or NumPy's) of at least `least`."""
    try:
        size = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = None
    if size is None:
        raise ValueError(f"{op}: `{name}` must be an integer, but it is {describe_value(value)}: pass an int")
    require(size >= least, f"{op}: `{name}` must be at least {least}, but it is {size}: pass a larger int")
    return size


def describe_value(value: Any) -> str:
    """`2.0` for a number or a text, `float32[2, 3]` for an array, the type's name for anything else."""
    return repr(value) if isinstance(value, numbers.Number | str | None) else describe(value)


def require_kind(op: str, name: str, x: Any, axes: str, *, kind: str = "floating") -> None:
    """`x` must be an array of `kind` ("floating", "integer", "bool"), of any rank."""
    letters = axes.split()
    require(
        hasattr(x, "shape") and hasattr(x, "dtype"),
        f"{op}: `{name}` must be an array [{', '.join(letters)}], "
        f"but it is a {type(x).__name__}: wrap it in jnp.asarray",
    )
    wanted = {"floating": jnp.floating, "integer": jnp.integer, "bool": jnp.bool_}[kind]
    remedy = {
        "floating": "cast it with .astype(jnp.float32) or to the activations' dtype",
        "integer": "cast it with .astype(jnp.int32)",
        "bool": "compare it, as in `ids != pad`, or cast it with .astype(bool)",
    }[kind]
    require(
        jnp.issubdtype(x.dtype, wanted),
        f"{op}: `{name}` must hold {kind} values, but it is {describe(x)}: {remedy}",
    )


def require_tokens(op: str, *, positions: Any = None, segment_ids: Any = None, mask: Any = None) -> None:
    """What is said of tokens must be None or arrays of their kind, whose shapes are checked elsewhere."""
    for name, x, axes, kind in (
        ("positions", positions, "T", "integer"), ("segment_ids", segment_ids, "T", "integer"),
        ("mask", mask, "T", "bool"),
    ):  # fmt: skip
        if x is not None:
            require_kind(op, name, x, axes, kind=kind)


def require_arrays(op: str, **values: Any) -> None:
    """Each must be None or an array."""
    for name, x in values.items():
        require(
            x is None or (hasattr(x, "shape") and hasattr(x, "dtype")),
            f"{op}: `{name}` must be an array, but it is a {type(x).__name__}: wrap it in jnp.asarray",
        )


def require_record(op: str, name: str, value: Any, *kinds: type, remedy: str) -> None:
    """`value` must be a record of one of these classes."""
    require(
        isinstance(value, kinds),
        f"{op}: `{name}` must be a {' or '.join(k.__name__ for k in kinds)}, but it is a {type(value).__name__}: "
        f"{remedy}",
    )


def require_array(op: str, name: str, x: Any, axes: str, *, kind: str = "floating") -> None:
    """`x` must be an array of `kind` ("floating", "integer", "bool") with at least the axes written in `axes`.

    `axes` is written as in the glossary, `*B T h K`: a leading `*` stands for any number of axes.
    """
    letters = axes.split()
    least = sum(not letter.startswith("*") for letter in letters)
    exact = least == len(letters)
    require_kind(op, name, x, axes, kind=kind)
    require(
        len(x.shape) == least if exact else len(x.shape) >= least,
        f"{op}: `{name}` must have {'the' if exact else 'at least the last'} axes [{', '.join(letters)}], "
        f"but it is {describe(x)}: {'add or remove axes' if exact else 'add the missing axes'}, "
        f"or map the extra ones with jax.vmap",
    )
    for letter, size in zip(reversed(letters), reversed(x.shape)):
        require(
            letter.startswith("*") or not is_symbolic_dim(size),
            f"{op}: the axis {letter} of `{name}` must be a number, but it is the symbol {size}: export a program for "
            "each size of it; axes in front (the batch) may be symbols",
        )


def require_choice(op: str, name: str, value: Any, choices: tuple) -> None:
    """`value` must be one of `choices`."""
    require(
        value in choices,
        f"{op}: `{name}` must be one of {', '.join(map(repr, choices))}, but it is {value!r}",
    )
