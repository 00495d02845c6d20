"""The benchmarks of calls: timed on a device that is there, compiled for one that is not, beside what is published."""

import json

import jax
import jax.numpy as jnp
import pytest

from deltanox.tools import _measure, _published, bench_gdn, bench_step
from helpers import needs_libtpu

SMALL = ["--heads", "1/2", "--size", "16", "--hidden", "32", "--on", "device", "--repeats", "2"]


def records(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_calls_are_timed_on_a_device_that_is_there(capsys):
    assert bench_gdn.main(["--length", "64,96", "--implementation", "xla", "--remat", *SMALL, "--json"]) == 0
    found = records(capsys)
    assert [(r["length"], r["part"], r["run"]) for r in found] == [
        (length, part, run) for length in (64, 96) for part in ("core", "layer") for run in ("forward", "step", "backward")
    ]  # fmt: skip
    for forward, step, backward in zip(found[::3], found[1::3], found[2::3]):
        assert forward["seconds"] > 0 and step["seconds"] > 0
        assert backward["seconds"] == step["seconds"] - forward["seconds"]
        assert forward["where"] == jax.devices()[0].device_kind and forward["clock"] == "host"
        assert forward["peak_bytes"] < step["peak_bytes"]


def test_the_table_has_a_line_for_every_call(capsys):
    assert bench_gdn.main(["--length", "64", "96", "--part", "core", "--implementation", "xla", *SMALL]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["T", "part", "engine", "run"]
    assert [line.split()[:4] for line in lines] == [
        [length, "core", "xla", run] for length in ("64", "96") for run in ("forward", "step", "backward")
    ]


def test_what_is_published_stands_beside_the_same_call():
    assert _published.told(_published.beside("layer", "step", "16/64", 65536)) == (
        "MaxText, pull request 5098 on TPU v7x: 254.17 ms, peak 32.83 GB"
    )
    assert _published.beside("layer", "step", "16/64", 8192) == []
    assert len(_published.beside("core", "forward", "16/64", 32768)) == 2


def test_a_donated_argument_is_given_anew_at_every_run():
    def f(state, x):
        return state + x

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    record = _measure.measure(f, x, x, repeats=3, donate=(0,))
    assert record["seconds"] > 0 and record["peak_bytes"] >= 2 * 32


def test_a_trace_without_events_of_a_device_tells_no_time(tmp_path):
    assert _measure.device_seconds(tmp_path) is None


@pytest.mark.slow
def test_a_whole_step(capsys, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        "[model]\nvocab_size=257\nembed_size=16\nnum_layers=2\nfull_attention_interval=2\nmlp_size=16\nnum_key_heads=1\n"
        "num_value_heads=1\nkey_head_size=8\nvalue_head_size=8\nnum_heads=1\nnum_kv_heads=1\nhead_size=8\n"
        "tied_head=true\n[data]\nrow_length=64\nbatch_size=2\n[optimiser]\nwarmup_steps=1\n[train]\naccumulation=2\nsteps=3\n"
    )
    assert (
        bench_step.main([str(path), "--on", "device", "--repeats", "1", "--json", "--set", "data.row_length=32"]) == 0
    )
    forward, step = records(capsys)
    assert (forward["run"], forward["tokens"], step["run"], step["tokens"]) == ("forward", 64, "step", 128)
    assert forward["seconds"] > 0 and step["seconds"] > 0 and forward["peak_bytes"] < step["peak_bytes"]
    assert bench_step.main([str(path), "--on", "device", "--repeats", "1", "--run", "forward"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["small", "128", "forward"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--heads", "16"], "bench gdn: --heads must be KEY/VALUE, such as 16/64, but it is 16"),
        (["--on", "topology", "--topology", "v9", "--heads", "1/1", "--length", "64"], "`topology` must be one of v4,"),
    ],
)
def test_wrong_use(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        bench_gdn.main(arguments)


@pytest.mark.slow
@needs_libtpu
def test_calls_are_compiled_for_a_tpu_that_is_not_there(capsys):
    arguments = ["--length", "1024", "--heads", "1/2", "--hidden", "128", "--on", "topology", "--json"]
    assert bench_gdn.main([*arguments, "--implementation", "pallas"]) == 0
    core, core_step, core_backward, layer, step, backward = records(capsys)
    assert set(core_step["bundles_per_head_chunk"]) == {"gdn_forward", "gdn_backward"}
    assert core_step["kernel_seconds"] == pytest.approx(
        sum(core_step["bundles_per_head_chunk"].values()) * 2 * 1024 / 64 / 2.2e9
    )
    assert core["static_seconds"] + core_backward["static_seconds"] == core_step["static_seconds"]
    # three projections, their products once forward and twice backward
    products = 2 * 1024 * 128 * (4 * 128 + 2 * 128 + 2 * 128 + 2 * 2) / (2307e12 / 2)
    assert layer["static_seconds"] - layer["kernel_seconds"] == pytest.approx(products)
    assert step["static_seconds"] - step["kernel_seconds"] == pytest.approx(3 * products)
    assert backward["seconds"] is None and step["where"].startswith("tpu7x")
