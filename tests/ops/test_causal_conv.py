"""The causal convolution against a list of its products, made tap by tap in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.ops import causal_conv1d, causal_conv1d_step
from helpers import TOLERANCE, rel

FAST = ["xla", "chunked"]
ALL = [*FAST, "reference"]


@pytest.fixture
def unchecked():
    """The checker off, so that the ops' own sentences are reached."""
    checker.update("jaxtyping_disable", True)
    yield
    checker.update("jaxtyping_disable", False)


class ByHand:
    """One row in float64: which input each tap of each token reads, and everything that follows from that list."""

    def __init__(self, x, weight, bias, state, ids=None, mask=None, silu=True):
        x, weight, state = (np.asarray(a, np.float64) for a in (x, weight, state))
        T, W = x.shape[0], weight.shape[1]
        ids = [0] * T if ids is None else [int(i) for i in ids]
        real = [t for t in range(T) if mask is None or mask[t]]
        number = {}  # of a real token's segment
        for before, t in zip([None, *real], real):
            number[t] = 0 if before is None else number[before] + (ids[t] != ids[before])
        first = real[0] if real else T
        self.reads = []  # (token, tap, "x" | "state", row)
        for t in real:
            for w in range(W):
                source = t - (W - 1 - w)
                if source >= first and source in number and number[source] == number[t]:
                    self.reads.append((t, w, "x", source))
                elif source < first and number[t] == 0:
                    self.reads.append((t, w, "state", source - first + W - 1))
        last = number[real[-1]] if real else 0
        inputs = [("state", i) if last == 0 else None for i in range(W - 1)]
        inputs += [("x", t) if number[t] == last else None for t in real]
        self.kept = inputs[len(inputs) - (W - 1) :]
        self.x, self.weight, self.state, self.real, self.silu = x, weight, state, real, silu
        self.pre = np.zeros_like(x)
        for t, w, kind, i in self.reads:
            self.pre[t] += weight[:, w] * (x if kind == "x" else state)[i]
        if bias is not None:
            self.pre[real] += np.asarray(bias, np.float64)
        self.gate = 1 / (1 + np.exp(-self.pre))

    def values(self):
        y = self.pre * self.gate if self.silu else self.pre
        rows = [
            np.zeros(self.x.shape[1]) if k is None else (self.x if k[0] == "x" else self.state)[k[1]] for k in self.kept
        ]
        return np.where(np.isin(np.arange(len(self.x)), self.real)[:, None], y, 0), np.reshape(rows, self.state.shape)

    def gradients(self, dy, dstate):
        """Of x, weight, bias and the initial state."""
        d = np.asarray(dy, np.float64)
        d = d * self.gate * (1 + self.pre * (1 - self.gate)) if self.silu else d
        into = {"x": np.zeros_like(self.x), "state": np.zeros_like(self.state)}
        dweight = np.zeros_like(self.weight)
        for t, w, kind, i in self.reads:
            into[kind][i] += d[t] * self.weight[:, w]
            dweight[:, w] += d[t] * (self.x if kind == "x" else self.state)[i]
        for row, k in zip(np.asarray(dstate, np.float64), self.kept):
            if k is not None:
                into[k[0]][k[1]] += row
        return into["x"], dweight, d[self.real].sum(0), into["state"]


