"""Hugging Face checkpoints of Qwen3-Next and Qwen3.5, in and out.

    model, config = load("Qwen3.5-0.8B")              # a folder with config.json and safetensors
    save(model, config, "out", like="Qwen3.5-0.8B")   # what transformers loads

`load` is strict: a tensor that is missing, not expected, of another shape or cut short is named, and no weight is left
at what it was drawn as. Nothing is fetched from a network, and no pickle is read.
"""

from ._config import config_from_hf as config_from_hf, config_to_hf as config_to_hf, read_json as read_json
from ._load import load as load
from ._save import save as save
from ._text import (
    GENERATION as GENERATION,
    TOKENIZER as TOKENIZER,
    TOKENIZER_CONFIG as TOKENIZER_CONFIG,
    Text as Text,
    check_text as check_text,
    end_token as end_token,
    end_tokens as end_tokens,
)
