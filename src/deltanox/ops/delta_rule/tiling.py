"""How the TPU kernels cut their work, and how much of a chip's vector memory (VMEM) that takes."""

import dataclasses

import jax

CHUNK = 128  # tokens that a kernel takes at once
LANES = 128  # of a TPU's registers: the unit of an array's last axis
MIB = 1 << 20
# VMEM of a TensorCore by device kind, and what a kernel may use where no mesh names the chip: the least of those that
# are sold today (v4, with 16 MiB, is given smaller tiles where the mesh names it).
VMEM = {"v4": 16, "v5 lite": 128, "v5e": 128, "v5p": 64, "v5": 64, "v6 lite": 128, "v6e": 128, "7x": 64}
UNNAMED = 64
SHARE = 0.75  # of VMEM that a kernel may fill
MOST_HEADS = {"forward": 16, "backward": 8}  # value heads a step: beyond, the loop's body grows over 8,000 bundles


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a step of a kernel takes.

    - `key_heads`: key heads, each with its value heads.
    - `chunks`: chunks of 128 tokens. Backward: as many as there are from one kept state to the next.
    """

    key_heads: int
    chunks: int

    def __post_init__(self):
        for name in ("key_heads", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Tiling: `{name}` must be an integer of at least 1, but it is {value!r}")

    @property
    def tile(self) -> int:
        """Tokens."""
        return CHUNK * self.chunks


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a tiling depends on. `every` counts chunks from one kept state to the next, at most as many as there are;
    `width` is bytes of an activation, `kept` bytes of a kept state's number (0: none are kept); `narrow` says that T is
    held in bfloat16, `inverted` that it is kept."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    length: int
    every: int
    width: int
    kept: int
    narrow: bool
    inverted: bool = False


def vmem_bytes(kernel: str, tiling: Tiling, p: Problem) -> int:
    """Bytes of VMEM that a kernel asks for: its blocks twice (one is computed on while the next one arrives) and its
    scratch. What the compiler spills comes on top, see `spill_bytes`."""
    heads = tiling.key_heads * p.heads // p.key_heads
    keys, values = (_lanes(n * size) for n, size in ((tiling.key_heads, p.key_size), (heads, p.value_size)))
    state = heads * p.key_size * _lanes(p.value_size)
    triangles = heads * CHUNK * CHUNK * (2 if p.narrow else 4) * tiling.chunks  # T
    gates = 2 * -(-heads // 8) * 8 * tiling.tile * 4
    if kernel == "forward":
        kept = max(tiling.chunks // p.every, 1) * state * p.kept
        blocks = tiling.tile * (2 * keys + 2 * values) * p.width + gates + 2 * state * 4 + kept
        blocks += triangles if p.inverted else 0
        return 2 * blocks + state * 4
    kept = tiling.chunks // p.every * state * p.kept
    blocks = tiling.tile * (4 * keys + 3 * values) * p.width + 2 * gates + 2 * state * 4 + kept
    new = heads * CHUNK * _lanes(p.value_size)
    return 2 * blocks + 2 * state * 4 + tiling.chunks * (state + new) * 4 + triangles * (2 if p.inverted else 1)


def spill_bytes(kernel: str, tiling: Tiling, p: Problem) -> int:
    """About what the compiler spills: the matrices of a chunk that stages hand on, for all heads of a step."""
    heads = tiling.key_heads * p.heads // p.key_heads
    squares, rows = (6, 2) if kernel == "forward" else (10, 6)
    return heads * CHUNK * (squares * CHUNK + rows * _lanes(p.value_size)) * 4


def _lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def budget() -> int:
    """Bytes of VMEM that a kernel may use on the chip that the current mesh names."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = str(getattr(device, "device_kind", "")).lower()
    size = next((size for name, size in VMEM.items() if name in kind), UNNAMED)
    return int(SHARE * size * MIB)


def choose(kernel: str, p: Problem) -> Tiling:
    """As many heads a step as fit the budget and a loop's body, and whole lanes of each array or all of it."""
    if kernel == "backward":
        chunks = p.every
    else:  # a tile holds whole groups of `every` chunks, or a group whole tiles
        chunks = 2 if p.length > CHUNK and (p.every == 1 or p.every % 2 == 0) else 1
    ratio = p.heads // p.key_heads
    counts = [n for n in range(1, p.key_heads + 1) if p.key_heads % n == 0]
    whole = [n for n in counts if n * p.key_size % LANES == n * ratio * p.value_size % LANES == 0 or n == p.key_heads]
    options = [Tiling(n, chunks) for n in whole]
    fitting = [x for x in options if x.key_heads * ratio <= MOST_HEADS[kernel] and vmem_bytes(kernel, x, p) <= budget()]
    return max(fitting, key=lambda x: x.key_heads, default=options[0])
