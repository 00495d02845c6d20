"""Files that others wrote, JSON and TOML: whatever is in them, an error is one sentence that names the file.

table = read_json_file(path, "fetch it again")                              # a file to a table
files = field(f"`{path}`", table, "weight_map", dict[str, str], remedy="fetch it again")   # a field of its kind
"""

import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

_DEEPEST = 100  # levels of tables and lists; Python's own limit depends on who asks
_KINDS = {
    dict: ("a table", "tables"), list: ("a list", "lists"), str: ("a text", "texts"), int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"), bool: ("true or false", "true or false"),
    types.NoneType: ("null", "null"),
}  # fmt: skip
_REQUIRED: Any = object()


def read_json_file(path: Path, remedy: str) -> dict[str, Any]:
    """The table in a JSON file, in UTF-8 (also with a byte order mark), UTF-16 or UTF-32.

    **Raises:** `ValueError` for what is no JSON, no table, or nested too deep; `OSError` for what cannot be read.
    """
    return parse_json(path.read_bytes(), f"`{path}`", remedy)


def parse_json(data: bytes | str, where: str, remedy: str) -> dict[str, Any]:
    """As `read_json_file`, of a file's bytes; `where` is what the sentence calls them."""
    return _table(json.loads, data, where, "JSON", remedy)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file, in UTF-8, also with a byte order mark.

    **Raises:** as `read_json_file`.
    """
    return _table(lambda data: tomllib.loads(data.decode("utf-8-sig")), path.read_bytes(), f"`{path}`", "TOML", "")


def _table(parse: Callable[[Any], Any], data: bytes | str, where: str, language: str, remedy: str) -> dict[str, Any]:
    end = f": {remedy}" if remedy else ""
    try:
        table = parse(data)
        deep = _is_deep(table)
    except ValueError as error:
        raise ValueError(f"{where} is no {language} ({error}){end}") from None
    except RecursionError:
        table, deep = None, True
    if deep:
        raise ValueError(f"{where} must be nested at most {_DEEPEST} levels deep, but it is deeper{end}")
    if not isinstance(table, dict):
        raise ValueError(f"{where} must hold a table, but it holds {shown(table)}{end}")
    return table


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        level = [x for values in inner for x in values]
        if not level:
            return False
    return True


def field(where: str, table: Mapping[str, Any], name: str, kind: Any, *, remedy: str, default: Any = _REQUIRED) -> Any:
    """The value of a field, of its kind.

    **Arguments:** `where`: what the sentence calls the file; `name`: of the field, "data.text" for one in a table;
    `kind`: a type that JSON has, such as `int`, `dict[str, str]` or `list[int] | None`. A `float` may be written as an
    integer and is finite; an `int` is no `bool`. `default`: the value where there is no such field.

    **Raises:** `ValueError` for a field that is missing, and one of another kind.
    """
    outer, _, inner = name.rpartition(".")
    inside = field(where, table, outer, dict, remedy=remedy) if outer else table
    value = inside.get(inner, default)
    if value is _REQUIRED:
        raise ValueError(f"{where}: there is no `{name}`: {remedy}")
    if inner in inside and (wrong := _wrong(value, kind)) is not None:
        at, found = wrong
        raise ValueError(f"{where}: `{name}` must be {_words(kind)}, but {at or 'it'} is {shown(found)}: {remedy}")
    return value


def _wrong(value: Any, kind: Any) -> tuple[str, Any] | None:
    """Which part of `value` is not of `kind`, and what it is; None if all is."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if any(_wrong(value, option) is None for option in inner) else ("", value)
    if origin in (dict, list) and isinstance(value, origin):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        wrong = next(((key, part) for key, part in parts if _wrong(part, inner[-1]) is not None), None)
        return None if wrong is None else (f"its {shown(wrong[0])}", wrong[1])
    holds = type(value) is (origin or kind)  # a bool is no int
    if kind is float and type(value) in (int, float):
        try:
            holds = math.isfinite(value)
        except OverflowError:
            holds = False
    return None if holds else ("", value)


def _words(kind: Any, *, several: bool = False) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return " or ".join(_words(option, several=several) for option in inner)
    word = _KINDS[origin or kind][several]
    return f"{word} of {_words(inner[-1], several=True)}" if origin else word


def shown(value: Any) -> str:
    """A value of a file in a sentence, in at most some sixty characters."""
    if isinstance(value, (dict, list)):
        return f"{_KINDS[type(value)][0]} of {len(value)}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def member(folder: Path, name: str, remedy: str = "copy the file into the folder") -> Path:
    """The path of a file in a folder that others made, which must not lead out of it.

    Links may lead to the folder itself, and to the folder `blobs` of Hugging Face's cache, where
    `models--x/snapshots/<revision>/<name>` is a link to `../../blobs/<hash>`. The folder itself may be a link.

    **Raises:** `ValueError` for an absolute name or one with `..`, as POSIX or Windows write them, and for a link that
    leads elsewhere.
    """
    parts = PureWindowsPath(name)  # both separators, drives
    if parts.anchor or ".." in parts.parts or not parts.parts:
        raise ValueError(f"`{folder}` must name files inside it, but it names {shown(name)}: fetch it again")
    path = folder / name
    try:
        real, places = path.resolve(), [folder.resolve()]
    except (OSError, RuntimeError, ValueError):  # a link to itself, a zero in the name: there is no such file
        return path
    snapshots = next((parent for parent in places[0].parents if parent.name == "snapshots"), None)
    if snapshots is not None:
        places.append((snapshots.parent / "blobs").resolve())
    if not any(real.is_relative_to(place) for place in places):
        raise ValueError(f"`{path}` must lie in its folder, but it is a link to `{real}`: {remedy}")
    return path
