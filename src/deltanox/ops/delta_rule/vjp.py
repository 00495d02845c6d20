from .chunked import chunked
xla = chunked
