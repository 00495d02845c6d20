"""Text as rows of tokens: documents, their split into training and validation, packing, and the order of a run.

A token is a byte, 0 to 255; one more, `BOUNDARY` (256), stands before the first byte of a document as input and after
its last byte as label. A document of n bytes is therefore n + 1 pairs of input and label,

    input  256 b1 b2 ... bn
    label   b1 b2 ... bn 256

Documents are laid end to end and the stream is cut into rows of T tokens. A pair belongs to one document, so no label
ever crosses into the next, and each byte is predicted exactly once. What is left of a document at the end of a row
continues in another row as a segment of its own (without the state of the part before it).

The order of documents and rows is a pure function of the seed and of the number of the epoch. Where a run is in its
data is one small record, `DataPosition`: a run that is resumed reads the same rows as one that was never stopped.
"""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

BOUNDARY = 256
"""The token before the first and after the last byte of a document."""

VOCABULARY_SIZE = 257
"""Bytes and `BOUNDARY`: a model's vocabulary must be at least this large."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Document(NamedTuple):
    """A file: its name (with forward slashes, relative to the folder that was asked for) and its bytes."""

    name: str
    data: bytes


class Batch(NamedTuple):
    """Rows of packed documents.

    - `tokens`: inputs.
    - `labels`: the token that follows each input in its document.
    - `segment_ids`: which part of which document a token belongs to, counted from 0 in each row.
    - `mask`: False at padding, None where there is none (every batch of a training run).
    """

    tokens: Int[Array | np.ndarray, "B T"]
    labels: Int[Array | np.ndarray, "B T"]
    segment_ids: Int[Array | np.ndarray, "B T"]
    mask: Bool[Array | np.ndarray, "B T"] | None = None


class DataPosition(NamedTuple):
    """Where a run is in its data: batches already read from the epoch, and epochs finished before it."""

    epoch: int = 0
    batch: int = 0


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


def encode(text: bytes | str) -> Int[np.ndarray, " T"]:
    """The tokens of the beginning of a document: `BOUNDARY`, then the bytes."""
    data = text.encode() if isinstance(text, str) else text
    return np.concatenate([np.array([BOUNDARY], np.int32), np.frombuffer(data, np.uint8).astype(np.int32)])


class _Stream:
    """Documents laid end to end. Position i holds an input, and i + 1 of the same array its label."""

    def __init__(self, documents: Sequence[Document]):
        # 256 b1 .. bn 256 b1 .. bm 256: the boundary that ends a document is also the one that begins the next.
        pieces = [np.array([BOUNDARY], np.uint16)]
        for document in documents:
            pieces += [np.frombuffer(document.data, np.uint8).astype(np.uint16), np.array([BOUNDARY], np.uint16)]
        self.tokens = np.concatenate(pieces)
        self.starts = np.cumsum([0, *(len(document.data) + 1 for document in documents)])[:-1]

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def rows(self, rows: np.ndarray, row_length: int) -> Batch:
        positions = rows[:, None] * row_length + np.arange(row_length)
        mask = positions < len(self)
        inside = np.minimum(positions, len(self) - 1)
        tokens = np.where(mask, self.tokens[inside], BOUNDARY).astype(np.int32)
        labels = np.where(mask, self.tokens[inside + 1], BOUNDARY).astype(np.int32)
        document = np.searchsorted(self.starts, positions, side="right")
        segment_ids = (document - document[:, :1]).astype(np.int32)
        return Batch(tokens, labels, segment_ids, None if mask.all() else mask)


def _permutation(size: int, *seed: int) -> np.ndarray:
    # Raw bits of a counter-based generator: unlike `Generator.permutation` they are promised to be the same in every
    # NumPy.
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(bits, kind="stable")


@dataclasses.dataclass
class TrainingData:
    """Endless batches of full rows in an order that depends on `seed` alone.

    **Arguments**: `documents`, the rows' length `row_length` in tokens, the number `batch_size` of rows in a batch,
    `seed`. Every epoch shuffles the documents, cuts other rows out of the new stream, and shuffles these. The few
    tokens that do not fill a row, and the few rows that do not fill a batch, are left out of that epoch.

    **Raises**: `ValueError` if the text does not fill one batch.
    """

    documents: Sequence[Document]
    row_length: int
    batch_size: int
    seed: int

    def __post_init__(self):
        self._epoch: tuple[int, _Stream, np.ndarray] | None = None
        tokens = sum(len(document.data) + 1 for document in self.documents)
        self.batches_per_epoch = tokens // self.row_length // self.batch_size
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"data: the training text must fill a batch of {self.batch_size} rows of {self.row_length} tokens; it "
                f"has {tokens} tokens: give more text, or lower data.batch_size or data.row_length"
            )

    def __call__(self, position: DataPosition) -> tuple[Batch, DataPosition]:
        """The batch at `position`, and the position after it."""
        if self._epoch is None or self._epoch[0] != position.epoch:
            order = _permutation(len(self.documents), self.seed, position.epoch, 0)
            stream = _Stream([self.documents[i] for i in order])
            rows = _permutation(len(stream) // self.row_length, self.seed, position.epoch, 1)
            self._epoch = (position.epoch, stream, rows)
        _, stream, rows = self._epoch
        first = position.batch * self.batch_size
        batch = stream.rows(rows[first : first + self.batch_size], self.row_length)
        if position.batch + 1 < self.batches_per_epoch:
            return batch, DataPosition(position.epoch, position.batch + 1)
        return batch, DataPosition(position.epoch + 1, 0)


def validation_batches(documents: Sequence[Document], row_length: int, batch_size: int) -> Iterator[Batch]:
    """Every token of `documents` once, in order. All batches have one shape and a mask: what is missing is padding."""
    stream = _Stream(documents)
    num_rows = -(-len(stream) // row_length)
    for first in range(0, num_rows, batch_size):
        batch = stream.rows(np.arange(first, first + batch_size), row_length)
        mask = np.ones(batch.tokens.shape, bool) if batch.mask is None else batch.mask
        yield batch._replace(mask=mask)
