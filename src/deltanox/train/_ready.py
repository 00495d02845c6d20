"""The ready configs: TOML files that come with the library and are called by name."""

import difflib
import re
from pathlib import Path

import deltanox

# In an installed package the folder lies in it (pyproject.toml copies it there), in a checkout beside src.
_PACKAGE = Path(deltanox.__file__).parent
_PLACES = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")


def ready_configs() -> dict[str, Path]:
    """The files of the ready configs by their names, such as `qwen3_5_nano`."""
    place = next((place for place in _PLACES if (place / "qwen3_5_nano.toml").is_file()), None)
    return {} if place is None else {path.stem: path for path in sorted(place.glob("*.toml"), key=_order)}


def _order(path: Path) -> tuple[bool, float, str]:
    """Qwen3.5 before Qwen3-Next, and each by billions of parameters."""
    size = re.search(r"_([\d.]+)b", path.stem)
    return path.stem.startswith("qwen3_next"), float(size[1]) if size else 0.0, path.stem


def find_config(name: str | Path) -> Path:
    """The file of a config: `name` is the path of a TOML file or, where there is no such file, a ready config's name.

    **Raises**: `ValueError` where it is neither.
    """
    path, ready = Path(name), ready_configs()
    if path.is_file():
        return path
    if str(name) in ready:
        return ready[str(name)]
    near = difflib.get_close_matches(path.name.removesuffix(".toml"), ready, 1) or ["qwen3_5_nano"]
    what = f"`{path}` is a folder" if path.is_dir() else f"there is no file `{path}`"
    raise ValueError(
        f"config: {what} and no ready config of that name; give the path of a TOML file, or a name such as {near[0]} "
        "(`deltanox configs` lists them)"
    )