def draw(getkey, B, T, C, W, dtype=jnp.float32):
    """x, weight, bias, initial state, and the cotangents of output and state; by numpy, which compiles nothing."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    shapes = [(B, T, C), (C, W), (C,), (B, W - 1, C), (B, T, C), (B, W - 1, C)]
    return [jnp.asarray(random.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes]


def run(arrays, *, implementation, silu=True, segment_ids=None, mask=None):
    """Outputs and gradients, compiled as one."""
    segment_ids, mask = (None if a is None else jnp.asarray(a) for a in (segment_ids, mask))

    @jax.jit
    def both(x, weight, bias, state, dy, dstate):
        def op(x, weight, bias, state):
            return causal_conv1d(
                x, weight, bias, initial_state=state, segment_ids=segment_ids, mask=mask,
                activation="silu" if silu else None, implementation=implementation,
            )  # fmt: skip

        out, pull = jax.vjp(op, x, weight, bias, state)
        return out, pull((dy, dstate))

    return both(*arrays)


def compare(arrays, got, *, silu=True, segment_ids=None, mask=None, dtype="float32"):
    x, weight, bias, state, dy, dstate = arrays
    outs, gradients = got
    rows = [
        ByHand(x[i], weight, bias, state[i], None if segment_ids is None else segment_ids[i], None if mask is None else mask[i], silu)
        for i in range(len(x))
    ]  # fmt: skip
    values = [np.stack(v) for v in zip(*(row.values() for row in rows))]
    for a, b in zip(outs, values):
        assert rel(a, b) < TOLERANCE[dtype]["value"]
    wanted = list(zip(*(row.gradients(dy[i], dstate[i]) for i, row in enumerate(rows))))
    wanted = [np.stack(wanted[0]), sum(wanted[1]), sum(wanted[2]), np.stack(wanted[3])]
    for name, a, b in zip(("x", "weight", "bias", "initial_state"), gradients, wanted):
        assert rel(a, b) < TOLERANCE[dtype]["gradient"], name


def packing(B, T, ids, mask):
    """Ids and masks with something different in every row; rows of a mask: left, right, both with a hole, all masked."""
    t = np.arange(T)
    segment_ids = mask_ = None
    if ids:
        cuts = [[1, 2, T // 2], [T - 1], [], [0, 3, 4]]
        segment_ids = np.stack(
            [7 + sum((t >= c).astype(np.int32) for c in cuts[i % 4]) + 0 * t for i in range(B)]
        ).astype(np.int32)
        segment_ids[0, :1] = 40  # ids need not grow
    if mask:
        rows = [t >= T // 3, t < T - T // 3, (t >= 1) & (t < T - 1) & (t % 3 != 2), t < 0]
        mask_ = np.stack([rows[i % 4] for i in range(B)])
    return segment_ids, mask_


SIZES = [(13, 4, "--"), (13, 4, "ids"), (13, 4, "mask"), (13, 4, "ids mask"), (1, 4, "ids mask"), (2, 4, "mask"), (3, 4, "ids"),
         (3, 4, "--"), (11, 1, "ids mask"), (11, 1, "--"), (5, 2, "ids mask"), (4, 7, "ids mask"), (4, 7, "--")]  # fmt: skip


CASES = [(*size, i) for size in SIZES for i in FAST] + [
    (*size, "reference") for size in SIZES[3:5] + SIZES[8:9] + SIZES[11:12]
]


@pytest.mark.parametrize("T, W, packed, implementation", CASES)
def test_values_and_gradients(getkey, T, W, packed, implementation):
    """All numbers distinct; rows 17: T below and at the width; rows 7 and 10: packed, different in every row."""
    B, C = 5, 3
    arrays = draw(getkey, B, T, C, W)
    segment_ids, mask = packing(B, T, "ids" in packed, "mask" in packed)
    got = run(arrays, implementation=implementation, segment_ids=segment_ids, mask=mask)
    compare(arrays, got, segment_ids=segment_ids, mask=mask)


@pytest.mark.parametrize("implementation", FAST)
def test_no_activation_no_bias_no_state(getkey, implementation):
    x, weight, _, state, dy, dstate = draw(getkey, 2, 9, 5, 4)

    def op(x, weight):
        return causal_conv1d(x, weight, implementation=implementation)

    (y, last), (dx, dweight) = jax.jit(lambda x, w, ct: (lambda y, pull: (y, pull(ct)))(*jax.vjp(op, x, w)))(
        x, weight, (dy, dstate)
    )
    hand = [ByHand(x[i], weight, None, 0 * state[i], silu=False) for i in range(2)]
    assert rel(y, np.stack([h.values()[0] for h in hand])) < 1e-6
    assert np.array_equal(last, x[:, -3:])
    want = [h.gradients(dy[i], dstate[i]) for i, h in enumerate(hand)]
    assert rel(dx, np.stack([w[0] for w in want])) < 1e-6
    assert rel(dweight, sum(w[1] for w in want)) < 1e-5


@pytest.mark.parametrize("implementation", ALL)
def test_float64(getkey, implementation):
    with jax.enable_x64(True):
        arrays = [a.astype(jnp.float64) for a in draw(getkey, 4, 9, 3, 4)]
        segment_ids, mask = packing(4, 9, True, True)
        got = run(arrays, implementation=implementation, segment_ids=segment_ids, mask=mask)
        assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(got))
        compare(arrays, got, segment_ids=segment_ids, mask=mask, dtype="float64")


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_unpadded(getkey, implementation, side):
    """Rows 1, 2, 5: outputs, states and gradients of a padded row are those of the row alone, with a state before it and NaN in the pads."""
    T, pads, C, W = 10, 4, 7, 4
    x, weight, bias, state, dy, dstate = draw(getkey, 1, T, C, W)
    real = slice(pads, T) if side == "left" else slice(0, T - pads)
    mask = np.zeros((1, T), bool)
    mask[:, real] = True
    x = jnp.where(mask[..., None], x, jnp.nan)
    (y, last), (dx, *rest) = run((x, weight, bias, state, dy, dstate), implementation=implementation, mask=mask)
    alone = (x[:, real], weight, bias, state, dy[:, real], dstate)
    (y0, last0), (dx0, *rest0) = run(alone, implementation=implementation)
    assert rel(y[:, real], y0) < 1e-6 and rel(dx[:, real], dx0) < 1e-6
    assert np.array_equal(last, last0)
    assert not np.any(y[~mask]) and not np.any(dx[~mask])
    for a, b in zip(rest, rest0):
        assert rel(a, b) < 1e-5


@pytest.mark.parametrize("implementation", FAST)
def test_documents_do_not_meet(getkey, implementation):
    """Row 7: documents of 37, 51 and 40 tokens packed equal three calls; NaN in the first leaves the others bit-equal; no gradient crosses."""
    lengths, C = [37, 51, 40], 6
    x, weight, bias, _, dy, _ = draw(getkey, 1, 128, C, 4)
    ids = jnp.asarray(np.repeat([5, 3, 5], lengths)[None], jnp.int32)

    @jax.jit
    def packed(x):
        return causal_conv1d(x, weight, bias, segment_ids=ids, activation="silu", implementation=implementation)

    def plain(x):
        return causal_conv1d(x, weight, bias, activation="silu", implementation=implementation)

    y, last = packed(x)
    start = 0
    for length in lengths:
        part = x[:, start : start + length]
        alone, alone_last = jax.jit(plain)(part)
        assert rel(y[:, start : start + length], alone) < 1e-6
        start += length
    assert np.array_equal(last, alone_last)
    broken, _ = packed(x.at[:, :37].set(jnp.nan))
    assert np.array_equal(broken[:, 37:], y[:, 37:])
    dx = jax.jit(jax.grad(lambda x: jnp.sum((packed(x)[0] * dy)[:, 37:88])))(x)
    assert not np.any(dx[:, :37]) and not np.any(dx[:, 88:]) and np.all(np.any(dx[:, 37:88], axis=-1))


@pytest.mark.parametrize("implementation", FAST)
def test_segments_of_one_token(getkey, implementation):
    """Row 11: 4,096 documents of one token each: only the last tap works, and the state is empty of the past."""
    x, weight, bias, state, *_ = draw(getkey, 1, 4096, 3, 4)
    ids = jnp.arange(4096, dtype=jnp.int32)[None]
    y, last = causal_conv1d(x, weight, bias, initial_state=state, segment_ids=ids, implementation=implementation)
    want = x * weight[:, -1][None, None] + bias[None, None]
    assert rel(y[:, 1:], want[:, 1:]) < 1e-6
    assert np.array_equal(last[0], np.stack([np.zeros(3), np.zeros(3), np.asarray(x[0, -1])]).astype(np.float32))


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("incoming", [False, True])
def test_row_17_short_rows(getkey, implementation, T, incoming):
    """T below the width: the new state is the last W − 1 of concat(old, new), and its derivative by the input is the identity there."""
    x, weight, *_ = draw(getkey, 1, T, 2, 4)
    state = jnp.ones((1, 3, 2)) if incoming else None

    def last(x):
        return causal_conv1d(x, weight, initial_state=state, implementation=implementation)[1]

    old = np.ones((1, 3, 2), np.float32) * incoming
    assert np.array_equal(last(x), np.concatenate([old, x], axis=1)[:, -3:])
    jacobian = jax.jit(jax.jacrev(last))(x)[0, :, :, 0]  # [3 2 T 2]
    want = np.zeros((3, 2, T, 2))
    for t in range(T):
        want[3 - T + t, :, t] = np.eye(2)
    assert np.array_equal(jacobian, want)


def test_splits_and_steps(getkey):
    """Row 47: cut anywhere, and token by token, the row is the same."""
    T, C = 7, 5
    x, weight, bias, state, *_ = draw(getkey, 2, T, C, 4)

    @jax.jit
    def conv(x, state):
        return causal_conv1d(x, weight, bias, initial_state=state, activation="silu")

    step = jax.jit(lambda x, state: causal_conv1d_step(x, weight, bias, initial_state=state, activation="silu"))
    whole, last = conv(x, state)
    for cut in range(1, T):
        left, middle = conv(x[:, :cut], state)
        right, end = conv(x[:, cut:], middle)
        assert rel(jnp.concatenate([left, right], axis=1), whole) < 1e-6
        assert np.array_equal(end, last)
    carry = state
    for t in range(T):
        y, carry = step(x[:, t], carry)
        assert rel(y, whole[:, t]) < 1e-6
    assert np.array_equal(carry, last)


def test_step_without_state_and_width_one(getkey):
    x, weight, bias, *_ = draw(getkey, 2, 1, 5, 4)
    y, state = causal_conv1d_step(x[:, 0], weight, bias)
    assert rel(y, x[:, 0] * weight[:, -1][None] + bias[None]) < 1e-6
    assert np.array_equal(state, np.concatenate([np.zeros((2, 2, 5)), x], axis=1))
    y, state = causal_conv1d_step(x[:, 0], weight[:, :1])
    assert state.shape == (2, 0, 5) and rel(y, x[:, 0] * weight[:, 0][None]) < 1e-6


@pytest.mark.parametrize("batch", [(), (2,), (3, 2)])
def test_leading_axes_and_vmap(getkey, batch):
    """Row 40: rows of a batch are independent, in values and gradients, whatever the number of leading axes."""
    T, C, W = 7, 3, 4
    x, weight, _, state, *_ = draw(getkey, int(np.prod(batch)), T, C, W)
    x, state = x.reshape(*batch, T, C), state.reshape(*batch, W - 1, C)
    ids = np.zeros((*batch, T), np.int32)
    ids[..., 4:] = 1
    mask = np.ones((*batch, T), bool)
    mask[..., :2] = False
    ids, mask = jnp.asarray(ids), jnp.asarray(mask)

    def op(x, state, ids, mask):
        y, last = causal_conv1d(x, weight, initial_state=state, segment_ids=ids, mask=mask, activation="silu")
        return y, last, jax.grad(lambda x: jnp.sum(jnp.sin(causal_conv1d(x, weight, segment_ids=ids, mask=mask)[0])))(x)

    got = jax.jit(op)(x, state, ids, mask)
    mapped = op
    for _ in batch:
        mapped = jax.vmap(mapped)
    for a, b in zip(got, jax.jit(mapped)(x, state, ids, mask)):
        assert a.shape == b.shape and rel(a, b) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_rounded_once(getkey, dtype):
    """Sums are float32: the output is the float64 value of the rounded inputs, rounded once."""
    arrays = draw(getkey, 2, 33, 8, 4, dtype)
    (y, last), gradients = run(arrays, implementation="xla")
    assert y.dtype == last.dtype == dtype and all(g.dtype == dtype for g in gradients)
    want = np.stack([ByHand(arrays[0][i], arrays[1], arrays[2], arrays[3][i]).values()[0] for i in range(2)])
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    assert np.all(np.abs(np.asarray(y, np.float64) - want) <= 1.01 * half_ulp * np.maximum(np.abs(want), 1e-3) + 1e-6)
    compare(arrays, ((y, last), gradients), dtype=jnp.dtype(dtype).name)


def test_float32_weight_under_bfloat16_inputs(getkey):
    """A weight that was kept in float32 isn't rounded, and its gradient is float32."""
    x, weight, *_ = draw(getkey, 1, 5, 3, 4)
    x = x.astype(jnp.bfloat16)
    y, _ = causal_conv1d(x, weight)
    assert y.dtype == jnp.bfloat16
    want = ByHand(x[0], weight, None, np.zeros((3, 3)), silu=False).values()[0]
    assert rel(y[0], want) < 2.0**-8
    assert jax.grad(lambda w: jnp.sum(causal_conv1d(x, w)[0]).astype(jnp.float32))(weight).dtype == jnp.float32


