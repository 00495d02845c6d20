"""Text as documents: reading them, their split into training and validation, and a fingerprint."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Document(NamedTuple):
    """A file: its name (with forward slashes, relative to the folder that was asked for) and its bytes."""

    name: str
    data: bytes


def standard_library() -> list[Document]:
    """The Python sources of the standard library of this interpreter, without its tests and the installed packages."""
    return _files(Path(sysconfig.get_path("stdlib")), suffix=".py")


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """All files under `paths` (files or folders, hidden ones and tests' caches left out), ordered by name.

    **Raises**: `ValueError` for a path that does not exist, a file that is not UTF-8, or where no text is found.
    """
    documents = []
    for path in map(Path, paths):
        if path.is_dir():
            documents += _files(path)
        elif path.is_file():
            documents.append(Document(path.name, path.read_bytes()))
        else:
            raise ValueError(f"text: `{path}` is neither a file nor a folder; give paths that exist")
    for document in documents:
        try:
            document.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text: `{document.name}` is not UTF-8 ({error.reason} at byte {error.start}); convert it or "
                "leave it out"
            ) from None
    documents = [document for document in documents if document.data]
    if not documents:
        raise ValueError(f"text: no text under {', '.join(map(str, paths))}; give files or folders that hold some")
    return sorted(documents)


def _files(root: Path, suffix: str = "") -> list[Document]:
    documents = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (suffix and n in _SKIPPED_FOLDERS))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                path = Path(folder, name)
                data = path.read_bytes()
                if data:
                    documents.append(Document(path.relative_to(root).as_posix(), data))
    return sorted(documents)


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only, the same on every machine and in every Python."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split_documents(
    documents: Sequence[Document], validation_fraction: float, validation_bytes: int | None = None
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents. A document is held out if the hash of its name is below `validation_fraction`.

    Of the documents held out, those that are evaluated are the first in the order of the hash that fit together into
    `validation_bytes`; the others are used for nothing.

    **Raises**: `ValueError` if one of the two parts is empty.
    """
    training = [document for document in documents if _hash(document.name) >= validation_fraction]
    held_out = sorted((d for d in documents if _hash(d.name) < validation_fraction), key=lambda d: _hash(d.name))
    validation, size = [], 0
    for document in held_out:
        if validation_bytes is None or size + len(document.data) <= validation_bytes:
            validation.append(document)
            size += len(document.data)
    if not training or not validation:
        part = "training" if not training else "validation"
        raise ValueError(
            f"data: no document is left for {part}: {len(documents)} documents, {len(held_out)} of them held out by "
            f"data.validation_fraction = {validation_fraction} (data.validation_bytes = {validation_bytes}); change "
            "these or give more files"
        )
    return training, validation


def fingerprint(documents: Sequence[Document]) -> str:
    """A hash of the names and the bytes: two runs with the same one read the same text."""
    digest = hashlib.sha256()
    for name, data in documents:
        digest.update(f"{len(name)} {name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()
