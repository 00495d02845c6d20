"""Where each array of a model lies in a checkpoint: one table, for both directions.

A layer's array and the tensors that hold it are tiled by `Part`s, pairs of views of equal shape: loading copies from
the tensor's view to the array's, saving back. Names are written without prefix here ("layers.3.mlp.gate.weight",
"lm_head.weight", "mtp.fc.weight"); `Names` knows what a checkpoint puts before them.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..models import Qwen3_5Config, Qwen3NextConfig
from ..ops._validate import require

View = Callable[[np.ndarray], np.ndarray]


class Part(NamedTuple):
    """A tensor of the checkpoint, its whole shape, the view of it that is meant, and the view of the layer's array
    that it is; None stands for all of it."""

    tensor: str
    shape: tuple[int, ...]
    of_tensor: View | None = None
    of_array: View | None = None


class Place(NamedTuple):
    """An array of the model: its path, shape and dtype, and its parts: one list for each period if it is `stacked`,
    else one list."""

    path: str
    array: Any
    stacked: bool
    periods: list[list[Part]]


class Layout(NamedTuple):
    """What checkpoints of equal models differ in: `fused` projections (Qwen3-Next), experts each by itself, in the
    model's layers and in the head for one token further."""

    fused: bool
    separate: bool
    separate_mtp: bool

    @staticmethod
    def of_names(names: Iterable[str]) -> "Layout":
        """That of the tensors' names; one of a layout is enough."""
        fused = separate = separate_mtp = False
        for name in names:
            fused |= name.endswith(".in_proj_qkvz.weight")
            if ".mlp.experts.0." in name:
                separate_mtp |= "mtp." in name
                separate |= "mtp." not in name
        return Layout(fused, separate, separate_mtp)

    @staticmethod
    def of_config(config: Qwen3_5Config) -> "Layout":
        """That of the released checkpoints."""
        old = isinstance(config, Qwen3NextConfig)
        return Layout(fused=old, separate=old, separate_mtp=True)


_TRUNK = (
    "model.", "model.language_model.", "language_model.model.", "model.language_model.model.", "language_model.", "",
)  # fmt: skip
_HEAD = ("lm_head.", "model.lm_head.", "language_model.lm_head.", "model.language_model.lm_head.")
_MTP = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
_VISION = ("visual.", "model.visual.", "vision_tower.", "model.vision_tower.")


