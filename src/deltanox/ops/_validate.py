"""Sentences for wrong arguments: what must hold, what was received, what to do."""

from typing import Any

import jax.numpy as jnp


def describe(x: Any) -> str:
    """`float32[2, 7, 3]` for an array, the type's name for anything else."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{jnp.dtype(x.dtype).name}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__


def shapes(**arrays: Any) -> str:
    """`q: float32[2, 7, 3], k: float32[2, 7, 3]`, without the arguments that are None."""
    return ", ".join(f"{name}: {describe(x)}" for name, x in arrays.items() if x is not None)


def require(condition: bool, sentence: str) -> None:
    """Raise `ValueError(sentence)` unless `condition` holds."""
    if not condition:
        raise ValueError(sentence)


def require_array(op: str, name: str, x: Any, axes: str, *, kind: str = "floating") -> None:
    """`x` must be an array of `kind` ("floating", "integer", "bool") with at least the axes written in `axes`.

    `axes` is written as in the glossary, `*B T h K`: a leading `*` stands for any number of axes.
    """
    letters = axes.split()
    least = sum(not letter.startswith("*") for letter in letters)
    exact = least == len(letters)
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
    require(
        len(x.shape) == least if exact else len(x.shape) >= least,
        f"{op}: `{name}` must have {'the' if exact else 'at least the last'} axes [{', '.join(letters)}], "
        f"but it is {describe(x)}: {'add or remove axes' if exact else 'add the missing axes'}, "
        f"or map the extra ones with jax.vmap",
    )


def require_choice(op: str, name: str, value: Any, choices: tuple) -> None:
    """`value` must be one of `choices`."""
    require(
        value in choices,
        f"{op}: `{name}` must be one of {', '.join(map(repr, choices))}, but it is {value!r}",
    )
