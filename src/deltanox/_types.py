"""The letters that shapes are written with, and the few types that several rooms share.

| letter | axis |
|---|---|
| `*B` | any number of leading batch axes (ops only: layers are unbatched, under `jax.vmap`) |
| `T`  | tokens |
| `h`  | key heads |
| `H`  | value heads, a multiple of `h`: value head i reads key head i // (H / h) |
| `K`  | size of a key head |
| `V`  | size of a value head |
| `C`  | channels of the convolution, 2hK + HV in the mixer |
| `W`  | width of the convolution |
| `D`  | embedding size |
| `E`  | experts |
| `N`  | vocabulary |
| `S`  | slots of a key-value cache |

Log-decays `g` are natural logarithms (≤ 0, no unit); `beta` is a rate in [0, 1] (up to 2 is stable).
"""

from typing import Literal

import numpy as np
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["auto", "xla", "chunked", "reference", "pallas"]
"""Which engine runs an op. "auto" is "xla" wherever no kernel is built for the platform that is compiled for."""

Precision = Literal["default", "high", "highest"]
"""Precision of the matrix products: one, three or all passes in the multiplier of the platform."""

Number = float | int | np.number
"""A number that is compiled into an op, of Python or of NumPy."""

SegmentIds = Int[Array, "*B T"]
Mask = Bool[Array, "*B T"]
State = Float[Array, "*B H K V"]
