"""What the delta rule asks of its arguments. Shapes and dtypes are checked at every call, values only by
`check_inputs`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._types import Mask, SegmentIds, State
from .._validate import describe, require, require_array, require_choice, require_number, shapes
from .residuals import Residuals

IMPLEMENTATIONS = ("auto", "xla", "chunked", "reference", "pallas")
PRECISIONS = ("default", "high", "highest")


def check_shapes(op: str, q, k, v, g, beta, initial_state, segment_ids=None, mask=None, *, axis_t: str = "T ") -> None:
    """Raise ValueError unless shapes and dtypes fit together. `axis_t` is "" for one token."""
    given = shapes(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, segment_ids=segment_ids, mask=mask
    )  # fmt: skip
    received = f"received {given}"
    for name, x, axes in (("q", q, "h K"), ("k", k, "h K"), ("v", v, "H V"), ("beta", beta, "H")):
        require_array(op, name, x, f"*B {axis_t}{axes}")
    if g is not None:
        require_array(op, "g", g, f"*B {axis_t}H")
    letters = ["*B", *axis_t.split()]
    heads_axes = f"[{', '.join([*letters, 'H'])}]"
    require(
        q.shape == k.shape,
        f"{op}: `q` and `k` must have one shape [{', '.join([*letters, 'h', 'K'])}]; {received}: "
        "both belong to the h key heads",
    )
    require(
        q.dtype == k.dtype == v.dtype,
        f"{op}: `q`, `k` and `v` must have one dtype; {received}: cast them to the activations' dtype",
    )
    lead = q.shape[:-2]
    require(
        v.shape[:-2] == lead,
        f"{op}: `v` must share the axes [{', '.join(letters)}] of `q`, {list(lead)}, but it has {list(v.shape[:-2])}; "
        f"{received}: "
        f"the order is [{', '.join([*letters, 'H', 'V'])}], tokens before heads",
    )
    for name, x in (("g", g), ("beta", beta)):
        require(
            x is None or x.shape == v.shape[:-1],
            f"{op}: `{name}` must be {heads_axes} = {list(v.shape[:-1])}, one value a token and value head, but it is "
            f"{None if x is None else describe(x)}; {received}: the order is tokens before heads",
        )
    sizes = {"h": q.shape[-2], "K": q.shape[-1], "H": v.shape[-2], "V": v.shape[-1]}
    if axis_t:
        sizes["T"] = lead[-1]
    for letter, size in sizes.items():
        require(size >= 1, f"{op}: the axis {letter} must not be empty; {received}")
    require(
        sizes["H"] % sizes["h"] == 0,
        f"{op}: the value heads H = {sizes['H']} must be a multiple of the key heads h = {sizes['h']}; {received}: "
        "value head i reads "
        f"key head i // (H / h)",
    )
    batch = lead[:-1] if axis_t else lead
    if initial_state is not None:
        require_array(op, "initial_state", initial_state, "*B H K V")
        wanted = (*batch, sizes["H"], sizes["K"], sizes["V"])
        require(
            initial_state.shape == wanted,
            f"{op}: `initial_state` must be [*B, H, K, V] = {list(wanted)}, but it is {describe(initial_state)}; "
            f"{received}: keys come "
            f"before values, one state a batch row and value head",
        )
    for name, x, kind in (("segment_ids", segment_ids, "integer"), ("mask", mask, "bool")):
        if x is not None:
            require_array(op, name, x, "*B T", kind=kind)
            require(
                x.shape == lead,
                f"{op}: `{name}` must be [*B, T] = {list(lead)}, but it is {describe(x)}; {received}: "
                "one value a token, the same for "
                f"all heads",
            )


def check_options(
    op: str,
    *,
    chunk_size,
    implementation,
    precision,
    state_dtype,
    decay_dtype,
    residuals,
    scale=None,
    l2norm_eps: Any = 1e-6,
) -> None:
    """Raise ValueError unless the options are ones that exist."""
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    require(
        whole and chunk_size >= 1 and chunk_size & (chunk_size - 1) == 0,
        f"{op}: `chunk_size` must be a power of two, but it is {chunk_size!r}: 64 suits most sizes",
    )
    require_choice(op, "implementation", implementation, IMPLEMENTATIONS)
    require_choice(op, "precision", precision, (None, *PRECISIONS))
    require(
        isinstance(residuals, Residuals),
        f"{op}: `residuals` must be a deltanox.ops.Residuals, but it is a {type(residuals).__name__}",
    )
    check_numbers(op, scale=scale, l2norm_eps=l2norm_eps)
    for name, dtype in (("state_dtype", state_dtype), ("decay_dtype", decay_dtype)):
        try:
            floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:
            floating = False
        require(floating, f"{op}: `{name}` must be a float dtype such as jnp.float32, but it is {dtype!r}")


def check_numbers(op: str, *, scale, l2norm_eps) -> None:
    """`scale` must be None or a finite number of float32, `l2norm_eps` a finite one that is not negative."""
    if scale is not None:
        size = abs(require_number(op, "scale", scale))
        require(
            size <= float(np.finfo(np.float32).max),
            f"{op}: `scale` must be a finite number in float32, but it is {scale!r}: scale `v` or the output instead",
        )
    if l2norm_eps is not None:
        require_number(op, "l2norm_eps", l2norm_eps, least=0.0)


def check_inputs(
    q: Float[Array, "*B T h K"],
    k: Float[Array, "*B T h K"],
    v: Float[Array, "*B T H V"],
    g: Float[Array, "*B T H"] | None,
    beta: Float[Array, "*B T H"],
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
) -> None:
    """Check the values that `gated_delta_rule` is about to be given, outside `jit`.

    Arguments: as in `gated_delta_rule`.

    Raises: ValueError, naming the argument, where one holds NaN or infinity at a real token (minus infinity in `g` is a
        reset and allowed; a NaN reaches the other documents of its chunk too), where `g` is above zero (a linear
    decay exp(g) passed
        for its logarithm), `beta` outside [0, 2], a mask leaves a row without a token or cuts a hole into a segment;
        for shapes as the op does;
        TypeError under `jit`, where there are no values to look at.
    """
    op = "check_inputs"
    arguments = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, segment_ids=segment_ids, mask=mask)
    for name, x in arguments.items():
        if isinstance(x, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
            raise TypeError(f"{op}: `{name}` is traced and has no values: call check_inputs outside jit, grad and vmap")
    check_shapes(op, q, k, v, g, beta, initial_state, segment_ids, mask)
    real = np.ones(q.shape[:-2], bool) if mask is None else np.asarray(mask)

    def forbid(name: str, bad, must: str, remedy: str) -> None:
        if np.any(bad):
            index = [int(i) for i in np.argwhere(bad)[0]]
            raise ValueError(f"{op}: `{name}` must {must}, but it does not, first at index {index}: {remedy}")

    def wide(x) -> np.ndarray:
        return np.asarray(x, np.float64)

    for name in ("q", "k", "v", "g", "beta"):
        x = arguments[name]
        if x is not None:
            bad = (np.isnan(wide(x)) if name == "g" else ~np.isfinite(wide(x))) & real.reshape(
                *real.shape, *[1] * (x.ndim - real.ndim)
            )
            must = "be free of NaN at real tokens" if name == "g" else "be free of NaN and infinity at real tokens"
            forbid(name, bad, must, "look at what made it, or mask the padding")
    if initial_state is not None:
        forbid("initial_state", ~np.isfinite(wide(initial_state)), "be finite", "look at what made it")
    if g is not None:
        bad = (wide(g) > 0) & real[..., None]
        forbid("g", bad, "be a log-decay, ≤ 0", "pass jnp.log(alpha) where you have a linear decay alpha")
    rate = wide(beta)
    forbid("beta", ((rate < 0) | (rate > 2)) & real[..., None], "lie in [0, 2]", "apply jax.nn.sigmoid")
    if mask is not None:
        rows = real.reshape(-1, real.shape[-1])
        forbid("mask", ~rows.any(-1), "leave a token in every row", "drop the rows that are padding only")
        ids = np.zeros(rows.shape, int) if segment_ids is None else np.asarray(segment_ids).reshape(rows.shape)
        holes = np.zeros(rows.shape, bool)
        for keep, segment, hole in zip(rows, ids, holes):
            where = np.flatnonzero(keep)
            hole[where[1:]] = (np.diff(where) > 1) & (segment[where[1:]] == segment[where[:-1]])
        forbid(
            "mask", holes, "have its padding outside of the segments (inside of one the convolution would see zeros)",
            "pad at the ends, or give the two sides different segment ids",
        )  # fmt: skip
