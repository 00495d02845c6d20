"""Where no TPU is attached, the commands keep libtpu from telling so; where one may be, nothing is hidden."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltanox.tools._libtpu import attached, quiet

SOURCE = Path(__file__).parents[2] / "src"
CLAIMS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "JAX_FORCE_TPU_INIT")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files of a machine without a TPU, and an environment that says nothing of one."""
    for name in CLAIMS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def add(path, text=""):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def card(slot, vendor, kind):
        add(f"sys/bus/pci/devices/{slot}/vendor", vendor + "\n")
        add(f"sys/bus/pci/devices/{slot}/class", kind + "\n")

    add("dev/vfio/vfio")
    card("0", "0x1ae0", "0x020000")  # Google's network card
    card("1", "0x1ae0", "0x010802")  # and its disk
    card("2", "0x10de", "0x120000")  # another maker's accelerator
    return tmp_path, add, card


def test_a_machine_without_a_tpu(machine):
    root, _, _ = machine
    assert not attached(str(root))
    assert not attached(str(root / "nothing"))


@pytest.mark.parametrize("sign", ["accel", "vfio", "card", "platform", *CLAIMS])
def test_any_sign_of_a_tpu(machine, monkeypatch, sign):
    root, add, card = machine
    match sign:
        case "accel":
            add("dev/accel0")
        case "vfio":
            add("dev/vfio/0")
        case "card":
            card("3", "0x1ae0", "0x120000")
        case "platform":
            monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
        case name:
            monkeypatch.setenv(name, "a")
    assert attached(str(root))
    with quiet(str(root)):
        before = dict(os.environ)
    assert dict(os.environ) == before


def test_nothing_is_left_in_the_environment(machine):
    root, _, _ = machine
    before = dict(os.environ)
    with quiet(str(root)):
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert dict(os.environ) == before


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(attached(), reason="a TPU may be attached")
def test_a_command_that_looks_for_devices_prints_nothing_of_libtpu():
    program = "import jax, deltanox.cli as c; c._configs = lambda _: print(jax.default_backend()); c.main(['configs'])"
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, env={**environment, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.stdout in ("cpu\n", "gpu\n")
    assert "TPU" not in done.stderr and "libtpu" not in done.stderr, done.stderr
