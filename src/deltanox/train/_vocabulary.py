"""What a run's documents are made of: bytes, or the tokens of a tokenizer.json."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from deltanox._read import member, read_json_file
from deltanox.interop import GENERATION, TOKENIZER, TOKENIZER_CONFIG, Text, check_text, end_token, end_tokens, read_json
from deltanox.train._documents import Document

BOUNDARY = 256
"""The token before the first and after the last byte of a document, in text of bytes."""

VOCABULARY_SIZE = 257
"""Bytes and `BOUNDARY`: the vocabulary of a model of bytes must be at least this large."""

_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", GENERATION,
)  # fmt: skip
_PIECE = 2**20  # characters that the tokenizer is given at a time: what it returns is a hundred times the tokens
_CUT = re.compile(r"\n(?=\S)")


class Vocabulary(NamedTuple):
    """Tokens 0 ... `size` - 1, of which `end` stands before and after each document; bytes without a `text`.

    `folder` is where the tokenizer's files lie, `file` its tokenizer.json, of whatever name, and `sha256` the hash of
    that.
    """

    end: int = BOUNDARY
    size: int = VOCABULARY_SIZE
    text: Text | None = None
    folder: Path | None = None
    sha256: str = ""
    file: Path | None = None

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
                source = self.file if name == TOKENIZER and self.file is not None else member(self.folder, name)
                if source.is_file():
                    (folder / name).unlink(missing_ok=True)  # may be read-only, as Hugging Face's cache is
                    shutil.copyfile(source, folder / name)

    def export(self, folder: Path) -> None:
        """The tokenizer's files for a checkpoint, in which a prompt begins as a document of the run does, with `end`:
        here and in transformers, which both let the tokenizer add it."""
        self.keep(folder)
        if self.text is None:
            return
        name = self.text.tokenizer.id_to_token(self.end)
        path = folder / TOKENIZER
        whole = read_json_file(path, "fetch it again")
        processors = [*_of_offsets(whole.get("post_processor")), _begin_with(name, self.end)]
        whole["post_processor"] = {"type": "Sequence", "processors": processors}
        path.write_text(json.dumps(whole, ensure_ascii=False), "utf-8")
        path = folder / TOKENIZER_CONFIG  # in which it must not say otherwise
        if path.is_file():
            told = read_json(folder, TOKENIZER_CONFIG) | {"bos_token": name, "add_bos_token": True}
            told |= {"add_eos_token": False} if "add_eos_token" in told else {}
            path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _of_offsets(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a post-processor that add no token."""
    if processor is None:
        return []
    parts = processor["processors"] if processor["type"] == "Sequence" else [processor]
    return [part for part in parts if part["type"] == "ByteLevel"]


def _begin_with(name: str, token: int) -> dict[str, Any]:
    """The post-processor, as tokenizer.json writes it, that puts a token in front."""

    def text(which: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": which, "type_id": 0}}]

    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": text("A") + text("B"),
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def keep_text_files(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint's tokenizer and of its generation, those that there are."""
    Vocabulary(folder=source).keep(folder)


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

    **Raises**: `ValueError` for a file that is missing or no tokenizer, and if no end token is known, or one that the
    tokenizer doesn't have.
    """
    path = member(Path(path), TOKENIZER) if Path(path).is_dir() else Path(path)
    text = Text.read(path)
    tokenizer = text.tokenizer
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
    if not 0 <= end < 2**32 or tokenizer.id_to_token(end) is None:
        raise ValueError(
            f"data.end_token: the files beside `{path}` name token {end}, which the tokenizer doesn't have; give the "
            "model's own tokenizer, or data.end_token"
        )
    size = 1 + max(end, *tokenizer.get_vocab(with_added_tokens=True).values())
    # as in the checkpoint that `export` goes with: its config.json names `end`, the other files are these
    stop_tokens = dict.fromkeys((end, *end_tokens(path.parent, tokenizer, (GENERATION, TOKENIZER_CONFIG))))
    text = text._replace(start_tokens=(end,), stop_tokens=tuple(stop_tokens))
    return Vocabulary(end, size, text, path.parent, hashlib.sha256(path.read_bytes()).hexdigest(), path)


def check_is_bytes(folder: str | Path, vocab_size: int, *, remedy: str = "") -> None:
    """A checkpoint without a tokenizer must be a model of bytes.

    **Raises**: `ValueError` for another size of the vocabulary.
    """
    if not VOCABULARY_SIZE <= vocab_size <= 2 * BOUNDARY:
        raise ValueError(
            f"tokenizer: `{folder}` has no {TOKENIZER}, and its vocabulary of {vocab_size} is not that of bytes "
            f"({VOCABULARY_SIZE}): add the release's {TOKENIZER}{remedy}"
        )


def encode(text: bytes | str) -> Int[np.ndarray, " T"]:
    """The tokens of the beginning of a document of bytes: `BOUNDARY`, then the bytes."""
    if isinstance(text, str):
        check_text(text)
    data = text.encode() if isinstance(text, str) else text
    return np.concatenate([np.array([BOUNDARY], np.int32), np.frombuffer(data, np.uint8).astype(np.int32)])
