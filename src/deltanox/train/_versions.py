"""What a run's numbers depend on besides its config and text: bit for bit they come again on these alone."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

_PACKAGES = ("deltanox", "jax", "jaxlib", "equinox", "optax", "numpy")


def versions() -> dict[str, str]:
    """Versions of the libraries that compute, the device, and the compiler's flags, by name."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on the path without having been installed
            found[name] = "unknown"
    device = jax.devices()[0]
    return found | {
        "machine": platform.machine(),
        "device": f"{device.platform} {device.device_kind}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def changed_versions(record: Mapping[str, Any]) -> str | None:
    """A sentence about what is not as it was when the checkpoint of this record was written, None if nothing is."""
    old, new = record.get("versions"), versions()
    if not isinstance(old, Mapping):
        return "the checkpoint does not say which versions it was written with: bit-equal losses are not promised"
    changed = [
        f"{name} was {old.get(name)!r} and is {value!r}" for name, value in new.items() if old.get(name) != value
    ]
    if not changed:
        return None
    return f"resumed on other software or another device ({'; '.join(changed)}): losses are close, but not bit-equal"
