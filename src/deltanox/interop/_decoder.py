"""Tokens to text, piece by piece, each as soon as its characters are whole."""

import codecs
from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what the package shows for bytes that are no character, or not yet one
_LONGEST = 4  # tokens that the bytes of one character come in at most


class StreamDecoder:
    """What `tokenizer.decode` makes of all tokens together, handed out as they come.

    The package's own stream fails on tokenizers with byte fallback (tokens such as `<0xC3>`): one wrong byte turns a
    whole run of them into U+FFFD, characters that were shown before included. Here the bytes that make no character
    are replaced, and only these.

    **Arguments:** `tokenizer`; `context`: the tokens of the text that goes on, whose last one says whether the space in
    front of the first new word is shown.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.bytes = _byte_tokens(tokenizer)
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin([token for token in context if self._known(token)][-1:])

    def step(self, token: int) -> str:
        """The characters that `token` makes whole: often none. Ids that the tokenizer doesn't have show nothing."""
        if not self._known(token):
            return ""
        if token in self.bytes:
            piece = self.held + self.utf8.decode(bytes([self.bytes[token]]))
            self._begin([token])
            return piece
        piece = self.utf8.decode(b"", final=True)
        self.window.append(token)
        text = self._decode(self.window)
        self.held = _INCOMPLETE if text.endswith(_INCOMPLETE) else ""
        piece += text[self.shown : len(text) - len(self.held)]
        if not self.held:
            self._begin([token])
        else:
            # What is incomplete lies in the last tokens: earlier ones are only decoded again
            self.window = self.window[-_LONGEST:]
            self.shown = len(self._decode(self.window)) - 1
        return piece

    def finish(self) -> str:
        """U+FFFD for an incomplete last character, or nothing."""
        piece = self.held + self.utf8.decode(b"", final=True)
        self._begin([])
        return piece

    def _begin(self, window: list[int]) -> None:
        self.window, self.held = window, ""
        self.shown = len(self._decode(window))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def _known(self, token: int) -> bool:
        return self.tokenizer.id_to_token(token) is not None


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """The tokens that stand for one byte each, and the byte, of a tokenizer with byte fallback."""
    found = {}
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        token = tokenizer.token_to_id(name)
        # where the decoder shows the name, it is a word like others
        if token is not None and tokenizer.decode([token], skip_special_tokens=False) != name:
            found[token] = byte
    return found
