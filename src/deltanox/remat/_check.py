"""What a policy does to a function: what it cannot do, and the bytes that it keeps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ._names import GROUPS, NAMES, Scope
from ._policy import HOST, Policy, deaf
from ._trace import named_input, trace

RECORD = "the engines 'xla' and 'pallas' of the delta rule, not by 'chunked' and 'reference'"


def check(
    policy: Policy,
    fn: Callable[..., Any],
    *args: Any,
    scope: Scope | None = None,
    devices: Sequence[Any] | None = None,
) -> None:
    """Refuse a policy that `fn(*args)` could not follow. A stack of layers does this itself.

    **Arguments:** `policy`; `fn`: what it is a policy of; `args`: its arguments, of whose arrays only shapes and dtypes
    count (`jax.ShapeDtypeStruct`s will do); `scope`: look at names of a layer, or of the head, only; `devices`: what
    it is compiled for, by default those of the mesh in use (`jax.set_mesh`), or the default device.

    **Raises:** `ValueError` for a name or group to be saved that `fn` has no array of, since the implementation in use
    never makes it; for a ready policy of which there is nothing at all; for "offload" where the devices have no
    pinned host memory.
    """
    if policy.base == "everything" or not policy.names("device", "offload"):
        return
    produced = trace(fn, args, Policy()).names
    told = ", ".join(name for name in NAMES if name in produced) or "none"
    for key, place in policy.given:
        if place == "remat":
            continue
        names = (key,) if key in NAMES else tuple(n for n in GROUPS[key] if not NAMES[n].made)
        missing = [n for n in names if n not in produced and scope in (None, NAMES[n].scope)]
        if missing:
            made = NAMES[missing[0]].made or (RECORD if missing[0] in GROUPS["gdn"] else "")
            raise ValueError(
                f"remat: {key} = '{place}' would save nothing: {' and '.join(f'`{x}`' for x in missing)} "
                f"{'is' if len(missing) == 1 else 'are'} never made here{f' (only by {made})' if made else ''}; "
                + (deaf() or f"set {key}='remat', or use what makes it; named arrays here: {told}")
            )
    if policy.base != "nothing" and produced.isdisjoint(policy.names("device", "offload")):
        raise ValueError(f"remat: '{policy.base}' would save nothing: named arrays here: {told}")
    if policy.names("offload"):
        for device in _targets() if devices is None else devices:
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST not in kinds:
                raise ValueError(
                    f"remat: 'offload' needs a device that reaches the host's memory ({HOST}), but {device} has "
                    f"{', '.join(kinds)}: use 'device' or 'remat' for {', '.join(policy.names('offload'))}"
                )


def _targets() -> list[Any]:
    """A device that the program is for, as far as it is known while it is traced."""
    if not jax.sharding.get_abstract_mesh().empty:
        try:
            return list(jax.sharding.get_mesh().devices.flat[:1])
        except ValueError:  # under jit no more than the mesh's shape is known
            return []
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return [default] if isinstance(default, jax.Device) else jax.devices(default)[:1]


class Bytes(NamedTuple):
    """What one layer keeps for the backward pass: bytes on the `device` and in the `host`'s memory."""

    device: int
    host: int


def bytes_per_layer(policy: Policy, layer: Callable[..., Any], x: Any, *args: Any) -> Bytes:
    """What a stack of `layer`s keeps for each of them, by JAX's own account of shapes: nothing runs.

    **Arguments:** `policy`; `layer`: called as `layer(x, *args)`; `x`: what goes from layer to layer, an array or a
    `jax.ShapeDtypeStruct`, as all of `args` may be. A batch is a layer under `jax.vmap`.

    **Returns:** the bytes, without padding of the device's tiles and without weights, which are there anyway.

    **Raises:** `ValueError` as `check`.
    """

    def named(x, *args):
        return layer(named_input(x), *args)

    check(policy, named, x, *args, scope="layer")
    traced = trace(named, (x, *args), policy)
    sizes = {"host": 0, "device": 0}
    for aval in traced.saved:
        place = "host" if aval.memory_space == jax.memory.Space.Host else "device"
        sizes[place] += aval.size * aval.dtype.itemsize
    sizes["device"] += x.size * x.dtype.itemsize * traced.kept[0]
    return Bytes(**sizes)
