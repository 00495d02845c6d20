"""Documents as rows of tokens: packing, and the order of a run.

A document of n tokens b1 ... bn (bytes, or those of a tokenizer) is n + 1 pairs of input and label, with the
vocabulary's end token E before its first token as input and after its last one as label:

    input    E b1 b2 ... bn
    label   b1 b2 ... bn  E

Documents are laid end to end and the stream is cut into rows of T tokens. A pair belongs to one document, so no label
ever crosses into the next, and each token is predicted exactly once. What is left of a document at the end of a row
continues in another row as a segment of its own (without the state of the part before it).

The order of documents and rows is a pure function of the seed and of the number of the epoch. Where a run is in its
data is one small record, `DataPosition`: a run that is resumed reads the same rows as one that was never stopped.
"""

import array
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from deltanox.train._documents import Document
from deltanox.train._vocabulary import BYTES, Vocabulary


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


class Corpus:
    """Documents as one array of tokens, each followed by the end token. They are encoded one after the other and not
    kept: of an iterator that forgets them, no more than the tokens is held (two bytes each, four above 65,536).

    - `num_bytes`, `num_tokens`: of all documents together, their ends among the tokens.
    """

    def __init__(self, documents: Iterable[Document], vocabulary: Vocabulary = BYTES):
        tokens = array.array("H" if vocabulary.size <= 2**16 else "I")
        kind, sizes, self.num_bytes = np.dtype(tokens.typecode), [], 0
        end = np.array([vocabulary.end], kind).tobytes()
        for size, ids in vocabulary.encode(documents):
            tokens.frombytes(ids.astype(kind, copy=False).tobytes())
            tokens.frombytes(end)
            sizes.append(len(ids) + 1)
            self.num_bytes += size
        self.end, self.num_tokens = vocabulary.end, len(tokens)
        self.tokens = np.frombuffer(tokens, kind)
        self.sizes = np.array(sizes, np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes


class _Stream:
    """A corpus' documents laid end to end in an order."""

    def __init__(self, corpus: Corpus, order: np.ndarray):
        self.corpus, self.begins = corpus, corpus.begins[order]
        sizes = corpus.sizes[order]
        self.starts = np.cumsum(sizes) - sizes

    def __len__(self) -> int:
        return self.corpus.num_tokens

    def rows(self, rows: np.ndarray, row_length: int) -> Batch:
        positions = rows[:, None] * row_length + np.arange(row_length)
        mask = positions < len(self)
        document = np.searchsorted(self.starts, positions, side="right") - 1
        inside = np.minimum(positions, len(self) - 1) - self.starts[document]
        at = self.begins[document] + inside
        end, tokens = np.int32(self.corpus.end), self.corpus.tokens
        labels = np.where(mask, tokens[at].astype(np.int32), end)
        inputs = np.where(mask & (inside > 0), tokens[np.maximum(at - 1, 0)].astype(np.int32), end)
        segment_ids = (document - document[:, :1]).astype(np.int32)
        return Batch(inputs, labels, segment_ids, None if mask.all() else mask)


def _permutation(size: int, *seed: int) -> np.ndarray:
    # Raw bits of a counter-based generator: unlike `Generator.permutation` they are promised to be the same in every
    # NumPy.
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(bits, kind="stable")


@dataclasses.dataclass
class TrainingData:
    """Endless batches of full rows in an order that depends on `seed` alone.

    **Arguments**: `documents`, or a `Corpus` of them, the rows' length `row_length` in tokens, the number `batch_size`
    of rows in a batch, `seed`. Every epoch shuffles the documents, cuts other rows out of the new stream, and shuffles
    these. The few tokens that do not fill a row, and the few rows that do not fill a batch, are left out of that epoch.

    **Raises**: `ValueError` if the text does not fill one batch.
    """

    documents: dataclasses.InitVar[Iterable[Document] | Corpus]
    row_length: int
    batch_size: int
    seed: int

    def __post_init__(self, documents):
        self._epoch: tuple[int, _Stream, np.ndarray] | None = None
        self.corpus = documents if isinstance(documents, Corpus) else Corpus(documents)
        tokens = self.corpus.num_tokens
        self.batches_per_epoch = tokens // self.row_length // self.batch_size
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"data: the training text must fill a batch of {self.batch_size} rows of {self.row_length} tokens; it "
                f"has {tokens} tokens: give more text, or lower data.batch_size or data.row_length"
            )

    def __call__(self, position: DataPosition) -> tuple[Batch, DataPosition]:
        """The batch at `position`, and the position after it."""
        if self._epoch is None or self._epoch[0] != position.epoch:
            stream = _Stream(self.corpus, _permutation(len(self.corpus.sizes), self.seed, position.epoch, 0))
            rows = _permutation(len(stream) // self.row_length, self.seed, position.epoch, 1)
            self._epoch = (position.epoch, stream, rows)
        _, stream, rows = self._epoch
        first = position.batch * self.batch_size
        batch = stream.rows(rows[first : first + self.batch_size], self.row_length)
        if position.batch + 1 < self.batches_per_epoch:
            return batch, DataPosition(position.epoch, position.batch + 1)
        return batch, DataPosition(position.epoch + 1, 0)


def validation_batches(documents: Iterable[Document] | Corpus, row_length: int, batch_size: int) -> Iterator[Batch]:
    """Every token of `documents` once, in order. All batches have one shape and a mask: what is missing is padding."""
    corpus = documents if isinstance(documents, Corpus) else Corpus(documents)
    stream = _Stream(corpus, np.arange(len(corpus.sizes)))
    num_rows = -(-len(stream) // row_length)
    for first in range(0, num_rows, batch_size):
        batch = stream.rows(np.arange(first, first + batch_size), row_length)
        mask = np.ones(batch.tokens.shape, bool) if batch.mask is None else batch.mask
        yield batch._replace(mask=mask)
