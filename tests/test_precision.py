"""Casts that leave alone what a layer keeps in float32 (rows 19, 20 of the faults)."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.precision import Precision


class Norm(eqx.Module):
    keep_float32: ClassVar[tuple[str, ...]] = ("weight",)
    weight: jax.Array


class Mixer(eqx.Module):
    keep_float32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    A_log: jax.Array
    dt_bias: jax.Array
    proj: eqx.nn.Linear
    norm: Norm
    ids: jax.Array
    eps: float = eqx.field(static=True)
    scale: float = 2.0


class Model(eqx.Module):
    layers: dict
    head: jax.Array


def make(getkey):
    mixer = Mixer(
        A_log=jnp.log(jnp.array([0.3, 5.7])),
        dt_bias=jnp.array([1.01, 0.99]),
        proj=eqx.nn.Linear(3, 4, use_bias=False, key=getkey()),
        norm=Norm(jnp.array([1.003, 1.0])),
        ids=jnp.arange(3),
        eps=1e-6,
    )
    return Model(layers={"a": [mixer, (mixer,)]}, head=jax.random.normal(getkey(), (5, 3)))


@pytest.mark.parametrize("method", ["cast_parameters", "cast_compute"])
def test_kept_fields_stay_float32(getkey, method):
    model = make(getkey)
    cast = getattr(Precision(parameter="bfloat16", compute="bfloat16"), method)(model)
    assert cast.head.dtype == jnp.bfloat16
    for mixer in (cast.layers["a"][0], cast.layers["a"][1][0]):
        assert mixer.proj.weight.dtype == jnp.bfloat16
        for kept, was in ((mixer.A_log, "A_log"), (mixer.dt_bias, "dt_bias")):
            assert kept.dtype == jnp.float32
            np.testing.assert_array_equal(kept, getattr(model.layers["a"][0], was))
        assert mixer.norm.weight.dtype == jnp.float32
        assert mixer.ids.dtype == jnp.int32
        assert mixer.scale == 2.0
    assert jax.tree.structure(cast) == jax.tree.structure(model)


def test_kept_fields_of_the_model_itself_and_of_shapes(getkey):
    norm = Precision(parameter="bfloat16").cast_parameters(Norm(jnp.ones(2, jnp.bfloat16)))
    assert norm.weight.dtype == jnp.float32
    shapes = eqx.filter_eval_shape(Precision(compute="bfloat16").cast_compute, make(getkey))
    assert shapes.head.dtype == jnp.bfloat16
    assert shapes.layers["a"][0].A_log.dtype == jnp.float32


def test_gradients_arrive_in_the_stored_dtype(getkey):
    precision = Precision(compute="bfloat16")

    def loss(model):
        model = precision.cast_compute(model)
        mixer = model.layers["a"][0]
        return (model.head.sum() * mixer.proj.weight.sum()).astype(jnp.float32) + mixer.A_log.sum()

    grads = eqx.filter_grad(loss)(make(getkey))
    assert {x.dtype for x in jax.tree.leaves(grads) if x is not None} == {jnp.dtype("float32")}


def test_records_are_equal_by_their_dtypes():
    assert Precision(compute=jnp.bfloat16) == Precision(compute="bfloat16")
    assert hash(Precision(compute=jnp.bfloat16)) == hash(Precision(compute="bfloat16"))


@pytest.mark.parametrize("value", ["int8", "float31", None, 3, "half precision"])
@pytest.mark.parametrize("field", ["parameter", "compute", "accumulation", "state", "decay"])
def test_refuses_what_is_not_a_float(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` must be one of .*'bfloat16'.* but it is"):
        Precision(**{field: value})


def test_refuses_a_decay_below_float32():
    with pytest.raises(ValueError, match="`decay` must be float32 or float64, but it is bfloat16"):
        Precision(decay="bfloat16")


def test_refuses_an_accumulation_below_float32_and_a_rounding_that_is_no_bool():
    with pytest.raises(
        ValueError, match="`accumulation` must be float32 or float64, but it is bfloat16: a sum of many gradients"
    ):
        Precision(accumulation=jnp.bfloat16)
    with pytest.raises(ValueError, match="`strict_hf_rounding` must be True or False, but it is 'yes'"):
        Precision(strict_hf_rounding="yes")
