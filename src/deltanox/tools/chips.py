"""What the TPU chips can do, as published, and the topologies that stand for them.

Sources: the system architecture pages of Cloud TPU (peak bf16 FLOP/s, bytes of HBM and their bandwidth, TensorCores a
chip), JAX's table for Pallas (VMEM of a core). The clock is the peak divided by what the MXUs of a chip do in a cycle.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, or with `share` a part of it.

    - `flops`: peak bf16 operations a second, multiplications and additions each counted.
    - `hbm_bandwidth`: bytes a second. `hbm_bytes`: bytes. Both, like `flops`, of all its cores together.
    - `vmem_bytes`: of one core. `clock`: Hz of a core, which issues one bundle a cycle.
    - `cores`: TensorCores. JAX's device is the whole chip on v4 and v5p (both cores run the program, megacore) and one
      core on tpu7x.
    - `topology`: libtpu's name of the smallest topology that holds the chip.
    """

    name: str
    flops: float
    hbm_bandwidth: float
    hbm_bytes: int
    vmem_bytes: int
    clock: float
    cores: int
    topology: str

    def share(self, cores: int) -> "Chip":
        """The part of the chip that belongs to `cores` of its cores."""
        part = cores / self.cores
        return dataclasses.replace(
            self,
            flops=self.flops * part,
            hbm_bandwidth=self.hbm_bandwidth * part,
            hbm_bytes=int(self.hbm_bytes * part),
            cores=cores,
        )


_GIB, _MIB = 2**30, 2**20

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 1228e9, 32 * _GIB, 16 * _MIB, 1.05e9, 2, "v4:2x2x1"),
        Chip("v5e", 197e12, 819e9, 16 * _GIB, 128 * _MIB, 1.5e9, 1, "v5e:1x1"),
        Chip("v5p", 459e12, 2765e9, 95 * _GIB, 64 * _MIB, 1.75e9, 2, "v5p:1x1x1"),
        Chip("v6e", 918e12, 1638e9, 32 * _GIB, 128 * _MIB, 1.75e9, 1, "v6e:1x1"),
        Chip("tpu7x", 2307e12, 7380e9, 192 * _GIB, 64 * _MIB, 2.2e9, 2, "tpu7x:1x1x1"),
    )
}


def parse_topology(topology: str) -> tuple[Chip, str]:
    """The chip and libtpu's name of a topology: "v5e" is the smallest one, "v5e:2x4" has eight chips.

    **Raises**: `ValueError` for a chip that isn't in the table, and for a shape that isn't written like 2x4 or 2x2x1.
    """
    name, colon, shape = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(
            f"aot: `topology` must be one of {', '.join(CHIPS)}, with or without a shape such as tpu7x:2x2x1, but it "
            f"is {topology!r}"
        )
    chip = CHIPS[name]
    rank = chip.topology.count("x", len(name)) + 1
    if not colon:
        return chip, chip.topology
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)" + "{" + str(rank - 1) + "}", shape):
        raise ValueError(
            f"aot: the shape of a {name} topology has {rank} sizes, such as {chip.topology}, but it is {topology!r}"
        )
    return chip, topology
