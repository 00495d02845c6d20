"""Text on a terminal that may not know every character."""

import sys


def say(text: str, end: str = "\n") -> None:
    """Print, with a replacement for what the encoding of standard output lacks: no work is lost to a character."""
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def replace_unprintable() -> None:
    """From now on, standard output shows a replacement for what its encoding lacks, whoever prints."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and getattr(sys.stdout, "errors", None) == "strict":
        reconfigure(errors="replace")
