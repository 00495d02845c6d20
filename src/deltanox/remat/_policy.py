"""Policies made of names."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ._names import GROUPS, NAMES, Place
from ._trace import trace

HOST = "pinned_host"
READY: Mapping[str, Mapping[str, Place]] = MappingProxyType({
    "nothing": {},
    "everything": {},
    "kernels": {"gdn": "device", "attention_out": "device", "attention_lse": "device"},
    "minimal_offloaded": dict.fromkeys(("gdn", "gdn_conv", "attention", "mlp", "moe", "layer_input"), "offload"),
})  # fmt: skip
"""What the ready policies are made of. They save what there is of it."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What `policy` returns: a policy for `jax.checkpoint` and `eqx.filter_checkpoint`, equal and hashable by value.

    - `given`: the keys (groups, names) and places that it was made of. `base`: the ready policy below them.
    """

    given: tuple[tuple[str, Place], ...] = ()
    base: str = "nothing"

    @property
    def places(self) -> dict[str, Place]:
        """Where each name of `NAMES` is."""
        places: dict[str, Place] = dict.fromkeys(NAMES, "device" if self.base == "everything" else "remat")
        for keys in (READY[self.base], dict(self.given)):
            for key in sorted(keys, key=lambda key: key in NAMES):  # single names after their groups
                places |= dict.fromkeys((key,) if key in NAMES else GROUPS[key], keys[key])
        return places

    def names(self, *places: Place) -> tuple[str, ...]:
        """The names at these places."""
        return tuple(name for name, place in self.places.items() if place in places)

    def table(self) -> dict[str, str]:
        """The `[remat]` table of a config that says the same."""
        return ({} if self.base == "nothing" else {"policy": self.base}) | dict(self.given)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """What JAX asks of each operation: whether its results are saved."""
        return _rule(self)(prim, *avals, **params)


@functools.lru_cache
def _rule(policy: Policy) -> Callable[..., Any]:
    if policy.base == "everything":
        return jax.checkpoint_policies.everything_saveable
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=policy.names("device"),
        names_which_can_be_offloaded=policy.names("offload"),
        offload_src="device",
        offload_dst=HOST,
    )


def policy(base: str = "nothing", /, **places: Any) -> Policy:
    """A policy made of names: `policy(gdn="device", gdn_conv="remat", mlp="offload")`.

    **Arguments:**

    - `base`: the ready policy that places what isn't given: "nothing", "kernels" (what makes every kernel run once),
      "minimal_offloaded" (all that is named, in the host's memory) or, alone, "everything".
    - `places`: "remat" (computed again in the backward pass), "device" (saved) or "offload" (saved in the host's
      memory) for groups (`GROUPS`) and for single names (`NAMES`), which go before their group.

    What a stack's layer is called with is saved in any case; `layer_input` = "device" saves the input of every block
    of a period, and "offload" moves them to the host.

    **Raises:** `ValueError` for names and places that aren't known, and for what would be saved in vain: states or
    T^-1 of the delta rule without its output, for which the kernel would run again.

    **Warns:** `UserWarning` where JAX's settings (jax_remat3, jax_custom_vjp3) keep names from policies.
    """
    known, choices = [*GROUPS, *NAMES], get_args(Place)
    if not isinstance(base, str) or base not in READY:
        raise ValueError(f"remat: the ready policies are {', '.join(map(repr, READY))}, but it is {base!r}")
    for key, place in places.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(dict.fromkeys(known))}"
            raise ValueError(f"remat: there is no residual and no group `{key}`; {hint}")
        if place not in choices:
            raise ValueError(
                f"remat: `{key}` must be 'remat' (computed again), 'device' or 'offload' (saved there, or in the "
                f"host's memory), but it is {place!r}"
            )
    if base == "everything" and places:
        raise ValueError(
            f"remat: 'everything' saves all arrays, named or not, and leaves no choice of {', '.join(places)}: begin "
            "with 'nothing', and name what is saved"
        )
    made = Policy(tuple(places.items()), base)
    where = made.places
    for name in made.names("device", "offload"):
        lost = [other for other in NAMES[name].needs if where[other] == "remat"]
        if lost:
            raise ValueError(
                f"remat: `{name}` is to be saved ('{where[name]}') without {' and '.join(f'`{x}`' for x in lost)}: "
                f"the kernel that makes both would run again, and nothing would be won: set {lost[0]}='device' or "
                f"'offload' too, or {name}='remat'"
            )
    if base != "everything" and made.names("device", "offload") and (sentence := deaf()):
        warnings.warn(f"remat: {sentence}", stacklevel=2)
    return made


def deaf() -> str:
    """Why JAX, as it is set, doesn't ask policies about names; "" if it does."""
    if not getattr(jax.config, "jax_remat3", False):
        return ""

    @jax.custom_vjp
    def op(x):
        return jnp.sin(x)

    op.defvjp(lambda x: (op(x), checkpoint_name(x, "inside")), lambda x, g: (x * g,))
    seen = trace(lambda x: op(checkpoint_name(jnp.sin(x), "outside")), (jnp.ones(()),), Policy()).names
    if "outside" not in seen:
        return f"with jax_remat3 JAX {jax.__version__} asks no policy about names and computes all again: unset it"
    if "inside" not in seen:
        return (
            "with jax_remat3 and without jax_custom_vjp3 JAX asks no policy about names in custom derivatives "
            "(gdn_out, gdn_states, attention_out), which are computed again: set both or neither"
        )
    return ""


nothing, everything, kernels, minimal_offloaded = (Policy(base=base) for base in READY)
