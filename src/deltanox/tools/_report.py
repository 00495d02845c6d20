"""What `aot.compile` returns: figures of a program and of its kernels, as records, as JSON and as a table."""

import dataclasses
import json
from typing import Any

from .chips import Chip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel, as compiled: calls with the same name and the same schedule are one record.

    - `calls`: calls in the compiled program. `launches`: how often it runs, the trips of loops around it included.
    - What libtpu's schedule says, each None where there is none: `vmem_bytes`, `bundles` (code), `issued` (bundles in
      one launch), `unknown_trips` (loops that `issued` counts once), `spills`, `matmuls`, `utilization` (share of each
      unit's slots in use, over the bundles issued); see `_schedule.Schedule`.
    """

    name: str
    calls: int
    launches: int
    vmem_bytes: int | None = None
    bundles: int | None = None
    issued: int | None = None
    unknown_trips: int | None = None
    spills: int | None = None
    matmuls: int | None = None
    utilization: dict[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """A program compiled for one device of a topology. Sizes are bytes, of one device.

    - `topology`: libtpu's name of it. `device`: the device's kind. `chip`: the peaks of what one device is.
    - `argument_bytes`, `output_bytes`, `temporary_bytes`, `aliased_bytes` (outputs that take the place of arguments),
      `code_bytes`: in HBM. `host_bytes`: all of these in the host's memory.
    - `kernels`: largest share of the time first.
    - `flops`, `mxu_flops`, `kernel_flops`: see `flops.Count`. `bytes`: what moves between HBM and the core: arguments
      and outputs once, or, where that is more, what products and kernels read and write (`flops.Count.bytes`).
    - `other_bundles`: bundles issued by XLA's own operations, as far as each has a schedule; None without any.
    - `no_schedule`: why there is none, "" if there is. `notes`: what could not be counted.
    """

    topology: str
    device: str
    chip: Chip
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    code_bytes: int
    host_bytes: int
    kernels: tuple[Kernel, ...]
    flops: int
    mxu_flops: int
    kernel_flops: int
    bytes: int
    other_bundles: int | None
    no_schedule: str
    notes: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """HBM that a run takes: arguments, outputs that are no arguments, temporaries and code."""
        return self.peak_bytes + self.code_bytes

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Calls in the compiled program by the name of the kernel."""
        calls: dict[str, int] = {}
        for kernel in self.kernels:
            calls[kernel.name] = calls.get(kernel.name, 0) + kernel.calls
        return calls

    @property
    def bundles(self) -> int | None:
        """Bundles issued in one run, kernels and XLA's operations; None without a schedule."""
        if self.other_bundles is None:
            return None
        return self.other_bundles + sum(kernel.launches * (kernel.issued or 0) for kernel in self.kernels)

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of one run: of its products at the chip's peak, of its bytes, and of its bundles one a cycle."""
        bounds = {"flops": self.mxu_flops / self.chip.flops, "bytes": self.bytes / self.chip.hbm_bandwidth}
        return bounds if self.bundles is None else bounds | {"bundles": self.bundles / self.chip.clock}

    @property
    def peak_bytes(self) -> int:
        """HBM of arguments, outputs that are no arguments, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes

    @property
    def kernel_seconds(self) -> float | None:
        """Seconds that the kernels issue, one bundle a cycle; None where one has no schedule."""
        if any(kernel.issued is None for kernel in self.kernels):
            return None
        return sum(kernel.launches * (kernel.issued or 0) for kernel in self.kernels) / self.chip.clock

    @property
    def static_seconds(self) -> float | None:
        """`kernel_seconds`, and XLA's own products at the chip's peak; None without a schedule."""
        kernels = self.kernel_seconds
        return None if kernels is None else kernels + (self.mxu_flops - self.kernel_flops) / self.chip.flops

    @property
    def roofline_seconds(self) -> float:
        """The largest of `bounds`."""
        return max(self.bounds.values())

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        derived = (
            "device_bytes", "peak_bytes", "kernel_calls", "bundles", "bounds", "kernel_seconds", "static_seconds",
            "roofline_seconds",
        )  # fmt: skip
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    def to_json(self) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        chip = self.chip
        cores = f"{chip.cores} TensorCore{'s' if chip.cores > 1 else ''}"
        sizes = ("argument", "output", "temporary", "aliased", "code", "host")
        sizes = [(name, getattr(self, f"{name}_bytes")) for name in sizes]
        bounds = self.bounds
        largest = max(bounds, key=bounds.__getitem__)
        lines = [
            f"{self.topology}  one {self.device} device, {cores} of {chip.name}: {chip.flops / 1e12:.0f} TFLOP/s, "
            f"{chip.hbm_bandwidth / 1e9:.0f} GB/s, {_size(chip.hbm_bytes)}",
            "memory    " + "  ".join(f"{name} {_size(size)}" for name, size in sizes)
            + f"  in all {_size(self.device_bytes)} of {_size(chip.hbm_bytes)}",
            f"work      {_short(self.flops)}FLOP in products, {_short(self.mxu_flops)}FLOP with the passes of their "
            f"precision  {_size(self.bytes)} moved" + ("" if self.bundles is None else f"  {self.bundles:,} bundles"),
            f"roofline  {_time(self.roofline_seconds)}, by {largest}: "
            + "  ".join(f"{name} {_time(seconds)}" for name, seconds in bounds.items()),
        ]  # fmt: skip
        lines += ["", *self._table()] if self.kernels else ["kernels   none"]
        if self.no_schedule:
            lines.append(f"schedule  none: {self.no_schedule}")
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])

    def _table(self) -> list[str]:
        head = ("kernel", "calls", "launches", "VMEM", "code", "issued", "time", "units in use")
        rows = [head, *(self._row(kernel) for kernel in self.kernels)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:]))]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        return lines

    def _row(self, kernel: Kernel) -> tuple[str, ...]:
        def known(value, show=lambda x: f"{x:,}"):
            return "-" if value is None else show(value)

        issued = kernel.issued
        units = sorted((kernel.utilization or {}).items(), key=lambda item: -item[1])
        return (
            kernel.name,
            str(kernel.calls),
            str(kernel.launches),
            known(kernel.vmem_bytes, _size),
            known(kernel.bundles),
            known(issued) + ("+" if kernel.unknown_trips else ""),
            "-" if issued is None else _time(issued * kernel.launches / self.chip.clock),
            "  ".join(f"{unit} {share:.0%}" for unit, share in units if share >= 0.05) or "-",
        )


def _size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"


def _short(number: int | float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:.4g} "


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"
