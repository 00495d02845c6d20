"""The peer that benchmarks are measured beside: whether it can be imported."""

import importlib.util


def require_peer(command: str, without: str) -> None:
    """PyTorch and transformers must be installed for `command`, which does without them under the option `without`.

    **Raises:** `ValueError`.
    """
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(
            f"{command}: the peer needs torch and transformers, but {' and '.join(absent)} cannot be imported: "
            f"pip install torch transformers, or leave the peer out with {without}"
        )
