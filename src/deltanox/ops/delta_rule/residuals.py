"""What the forward pass keeps for the backward pass: one record for the XLA path and the TPU kernels."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Which intermediate arrays of the delta rule are kept, and which are computed again in the backward pass.

    Inputs are always kept (they are the caller's own arrays). For N = ceil(T / chunk_size) chunks of C tokens:

    - `states_every`: the state is kept before every n-th chunk, `[*B, ceil(N / n), H, K, V]` in the state's dtype, 4
      B H K V T / (n C) bytes in float32; the states between are computed again. The default of 2 is every 128 tokens,
      the least that the TPU kernels take; on a CPU 1 is 7 % faster, on a TPU more cost nothing but the kernels' own
      memory, up to 8 or 16.
    - `t_inv`: "save" keeps T = (I + A)^-1 of every chunk, `[*B, N, H, C, C]`, 4 B H C T bytes in float32, half of that
      in the bfloat16 of the kernels' "default" precision; "recompute" inverts again. The kernels keep
      (I + strict(Γ ∘ K Kᵀ) diag(β))^-1, which serves as well, for chunks of 128 tokens.
    - `out`: "save" keeps the output `[*B, T, H, V]` under its own name, so that a rematerialisation policy can spare
      the second forward pass; "recompute" leaves it to the caller.
    - `qkv`: of the mixer (`GatedDeltaNet`, where the rule's caller is the convolution): "save" keeps the convolution's
      input, unless a rematerialisation policy drops it; "recompute" makes it from the layer's input a second time, and
      only after the rule's own gradients. Where the layer runs again as a whole it is then held at no time beside
      the convolution's output, 2 B T C bytes less at the peak in bfloat16 for one more product.
    """

    states_every: int = 2
    t_inv: Literal["save", "recompute"] = "recompute"
    out: Literal["save", "recompute"] = "save"
    qkv: Literal["save", "recompute"] = "save"

    def __post_init__(self):
        if not isinstance(self.states_every, int) or isinstance(self.states_every, bool) or self.states_every < 1:
            raise ValueError(
                f"Residuals: `states_every` must be an integer of at least 1 (a state is kept before every n-th "
                f"chunk), "
                f"but it is {self.states_every!r}"
            )
        for name in ("t_inv", "out", "qkv"):
            if getattr(self, name) not in ("save", "recompute"):
                raise ValueError(
                    f"Residuals: `{name}` must be 'save' or 'recompute', but it is {getattr(self, name)!r}"
                )
