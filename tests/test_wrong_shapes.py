"""A wrong shape is named, with its argument and axes: by the checker where it is on, by our own sentence where it is off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {
    "swapped head axes": "gated_delta_rule(jnp.ones((2, 3, 7, 4)), jnp.ones((2, 3, 7, 4)), jnp.ones((2, 7, 6, 5)), None, jnp.ones((2, 7, 6)))",
    "missing batch": "layer(jnp.ones((2, 7, 8)))",
    "wrong width": "layer(jnp.ones((7, 9)))",
    "wrong state": "layer(jnp.ones((7, 8)), DeltaNetState(jnp.zeros((3, 20)), jnp.zeros((2, 5, 4))))",
}
SCRIPT = """
import jax, jax.numpy as jnp
from jaxtyping import install_import_hook
if {checked}:
    install_import_hook("deltanox", "beartype.beartype(conf=beartype.BeartypeConf(is_color=False))")
from deltanox import DeltaNetState, GatedDeltaNet, gated_delta_rule
layer = GatedDeltaNet(8, num_key_heads=1, num_value_heads=2, key_head_size=4, value_head_size=5, conv_size=4, key=jax.random.key(0))
for name, run in {{{examples}}}.items():
    try:
        run()
    except Exception as error:
        text = str(error)
        print("==", name, "==", type(error).__name__, "==", text.replace(chr(10), " "))
"""
OFF = {
    "swapped head axes": r"ValueError == gated_delta_rule: `v` must share the axes \[\*B, T\] of `q`, \[2, 3\], but it has \[2, 7\]",
    "missing batch": r"ValueError == .*`x`.*\[T, embed_size\] = \[T, 8\].*float32\[2, 7, 8\].*jax\.vmap",
    "wrong width": r"ValueError == .*`x`.*8.*float32\[7, 9\]",
    "wrong state": r"ValueError == .*state.*float32\[3, 20\]",
}
ON = {
    "swapped head axes": r"TypeCheckError == .*parameter '[vq]'.*f32\[2,7,6,5\].*\*B T H V",
    "missing batch": r"TypeCheckError == .*parameter 'x'.*f32\[2,7,8\].*T D",
    "wrong width": r"(ValueError|TypeCheckError) == .*x.*(float32\[7, 9\]|f32\[7,9\])",
    "wrong state": r"(ValueError|TypeCheckError) == .*state",
}


@pytest.mark.parametrize(("checked", "expected"), [(False, OFF), (True, ON)])
def test_wrong_shapes(checked, expected):
    examples = ", ".join(f"{name!r}: lambda: {code}" for name, code in EXAMPLES.items())
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(checked=checked, examples=examples)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line.split(" == ")[0].removeprefix("== "): line for line in done.stdout.splitlines()}
    for name, pattern in expected.items():
        assert re.search(pattern, lines.get(name, "nothing was raised")), lines.get(name, done.stdout)
        print(lines[name])
