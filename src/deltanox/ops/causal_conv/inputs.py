"""What the convolution asks of its arguments, as far as shapes and dtypes can tell."""

from .._validate import describe, require, require_array, require_choice, shapes

IMPLEMENTATIONS = ("auto", "xla", "chunked", "reference", "pallas")
ACTIVATIONS = ("silu", None)


def check_options(op: str, *, activation, implementation="auto") -> None:
    """ValueError for options that don't exist."""
    require_choice(op, "activation", activation, ACTIVATIONS)
    require_choice(op, "implementation", implementation, IMPLEMENTATIONS)


def check_weight(op: str, weight, bias, channels: int, received: str, *, names=("weight", "bias")) -> None:
    """`weight` must be [C W] with W ≥ 1 and `bias` [C], for C channels."""
    name_w, name_b = names
    require_array(op, name_w, weight, "C W")
    swapped = ": the axes are swapped, transpose it" if weight.shape[1] == channels != weight.shape[0] else ""
    require(
        weight.shape[0] == channels,
        f"{op}: `{name_w}` must be [C, W] = [{channels}, W], one row of taps a channel, but it is "
        f"{describe(weight)}{swapped}; {received}",
    )
    require(
        weight.shape[1] >= 1,
        f"{op}: `{name_w}` must have at least one tap, but W = 0 ({describe(weight)}): W = 1 looks at the current "
        f"token only",
    )
    if bias is not None:
        require_array(op, name_b, bias, "C")
        require(
            bias.shape == (channels,),
            f"{op}: `{name_b}` must be [C] = [{channels}], but it is {describe(bias)}; {received}",
        )


def check_state(
    op: str, state, lead: tuple, past: int, channels: int, dtype, received: str, *, name="initial_state"
) -> None:
    """`state` must be [*B W-1 C] in the inputs' dtype."""
    if state is None:
        return
    require_array(op, name, state, "*B W-1 C")
    wanted = (*lead, past, channels)
    require(
        state.shape == wanted,
        f"{op}: `{name}` must be [*B, W-1, C] = {list(wanted)}, the last W - 1 inputs, oldest first, but it is "
        f"{describe(state)}; {received}: the order is tokens before channels, and the current token is not part of it",
    )
    require(
        state.dtype == dtype,
        f"{op}: `{name}` must have the inputs' dtype {dtype}, but it is {describe(state)}; {received}: it holds "
        f"inputs, cast it with .astype({dtype})",
    )


def check_tokens(op: str, lead: tuple, received: str, **arrays) -> None:
    """`segment_ids` and `mask` must be [*B T]."""
    for name, x in arrays.items():
        if x is None:
            continue
        require_array(op, name, x, "*B T", kind="bool" if name == "mask" else "integer")
        require(
            x.shape == lead,
            f"{op}: `{name}` must be [*B, T] = {list(lead)}, but it is {describe(x)}; {received}: one value a token",
        )


def check_shapes(op: str, x, weight, bias, initial_state, segment_ids=None, mask=None, *, axis_t: str = "T ") -> None:
    """Raise ValueError unless shapes and dtypes fit together. `axis_t` is "" for one token."""
    arrays = dict(weight=weight, bias=bias, initial_state=initial_state, segment_ids=segment_ids, mask=mask)
    received = f"received {shapes(x=x, **arrays)}"
    require_array(op, "x", x, f"*B {axis_t}C")
    for letter, size in zip(("C", "T"), reversed(x.shape)):
        require(
            size >= 1 or (letter == "T" and not axis_t),
            f"{op}: the axis {letter} must not be empty; {received}",
        )
    channels = x.shape[-1]
    check_weight(op, weight, bias, channels, received)
    lead = x.shape[:-2] if axis_t else x.shape[:-1]
    check_state(op, initial_state, lead, weight.shape[1] - 1, channels, x.dtype, received)
    check_tokens(op, x.shape[:-1], received, segment_ids=segment_ids, mask=mask)
