"""Text in and out of a loaded model, by the checkpoint's own tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..generate import Sampler, stream
from ..models import HybridLM
from ..ops._validate import require
from ._config import read_json

TOKENIZER = "tokenizer.json"


class Text(NamedTuple):
    """A checkpoint's tokenizer (of the package `tokenizers`), and the tokens that end a text."""

    tokenizer: Any
    stop_tokens: tuple[int, ...]

    @staticmethod
    def of(folder: str | Path) -> "Text":
        """That of a checkpoint's folder. The tokens that end a text are those of `generation_config.json`, or else of
        `config.json`.

        **Raises:** `ValueError` for a folder without `tokenizer.json`, or if the package is missing.
        """
        folder = Path(folder)
        require((folder / TOKENIZER).is_file(), f"generate: there is no `{TOKENIZER}` in `{folder}`; add the release's")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                f"generate: `{folder / TOKENIZER}` needs the package tokenizers: pip install 'deltanox[hf]'"
            ) from None
        try:
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # what the package raises is of no narrower kind
            raise ValueError(f"generate: `{folder / TOKENIZER}` is no tokenizer: {error}; fetch it again") from None
        tables = [read_json(folder, name) for name in ("generation_config.json",) if (folder / name).is_file()]
        whole = read_json(folder)
        tables += [whole, whole.get("text_config") or {}]
        end = next((t["eos_token_id"] for t in tables if t.get("eos_token_id") is not None), ())
        return Text(tokenizer, (end,) if isinstance(end, int) else tuple(end))

    def stream(
        self, model: HybridLM, prompt: str, *, max_tokens: int, sampler: Sampler, seed: int = 0, drafts: int = 0
    ) -> Iterator[str]:
        """Text that continues `prompt`, piece by piece, each as soon as its characters are whole: up to `max_tokens`
        tokens, or up to one that ends a text, which isn't put out.

        **Raises:** `ValueError` for an empty prompt and for wrong values, before anything is generated.
        """
        tokens = self.tokenizer.encode(prompt).ids
        require(len(tokens) > 0, "generate: give a --prompt of at least one token, such as a word")
        key = jax.random.key(seed)
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