@pytest.mark.parametrize("implementation", FAST)
def test_memory_keeps_only_the_inputs(getkey, implementation):
    """Nothing of x's size is saved for the backward pass but x."""
    x, weight, *_ = draw(getkey, 2, 64, 16, 4)
    _, pull = jax.vjp(lambda x, w: causal_conv1d(x, w, activation="silu", implementation=implementation)[0], x, weight)
    saved = sum(leaf.size for leaf in jax.tree.leaves(pull) if hasattr(leaf, "size"))
    assert saved <= x.size + 2 * weight.size


def test_second_derivatives(getkey):
    x, weight, *_ = draw(getkey, 1, 5, 2, 4)

    def loss(x, implementation):
        return jnp.sum(causal_conv1d(x, weight, activation="silu", implementation=implementation)[0] ** 2)

    hessian = jax.jit(jax.hessian(lambda x: loss(x, "chunked")))(x)  # forward over reverse
    step = 3e-3 * draw(getkey, 1, 5, 2, 4)[0]
    gradient = jax.jit(jax.grad(lambda x: loss(x, "xla")))
    change = gradient(x + step) - gradient(x - step)
    assert rel(change / 2, jnp.tensordot(hessian, step, 3)) < 1e-3
    with pytest.raises(NotImplementedError, match="implementation='xla' .*use implementation='chunked'"):
        jax.jacrev(jax.grad(lambda x: loss(x, "xla")))(x)


