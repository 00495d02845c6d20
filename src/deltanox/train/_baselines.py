"""What a model has to beat: `gzip`, and a Markov model of order two.

Both are measured in bits per byte on the documents that the model is validated on, and like the model they also pay
for the end of every document.
"""

import gzip
import lzma
import math
from collections.abc import Sequence

import numpy as np

from deltanox.train._documents import Document
from deltanox.train._vocabulary import BOUNDARY, VOCABULARY_SIZE


def num_bytes(documents: Sequence[Document]) -> int:
    """Bytes in all documents together."""
    return sum(len(document.data) for document in documents)


def gzip_bits_per_byte(documents: Sequence[Document]) -> float:
    """Bits per byte of `gzip -9`, file by file: nothing is learned from other files, and headers count."""
    compressed = sum(len(gzip.compress(document.data, compresslevel=9, mtime=0)) for document in documents)
    return 8 * compressed / num_bytes(documents)


def archive_bits_per_byte(documents: Sequence[Document]) -> tuple[float, float]:
    """Bits per byte of `gzip -9` and `xz -9` on all documents in one archive, laid end to end without names: what is
    repeated in another document within the window (gzip 32 kB, xz 64 MB) costs little."""
    data = b"".join(document.data for document in documents)
    compressed = gzip.compress(data, compresslevel=9, mtime=0), lzma.compress(data, preset=9)
    return 8 * len(compressed[0]) / len(data), 8 * len(compressed[1]) / len(data)


def markov_bits_per_byte(training: Sequence[Document], validation: Sequence[Document], order: int = 2) -> float:
    """Bits per byte on `validation` of a Markov model of bytes, counted on `training`.

    The probability of symbol c after the context s (the last `order` symbols) is interpolated with that of the shorter
    context s' by Witten and Bell's rule, d(s) being the number of different symbols seen after s, and n a count:

        P(c | s) = (n(s c) + d(s) P(c | s')) / (n(s) + d(s)),      P(c | nothing) from P = 1 / 257

    A context never seen gives P(c | s'). The 257 symbols are the bytes and the boundary of documents, with which a
    document's first contexts are filled and which ends it.

    Source: I. H. Witten, T. C. Bell, The zero-frequency problem, IEEE Transactions on Information Theory 37 (1991).
    """
    size = VOCABULARY_SIZE
    seen, wanted = _symbols(training, order), _symbols(validation, order)
    probability = np.full(len(wanted), 1 / size)
    for length in range(order + 1):
        # A context and its next symbol as one number; the newest symbol has the smallest weight.
        weights = size ** np.arange(length, -1, -1)
        counts = np.bincount(seen[:, order - length :] @ weights, minlength=size ** (length + 1)).reshape(-1, size)
        total, different = counts.sum(axis=1), (counts > 0).sum(axis=1)
        code = wanted[:, order - length :] @ weights
        context = code // size
        denominator = (total + different)[context]
        mixed = counts.reshape(-1)[code] + different[context] * probability
        probability = np.where(denominator > 0, mixed / np.maximum(denominator, 1), probability)
    return float(-np.log(probability).sum() / math.log(2) / num_bytes(validation))


def _symbols(documents: Sequence[Document], order: int) -> np.ndarray:
    """Every symbol of the documents with the `order` symbols before it: [symbols, order + 1]."""
    pieces = []
    for document in documents:
        padded = np.full(len(document.data) + order + 1, BOUNDARY, np.int64)
        padded[order:-1] = np.frombuffer(document.data, np.uint8)
        pieces.append(np.lib.stride_tricks.sliding_window_view(padded, order + 1))
    return np.concatenate(pieces)
