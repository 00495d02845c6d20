"""A folder of safetensors: its tensors as views of the files' bytes, and writing one."""

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from .._oserror import naming
from .._read import field, member, parse_json, read_json_file
from ..generate._files import permissions_of_a_new_file
from ..ops._validate import require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2"), "F32": np.dtype("f4"), "F64": np.dtype("f8")}
_OTHERS = {
    "BOOL": np.dtype("?"),
    **{f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
}


class Tensor(NamedTuple):
    """A tensor in a file: `dtype` as safetensors names it, `begin` its first byte."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


class Checkpoint:
    """The safetensors of a folder. Files are mapped, not read: what is copied out of a view is all that is held.

    The package `safetensors` checks each file's header against its length. Its own arrays for numpy are copies, which
    would be a second one here.
    """

    def __init__(self, folder: Path):
        """**Raises:** `ValueError` for a folder without safetensors, and for a file that is missing, damaged or cut
        short."""
        require(folder.is_dir(), f"load: there is no folder `{folder}`; give the folder of a Hugging Face checkpoint")
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self._maps: dict[str, mmap.mmap] = {}
        if (folder / SINGLE).is_file():
            self._open(SINGLE)
        elif (folder / INDEX).is_file():
            self._open_shards()
        else:
            raise ValueError(
                f"load: `{folder}` has neither `{SINGLE}` nor `{INDEX}`; other formats are not read, so save the model "
                "as safetensors first"
            )

    def _open_shards(self) -> None:
        index = member(self.folder, INDEX)
        table = read_json_file(index, "fetch it again")
        where = field(f"load: `{index}`", table, "weight_map", dict[str, str], remedy="fetch it again")
        for file in sorted(set(where.values())):
            require(
                member(self.folder, file).is_file(),
                f"load: the shard `{self.folder / file}` is missing, which `{INDEX}` lists; fetch it again",
            )
            self._open(file)
        for name, tensor in self.tensors.items():
            require(
                where.get(name) == tensor.file,
                f"load: the tensor `{name}` is in `{tensor.file}`, but `{INDEX}` "
                f"{'looks for it in `' + where[name] + '`' if name in where else 'does not list it'}; fetch both again",
            )
        lost = sorted(where.keys() - self.tensors.keys())
        require(
            not lost,
            f"load: `{INDEX}` lists the tensor {first(lost)} in `{where[lost[0]] if lost else ''}`, which doesn't have "
            "it; fetch both again",
        )

    def _open(self, file: str) -> None:
        path = member(self.folder, file)
        try:
            with safetensors.safe_open(path, "numpy"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"load: `{path}` is cut short or damaged ({error}); fetch it again") from None
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(length), f"load: the header of `{path}`", "fetch it again")
            self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                require(
                    name not in self.tensors,
                    f"load: the tensor `{name}` is in two files, `{file}` and `"
                    f"{self.tensors[name].file if name in self.tensors else ''}`; delete the one that doesn't belong",
                )
                self.tensors[name] = Tensor(file, entry["dtype"], tuple(entry["shape"]), begin, end - begin)

    def view(self, name: str) -> np.ndarray:
        """A tensor's values, in the file.

        **Raises:** `ValueError` for a kind that numpy doesn't have.
        """
        tensor = self.tensors[name]
        dtype = (DTYPES | _OTHERS).get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"checkpoint: `{name}` in `{self.folder}` holds {tensor.dtype}, which can't be copied")
        return np.ndarray(tensor.shape, dtype, buffer=self._maps[tensor.file], offset=tensor.begin)

    def release(self, name: str) -> None:
        """Give back the memory through which a tensor was read (it stays in the system's cache of the file)."""
        if hasattr(mmap, "MADV_DONTNEED"):
            tensor = self.tensors[name]
            begin = tensor.begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, begin, tensor.begin + tensor.size - begin)


def first(names: Iterable[str]) -> str:
    """`a` and 3 more, for sentences."""
    names = list(names)
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, as many in a file as its bytes allow, at least one."""
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file, with the mark that transformers looks for."""
    with permissions_of_a_new_file(path):
        save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, path, metadata={"format": "pt"})


def write_json(path: Path, value: Any) -> None:
    """Indented, with a line's end, as transformers writes it."""
    with naming(path):
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