def test_cotangents_that_are_not_arrays_of_their_own(getkey):
    """Row 39: broadcast and transposed cotangents."""
    x, weight, *_ = draw(getkey, 2, 6, 3, 4)
    ones = jax.jit(jax.grad(lambda x: jnp.sum(causal_conv1d(x, weight)[0])))(x)
    swapped = jax.jit(jax.grad(lambda x: jnp.sum(jnp.swapaxes(causal_conv1d(x, weight)[0], 1, 2) @ jnp.ones((6, 1)))))(
        x
    )
    none = np.zeros((3, 3))
    hand = [ByHand(x[i], weight, None, none, silu=False) for i in range(2)]
    want = np.stack([h.gradients(np.ones((6, 3)), none)[0] for h in hand])
    assert rel(ones, want) < 1e-6 and rel(swapped, want) < 1e-6


REFUSED = {
    "swapped weight": (dict(weight=(4, 5)), r"`weight` must be \[C, W\] = \[5, W\].*float32\[4, 5\].*axes are swapped"),
    "other weight": (dict(weight=(3, 4)), r"`weight` must be \[C, W\] = \[5, W\], one row of taps a channel"),
    "no taps": (dict(weight=(5, 0), state=None), r"at least one tap, but W = 0"),
    "bias": (dict(bias=(4,)), r"`bias` must be \[C\] = \[5\], but it is float32\[4\]"),
    "state of W rows": (dict(state=(2, 4, 5)), r"`initial_state` must be \[\*B, W-1, C\] = \[2, 3, 5\]"),
    "state transposed": (dict(state=(2, 5, 3)), r"`initial_state` must be .* = \[2, 3, 5\].*tokens before channels"),
    "ids": (dict(segment_ids=((2, 6), jnp.int32)), r"`segment_ids` must be \[\*B, T\] = \[2, 7\], but it is int32\[2, 6\]"),
    "float ids": (dict(segment_ids=((2, 7), jnp.float32)), r"`segment_ids` must hold integer values"),
    "integer mask": (dict(mask=((2, 7), jnp.int32)), r"`mask` must hold bool values"),
    "integer inputs": (dict(x=((2, 7, 5), jnp.int32)), r"`x` must hold floating values, but it is int32\[2, 7, 5\]: cast it"),
    "one axis": (dict(x=(5,), state=None), r"`x` must have at least the last axes \[\*B, T, C\]"),
    "no tokens": (dict(x=(2, 0, 5)), r"the axis T must not be empty"),
    "no channels": (dict(x=(2, 7, 0), weight=(0, 4), state=None), r"the axis C must not be empty"),
    "state's dtype": (dict(state=((2, 3, 5), jnp.bfloat16)), r"`initial_state` must have the inputs' dtype float32"),
    "activation": (dict(activation="gelu"), r"`activation` must be one of 'silu', None, but it is 'gelu'"),
    "implementation": (dict(implementation="cuda"), r"`implementation` must be one of 'auto', 'xla'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(unchecked, case):
    changes, sentence = REFUSED[case]
    arguments = dict(x=(2, 7, 5), weight=(5, 4), bias=None, state=(2, 3, 5)) | changes

    def array(spec):
        if not isinstance(spec, tuple):
            return spec
        shape, dtype = spec if isinstance(spec[0], tuple) else (spec, jnp.float32)
        return jnp.zeros(shape, dtype)

    arguments = {name: array(spec) for name, spec in arguments.items()}
    positional = [arguments.pop(name) for name in ("x", "weight", "bias")]
    with pytest.raises(ValueError, match="(?s)causal_conv1d: .*" + sentence):
        causal_conv1d(*positional, initial_state=arguments.pop("state"), **arguments)


def test_step_refusals(unchecked):
    with pytest.raises(ValueError, match=r"causal_conv1d_step: `initial_state` must be \[\*B, W-1, C\] = \[2, 3, 5\]"):
        causal_conv1d_step(jnp.zeros((2, 5)), jnp.zeros((5, 4)), initial_state=jnp.zeros((2, 4, 5)))
