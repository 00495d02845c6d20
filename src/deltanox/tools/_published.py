"""Latencies of gated DeltaNet kernels that others publish, measured on hardware of theirs; ours stand beside them."""

from typing import NamedTuple


class Published(NamedTuple):
    """What a source says of one call: B = 1, heads of 128, bfloat16.

    - `part`: "core" is the delta rule alone, "core with convolution", or "layer", the whole mixer.
    - `run`: "forward", "backward", "step" (both).
    """

    source: str
    device: str
    heads: str
    length: int
    part: str
    run: str
    seconds: float
    peak_bytes: float | None = None


_MAXTEXT = ("MaxText, pull request 5098", "TPU v7x", "16/64", 65536)
_TOKAMAX = ("Tokamax 0.0.17, tuning data", "TPU v7x")
_DELTANET = ("deltanet-tpu 0.3.0", "TPU v6e")
_FLASHQLA = ("FlashQLA", "NVIDIA H200")

PUBLISHED = (
    Published(*_MAXTEXT, "core", "forward", 37.55e-3),
    Published(*_MAXTEXT, "core", "backward", 93.59e-3),
    Published(*_MAXTEXT, "layer", "forward", 68.18e-3),
    Published(*_MAXTEXT, "layer", "backward", 185.99e-3),
    Published(*_MAXTEXT, "layer", "step", 254.17e-3, 32.83e9),
    Published(*_TOKAMAX, "16/64", 4096, "core with convolution", "forward", 1.343e-3),
    Published(*_TOKAMAX, "2/8", 8192, "core with convolution", "forward", 0.388e-3),
    Published(*_DELTANET, "16/32", 8192, "core", "forward", 11.37e-3),
    Published(*_DELTANET, "16/32", 8192, "core", "step", 22.52e-3),
    Published(*_DELTANET, "16/16", 8192, "core", "forward", 5.63e-3),
    Published(*_DELTANET, "16/16", 8192, "core", "step", 10.93e-3),
    Published(*_FLASHQLA, "16/64", 32768, "core", "forward", 1.521e-3),
    Published("flash-linear-attention", "NVIDIA H200", "16/64", 32768, "core", "forward", 3.331e-3),
    Published(*_FLASHQLA, "16/32", 8192, "core", "forward", 0.280e-3),
    Published(*_FLASHQLA, "16/32", 8192, "core", "backward", 0.789e-3),
)


def beside(part: str, run: str, heads: str, length: int) -> list[Published]:
    """What is published of this call."""
    return [p for p in PUBLISHED if (p.part, p.run, p.heads, p.length) == (part, run, heads, length)]


def told(found: list[Published]) -> str:
    """The same as text."""

    def one(p: Published) -> str:
        peak = "" if p.peak_bytes is None else f", peak {p.peak_bytes / 1e9:.2f} GB"
        return f"{p.source} on {p.device}: {1e3 * p.seconds:.2f} ms{peak}"

    return "; ".join(map(one, found))
