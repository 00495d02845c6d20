"""Text in and out of a loaded model, by the checkpoint's own tokenizer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..generate import Sampler, stream
from ..models import HybridLM
from ..ops._validate import require
from ._config import CONFIG, read_json

TOKENIZER = "tokenizer.json"


class Text(NamedTuple):
    """A tokenizer (of the package `tokenizers`), the tokens that end a text, and those that stand before a prompt."""

    tokenizer: Any
    stop_tokens: tuple[int, ...] = ()
    start_tokens: tuple[int, ...] = ()

    @staticmethod
    def of(folder: str | Path) -> "Text":
        """That of a checkpoint's folder. The tokens that end a text are those of `generation_config.json`, or else of
        `config.json`.

        **Raises:** `ValueError` for a folder without `tokenizer.json`, or if the package is missing.
        """
        folder = Path(folder)
        text = Text.read(folder / TOKENIZER)
        tables = [read_json(folder, name) for name in ("generation_config.json",) if (folder / name).is_file()]
        whole = read_json(folder)
        return text._replace(stop_tokens=_ends(*tables, whole, whole.get("text_config") or {}))

    @staticmethod
    def read(path: Path) -> "Text":
        """A tokenizer.json alone.

        **Raises:** `ValueError` where there is none, or if the package is missing.
        """
        require(path.is_file(), f"tokenizer: there is no `{path.name}` in `{path.parent}`; add the release's")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(f"tokenizer: `{path}` needs the package tokenizers: pip install 'deltanox[hf]'") from None
        try:
            return Text(Tokenizer.from_file(str(path)))
        except Exception as error:  # what the package raises is of no narrower kind
            raise ValueError(f"tokenizer: `{path}` is no tokenizer: {error}; fetch it again") from None

    def stream(
        self, model: HybridLM, prompt: str, *, max_tokens: int, sampler: Sampler, seed: int | jax.Array = 0,
        drafts: int = 0,
    ) -> Iterator[str]:  # fmt: skip
        """Text that continues `prompt`, piece by piece, each as soon as its characters are whole: up to `max_tokens`
        tokens, or up to one that ends a text, which isn't put out.

        **Raises:** `ValueError` for an empty prompt and for wrong values, before anything is generated.
        """
        tokens = [*self.start_tokens, *self.tokenizer.encode(prompt, add_special_tokens=not self.start_tokens).ids]
        require(len(tokens) > 0, "generate: give a --prompt of at least one token, such as a word")
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        drawn = stream(
            model, tokens, max_new_tokens=max_tokens, sampler=sampler, stop_tokens=self.stop_tokens, drafts=drafts,
            key=key,
        )  # fmt: skip
        return self._decode(map(int, drawn))

    def _decode(self, tokens: Iterator[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=False)
        for token in tokens:
            if token in self.stop_tokens:
                return
            piece = decoder.step(self.tokenizer, token)
            if piece:
                yield piece


def _ends(*tables: Mapping[str, Any]) -> tuple[int, ...]:
    end = next((t["eos_token_id"] for t in tables if t.get("eos_token_id") is not None), ())
    return (end,) if isinstance(end, int) else tuple(end)


def end_token(folder: Path, tokenizer: Any) -> int | None:
    """The token that ends a document: `eos_token_id` of `config.json`, then of `generation_config.json` (the first,
    where there are several), then `eos_token` of `tokenizer_config.json`; None if none of them names it."""

    def table(name: str) -> Mapping[str, Any]:
        return read_json(folder, name) if (folder / name).is_file() else {}

    whole = table(CONFIG)
    ends = _ends(whole, whole.get("text_config") or {}, table("generation_config.json"))
    if ends:
        return ends[0]
    token = table("tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    return None if token is None else tokenizer.token_to_id(token)
