"""The registry of named arrays: what each is, its shape and dtype, and the bytes it takes."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Place = Literal["remat", "device", "offload"]
Scope = Literal["layer", "head"]


class Residual(NamedTuple):
    """A named array: `what` it is, its `shape` in the letters of the glossary (factors of its size), its `dtype`.

    More letters: `s` and `c`, tokens from one kept state to the next and in a chunk; F and I, widths of the
    feed-forward part and of an expert; R, rows in the experts' blocks: k T and what fills each expert's last block.

    - `group`: what it is chosen with. `scope`: where it is, in a layer of a stack or in the head.
    - `needs`: names without which it is saved in vain, since what makes it would run again.
    - `made`: by what, if not by every layer of its kind; a group goes without it then.
    """

    group: str
    what: str
    shape: str
    dtype: str = "activations"
    needs: tuple[str, ...] = ()
    made: str = ""
    scope: Scope = "layer"

    @property
    def formula(self) -> str:
        """Bytes as a product, e the size of an activation's element."""
        return f"{'e' if self.dtype == 'activations' else '4'} {self.shape}"

    def bytes(self, itemsize: int = 2, **sizes: int) -> int:
        """`formula` at these `sizes` of its letters; quotients are rounded up. `itemsize` is e."""

        def factor(text: str) -> int:
            above, _, below = text.partition("/")
            value = sizes[above] if above.isalpha() else int(above)
            return -(-value // sizes[below]) if below else value

        return (itemsize if self.dtype == "activations" else 4) * math.prod(map(factor, self.shape.split()))


NAMES: Mapping[str, Residual] = MappingProxyType({
    "gdn_out": Residual("gdn", "output of the delta rule", "B T H V"),
    "gdn_states": Residual("gdn", "state at every s-th token", "B T/s H K V", "float32", ("gdn_out",)),
    "gdn_t_inv": Residual(
        "gdn", "T = (I + A)^-1 of every chunk", "B T/c H c c", "float32", ("gdn_out", "gdn_states"),
        made="layers with Residuals(t_inv='save')",
    ),
    "gdn_qkv": Residual(
        "gdn_conv", "merged projection, the convolution's input", "B T C", made="layers with Residuals(qkv='save')"
    ),
    "gdn_conv_out": Residual("gdn_conv", "the same after convolution and SiLU", "B T C", made="convolutions"),
    "gdn_gates": Residual("gdn_conv", "log-decay g and rate beta", "2 B T H", "float32"),
    "gdn_z": Residual("gdn_conv", "projected gate of the output, before its activation", "B T H V"),
    "attention_query": Residual("attention", "projected queries and gates", "2 B T n hd"),
    "attention_key": Residual("attention", "projected keys", "B T m hd"),
    "attention_value": Residual("attention", "projected values", "B T m hd"),
    "attention_out": Residual("attention", "output of softmax attention, before its gate", "B T n hd"),
    "attention_lse": Residual(
        "attention", "logarithm of a query's sum of exponentials", "B T n", "float32", ("attention_out",),
        made="attention in blocks, beyond 256² scores",
    ),
    "mlp_gate": Residual("mlp", "gate projection of SwiGLU, of a shared expert too", "B T F"),
    "mlp_up": Residual("mlp", "its other projection", "B T F"),
    "moe_logits": Residual("moe", "the router's logits", "B T E"),
    "moe_hidden": Residual("moe", "gate and up projections of the experts' blocks", "2 B R I"),
    "moe_out": Residual("moe", "outputs of the experts' blocks", "B R D"),
    "layer_input": Residual("layer_input", "what each block of a stack begins with", "B T D"),
    "logits": Residual(
        "logits", "scores of the whole vocabulary", "B T N", "float32", scope="head",
        made="a vocabulary that is one block of `cross_entropy`, and `HybridLM.logits`",
    ),
})  # fmt: skip
"""The names that deltanox's layers give."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {group: tuple(n for n, r in NAMES.items() if r.group == group) for group in [r.group for r in NAMES.values()]}
    | {"gdn_states": ("gdn_states",)}
)
"""Names that are chosen together."""


def table() -> str:
    """The names: group, name, bytes, dtype and what it is, a line each."""
    rows = [("group", "name", "bytes", "dtype", "what it is")]
    rows += [(r.group, name, r.formula, r.dtype, r.what) for name, r in NAMES.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[4]]) for row in rows)