class Names(NamedTuple):
    """The prefixes of a checkpoint: of the model, of its head, and of the head for one token further."""

    trunk: str = "model."
    head: str = "lm_head."
    mtp: str = "mtp."

    @staticmethod
    def of(names: Iterable[str], folder: Any) -> "Names":
        """Those of the tensors' names.

        **Raises:** `ValueError` if there is no embedding under a known prefix, or more than one.
        """
        names = set(names)
        trunk = [prefix for prefix in _TRUNK if f"{prefix}embed_tokens.weight" in names]
        require(
            len(trunk) == 1,
            f"load: `{folder}` must have one tensor `embed_tokens.weight` under one of the prefixes "
            f"{', '.join(map(repr, _TRUNK))}, but there {'are ' + str(len(trunk)) if trunk else 'is none'}; its first "
            f"tensors are {', '.join(sorted(names)[:3])}",
        )
        head = next((prefix for prefix in _HEAD if f"{prefix}weight" in names), _HEAD[0])
        mtp = next((prefix for prefix in _MTP if any(name.startswith(prefix) for name in names)), _MTP[0])
        return Names(trunk[0], head, mtp)

    def __call__(self, name: str) -> str:
        """A name as it is in the checkpoint."""
        for own, prefix in (("lm_head.", self.head), ("mtp.", self.mtp)):
            if name.startswith(own):
                return prefix + name.removeprefix(own)
        return self.trunk + name

    def is_vision(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to the vision tower."""
        return name.startswith(_VISION)

    def is_mtp(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to the head for one token further."""
        return name.startswith(self.mtp)


_BLOCK = re.compile(r"\.layers\.layers\.blocks\[(\d+)\]\.(.+)")
_TOP = {".embedding": "embed_tokens.weight", ".norm.weight": "norm.weight", ".head": "lm_head.weight"}
_NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def places(config: Qwen3_5Config, model: Any, layout: Layout) -> list[Place]:
    """A `Place` for each array of a model, or of its skeleton of `jax.ShapeDtypeStruct`s."""
    interval, found = config.full_attention_interval, []
    for keys, array in jax.tree_util.tree_leaves_with_path(model):
        path = jax.tree_util.keystr(keys)
        if match := _BLOCK.fullmatch(path):
            j, rest = int(match[1]), match[2]
            mixer = "self_attn" if j + 1 == interval else "linear_attn"
            layers = [f"layers.{period * interval + j}." for period in range(config.num_periods)]
            parts = [_block(layer, rest, array.shape[1:], mixer, config, layout) for layer in layers]
            found.append(Place(path, array, True, parts))
        elif path.startswith(".mtp.block."):
            mtp = layout._replace(separate=layout.separate_mtp)
            rest = path.removeprefix(".mtp.block.")
            parts = _block("mtp.layers.0.", rest, array.shape, "self_attn", config, mtp)
            found.append(Place(path, array, False, [parts]))
        else:
            name = _TOP[path] if path in _TOP else path.removeprefix(".")
            found.append(Place(path, array, False, [[Part(name, array.shape)]]))
    return found


def _block(layer: str, rest: str, shape: tuple, mixer: str, config: Qwen3_5Config, layout: Layout) -> list[Part]:
    """The parts of one array of a block: `rest` is its path in the block, `shape` its shape."""
    part, _, inner = rest.partition(".")
    if part in _NORMS:
        return [Part(f"{layer}{_NORMS[part]}.{inner}", shape)]
    if part == "mlp":
        return _mlp(f"{layer}mlp.", inner, shape, layout)
    module = f"{layer}{mixer}."
    if inner == "conv.weight":
        return [Part(f"{module}conv1d.weight", (shape[0], 1, shape[1]), lambda tensor: tensor[:, 0])]
    if layout.fused and inner.startswith("in_proj_"):
        return _fused(module, inner, config)
    return [Part(module + inner, shape)]


def _mlp(module: str, inner: str, shape: tuple, layout: Layout) -> list[Part]:
    if inner not in ("experts_gate_up", "experts_down"):
        return [Part(module + inner, shape)]
    if not layout.separate:
        return [Part(f"{module}experts.{inner.removeprefix('experts_')}_proj", shape)]
    num_experts, rows, width = shape
    if inner == "experts_down":
        return [
            Part(f"{module}experts.{e}.down_proj.weight", (rows, width), None, lambda array, e=e: array[e])
            for e in range(num_experts)
        ]
    half = rows // 2
    return [
        Part(f"{module}experts.{e}.{name}_proj.weight", (half, width), None, lambda array, e=e, i=i: array[e, i])
        for e in range(num_experts)
        for name, i in (("gate", slice(None, half)), ("up", slice(half, None)))
    ]


def _fused(module: str, inner: str, config: Qwen3_5Config) -> list[Part]:
    """Qwen3-Next's rows lie by key head: [q | k | its value heads' v | their z], and [b | a] of its value heads."""
    h, K, D = config.num_key_heads, config.key_head_size, config.embed_size
    ratio = config.num_value_heads // h
    wide = ratio * config.value_head_size

    def part(name: str, rows: int, begin: int, size: int, first: int = 0) -> Part:
        """`size` rows of the `rows` of each key head, `begin` on, are the array's rows `first` on."""
        return Part(
            f"{module}{name}.weight",
            (h * rows, D),
            lambda tensor: tensor.reshape(h, rows, D)[:, begin : begin + size],
            lambda array: array[first : first + h * size].reshape(h, size, D),
        )

    if inner in ("in_proj_b.weight", "in_proj_a.weight"):
        return [part("in_proj_ba", 2 * ratio, 0 if inner == "in_proj_b.weight" else ratio, ratio)]
    rows = 2 * K + 2 * wide
    if inner == "in_proj_z.weight":
        return [part("in_proj_qkvz", rows, 2 * K + wide, wide)]
    return [
        part("in_proj_qkvz", rows, begin, size, first)
        for begin, size, first in ((0, K, 0), (K, K, h * K), (2 * K, wide, 2 * h * K))
    ]
