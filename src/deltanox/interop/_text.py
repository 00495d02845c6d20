"""Text in and out of a loaded model, by the checkpoint's own tokenizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._read import member, shown
from ..generate import Sampler, make_key, stream
from ..models import HybridLM
from ..ops._validate import require
from ._config import CONFIG, read_json
from ._decoder import StreamDecoder

TOKENIZER = "tokenizer.json"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


class Text(NamedTuple):
    """A tokenizer (of the package `tokenizers`), the tokens that end a text, and those that stand before a prompt."""

    tokenizer: Any
    stop_tokens: tuple[int, ...] = ()
    start_tokens: tuple[int, ...] = ()

    @staticmethod
    def of(folder: str | Path) -> "Text":
        """That of a checkpoint's folder. The tokens that end a text are all those that its files name (`end_tokens`).

        **Raises:** `ValueError` for a folder without `tokenizer.json`, or if the package is missing.
        """
        folder = Path(folder)
        text = Text.read(member(folder, TOKENIZER))
        return text._replace(stop_tokens=end_tokens(folder, text.tokenizer))

    @staticmethod
    def read(path: Path) -> "Text":
        """A tokenizer.json alone. Whatever else it stores for batches of its own training or serving (truncation,
        padding, dropout) is switched off: text is read whole, and always the same way.

        **Raises:** `ValueError` where there is none, or if the package is missing.
        """
        require(path.is_file(), f"tokenizer: there is no `{path.name}` in `{path.parent}`; add the release's")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(f"tokenizer: `{path}` needs the package tokenizers: pip install 'deltanox[hf]'") from None
        try:
            tokenizer = Tokenizer.from_str(path.read_text("utf-8-sig"))
        except OSError:
            raise
        except Exception as error:  # what the package raises is of no narrower kind
            raise ValueError(f"tokenizer: `{path}` is no tokenizer: {error}; fetch it again") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        return Text(tokenizer)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, with those that stand before it.

        **Raises:** `ValueError` for a prompt of no token, and one that is no text in UTF-8.
        """
        check_text(prompt)
        tokens = [*self.start_tokens, *self.tokenizer.encode(prompt, add_special_tokens=not self.start_tokens).ids]
        require(len(tokens) > 0, "generate: give a --prompt of at least one token, such as a word")
        return tokens

    def stream(
        self, model: HybridLM, prompt: str, *, max_tokens: int, sampler: Sampler, seed: int | jax.Array = 0,
        drafts: int = 0,
    ) -> Iterator[str]:  # fmt: skip
        """Text that continues `prompt`, piece by piece, each as soon as its characters are whole: up to `max_tokens`
        tokens, or up to one that ends a text, which isn't put out. The pieces are what the tokenizer decodes after the
        prompt; bytes that are no UTF-8, and a last character that is incomplete, come out as U+FFFD.

        **Raises:** `ValueError` for an empty prompt and for wrong values, before anything is generated.
        """
        tokens = self.encode(prompt)
        # An end beyond the model's vocabulary is never drawn
        stop_tokens = tuple(token for token in self.stop_tokens if token < model.vocab_size)
        drawn = stream(
            model, tokens, max_new_tokens=max_tokens, sampler=sampler, stop_tokens=stop_tokens, drafts=drafts,
            key=make_key(seed),
        )  # fmt: skip
        # A text begins with its first word, not with the space before it: an empty prompt is no context
        return self._decode(map(int, drawn), tokens if prompt else ())

    def _decode(self, tokens: Iterator[int], context: Sequence[int] = ()) -> Iterator[str]:
        decoder = StreamDecoder(self.tokenizer, context)
        for token in tokens:
            if token in self.stop_tokens:
                break
            if piece := decoder.step(token):
                yield piece
        if piece := decoder.finish():
            yield piece


def check_text(prompt: str) -> None:
    """**Raises:** `ValueError` for a string that is no text, such as an argument in bytes that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"generate: the prompt must be text in UTF-8, but there is {prompt[error.start]!r} at character "
            f"{error.start}; write it in UTF-8"
        ) from None


def end_tokens(
    folder: Path, tokenizer: Any, names: Iterable[str] = (CONFIG, GENERATION, TOKENIZER_CONFIG)
) -> tuple[int, ...]:
    """The tokens that end a text: all that the files `names` in `folder` give as `eos_token_id` (config.json also in
    its `text_config`) or as `eos_token`, each once, in the files' order. A field may hold one token or a list, as an
    id, a name, or a table with the name as `content`.

    **Raises:** `ValueError` for a field that holds something else.
    """
    found: list[int] = []
    for name in names:
        whole = read_json(folder, name) if (folder / name).is_file() else {}
        inner = whole.get("text_config")
        for table in (whole, inner if isinstance(inner, Mapping) else {}):
            field = "eos_token" if name == TOKENIZER_CONFIG else "eos_token_id"
            found += _tokens(table.get(field), tokenizer, f"{folder / name}: `{field}`")
    return tuple(dict.fromkeys(found))


def _tokens(value: Any, tokenizer: Any, field: str) -> list[int]:
    if value is None:
        return []
    if isinstance(value, list):
        return [token for one in value for token in _tokens(one, tokenizer, field)]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
        return [value]
    name = value.get("content") if isinstance(value, Mapping) else value
    require(
        isinstance(name, str),
        f"{field} must be a token, by id or by name, or a list of such, but there is {shown(value)}; correct the file",
    )
    token = tokenizer.token_to_id(name)
    return [] if token is None else [token]  # a name that the tokenizer doesn't know is none of the model's tokens


def end_token(folder: Path, tokenizer: Any) -> int | None:
    """The token that ends a document: the first of `end_tokens`; None where no file names one."""
    return next(iter(end_tokens(folder, tokenizer)), None)
