"""A run of the tiny model, on text that is made on the spot."""

from pathlib import Path

import numpy as np

from deltanox.train import config_from_dict, read_log, train
from tiny_model import TinyConfig, make_tiny


def make_text(folder):
    """Forty files of text with a little structure, a fifth of which is held out."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    words = ["the ", "cat ", "sat ", "on ", "a ", "mat.\n"]
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(rng.choice(words, rng.integers(20, 80))))


def tiny_config(directory, **train_values):
    return config_from_dict(
        {
            "model": {"width": 16},
            "data": {"row_length": 32, "batch_size": 2, "validation_fraction": 0.2},
            "optimiser": {"learning_rate": 3e-2, "warmup_steps": 5},
            "train": {"steps": 24, "checkpoint_every": 8, "accumulation": 2, "directory": str(directory), "seed": 3}
            | train_values,
        },
        model_type=TinyConfig,
    )


def run(config, text, **kwargs):
    said = []
    result = train(config, text=[text], make_model=make_tiny, say=said.append, progress=False, **kwargs)
    return result, said


def steps(directory):
    return [record for record in read_log(Path(directory) / "log.jsonl") if "loss" in record]
