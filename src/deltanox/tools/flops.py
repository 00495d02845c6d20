"""Operations and bytes of a function, counted in its jaxpr: loops, kernels and ragged products included.

XLA's own count takes a loop's body once, and a ragged product as often as there are groups. Here a scan counts its
length times, a Pallas kernel as often as its grid has steps, and a ragged product by the formula of the rows it has.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

GRID_LIMIT = 2**22  # steps of a grid whose block indices are looked at one by one


class Count(NamedTuple):
    """What a function does once.

    - `flops`: multiplications and additions of its products (`FORMULAS`). Elementwise work is not counted.
    - `mxu_flops`: the same, times the bfloat16 passes that each product's precision takes.
    - `bytes`: what products read and write, and what kernels' blocks move, as if everything else were fused. A block
      moves when its index changes.
    - `kernel_flops`: the part of `mxu_flops` that is done in Pallas kernels.
    - `notes`: sentences about what could not be counted.
    """

    flops: int = 0
    mxu_flops: int = 0
    bytes: int = 0
    kernel_flops: int = 0
    notes: frozenset[str] = frozenset()

    def plus(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(self[:4], other[:4])), self.notes | other.notes)

    def times(self, n: int) -> "Count":
        return Count(*(a * n for a in self[:4]), self.notes)


def count(jaxpr: Any, *, platform: str = "tpu") -> Count:
    """The work of a jaxpr (closed or not), on `platform` where branches depend on it."""
    total = Count()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total = total.plus(_equation(eqn, platform))
    return total


# Products --------------------


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _free(eqn: Any, dimension_numbers: Any, group: Any = ()) -> int:
    """Entries of the right operand that every entry of the left one is multiplied with."""
    (_, contracting), (_, batch) = dimension_numbers
    taken = {*contracting, *batch, *group}
    return math.prod(size for i, size in enumerate(_shape(eqn.invars[1])) if i not in taken)


def _dot(eqn: Any) -> int:
    return 2 * math.prod(_shape(eqn.invars[0])) * _free(eqn, eqn.params["dimension_numbers"])


def _ragged_dot(eqn: Any) -> int:
    # every row meets the matrix of its own group only, whichever axis is ragged
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    free = _free(eqn, numbers.dot_dimension_numbers, numbers.rhs_group_dimensions)
    return 2 * math.prod(_shape(eqn.invars[0])) * free


def _convolution(eqn: Any) -> int:
    # each output is a sum over the kernel's window and the inputs of its group; padding and dilation count as inputs
    kernel, out_features = _shape(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec[0]
    return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) // kernel[out_features]


FORMULAS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    # ours: x [G R in] with one matrix a block, and a [G R O] with b [G R I]
    "block_dot": lambda eqn: 2 * math.prod(_shape(eqn.invars[0])) * _shape(eqn.outvars[0])[-1],
    "block_outer": lambda eqn: 2 * math.prod(_shape(eqn.invars[0])) * _shape(eqn.invars[1])[-1],
}
"""Multiplications and additions of a primitive, from its equation."""

_PASSES = {"DEFAULT": (1, 1), "HIGH": (3, 2), "HIGHEST": (6, 3)}  # with both operands in float32, with one
_PRESETS = {"BF16_BF16_F32_X3": 3, "BF16_BF16_F32_X6": 6, "BF16_BF16_F32_X9": 9, "TF32_TF32_F32": 3, "F32_F32_F32": 6}


def passes(eqn: Any) -> int:
    """Passes of the MXU in bfloat16 that a product takes at its precision: in float32 1, 3 or 6 of them."""
    precision = eqn.params.get("precision")
    wide = sum(operand.aval.dtype.itemsize > 2 for operand in eqn.invars[:2])
    if precision is None or wide == 0:
        return 1
    if isinstance(precision, tuple):
        return max(_PASSES[p.name][2 - wide] for p in precision)
    return _PRESETS.get(getattr(precision, "name", ""), 1)


# Equations --------------------


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def _equation(eqn: Any, platform: str) -> Count:
    name, params = eqn.primitive.name, eqn.params
    if name in FORMULAS:
        flops = FORMULAS[name](eqn)
        moved = sum(_num_bytes(variable.aval) for variable in (*eqn.invars, *eqn.outvars))
        return Count(flops, flops * passes(eqn), moved)
    if name == "scan":
        return count(params["jaxpr"], platform=platform).times(params["length"])
    if name == "while":
        body = count(params["body_jaxpr"], platform=platform).plus(count(params["cond_jaxpr"], platform=platform))
        note = "a while loop of unknown length is counted once"
        return body._replace(notes=body.notes | {note}) if any(body[:4]) else body
    if name == "cond":
        return _branches(params, platform)
    if name == "pallas_call":
        return _kernel(eqn, platform)
    total = Count()
    for inner in jaxprs_in_params(params):
        total = total.plus(count(inner, platform=platform))
    # inside it shapes are those of one device
    return total.times(params["mesh"].size) if name == "shard_map" else total


def _branches(params: dict[str, Any], platform: str) -> Count:
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
        here = [i for i, names in enumerate(platforms) if names is not None and platform in names]
        here = here or [i for i, names in enumerate(platforms) if names is None]
        branches = [branches[i] for i in here]
    counts = [count(branch, platform=platform) for branch in branches]
    most = Count(*(max(c[i] for c in counts) for i in range(4)), frozenset().union(*(c.notes for c in counts)))
    if len({c[:4] for c in counts}) > 1:
        most = most._replace(notes=most.notes | {"a condition is counted as its most expensive branch"})
    return most


# Kernels --------------------


def _kernel(eqn: Any, platform: str) -> Count:
    mapping, name = eqn.params["grid_mapping"], eqn.params.get("name") or "a kernel"
    notes = set()
    grid = tuple(mapping.grid)
    if not all(isinstance(size, int) for size in grid):
        notes.add(f"{name}: the size of its grid is not a constant, and counts as 1")
        grid = tuple(size if isinstance(size, int) else 1 for size in grid)
    steps = math.prod(grid)
    body = count(eqn.params["jaxpr"], platform=platform).times(steps)
    moved = 0
    for block in mapping.block_mappings:
        aval: Any = getattr(block, "transformed_block_aval", None) or block.block_aval  # before JAX 0.12.1, and since
        if str(getattr(aval, "memory_space", "")).lower() in ("any", "hbm"):
            # the kernel copies from it what it wants; the whole array is our guess
            notes.add(f"{name}: an operand that stays in HBM counts as read or written once")
            moved += _num_bytes(block.array_aval)
            continue
        fetches = _fetches(block.index_map_jaxpr, grid)
        if fetches is None:
            notes.add(f"{name}: blocks whose index is not a function of the grid alone count at every step")
            fetches = steps
        moved += fetches * math.prod(aval.shape) * aval.dtype.itemsize
    return Count(body.flops, body.mxu_flops, moved, body.mxu_flops, body.notes | notes)


def _fetches(index_map: Any, grid: tuple[int, ...]) -> int | None:
    """How often the block's index changes while the grid is walked, last axis fastest; None if that is not known."""
    steps = math.prod(grid)
    if steps == 0 or steps > GRID_LIMIT:
        return 0 if steps == 0 else None
    points = np.indices(grid, dtype=np.int32).reshape(len(grid), steps)
    try:
        values = _evaluate(index_map, list(points))
    except (KeyError, TypeError):
        return None
    index = np.stack([np.broadcast_to(value, (steps,)) for value in values])
    return 1 + int(np.any(index[:, 1:] != index[:, :-1], axis=0).sum())


def _truncated(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _truncated, "rem": np.fmod, "neg": np.negative,
    "sign": np.sign, "abs": np.abs, "max": np.maximum, "min": np.minimum,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shift_left": np.left_shift, "shift_right_arithmetic": np.right_shift,
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int32), cases),
}  # fmt: skip


def _evaluate(jaxpr: Any, arguments: list[Any]) -> list[Any]:
    """Scalar integer arithmetic, on arrays of all grid points.

    KeyError for any other primitive, TypeError for a map that takes references."""
    constants = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if len(jaxpr.invars) != len(arguments):
        raise TypeError("the index map reads scalars in memory")
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        inputs = [read(variable) for variable in eqn.invars]
        if inner := list(jaxprs_in_params(eqn.params)):
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", inner[0]))
            outputs = _evaluate(closed, inputs)
        elif eqn.primitive.name == "convert_element_type":
            outputs = [np.asarray(inputs[0]).astype(eqn.params["new_dtype"])]
        else:
            outputs = [_NUMPY[eqn.primitive.name](*inputs)]
        values.update(zip(eqn.outvars, outputs))
    return [read(variable) for variable in jaxpr.outvars]
