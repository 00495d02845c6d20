"""libtpu without a TPU: loaded once a process, with a dump of its schedules where that can still be had."""

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ._schedule import FLAGS

LOCK = threading.RLock()
"""Held while a program is compiled: the folder of the dump belongs to the process."""


class Dump(NamedTuple):
    """Where libtpu writes its schedules; `folder` is None where it doesn't, for this `reason`."""

    folder: Path | None
    reason: str = ""


@contextlib.contextmanager
def environment(**extra: str) -> Iterator[None]:
    """What libtpu wants to be told where there is no TPU, as far as it isn't set; as it was before, afterwards."""
    wanted = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        # without it a second process aborts on libtpu's lock file
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    wanted = {name: value for name, value in wanted.items() if name not in os.environ} | extra
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_CLAIMS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "JAX_FORCE_TPU_INIT")


def attached(root: str = "/") -> bool:
    """Whether there is any sign of a TPU: a device of this machine, or an environment variable that claims one. Without
    one libtpu, where it is installed, cannot but fail. `root` is where /dev and /sys are looked for."""
    platforms = os.environ.get("JAX_PLATFORMS", "").split(",")
    if "tpu" in platforms or any(name in os.environ for name in _CLAIMS):
        return True
    if any(Path(root).glob("dev/accel*")) or any(Path(root).glob("dev/vfio/[0-9]*")):
        return True
    for vendor in Path(root).glob("sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            kind = vendor.with_name("class").read_text().strip()
            # Google's network cards (0x02) and disks (0x01) are in virtual machines without a TPU too
            if vendor.read_text().strip() == "0x1ae0" and not kind.startswith(("0x01", "0x02")):
                return True
    return False


@contextlib.contextmanager
def quiet(root: str = "/") -> Iterator[None]:
    """Where no TPU is attached, libtpu doesn't print that it finds none when JAX looks for devices. Where one is,
    nothing changes: a failure of it is heard."""
    with contextlib.nullcontext() if attached(root) else environment():
        yield


def missing() -> str:
    """Why nothing can be compiled for a TPU here; "" if it can."""
    if os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu") is not None:
        return ""
    return "libtpu is not installed: pip install 'libtpu>=0.0.52' (Linux on x86-64)"


def _loaded() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and "libtpu" in maps.read_text()


@functools.cache  # libtpu reads its flags when it is loaded, once a process
def load() -> Dump:
    """Load libtpu, with a dump unless something else has loaded it before."""
    if reason := missing():
        raise ValueError(f"aot: {reason}")
    if _loaded():
        return Dump(None, "libtpu was loaded before its dump could be asked for: call aot.prepare() first")
    folder = tempfile.mkdtemp(prefix="deltanox_aot_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {FLAGS.format(folder)}".strip()
    with environment(LIBTPU_INIT_ARGS=flags):
        _topology("v5e:1x1")
    return Dump(Path(folder))


def _topology(name: str, **options: Any) -> list[Any]:
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    if set(name.partition(":")[2].split("x")) == {"1"}:
        options["chips_per_host_bounds"] = [1, 1, 1]  # libtpu before 0.0.52 takes 2x2x1 otherwise, and refuses
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except JaxRuntimeError as error:
        sentence = " ".join(str(error).split())[:300]
        raise ValueError(
            f"aot: libtpu does not make the topology `{name}`: {sentence}; take another one, or a newer libtpu"
        ) from None


@functools.cache
def devices(topology: str) -> list[Any]:
    """The devices of a topology by libtpu's name. Both cores of a v4 chip are one device, as JAX has them."""
    load()
    # v5p is so by default
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    with environment():
        return _topology(topology, **options)


def clear(dump: Dump) -> None:
    """Delete what was dumped so far."""
    if dump.folder is not None:
        for path in dump.folder.iterdir():
            path.unlink()
