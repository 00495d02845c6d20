"""What a run's documents are made of: bytes, or the tokens of a tokenizer.json."""

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from deltanox.interop import TOKENIZER, Text, end_token
from deltanox.train._documents import Document

BOUNDARY = 256
"""The token before the first and after the last byte of a document, in text of bytes."""

VOCABULARY_SIZE = 257
"""Bytes and `BOUNDARY`: the vocabulary of a model of bytes must be at least this large."""

_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_PIECE = 2**20  # characters that the tokenizer is given at a time: what it returns is a hundred times the tokens
_CUT = re.compile(r"\n(?=\S)")


class Vocabulary(NamedTuple):
    """Tokens 0 ... `size` - 1, of which `end` stands before and after each document; bytes without a `text`.

    `folder` is where the tokenizer's files lie, `sha256` the hash of its tokenizer.json.
    """

    end: int = BOUNDARY
    size: int = VOCABULARY_SIZE
    text: Text | None = None
    folder: Path | None = None
    sha256: str = ""

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[int, np.ndarray]]:
        """The bytes and the tokens of each document, without its end."""
        if self.text is None:
            for document in documents:
                yield len(document.data), np.frombuffer(document.data, np.uint8)
            return
        ids = []
        for batch in _batches(documents):
            texts = [text for text, _ in batch]
            for (_, size), found in zip(batch, self.text.tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
                ids.append(np.array(found.ids, np.uint32))
                if size is not None:
                    yield size, np.concatenate(ids)
                    ids = []

    def keep(self, folder: Path) -> None:
        """Copy the tokenizer's files into `folder`."""
        if self.folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, folder / name)


BYTES = Vocabulary()


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[str, int | None]]]:
    """Pieces of documents, so many that the tokenizer is busy; with a document's last piece the document's bytes."""
    batch, size = [], 0
    for document in documents:
        pieces = _pieces(document.data.decode("utf-8"))
        piece = next(pieces)
        while piece is not None:
            following = next(pieces, None)
            batch.append((piece, len(document.data) if following is None else None))
            size += len(piece)
            if size >= _PIECE:
                yield batch
                batch, size = [], 0
            piece = following
    yield batch


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at beginnings of lines, where byte-level tokenizers cut by themselves."""
    begin = 0
    while match := _CUT.search(text, begin + _PIECE):
        yield text[begin : match.end()]
        begin = match.end()
    yield text[begin:]


def read_vocabulary(path: str | Path, *, name: str = "", end: int | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer.json, or of one in the folder `path`.

    **Arguments**: `name`, of the token that ends a document, "" for the one that the files beside it give
    (`eos_token_id` of config.json or generation_config.json, `eos_token` of tokenizer_config.json); `end`, its number,
    if it is known.

    **Raises**: `ValueError` for a file that is missing or no tokenizer, and if no end token is known.
    """
    path = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
    text = Text.read(path)
    tokenizer = text.tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if name:
        end = tokenizer.token_to_id(name)
        if end is None:
            raise ValueError(f"data.end_token: `{path}` has no token {name!r}; give one of its own")
    elif end is None:
        end = end_token(path.parent, tokenizer)
        if end is None:
            raise ValueError(
                f"data.end_token: give the token that ends a document, such as '<|endoftext|>': no file beside "
                f"`{path}` names one"
            )
    size = 1 + max(end, *tokenizer.get_vocab(with_added_tokens=True).values())
    text = text._replace(start_tokens=(end,), stop_tokens=(end,))
    return Vocabulary(end, size, text, path.parent, hashlib.sha256(path.read_bytes()).hexdigest())


def encode(text: bytes | str) -> Int[np.ndarray, " T"]:
    """The tokens of the beginning of a document of bytes: `BOUNDARY`, then the bytes."""
    data = text.encode() if isinstance(text, str) else text
    return np.concatenate([np.array([BOUNDARY], np.int32), np.frombuffer(data, np.uint8).astype(np.int32)])
