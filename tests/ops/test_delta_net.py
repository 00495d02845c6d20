"""The mixer's core on merged arrays against the float64 token loop, and the faults that others met."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.ops import gated_delta_net, gated_delta_net_step
from helpers import TOLERANCE, rel
from token_loop import ARRAYS, draw, oracle


@pytest.fixture
def unchecked():
    """The checker off, so that the op's own sentences are reached."""
    checker.update("jaxtyping_disable", True)
    yield
    checker.update("jaxtyping_disable", False)


def op(qkv, a, b, A_log, dt_bias, conv_weight, conv_state, initial_state, **options):
    return gated_delta_net(
        qkv, a, b, A_log, dt_bias, conv_weight, conv_state=conv_state, initial_state=initial_state, **options
    )


@functools.lru_cache
def compiled(**options):
    return jax.jit(lambda *arrays, segment_ids, mask: op(*arrays, segment_ids=segment_ids, mask=mask, **options))


def call(arrays, *, segment_ids=None, mask=None, **options):
    return compiled(**options)(*map(jnp.asarray, arrays), segment_ids=segment_ids, mask=mask)


def run(arrays, cotangents, *, segment_ids=None, mask=None, **options):
    @jax.jit
    def both(arrays, cotangents):
        values, pull = jax.vjp(lambda *arrays: op(*arrays, segment_ids=segment_ids, mask=mask, **options), *arrays)
        return values, pull(cotangents)

    return both([jnp.asarray(x) for x in arrays], tuple(jnp.asarray(x) for x in cotangents))


