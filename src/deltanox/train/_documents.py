"""Text as documents: reading them, their split into training and validation, and a fingerprint."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Held-out text that is cut out of documents lies in at most this many places.
_PLACES = 8
# The split goes by files where the bytes that it holds out are within this factor of those asked for.
_UNEVEN = 3
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Document(NamedTuple):
    """A file: its name (with forward slashes, relative to the folder that was asked for) and its bytes."""

    name: str
    data: bytes


def standard_library() -> list[Document]:
    """The Python sources of the standard library of this interpreter, without its tests and the installed packages."""
    return _files(Path(sysconfig.get_path("stdlib")), suffix=".py")


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """All files under `paths` (files or folders; hidden and empty files are left out), ordered by name.

    Links are followed. A file that is reached twice is read once, so that no copy of it is on both sides of the split.

    **Raises**: `ValueError` for a path that does not exist, a broken link, what is no regular file (such as a FIFO), a
    file that cannot be read or is not text in UTF-8, or where no text is found.
    """
    documents, read = [], set()
    for path in map(Path, paths):
        if path.is_dir():
            documents += _files(path, read=read)
        elif (document := _document(path, path.name, read)) is not None:
            documents.append(document)
    for document in documents:
        try:
            document.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text: `{document.name}` is not UTF-8 ({error.reason} at byte {error.start}); convert it or "
                "leave it out"
            ) from None
        if (zero := document.data.find(0)) >= 0:
            raise ValueError(
                f"text: `{document.name}` must be text, but it has a zero at byte {zero}, as binary files and UTF-16 "
                "have; convert it to UTF-8 or leave it out"
            )
    if not documents:
        raise ValueError(f"text: no text under {', '.join(map(str, paths))}; give files or folders that hold some")
    return sorted(documents)


def _files(root: Path, suffix: str = "", read: set[Path] | None = None) -> list[Document]:
    """The files under `root`. `read`: the files and folders that were read before, which are passed over, links being
    followed; None: links to folders are not followed, and a file with two names is read twice."""
    documents = []
    for folder, folders, names in os.walk(root, followlinks=read is not None):
        if read is not None:
            # A link back to a folder that was walked through would never end.
            if (real := Path(folder).resolve()) in read:
                folders[:] = []
                continue
            read.add(real)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (suffix and n in _SKIPPED_FOLDERS))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                path = Path(folder, name)
                document = _document(path, path.relative_to(root).as_posix(), read)
                if document is not None:
                    documents.append(document)
    return sorted(documents)


def _document(path: Path, name: str, read: set[Path] | None) -> Document | None:
    """The file at `path`; None if it is empty or was read before."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            # Opening a FIFO waits for somebody who writes to it, for ever.
            raise ValueError(
                f"text: `{path}` is neither a file nor a folder; give regular files and folders, and write the output "
                "of a program to a file first"
            )
        if read is not None:
            if (real := path.resolve()) in read:
                return None
            read.add(real)
        data = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise ValueError(
                f"text: `{path}` is a broken link to `{os.readlink(path)}`; mend it or remove it"
            ) from None
        raise ValueError(f"text: `{path}` is neither a file nor a folder; give paths that exist") from None
    except OSError as error:
        raise ValueError(
            f"text: `{path}` must be readable, but it is not ({error.strerror}); change its permissions or leave it out"
        ) from None
    return Document(name, data) if data else None


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only, the same on every machine and in every Python."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split_documents(
    documents: Sequence[Document], validation_fraction: float, validation_bytes: int | None = None
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents: a function of names and bytes alone.

    Where files are many and even, the split goes by files. A document is held out if the hash of its name is below
    `validation_fraction`. Of the documents held out, those that are evaluated are the first in the order of the hash
    that fit together into `validation_bytes`; the others are used for nothing.

    Where that would hold out no document, more than three times the fraction of the bytes, or evaluate less than a
    third of the bytes asked for, the split goes by pieces. Pieces of at most `validation_fraction` of the bytes
    together, and at most `validation_bytes`, are cut out of up to eight places that are spread over the text, at
    beginnings of lines where there are some. Every piece, and every part that is left between two of them, is a
    document of its own named "name[first byte:last byte + 1]", so that no token is predicted across a cut. All other
    text is trained on.

    **Raises**: `ValueError` if the text is too short to be split.
    """
    total = sum(len(document.data) for document in documents)
    wanted = int(validation_fraction * total)
    if validation_bytes is not None:
        wanted = min(wanted, validation_bytes)
    training, held_out, validation = _by_files(documents, validation_fraction, validation_bytes)
    held_out_bytes, evaluated = (sum(len(d.data) for d in part) for part in (held_out, validation))
    even = held_out_bytes <= _UNEVEN * validation_fraction * total and _UNEVEN * evaluated >= wanted
    if training and validation and even:
        return training, validation
    training, validation = _by_pieces(documents, max(wanted, 1))
    if not training or not validation:
        part = "training" if not training else "validation"
        raise ValueError(
            f"data: no text is left for {part}: {len(documents)} documents of {total} bytes together, of which "
            f"data.validation_fraction = {validation_fraction} is to be held out (data.validation_bytes = "
            f"{validation_bytes}); give more text"
        )
    return training, validation


def _by_files(
    documents: Sequence[Document], validation_fraction: float, validation_bytes: int | None
) -> tuple[list[Document], list[Document], list[Document]]:
    """Documents for training, those held out, and those of them that are evaluated."""
    training = [document for document in documents if _hash(document.name) >= validation_fraction]
    held_out = sorted((d for d in documents if _hash(d.name) < validation_fraction), key=lambda d: _hash(d.name))
    validation, size = [], 0
    for document in held_out:
        if validation_bytes is None or size + len(document.data) <= validation_bytes:
            validation.append(document)
            size += len(document.data)
    return training, held_out, validation


def _by_pieces(documents: Sequence[Document], wanted: int) -> tuple[list[Document], list[Document]]:
    """Documents cut where pieces of at most `wanted` bytes together are held out.

    The documents are laid end to end and the stream is divided into equal parts; each has one piece, at a place that
    depends on the part's number only.
    """
    documents = sorted(documents)
    total = sum(len(document.data) for document in documents)
    places = min(_PLACES, -(-wanted // 4096))
    size, part = wanted // places, total / places
    begins = [int(part * i + _hash(f"place {i}") * (part - size)) for i in range(places)]
    training, validation, offset = [], [], 0
    for document in documents:
        done = 0
        for begin in begins:
            first, last = max(begin - offset, done), min(begin + size - offset, len(document.data))
            if first >= last:
                continue
            # Both cuts move into the piece, by at most a quarter of it: it never grows.
            room = (last - first) // 4
            first = first if first == done else _cut_after(document.data, first, room)
            last = last if last == len(document.data) else _cut_before(document.data, last, room)
            if first < last:
                training += _piece(document, done, first)
                validation += _piece(document, first, last)
                done = last
        training += _piece(document, done, len(document.data))
        offset += len(document.data)
    return training, validation


def _piece(document: Document, first: int, last: int) -> list[Document]:
    """The bytes from `first` to `last` as a document, or none of no bytes."""
    if first == 0 and last == len(document.data):
        return [document]
    return [Document(f"{document.name}[{first}:{last}]", document.data[first:last])] if first < last else []


def _cut_after(data: bytes, at: int, room: int) -> int:
    """The first beginning of a line from `at` on, or, if there is none within `room` bytes, of a character."""
    line = data.find(b"\n", at - 1, at + room)
    if line >= 0:
        return line + 1
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _cut_before(data: bytes, at: int, room: int) -> int:
    """The last beginning of a line up to `at`, or, if there is none within `room` bytes, of a character."""
    line = data.rfind(b"\n", at - room, at)
    if line >= 0:
        return line + 1
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def describe_split(documents: Sequence[Document], training: Sequence[Document], validation: Sequence[Document]) -> str:
    """What `split_documents` made of `documents`, in words: every byte is accounted for."""

    def size(part):
        return sum(len(document.data) for document in part)

    whole = {document.name for document in documents}
    files = f"{len(documents)} file{'s' if len(documents) != 1 else ''}"
    used = f"text: {size_in_words(size(documents))} in {files}: {size_in_words(size(training))} for training, "
    used += f"{size_in_words(size(validation))} for validation"
    if not all(document.name in whole for document in (*training, *validation)):
        pieces = f"{len(validation)} piece{'s' if len(validation) != 1 else ''}"
        return f"{used} in {pieces} cut out of the files, which are too few or too uneven to be held out whole"
    unused = size(documents) - size(training) - size(validation)
    used += f" in {len(validation)} files held out whole"
    return f"{used}; {size_in_words(unused)} held out and not evaluated (data.validation_bytes)" if unused else used


def size_in_words(num_bytes: int) -> str:
    """Bytes for people: "812 bytes", "12.3 kB", "4.56 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes" if num_bytes != 1 else "1 byte"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.2f} MB"


def fingerprint(documents: Sequence[Document]) -> str:
    """A hash of the names and the bytes: two runs with the same one read the same text."""
    digest = hashlib.sha256()
    for name, data in documents:
        digest.update(f"{len(name)} {name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()
