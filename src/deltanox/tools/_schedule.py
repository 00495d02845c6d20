"""The static cost of kernels, read off the schedule that libtpu dumps.

A TensorCore is a statically scheduled VLIW machine: the bundles that a kernel issues are known when it is compiled, and
bundles / clock is what they take without a wait for memory. Code that a branch may skip (`pl.when`) is counted as if it
ran. A loop without a constant trip count is counted once and said so. The dump is not documented and may change with
libtpu (read here: 0.0.52); what isn't found is None, never a guess.
"""

import re
from pathlib import Path
from typing import NamedTuple

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
"""libtpu's flags for a dump into a folder."""


class Schedule(NamedTuple):
    """One kernel or fusion.

    - `bundles`: its code. Large bodies overflow the instruction memory.
    - `issued`: bundles issued in one run, each as often as the loops around it turn.
    - `unknown_trips`: loops without a constant trip count, counted once.
    - `spills`: bundles that spill or fill registers. `matmuls`: matrix instructions in the code.
    - `vmem_bytes`: VMEM that it allocates: windows, scratch and the compiler's own. Operands that XLA keeps in VMEM are
      not among them. None where the dump doesn't say.
    - `utilization`: share of each unit's slots in use, over the bundles issued.
    """

    bundles: int
    issued: int
    unknown_trips: int
    spills: int
    matmuls: int
    vmem_bytes: int | None
    utilization: dict[str, float]


_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(LH|LB|LE|PB|PF|CT)?\s*:\s*(>*)")
_EXIT = re.compile(r"scmp\.(?:ge|eq|ne|gt)\.[su]32\.\w+ %s\w+, (\d+) /\* loop exit test")
_ALLOCATION = re.compile(r"#(allocation\d+) \[shape = .*?, space=vmem, size = (0x[0-9a-f]+|\d+)")


def read_schedules(folder: Path) -> dict[str, Schedule]:
    """By the name of the HLO instruction: every kernel and fusion in a dump, the newest where there are several."""
    found = {}
    for path in sorted(folder.glob("*final_bundles.txt")):
        stamp, _, rest = path.name.partition("-")
        label = rest.rsplit("-", 2)[0]
        if "schedule-analysis" in rest or label.startswith(("TLP", "<late-")):
            continue
        others = {part: _beside(folder, stamp, label, part) for part in ("registers-and-allocations", "utilization")}
        found[label] = read_schedule(path.read_text(), others["registers-and-allocations"], others["utilization"])
    return found


def read_hlo(folder: Path) -> str:
    """The text of the newest program in a dump, "" if there is none."""
    paths = sorted(folder.glob("*TLP-hlo.txt"))
    return paths[-1].read_text() if paths else ""


def _beside(folder: Path, stamp: str, label: str, part: str) -> str:
    paths = [path for path in folder.glob(f"{stamp}-*{part}.txt") if path.name.startswith(f"{stamp}-{label}-")]
    return paths[0].read_text() if paths else ""


def read_schedule(text: str, allocations: str = "", utilization: str = "") -> Schedule:
    """From the texts of the final bundles, of the allocations ("" if unknown) and of the units in use ("" likewise)."""
    lines = [line for line in text.splitlines() if _BUNDLE.match(line)]
    times, unknown = multiplicities(lines)
    sizes = {name: int(size, 0) for name, size in _ALLOCATION.findall(allocations)}
    return Schedule(
        bundles=len(lines),
        issued=sum(times),
        unknown_trips=unknown,
        spills=sum("_spill" in line for line in lines),
        matmuls=len(re.findall(r"\bvmatmul", text)),
        vmem_bytes=sum(sizes.values()) if allocations else None,
        utilization=_utilization(utilization, times),
    )


def multiplicities(lines: list[str]) -> tuple[list[int], int]:
    """How often each bundle is issued in one run, and how many loops have no constant trip count (those count once)."""
    rows = [(len(m.group(2)), m.group(1) == "LB", line) for line in lines if (m := _BUNDLE.match(line))]
    times, unknown = [1] * len(rows), 0

    def loop(start: int, depth: int) -> int:
        """Multiply the loop that begins here, and those inside it, by their trips; return where it ends."""
        nonlocal unknown
        # it runs to its last bundle before the next loop that is no deeper
        stop = next((j for j in range(start + 1, len(rows)) if rows[j][1] and rows[j][0] <= depth), len(rows))
        stop = 1 + max(j for j in range(start, stop) if rows[j][0] >= depth)
        exits = [int(m.group(1)) for d, _, text in rows[start:stop] if d == depth and (m := _EXIT.search(text))]
        unknown += not exits
        if exits:
            times[start:stop] = [t * exits[-1] for t in times[start:stop]]
        walk(start + 1, stop, depth)
        return stop

    def walk(start: int, end: int, depth: int) -> None:
        while start < end:
            inner, head, _ = rows[start]
            start = loop(start, inner) if head and inner > depth else start + 1

    walk(0, len(rows), 0)
    return times, unknown


def _utilization(text: str, times: list[int]) -> dict[str, float]:
    lines = text.splitlines()
    if len(lines) < 4:
        return {}
    units, capacity = lines[1].split(", "), [int(word) for word in lines[2].split()]
    rows = [[int(word) for word in line.split()] for line in lines[4:] if line[:1].isdigit()]
    weights = times if len(rows) == len(times) else [1] * len(rows)
    total = max(sum(weights), 1)
    return {
        unit: round(sum(w * row[i] for w, row in zip(weights, rows)) / total / capacity[i], 3)
        for i, unit in enumerate(units)
    }