def packing(B, T, packed):
    """Ids and masks with something different in every row: padded left, right, and on both sides with a hole."""
    t = np.arange(T)
    cuts = [[1, 2, T // 2], [T - 1], [T // 3]]
    ids = np.stack([sum((t >= c).astype(np.int32) for c in cuts[i % 3]) for i in range(B)])
    masks = [t >= T // 3, t < T - T // 3, (t >= 1) & (t < T - 1) & (t % 5 != 2)]
    mask = np.stack([masks[i % 3] for i in range(B)])
    return dict(
        segment_ids=jnp.asarray(ids, jnp.int32) if "ids" in packed else None,
        mask=jnp.asarray(mask) if "mask" in packed else None,
    )


def compare(got, want, dtype="float32"):
    for name, a, b in zip(("out", "conv_state", "state"), got[0], want[0]):
        assert rel(a, b) < TOLERANCE[dtype]["value"], name
    for name, a, b in zip(ARRAYS, got[1], want[1]):
        # sums over all tokens and batch rows of terms of both signs, which leave a small part of their size
        factor = 5 if name in ("A_log", "dt_bias") else 1
        assert rel(a, b) < factor * TOLERANCE[dtype]["gradient"], name


PRIMES = dict(B=2, T=13, h=3, H=6, K=5, V=7, W=4)
SIZES = {
    "primes": (PRIMES, "--", "xla"),
    "primes, chunked": (PRIMES, "ids mask", "chunked"),
    "primes, reference": (PRIMES | dict(T=7), "ids mask", "reference"),
    "T = H": (PRIMES | dict(T=6), "ids", "xla"),
    "several chunks": (PRIMES | dict(B=3, T=37), "ids mask", "xla"),
    "one token": (PRIMES | dict(T=1), "--", "xla"),
    "two tokens": (PRIMES | dict(T=2), "mask", "xla"),
    "width 1, one head": (dict(B=1, T=11, h=1, H=1, K=3, V=2, W=1), "ids mask", "xla"),
    "width 6, four to one": (dict(B=1, T=4, h=1, H=4, K=2, V=3, W=6), "--", "xla"),
}


@pytest.mark.parametrize("case", SIZES)
def test_values_and_gradients(getkey, case):
    """Rows 7, 10, 17, 51, 57: sizes that are all different, T below the width, T = H, rows that differ in packing and padding."""
    sizes, packed, implementation = SIZES[case]
    arrays, cotangents = draw(getkey, **sizes)
    options = packing(sizes["B"], sizes["T"], packed)
    got = run(
        arrays,
        cotangents,
        num_key_heads=sizes["h"],
        key_head_size=sizes["K"],
        chunk_size=16,
        implementation=implementation,
        **options,
    )
    compare(got, oracle(arrays, cotangents, h=sizes["h"], K=sizes["K"], **options))


def test_float64(getkey):
    with jax.enable_x64(True):
        arrays, cotangents = draw(getkey, **PRIMES, dtype=np.float64)
        options = packing(2, 13, "ids mask")
        got = run(arrays, cotangents, num_key_heads=3, key_head_size=5, chunk_size=8, **options)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
        compare(got, oracle(arrays, cotangents, h=3, K=5, **options), "float64")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_unpadded(getkey, side):
    """Rows 1, 2, 5: with states before it and NaN at the pads, a padded row has the values, states and gradients of the row alone."""
    T, pads = 11, 5
    arrays, cotangents = draw(getkey, **PRIMES | dict(B=1, T=T))
    real = slice(pads, T) if side == "left" else slice(0, T - pads)
    mask = np.zeros((1, T), bool)
    mask[:, real] = True
    options = dict(num_key_heads=3, key_head_size=5, chunk_size=8)
    padded = [np.where(mask[..., None], x, np.nan) for x in arrays[:3]]
    (out, *states), gradients = run([*padded, *arrays[3:]], cotangents, mask=jnp.asarray(mask), **options)
    alone = [x[:, real] for x in arrays[:3]]
    (out0, *states0), gradients0 = run([*alone, *arrays[3:]], (cotangents[0][:, real], *cotangents[1:]), **options)
    assert not np.any(out[~mask]) and rel(out[:, real], out0) < 1e-6
    for a, b in zip(states, states0):
        assert rel(a, b) < 1e-6
    for name, a, b in zip(ARRAYS, gradients, gradients0):
        assert np.all(np.isfinite(a)), name
        if name in ARRAYS[:3]:
            assert not np.any(a[~mask])
            a = a[:, real]
        assert rel(a, b) < 1e-5, name


def test_row_7_documents_do_not_meet(getkey):
    """Row 7 (and 15, on a CPU): documents of 37, 51 and 40 tokens, slow decay: three calls; the first changed, the others bit-equal; no
    gradient crosses, through the convolution or the recurrence."""
    lengths = [37, 51, 40]
    arrays, (dout, *_) = draw(getkey, 1, 128, 2, 4, 3, 5, 4, A=0.05)
    options = dict(num_key_heads=2, key_head_size=3, chunk_size=64)
    ids = jnp.asarray(np.repeat([0, 1, 2], lengths)[None], jnp.int32)
    arrays[6:] = [0 * x for x in arrays[6:]]
    out, conv_state, state = call(arrays, segment_ids=ids, **options)
    start = 0
    for length in lengths:
        part = [x[:, start : start + length] for x in arrays[:3]]
        alone, conv_alone, state_alone = call([*part, *arrays[3:]], **options)
        assert rel(out[:, start : start + length], alone) < 1e-6
        start += length
    assert np.array_equal(conv_state, conv_alone) and rel(state, state_alone) < 1e-6
    leaking = call(arrays, **options)[0]
    assert rel(leaking[:, 37:], out[:, 37:]) > 0.1  # the test can fail

    changed = [np.concatenate([x[:, :37] + 1, x[:, 37:]], axis=1) for x in arrays[:3]]
    again, _, state_again = call([*changed, *arrays[3:]], segment_ids=ids, **options)
    assert np.array_equal(again[:, 37:], out[:, 37:]) and np.array_equal(state_again, state)
    assert not np.array_equal(again[:, :37], out[:, :37])

    second = np.zeros_like(dout)
    second[:, 37:88] = dout[:, 37:88]
    _, gradients = run(arrays, (second, 0 * arrays[6], 0 * arrays[7]), segment_ids=ids, **options)
    for d in gradients[:3]:
        assert not np.any(d[:, :37]) and not np.any(d[:, 88:]) and np.any(d[:, 37:88])
    assert not np.any(gradients[6]) and not np.any(gradients[7])


def test_row_8_shards_of_a_sequence(getkey):
    """Row 8, on one device: documents of 37, 51 and 40 tokens cut into four parts of 32, each with the ids of its own
    tokens and the states of the part before it, are one call; gradients too."""
    arrays, (dout, *_) = draw(getkey, 1, 128, 2, 4, 3, 5, 4, A=0.05)
    ids = jnp.asarray(np.repeat([0, 1, 2], [37, 51, 40])[None], jnp.int32)
    options = dict(num_key_heads=2, key_head_size=3, chunk_size=16)

    def whole(*arrays):
        return gated_delta_net(*arrays[:6], conv_state=arrays[6], initial_state=arrays[7], segment_ids=ids, **options)

    def parts(*arrays):
        outs, states = [], arrays[6:]
        for i in range(0, 128, 32):
            tokens = [x[:, i : i + 32] for x in arrays[:3]]
            out, *states = gated_delta_net(
                *tokens, *arrays[3:6], conv_state=states[0], initial_state=states[1],
                segment_ids=ids[:, i : i + 32], **options,
            )  # fmt: skip
            outs.append(out)
        return jnp.concatenate(outs, axis=1), *states

    arrays = [jnp.asarray(x) for x in arrays]
    want, pull = jax.vjp(whole, *arrays)
    got, pull_parts = jax.vjp(parts, *arrays)
    cotangents = (jnp.asarray(dout), jnp.ones_like(want[1]), jnp.ones_like(want[2]))
    for a, b in zip((*got, *pull_parts(cotangents)), (*want, *pull(cotangents)), strict=True):
        assert rel(a, b) < 1e-5
    assert rel(whole(*arrays[:6], *(0 * x for x in arrays[6:]))[0][:, :37], want[0][:, :37]) > 1e-2  # states matter


def test_row_10_ids_differ_per_row(getkey):
    """Row 10: two rows with ids of their own are two calls."""
    arrays, _ = draw(getkey, **PRIMES | dict(T=16))
    ids = jnp.asarray([[0] * 3 + [1] * 13, [4] * 7 + [0] * 1 + [4] * 8], jnp.int32)
    options = dict(num_key_heads=3, key_head_size=5)
    both = call(arrays, segment_ids=ids, **options)
    for i in range(2):
        one = [x[i : i + 1] for x in arrays[:3]] + arrays[3:6] + [x[i : i + 1] for x in arrays[6:]]
        for a, b in zip(both, call(one, segment_ids=ids[i : i + 1], **options)):
            assert rel(a[i], b[0]) < 1e-6


def test_row_11_thousands_of_documents(getkey):
    """Row 11: 4,096 documents of one token, 32 heads, the last 1,000 tokens padding: each output has a closed form."""
    h, H, K, V, T = 8, 32, 3, 2, 4096
    arrays, _ = draw(getkey, 1, T, h, H, K, V, 4)
    mask = np.arange(T)[None] < T - 1000
    arrays[6:] = [0 * x for x in arrays[6:]]
    out, conv_state, state = call(
        arrays,
        segment_ids=jnp.arange(T, dtype=jnp.int32)[None],
        mask=jnp.asarray(mask),
        num_key_heads=h,
        key_head_size=K,
    )
    pre = arrays[0][0].astype(np.float64) * arrays[5][:, -1]
    x = pre / (1 + np.exp(-pre))
    q, k = (x[:, i * h * K : (i + 1) * h * K].reshape(T, h, K) for i in range(2))
    q, k = (np.repeat(y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6), H // h, axis=1) for y in (q, k))
    v, beta = x[:, 2 * h * K :].reshape(T, H, V), 1 / (1 + np.exp(-arrays[2][0].astype(np.float64)))
    want = (beta * (q * k).sum(-1) * K**-0.5)[..., None] * v
    assert rel(out[0], np.where(mask[0, :, None], want.reshape(T, -1), 0)) < 1e-5
    last = T - 1001
    assert rel(state[0], beta[last][:, None, None] * k[last][:, :, None] * v[last][:, None, :]) < 1e-5
    assert not np.any(conv_state[0, :2]) and np.array_equal(conv_state[0, 2], arrays[0][0, last])


def test_row_47_splits(getkey):
    """Row 47: 150 tokens cut anywhere, the second part going on from both states; with the shapes of the parts, and with the parts of one
    shape, padded right and left."""
    T = 150
    arrays, _ = draw(getkey, 1, T, 2, 4, 3, 5, 4, A=0.05)
    options = dict(num_key_heads=2, key_head_size=3, chunk_size=64)
    whole, *ends = call(arrays, **options)
    for cut in (1, 2, 3, 4, 5, 63, 64, 65, 149):
        first = jnp.arange(T)[None] < cut
        left, *states = call(arrays, mask=first, **options)
        right, *states = call([*arrays[:6], *states], mask=~first, **options)
        assert rel(left + right, whole) < 1e-5
        assert np.array_equal(states[0], ends[0]) and rel(states[1], ends[1]) < 1e-5
    for cut in (3, 65):
        left, *states = call([*(x[:, :cut] for x in arrays[:3]), *arrays[3:]], **options)
        right, *states = call([*(x[:, cut:] for x in arrays[:3]), *arrays[3:6], *states], **options)
        assert rel(jnp.concatenate([left, right], axis=1), whole) < 1e-5
        assert np.array_equal(states[0], ends[0]) and rel(states[1], ends[1]) < 1e-5


@functools.partial(jax.jit, static_argnames=("h", "K"))
def decode(qkv, a, b, A_log, dt_bias, conv_weight, conv_state, state, *, h, K):
    """Every token by the step, in one scan."""

    def token(states, inputs):
        out, *states = gated_delta_net_step(
            *inputs,
            A_log,
            dt_bias,
            conv_weight,
            num_key_heads=h,
            key_head_size=K,
            conv_state=states[0],
            initial_state=states[1],
        )
        return tuple(states), out

    states, out = jax.lax.scan(token, (conv_state, state), tuple(jnp.moveaxis(x, 1, 0) for x in (qkv, a, b)))
    return jnp.moveaxis(out, 0, 1), *states


def test_row_53_steps_are_the_sequence(getkey):
    """Rows 53 and 75: decoding is the token loop, states and all."""
    arrays, cotangents = draw(getkey, **PRIMES | dict(T=64))
    values, _ = oracle(arrays, cotangents, h=3, K=5)
    for got, want in zip(decode(*map(jnp.asarray, arrays), h=3, K=5), values):
        assert got.dtype == jnp.float32 and rel(got, want) < 1e-5


def test_row_23_long_decoding_keeps_its_state(getkey):
    """Row 23: 2,048 steps with little decay: the float32 state stays within 1e-5 of float64, also under bfloat16 activations."""
    arrays, cotangents = draw(getkey, 1, 2048, 1, 2, 5, 3, 4, A=0.01)
    values, _ = oracle(arrays, cotangents, h=1, K=5)
    out, _, state = decode(*map(jnp.asarray, arrays), h=1, K=5)
    assert rel(out, values[0]) < 1e-5 and rel(state, values[2]) < 1e-5
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in arrays]
    low[3:6] = map(jnp.asarray, arrays[3:6])
    low[7] = jnp.asarray(arrays[7])
    out, conv_state, state = decode(*low, h=1, K=5)
    assert out.dtype == conv_state.dtype == jnp.bfloat16 and state.dtype == jnp.float32


def test_row_54_left_padded_prefill_in_parts(getkey):
    """Row 54: 2,000 tokens, every row left-padded differently, in four parts that go on from each other's states."""
    B, T = 3, 2000
    arrays, cotangents = draw(getkey, B, T, 1, 2, 4, 3, 4)
    arrays[6:] = [0 * x for x in arrays[6:]]
    mask = np.arange(T)[None] >= np.array([[0], [499], [777]])
    values, _ = oracle(arrays, cotangents, h=1, K=4, mask=mask)
    states, outs = arrays[6:], []
    for i in range(4):
        part = slice(500 * i, 500 * (i + 1))
        out, *states = call(
            [*(x[:, part] for x in arrays[:3]), *arrays[3:6], *states],
            mask=jnp.asarray(mask[:, part]),
            num_key_heads=1,
            key_head_size=4,
        )
        outs.append(out)
    assert rel(jnp.concatenate(outs, axis=1), values[0]) < 1e-5
    assert np.array_equal(states[0], values[1].astype(np.float32)) and rel(states[1], values[2]) < 1e-5


def test_row_55_value_heads_are_grouped(getkey):
    """Row 55: two key heads, six value heads: key head 1 serves the value heads 3, 4 and 5."""
    arrays, _ = draw(getkey, 1, 9, 2, 6, 3, 5, 4)
    options = dict(num_key_heads=2, key_head_size=3)
    before = call(arrays, **options)[0].reshape(9, 6, 5)
    for head in range(2):
        changed = arrays[0].copy()
        changed[..., 6 + 3 * head : 6 + 3 * head + 3] += 1  # keys come after the queries of both heads
        after = call([changed, *arrays[1:]], **options)[0].reshape(9, 6, 5)
        moved = [bool(np.any(np.asarray(before[:, i] != after[:, i]))) for i in range(6)]
        assert moved == [i // 3 == head for i in range(6)]


def test_row_75_the_error_sees_the_decayed_state(getkey):
    """Row 75: two tokens in closed form, o_2 = q_2 · (e^{g_2} S_1 + β_2 k_2 (v_2 − e^{g_2} S_1ᵀ k_2)), without a convolution."""
    K, V = 5, 3
    arrays, _ = draw(getkey, 1, 2, 1, 1, K, V, 4, A=0.5)
    qkv, a, b, A_log, dt_bias = (x.astype(np.float64) for x in arrays[:5])
    q, k = (qkv[0, :, i * K : (i + 1) * K] for i in range(2))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    v, beta, decay = (
        qkv[0, :, 2 * K :],
        1 / (1 + np.exp(-b[0, :, 0])),
        np.exp(-np.exp(A_log[0]) * np.log1p(np.exp(a[0, :, 0] + dt_bias[0]))),
    )
    first = beta[0] * np.outer(k[0], v[0])
    faded = decay[1] * first
    want = (faded + beta[1] * np.outer(k[1], v[1] - faded.T @ k[1])).T @ q[1] * K**-0.5
    out, conv_state, _ = gated_delta_net(*map(jnp.asarray, arrays[:5]), None, num_key_heads=1, key_head_size=K)
    assert rel(out[0, 1], want) < 1e-5 and conv_state.shape == (1, 0, 2 * K + V)
    wrong = (faded + beta[1] * np.outer(k[1], v[1] - first.T @ k[1])).T @ q[1] * K**-0.5
    assert rel(wrong, want) > 1e-3  # the test can fail


def test_without_a_convolution(getkey):
    """conv_weight None is a convolution of width 1, a weight of one and no activation; with any number of leading axes."""
    arrays, _ = draw(getkey, **PRIMES | dict(B=6))
    qkv, a, b, A_log, dt_bias, *_, state = map(jnp.asarray, arrays)
    mask = packing(6, 13, "mask")["mask"]
    sizes = dict(num_key_heads=3, key_head_size=5)

    @functools.partial(jax.jit, static_argnames="width")
    def net(qkv, a, b, state, mask, width=0):
        weight = jnp.ones((qkv.shape[-1], 1)) if width else None
        activation = None if width else "silu"
        return gated_delta_net(
            qkv, a, b, A_log, dt_bias, weight, initial_state=state, mask=mask, activation=activation, **sizes
        )

    got = net(jnp.where(mask[..., None], qkv, jnp.nan), a, b, state, mask)
    for x, y in zip(got, net(qkv, a, b, state, mask, width=1)):
        assert rel(x, y) < 1e-6
    wide = [x.reshape(3, 2, *x.shape[1:]) for x in (qkv, a, b, state, mask)]
    for x, y in zip(net(*wide), got):
        assert rel(x.reshape(y.shape), y) < 1e-6

    @jax.jit
    def step(qkv, a, b, state):
        return gated_delta_net_step(qkv, a, b, A_log, dt_bias, None, initial_state=state, **sizes)

    out, empty, new = step(qkv[:, 0], a[:, 0], b[:, 0], state)
    first = net(qkv[:, :1], a[:, :1], b[:, :1], state, None)
    assert rel(out, first[0][:, 0]) < 1e-5 and rel(new, first[2]) < 1e-5 and empty.shape == (6, 0, qkv.shape[-1])


@pytest.mark.parametrize("step", [False, True])
def test_bfloat16(getkey, step):
    """Outputs and the convolution's state are bfloat16, the recurrent state float32; errors are those of the roundings."""
    arrays, cotangents = draw(getkey, **PRIMES | dict(T=32))
    low = [
        jnp.asarray(x).astype(jnp.bfloat16) if i in (0, 1, 2, 5, 6) else jnp.asarray(x) for i, x in enumerate(arrays)
    ]
    values, _ = oracle([np.asarray(x, np.float32) for x in low], cotangents, h=3, K=5)
    out, conv_state, state = decode(*low, h=3, K=5) if step else call(low, num_key_heads=3, key_head_size=5)
    assert out.dtype == conv_state.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # the convolution's output is rounded as well as the op's (2^-9 each), and q and k enter twice
    assert rel(out, values[0]) < 1.5 * TOLERANCE["bfloat16"]["value"]
    assert rel(state, values[2]) < TOLERANCE["bfloat16"]["value"]
    assert np.array_equal(np.asarray(conv_state, np.float64), values[1])


def test_strict_rounding(getkey):
    """Hugging Face's roundings: none in float32; in bfloat16 before the SiLU, and of β."""
    arrays, _ = draw(getkey, **PRIMES)
    options = dict(num_key_heads=3, key_head_size=5)
    for x, y in zip(call(arrays, **options), call(arrays, **options, strict_hf_rounding=True)):
        assert rel(x, y) < 1e-6
    low = [
        jnp.asarray(x).astype(jnp.bfloat16) if i in (0, 1, 2, 5, 6) else jnp.asarray(x) for i, x in enumerate(arrays)
    ]
    assert not np.array_equal(call(low, **options)[2], call(low, **options, strict_hf_rounding=True)[2])


def test_row_76_memory_grows_with_tokens_only(getkey):
    """Row 76: no state per token is kept for the backward pass: its memory at T = 2,048 is a few copies of the inputs."""
    T, h, H, K, V = 2048, 2, 4, 32, 32
    arrays, cotangents = draw(getkey, 1, T, h, H, K, V, 4)
    arrays = [jnp.asarray(x) for x in arrays]

    def loss(qkv, a, b):
        return jnp.sum(op(qkv, a, b, *arrays[3:], num_key_heads=h, key_head_size=K)[0])

    used = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays[:3]).compile().memory_analysis().temp_size_in_bytes
    per_token_states = 4 * T * H * K * V
    assert used < per_token_states / 2, (used, per_token_states)


def test_second_derivatives(getkey):
    """ "chunked" reaches a convolution with all derivatives; "xla" refuses with a sentence."""
    arrays, _ = draw(getkey, 1, 4, 1, 2, 3, 2, 3)
    arrays = [jnp.asarray(x) for x in arrays]

    def loss(qkv, implementation):
        options = dict(num_key_heads=1, key_head_size=3, chunk_size=4, implementation=implementation)
        return jnp.sum(op(qkv, *arrays[1:], **options)[0] ** 2)

    step = 3e-3 * jnp.ones_like(arrays[0])
    gradient = jax.jit(jax.grad(lambda x: loss(x, "chunked")))
    _, product = jax.jit(lambda x, v: jax.jvp(jax.grad(lambda x: loss(x, "chunked")), (x,), (v,)))(arrays[0], step)
    assert rel((gradient(arrays[0] + step) - gradient(arrays[0] - step)) / 2, product) < 1e-3
    with pytest.raises(NotImplementedError, match="implementation='chunked'"):
        jax.jvp(jax.grad(lambda x: loss(x, "xla")), (arrays[0],), (step,))


WRONG = {
    "merged width": (dict(qkv=(2, 7, 50)), r"`qkv` must be 2hK \+ HV.*2·h·K = 2·2·3 = 12 and a multiple V of H = 4, as 12 \+ 4·V, but it is 50"),
    "only q and k": (dict(qkv=(2, 7, 12)), r"2hK \+ HV.*but it is 12"),
    "T": (dict(a=(2, 6, 4), b=(2, 6, 4)), r"`a` and `b` must be \[\*B, T, H\] = \[2, 7, 4\], .* but they are float32\[2, 6, 4\]"),
    "swapped a": (dict(a=(2, 4, 7), b=(2, 4, 7)), r"`A_log` must be \[H\] = \[7\]"),
    "a and b": (dict(b=(2, 7, 2)), r"`a` and `b` must have one shape"),
    "head ratio": (dict(num_key_heads=3), r"H = 4 .* must be a multiple of the key heads num_key_heads = 3"),
    "no key heads": (dict(num_key_heads=0), r"`num_key_heads` must be an integer of at least 1"),
    "float size": (dict(key_head_size=3.0), r"`key_head_size` must be an integer of at least 1, but it is 3.0"),
    "conv weight": (dict(conv_weight=(4, 32)), r"`conv_weight` must be \[C, W\] = \[32, W\].*axes are swapped"),
    "no taps": (dict(conv_weight=(32, 0), conv_state=None), r"at least one tap, but W = 0"),
    "conv bias": (dict(conv_bias=(31,)), r"`conv_bias` must be \[C\] = \[32\]"),
    "conv state": (dict(conv_state=(2, 4, 32)), r"`conv_state` must be \[\*B, W-1, C\] = \[2, 3, 32\]"),
    "state without convolution": (dict(conv_weight=None), r"`conv_state` must be \[\*B, W-1, C\] = \[2, 0, 32\]"),
    "bias without convolution": (dict(conv_weight=None, conv_bias=(32,)), r"`conv_bias` needs a `conv_weight`"),
    "state": (dict(initial_state=(2, 4, 5, 3)), r"`initial_state` must be \[\*B, H, K, V\] = \[2, 4, 3, 5\].*keys come before"),
    "ids": (dict(segment_ids=((7,), jnp.int32)), r"`segment_ids` must be \[\*B, T\] = \[2, 7\], but it is int32\[7\]"),
    "mask": (dict(mask=((2, 7), jnp.int32)), r"`mask` must hold bool values"),
    "integers": (dict(qkv=((2, 7, 32), jnp.int32)), r"`qkv` must hold floating values"),
    "chunk": (dict(chunk_size=24), r"`chunk_size` must be"),
    "implementation": (dict(implementation="fast"), r"`implementation` must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refusals(unchecked, case):
    changes, sentence = WRONG[case]
    arguments = dict(qkv=(2, 7, 32), a=(2, 7, 4), b=(2, 7, 4), A_log=(4,), dt_bias=(4,), conv_weight=(32, 4), conv_state=(2, 3, 32),
                     initial_state=(2, 4, 3, 5), num_key_heads=2, key_head_size=3) | changes  # fmt: skip

    def array(spec):
        if not isinstance(spec, tuple):
            return spec
        shape, dtype = spec if isinstance(spec[0], tuple) else (spec, jnp.float32)
        return jnp.zeros(shape, dtype)

    with pytest.raises(ValueError, match="(?s)gated_delta_net: .*" + sentence):
        gated_delta_net(**{name: array(spec) for name, spec in arguments.items()})


def test_step_refusals_and_pallas(unchecked):
    z = jnp.zeros
    with pytest.raises(ValueError, match=r"gated_delta_net_step: `a` and `b` must be \[\*B, H\] = \[2, 4\]"):
        gated_delta_net_step(z((2, 32)), z((3, 4)), z((3, 4)), z(4), z(4), z((32, 4)), num_key_heads=2, key_head_size=3)
    with pytest.raises(ValueError, match="'pallas' cannot take these inputs: C must be a multiple of 128"):
        gated_delta_net(
            z((7, 32)),
            z((7, 4)),
            z((7, 4)),
            z(4),
            z(4),
            z((32, 4)),
            num_key_heads=2,
            key_head_size=3,
            implementation="pallas",
        )
