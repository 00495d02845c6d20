"""A wrong argument gets one sentence: what must hold, what was received, what to do."""

import jax
import jax.numpy as jnp
import pytest

from deltanox.ops import Residuals, check_inputs, gated_delta_rule, gated_delta_step

# jaxtyping's checker is on in the tests and catches most of these first, with names of its own; `__wrapped__` is the
# op without it
op = getattr(gated_delta_rule, "__wrapped__", gated_delta_rule)
step = getattr(gated_delta_step, "__wrapped__", gated_delta_step)
check = getattr(check_inputs, "__wrapped__", check_inputs)


def call(function, arguments):
    arguments = dict(arguments)
    return function(*[arguments.pop(name) for name in ("q", "k", "v", "g", "beta")], **arguments)


def good(**changes):
    arrays = dict(
        q=jnp.ones((2, 7, 3, 4)), k=jnp.ones((2, 7, 3, 4)), v=jnp.ones((2, 7, 6, 5)), g=-jnp.ones((2, 7, 6)),
        beta=jnp.ones((2, 7, 6)),
    )  # fmt: skip
    return {**arrays, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(q=jnp.ones((2, 3, 7, 4)), k=jnp.ones((2, 3, 7, 4))), r"`v` must share the axes \[\*B, T\] of `q`, \[2, 3\].*tokens before heads"),
        (dict(k=jnp.ones((2, 7, 3, 8))), r"`q` and `k` must have one shape \[\*B, T, h, K\].*k: float32\[2, 7, 3, 8\]"),
        (dict(v=jnp.ones((2, 8, 6, 5))), r"`v` must share the axes.*\[2, 7\], but it has \[2, 8\]"),
        (dict(g=-jnp.ones((2, 6, 7))), r"`g` must be \[\*B, T, H\] = \[2, 7, 6\].*float32\[2, 6, 7\]"),
        (dict(beta=jnp.ones((2, 7, 3))), r"`beta` must be \[\*B, T, H\] = \[2, 7, 6\].*one value a token and value head"),
        (dict(v=jnp.ones((2, 7, 5, 5)), g=None, beta=jnp.ones((2, 7, 5))), r"H = 5 must be a multiple of the key heads h = 3"),
        (dict(q=jnp.ones((2, 7, 3, 4), int), k=jnp.ones((2, 7, 3, 4), int)), r"`q` must hold floating values.*astype"),
        (dict(v=jnp.ones((2, 7, 6, 5), jnp.bfloat16)), r"must have one dtype; received q: float32.*v: bfloat16"),
        (dict(q=jnp.ones((4,))), r"`q` must have at least the last axes \[\*B, T, h, K\], but it is float32\[4\]"),
        (dict(q=[1.0]), r"`q` must be an array.*list.*jnp.asarray"),
        (dict(initial_state=jnp.ones((2, 6, 5, 4))), r"`initial_state` must be \[\*B, H, K, V\] = \[2, 6, 4, 5\].*keys come before values"),
        (dict(segment_ids=jnp.ones((2, 6), int)), r"`segment_ids` must be \[\*B, T\] = \[2, 7\]"),
        (dict(segment_ids=jnp.ones((2, 7))), r"`segment_ids` must hold integer values.*int32"),
        (dict(mask=jnp.ones((2, 7), int)), r"`mask` must hold bool values.*astype\(bool\)"),
        (dict(mask=jnp.ones((7,), bool)), r"`mask` must be \[\*B, T\] = \[2, 7\]"),
        (dict(chunk_size=48), r"`chunk_size` must be a power of two, but it is 48: 64 suits"),
        (dict(chunk_size=0), r"`chunk_size` must be a power of two"),
        (dict(chunk_size=True), r"`chunk_size` must be a power of two"),
        (dict(implementation="triton"), r"`implementation` must be one of 'auto', 'xla'.*but it is 'triton'"),
        (dict(precision="float32"), r"`precision` must be one of None, 'default', 'high', 'highest', but it is 'float32'"),
        (dict(state_dtype=jnp.int32), r"`state_dtype` must be a float dtype"),
        (dict(state_dtype="float33"), r"`state_dtype` must be a float dtype"),
        (dict(residuals=8), r"`residuals` must be a deltanox.ops.Residuals, but it is a int"),
        (dict(scale=jnp.ones(())), r"`scale` must be a finite number"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes, text):
    with pytest.raises(ValueError, match=text):
        call(op, good(**changes))


def test_empty_sequence():
    with pytest.raises(ValueError, match="the axis T must not be empty"):
        op(jnp.ones((2, 0, 3, 4)), jnp.ones((2, 0, 3, 4)), jnp.ones((2, 0, 6, 5)), None, jnp.ones((2, 0, 6)))


def test_pallas_says_what_it_cannot_take():
    with pytest.raises(
        ValueError, match="implementation='pallas' cannot take these inputs: head sizes must be 64, 128"
    ):
        op(*good().values(), implementation="pallas")


def test_step():
    one = {name: x[:, 0] for name, x in good().items()}
    with pytest.raises(ValueError, match=r"gated_delta_step: `beta` must be \[\*B, H\] = \[2, 6\]"):
        step(one["q"], one["k"], one["v"], one["g"], one["beta"].T)


@pytest.mark.parametrize(
    ("field", "value"), [("states_every", 0), ("states_every", 1.5), ("t_inv", True), ("out", "keep")]
)
def test_residuals(field, value):
    make = getattr(Residuals, "__wrapped__", Residuals)
    with pytest.raises((ValueError, TypeError), match=field):
        make(**{field: value})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(g=jnp.ones((2, 7, 6)) * 0.9), r"`g` must be a log-decay, ≤ 0, but it does not, first at index \[0, 0, 0\]: pass jnp.log"),
        (dict(beta=jnp.full((2, 7, 6), 2.5)), r"`beta` must lie in \[0, 2\]"),
        (dict(q=jnp.ones((2, 7, 3, 4)).at[1, 2, 0, 3].set(jnp.nan)), r"`q` must be free of NaN.*index \[1, 2, 0, 3\]"),
        (dict(initial_state=jnp.full((2, 6, 4, 5), jnp.inf)), r"`initial_state` must be finite"),
        (dict(mask=jnp.zeros((2, 7), bool)), r"`mask` must leave a token in every row"),
        (dict(mask=jnp.ones((2, 7), bool).at[1, 3].set(False)), r"`mask` must have its padding outside of the segments.*index \[1, 4\]"),
    ],
)  # fmt: skip
def test_check_inputs(changes, text):
    """Case 32 and its kind: what only values can tell."""
    with pytest.raises(ValueError, match=text):
        call(check, good(**changes))


def test_check_inputs_accepts():
    mask = jnp.ones((2, 7), bool).at[0, :2].set(False).at[1, 3].set(False)
    ids = jnp.array([[9, 9, 0, 0, 0, 0, 0], [0, 0, 0, 9, 1, 1, 1]])
    call(check, good(mask=mask, segment_ids=ids, q=jnp.ones((2, 7, 3, 4)).at[0, 0].set(jnp.nan)))


def test_check_inputs_under_jit():
    with pytest.raises(TypeError, match="`q` is traced.*outside jit"):
        jax.jit(lambda *a: check(*a))(*good().values())
