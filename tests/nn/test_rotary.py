"""Rotary positions against complex multiplication, and the interleaving of three axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.nn import RotaryEmbedding, apply_rotary
from helpers import rel


def test_pairs_turn_like_complex_numbers(getkey):
    T, n, hd, size, theta = 9, 3, 10, 6, 100.0
    x = jax.random.normal(getkey(), (T, n, hd))
    positions = jnp.asarray([0, 1, 2, 3, 7, 7, 2, 100, 5], jnp.int32)
    got = apply_rotary(x, *RotaryEmbedding(size, theta=theta)(positions))
    x = np.asarray(x, np.float64)
    z = x[..., :3] + 1j * x[..., 3:6]
    angle = np.asarray(positions)[:, None] * theta ** (-2 * np.arange(3) / size)
    z = z * np.exp(1j * angle)[:, None]
    assert rel(got, np.concatenate([z.real, z.imag, x[..., 6:]], axis=-1)) < 1e-5


def test_only_part_of_a_head_turns(getkey):
    """Row 61: a head of 16 with a factor of 0.25 keeps features 4 ... 15, with and without three axes."""
    x = jax.random.normal(getkey(), (5, 2, 16))
    positions = jnp.arange(1, 6, dtype=jnp.int32)
    for rotary, p in (
        (RotaryEmbedding(4), positions),
        (RotaryEmbedding(4, sections=(2, 0, 0)), jnp.stack([positions] * 3)),
    ):
        got = apply_rotary(x, *rotary(p))
        assert np.array_equal(np.asarray(got[..., 4:]), np.asarray(x[..., 4:]))
        assert np.all(np.asarray(got[..., :4]) != np.asarray(x[..., :4]))


def test_three_axes_are_interleaved():
    """Row 62: T, H, W = 1, 10, 100, sections (11, 11, 10): T at 0, 3 ... 30, H at 1, 4 ... 31, W at 2, 5 ... 29."""
    cos, sin = RotaryEmbedding(64, theta=1e7, sections=(11, 11, 10))(jnp.asarray([[1], [10], [100]], jnp.int32))
    position = np.zeros(32)
    position[0:31:3], position[1:32:3], position[2:30:3] = 1, 10, 100
    assert np.all(position > 0)
    angle = position * 1e7 ** (-2 * np.arange(32) / 64)
    for got, want in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert got.shape == (1, 64)
        assert got.dtype == jnp.float32
        assert np.max(np.abs(np.asarray(got[0]) - np.concatenate([want, want]))) < 1e-5


def test_three_equal_positions_are_text_bit_for_bit():
    positions = jnp.asarray([0, 3, 1000, 200_000], jnp.int32)
    text = RotaryEmbedding(64)(positions)
    three = RotaryEmbedding(64, sections=(11, 11, 10))(jnp.stack([positions] * 3))
    plain = RotaryEmbedding(64, sections=(11, 11, 10))(positions)
    for a, b, c in zip(text, three, plain):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.array_equal(np.asarray(a), np.asarray(c))


def test_theta_is_no_shared_state():
    """Two bases in one process give two tables."""
    p = jnp.arange(5, dtype=jnp.int32)
    a, b = RotaryEmbedding(8, theta=1e4)(p)[0], RotaryEmbedding(8, theta=1e7)(p)[0]
    assert rel(a, np.cos(np.arange(5)[:, None] * np.tile(1e4 ** (-np.arange(4) / 4), 2))) < 1e-6
    assert rel(b, np.cos(np.arange(5)[:, None] * np.tile(1e7 ** (-np.arange(4) / 4), 2))) < 1e-6


def test_scores_depend_on_distance_only(getkey):
    q, k = jax.random.normal(getkey(), (1, 1, 8)), jax.random.normal(getkey(), (1, 1, 8))
    rotary = RotaryEmbedding(8, theta=100.0)

    def score(a, b):
        q_turned = apply_rotary(q, *rotary(jnp.asarray([a], jnp.int32)))
        return float(jnp.sum(q_turned * apply_rotary(k, *rotary(jnp.asarray([b], jnp.int32)))))

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-4, abs=1e-5)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def test_bfloat16_is_rounded_once(getkey):
    x = jax.random.normal(getkey(), (6, 2, 8)).astype(jnp.bfloat16)
    cos, sin = RotaryEmbedding(8)(jnp.arange(6, dtype=jnp.int32))
    got = apply_rotary(x, cos, sin)
    want = apply_rotary(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    "size, sections", [(7, None), (0, None), (64, (11, 11, 11)), (64, (32, 16, 16)), (16, (2, 4, 2))]
)
def test_sizes_and_sections_that_do_not_fit_are_refused(size, sections):
    with pytest.raises(ValueError, match=r"`size` must be even|`sections` must add up"):
        RotaryEmbedding(size, sections=sections)


def test_three_positions_without_sections_are_refused():
    with pytest.raises(ValueError, match="no sections"):
        RotaryEmbedding(8)(jnp.zeros((3, 5), jnp.int32))
