"""GatedAttention against a formula in float64 numpy, and its cache against one pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.nn import GatedAttention, KVCache
from helpers import TOLERANCE, rel

D, HEADS, KV, HD, ROT = 10, 6, 2, 8, 4


def make(key, dtype=jnp.float32, **more):
    settings = dict(num_heads=HEADS, num_kv_heads=KV, head_size=HD, rotary_size=ROT, rope_theta=100.0) | more
    layer = GatedAttention(D, **settings, dtype=dtype, key=key)
    # weights of some size, so that scores, gates and norms matter
    leaves, tree = jax.tree.flatten(eqx.filter(layer, eqx.is_array))
    keys = jax.random.split(key, len(leaves))
    leaves = [(0.5 * jax.random.normal(k, x.shape)).astype(x.dtype) for k, x in zip(keys, leaves)]
    return eqx.combine(jax.tree.unflatten(tree, leaves), layer)


@eqx.filter_jit
def run(layer, x, state=None, **more):
    return layer(x, state, **more)


def by_hand(layer, x, positions=None, rot=ROT, theta=100.0):
    """One unpadded sequence, in float64."""
    w = {
        name: np.asarray(getattr(layer, name).weight, np.float64)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    x = np.asarray(x, np.float64)
    T, n, m, hd = x.shape[0], layer.num_heads, layer.num_kv_heads, layer.head_size
    positions = np.arange(T) if positions is None else np.asarray(positions)
    both = (x @ w["q_proj"].T).reshape(T, n, 2, hd)
    q, gate = both[:, :, 0], both[:, :, 1]
    k, v = (x @ w["k_proj"].T).reshape(T, m, hd), (x @ w["v_proj"].T).reshape(T, m, hd)

    def norm_and_turn(z, weight):
        z = z / np.sqrt(np.mean(z**2, -1, keepdims=True) + 1e-6) * (1 + weight)
        half = rot // 2
        angle = positions[:, None] * theta ** (-2 * np.arange(half) / rot)
        turned = (z[..., :half] + 1j * z[..., half:rot]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag, z[..., rot:]], -1)

    q, k = norm_and_turn(q, w["q_norm"]), norm_and_turn(k, w["k_norm"])
    out = np.zeros((T, n, hd))
    for t in range(T):
        for i in range(n):
            j = i // (n // m)
            score = k[: t + 1, j] @ q[t, i] / np.sqrt(hd)
            weight = np.exp(score - score.max())
            out[t, i] = weight / weight.sum() @ v[: t + 1, j]
    return (out / (1 + np.exp(-gate))).reshape(T, -1) @ w["o_proj"].T


@pytest.mark.parametrize("heads, kv", [(6, 2), (3, 3), (4, 1)])
def test_values(getkey, heads, kv):
    layer = make(getkey(), num_heads=heads, num_kv_heads=kv)
    x = jax.random.normal(getkey(), (13, D))
    y, cache = run(layer, x)
    assert rel(y, by_hand(layer, x)) < 1e-5
    assert cache.key.shape == cache.value.shape == (13, kv, HD)
    assert int(cache.length) == int(cache.position) == 13
    assert np.all(np.asarray(cache.valid))


def test_explicit_positions(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (5, D))
    positions = jnp.asarray([3, 4, 4, 9, 2], jnp.int32)
    y, cache = run(layer, x, positions=positions)
    assert rel(y, by_hand(layer, x, positions)) < 1e-5
    assert int(cache.position) == 10  # one past the largest


def test_gates_sit_beside_their_queries(getkey):
    """Row 60: three heads of four; shutting head 1's gate removes head 1's contribution and nothing else."""
    layer = make(getkey(), num_heads=3, num_kv_heads=3, head_size=4, rotary_size=2)
    x = jnp.abs(jax.random.normal(getkey(), (7, D)))
    shut = layer.q_proj.weight.at[1 * 8 + 4 : 1 * 8 + 8].set(-1e4)
    got = run(eqx.tree_at(lambda l: l.q_proj.weight, layer, shut), x)[0]
    without = eqx.tree_at(lambda l: l.o_proj.weight, layer, layer.o_proj.weight.at[:, 4:8].set(0))
    assert rel(got, run(without, x)[0]) < 1e-6
    assert rel(got, run(layer, x)[0]) > 1e-2


def feed(layer, x, sizes, state, positions=None, segment_ids=None, mask=None):
    """The sequence in pieces of `sizes`, each on the cache of those before."""
    out, start = [], 0
    for size in sizes:
        cut = slice(start, start + size)
        part = dict(
            positions=None if positions is None else positions[..., cut],
            segment_ids=None if segment_ids is None else segment_ids[cut],
            mask=None if mask is None else mask[cut],
        )
        y, state = run(layer, x[cut], state, **part)
        out.append(y)
        start += size
    assert start == x.shape[0]
    return jnp.concatenate(out), state


T = 16
# segment ids change inside a piece: the cached tokens belong to the first segment of the next piece
PACKED = jnp.asarray([5] * 6 + [2] * 3 + [5] * 7, jnp.int32)
CASES = {
    "plain": {},
    "left padded": dict(mask=jnp.arange(T) >= 5),
    "holes": dict(mask=(jnp.arange(T) % 5 != 3)),
    "three axes": dict(positions=jnp.stack([jnp.arange(T) // 4, jnp.arange(T) * 3 % 7, jnp.arange(T) * 5 % 11])),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(7, 9), (4, 4, 4, 4), (1,) * T, (12, 1, 1, 1, 1)])
def test_prefill_in_pieces_and_decode_equal_one_pass(getkey, case, sizes):
    layer = make(getkey(), mrope_sections=(1, 1, 0))
    x = jax.random.normal(getkey(), (T, D))
    want, whole = run(layer, x, **CASES[case])
    got, cache = feed(layer, x, sizes, layer.init_state(T + 3), **CASES[case])
    assert rel(got, want) < 1e-5
    assert rel(cache.key[:T], whole.key) < 1e-5
    assert np.array_equal(np.asarray(cache.valid[:T]), np.asarray(whole.valid))
    assert not np.any(np.asarray(cache.valid[T:]))
    assert int(cache.length) == T
    assert int(cache.position) == int(whole.position)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_pieces_equal_one_pass(getkey, masked):
    """Pieces that end on a border carry the border in an id that goes on: the piece begins with the last piece's last
    id."""
    layer, x = make(getkey()), jax.random.normal(getkey(), (T, D))
    mask = (jnp.arange(T) % 4 != 2) if masked else None
    want, whole = run(layer, x, segment_ids=PACKED, mask=mask)
    for sizes in ((8, 8), (8, 2, 6)):
        got, cache = feed(layer, x, sizes, layer.init_state(T), segment_ids=PACKED, mask=mask)
        assert rel(got, want) < 1e-5
        assert np.array_equal(np.asarray(cache.valid), np.asarray(whole.valid))
        assert int(cache.position) == int(whole.position)
    # and the documents alone
    for a, b in ((0, 6), (6, 9), (9, 16)):
        alone = run(layer, x[a:b], mask=None if mask is None else mask[a:b])[0]
        assert rel(want[a:b], alone) < 1e-5


def test_a_returned_cache_goes_on_after_resize(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (T, D))
    want, _ = run(layer, x)
    first, cache = run(layer, x[:9])
    assert cache.capacity == 9
    second, cache = run(layer, x[9:], cache.resize(T))
    assert rel(jnp.concatenate([first, second]), want) < 1e-5
    assert cache.resize(T + 4).capacity == T + 4
    with pytest.raises(ValueError, match="must not be below the 16 slots in use"):
        cache.resize(T - 1)


def test_too_small_a_cache_is_nan_for_good(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (6, D))
    y, cache = run(layer, x[:3], layer.init_state(5))
    assert np.all(np.isfinite(np.asarray(y)))
    y, cache = run(layer, x[:3], cache)
    assert np.all(np.isnan(np.asarray(y)))
    y, _ = run(layer, x[:1], cache)
    assert np.all(np.isnan(np.asarray(y)))
    y, _ = eqx.filter_jit(lambda l, x, c: l(x, c.resize(20)))(layer, x[:1], cache)
    assert np.all(np.isnan(np.asarray(y)))
    with pytest.raises(ValueError, match="prefill again"):
        cache.resize(20)
    with pytest.raises(ValueError, match="at least as many slots"):
        layer(x, layer.init_state(5))


def test_left_padded_batch_equals_the_unpadded_rows(getkey):
    layer = make(getkey())
    lengths = [7, 3, 5]
    rows = [jax.random.normal(getkey(), (n, D)) for n in lengths]
    following = jax.random.normal(getkey(), (3, 2, D))
    x = jnp.stack([jnp.concatenate([jnp.full((7 - r.shape[0], D), jnp.nan), r]) for r in rows])
    mask = jnp.stack([jnp.arange(7) >= 7 - n for n in lengths])
    state = jax.vmap(lambda _: layer.init_state(9))(jnp.arange(3))
    batched = eqx.filter_jit(lambda l, x, s, m: jax.vmap(lambda x, s, m: l(x, s, mask=m))(x, s, m))
    y, state = batched(layer, x, state, mask)
    z, state = batched(layer, following, state, jnp.ones((3, 2), bool))
    assert state.position.tolist() == [9, 5, 7]
    for b, row in enumerate(rows):
        want, _ = run(layer, jnp.concatenate([row, following[b]]))
        assert rel(jnp.concatenate([y[b, 7 - lengths[b] :], z[b]]), want) < 1e-5
        assert np.all(np.asarray(y[b, : 7 - lengths[b]]) == 0)


def test_documents_never_meet(getkey):
    """Changing the first document leaves the others bit-identical, and no gradient crosses."""
    layer, x = make(getkey()), jax.random.normal(getkey(), (T, D))
    y = run(layer, x, segment_ids=PACKED)[0]
    other = run(layer, x.at[:6].set(jax.random.normal(getkey(), (6, D))), segment_ids=PACKED)[0]
    assert np.array_equal(np.asarray(y[6:]), np.asarray(other[6:]))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x, l: jnp.sum(jnp.sin(l(x, segment_ids=PACKED)[0][6:9]))))(
        x, layer
    )
    assert np.all(np.asarray(gradient[:6]) == 0)
    assert np.all(np.asarray(gradient[9:]) == 0)
    assert np.any(np.asarray(gradient[6:9]) != 0)


def test_repeating_positions_are_no_borders(getkey):
    """Row 12: an image's positions stand still or fall; packing is never read from them."""
    layer, x = make(getkey(), mrope_sections=(1, 1, 0)), jax.random.normal(getkey(), (T, D))
    patch = jnp.arange(T, dtype=jnp.int32)
    positions = jnp.stack([jnp.zeros(T, jnp.int32), patch // 4, patch % 4])
    y, cache = run(layer, x, positions=positions)
    one = run(layer, x, positions=positions, segment_ids=jnp.zeros(T, jnp.int32))[0]
    assert rel(y, one) < 1e-6
    assert np.all(np.asarray(cache.valid))
    first = eqx.filter_jit(eqx.filter_grad(lambda x, l: jnp.sum(l(x, positions=positions)[0][-1])))(x, layer)[0]
    assert np.any(np.asarray(first) != 0)


def test_nan_in_padding_reaches_no_output_and_no_gradient(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (9, D))
    mask = jnp.asarray([False] * 3 + [True] * 4 + [False] * 2)
    bad = jnp.where(mask[:, None], x, jnp.nan)

    @eqx.filter_jit
    def gradient(layer, x, mask):
        return eqx.filter_value_and_grad(lambda a: jnp.sum(jnp.sin(a[0](a[1], mask=mask)[0])))((layer, x))

    value, grads = gradient(layer, bad, mask)
    want_value, want = gradient(layer, x[3:7], None)
    assert rel(value, want_value) < 1e-5
    assert np.all(np.asarray(grads[1])[~np.asarray(mask)] == 0)
    assert rel(grads[1][3:7], want[1]) < 1e-5
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(want[0])):
        assert rel(a, b) < 1e-5


def test_all_masked_is_finite_and_leaves_the_cache_as_it_was(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (4, D))
    _, cache = run(layer, x, layer.init_state(12))
    y, after = run(layer, x, cache, mask=jnp.zeros(4, bool))
    assert np.all(np.asarray(y) == 0)
    assert np.array_equal(np.asarray(after.valid), np.asarray(cache.valid))
    assert int(after.position) == 4
    assert int(after.length) == 8
    want = run(layer, jnp.concatenate([x, x[:2]]))[0][4:]
    assert rel(run(layer, x[:2], after)[0], want) < 1e-5


def test_bfloat16(getkey):
    key = getkey()
    layer, x = make(key, jnp.bfloat16), jax.random.normal(getkey(), (40, D)).astype(jnp.bfloat16)
    y, cache = run(layer, x)
    assert y.dtype == cache.key.dtype == cache.value.dtype == jnp.bfloat16
    # five roundings in a row: projection, norm, rotation, attention with its gate, output
    assert rel(y, by_hand(layer, x)) < 3 * TOLERANCE["bfloat16"]["value"]
    got, _ = feed(layer, x, (20, 20), layer.init_state(40))
    assert rel(got, by_hand(layer, x)) < 3 * TOLERANCE["bfloat16"]["value"]


def test_cache_in_a_narrower_dtype(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (12, D))
    state = layer.init_state(12, dtype=jnp.bfloat16)
    got, cache = feed(layer, x, (6, 6), state)
    assert got.dtype == jnp.float32
    assert cache.key.dtype == jnp.bfloat16
    assert rel(got, run(layer, x)[0]) < 2e-2


def test_initialisation(getkey):
    layer = GatedAttention(
        64, num_heads=8, num_kv_heads=2, head_size=16, rotary_size=4, dtype=jnp.bfloat16, key=getkey()
    )
    assert layer.q_proj.weight.shape == (8 * 16 * 2, 64)
    assert layer.k_proj.weight.shape == layer.v_proj.weight.shape == (2 * 16, 64)
    assert layer.o_proj.weight.shape == (64, 8 * 16)
    assert layer.q_norm.weight.shape == layer.k_norm.weight.shape == (16,)
    assert {x.dtype for x in jax.tree.leaves(eqx.filter(layer, eqx.is_array))} == {jnp.dtype(jnp.bfloat16)}
    state = layer.init_state(7)
    assert isinstance(state, KVCache)
    assert state.key.shape == (7, 2, 16)
    assert state.key.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(num_heads=4, num_kv_heads=3), "`num_heads` must be a multiple of `num_kv_heads`, but they are 4 and 3"),
        (dict(rotary_size=10), "`rotary_size` must be at most head_size = 8, but it is 10"),
        (dict(rotary_size=3), "`size` must be even"),
    ],
)
def test_settings_that_do_not_fit_are_refused(getkey, settings, words):
    with pytest.raises(ValueError, match=words):
        make(getkey(), **settings)


def test_wrong_width_is_refused(getkey):
    with pytest.raises(ValueError, match=r"`x` must have D = 10 features last, but it is float32\[7, 9\] \[T, D\]"):
        make(getkey())(jnp.zeros((7, 9)))


def test_foreign_cache_is_refused(getkey):
    other = make(getkey(), num_heads=3, num_kv_heads=3).init_state(8)
    with pytest.raises(ValueError, match=r"keys and values \[S, 2, 8\].*float32\[8, 3, 8\]"):
        make(getkey())(jnp.zeros((2, D)), other)
