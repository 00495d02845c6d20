"""The command `deltanox`: train | generate | convert | configs | aot | bench.

Nothing heavy is imported before a subcommand runs.
"""

import argparse
import ast
import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deltanox._console import replace_unprintable, say
from deltanox.tools._libtpu import quiet


@quiet()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's own) and return the exit status. Wrong use is one sentence on stderr."""
    replace_unprintable()
    parser = _parser()
    arguments = parser.parse_args(argv)
    status = 141  # as of a process that SIGPIPE ends
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except ValueError as error:
        print(f"deltanox: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader has gone, as in `deltanox generate ... | head`
        from deltanox._oserror import discard_output

        discard_output()
    except OSError as error:  # what the machine refuses, such as a full disk
        from deltanox._oserror import sentence

        print(f"deltanox: {sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if str(error):  # of a training run, which says how to go on
            print(f"deltanox: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 130)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deltanox", description="Train and run hybrid linear-attention language models."
    )
    parser.add_argument("--version", action="version", version=_version(), help="print versions and leave")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model from a TOML config",
        description="Train a model. The run's folder gets log.jsonl, loss.png and checkpoints.",
    )
    train.add_argument("config", nargs="?", metavar="CONFIG", help=f"{_CONFIG_HELP}; may be left out with --resume")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a value of the config, written as in TOML",
    )
    train.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of UTF-8 text (default: the standard library's sources)",
    )
    train.add_argument(
        "--from",
        dest="start",
        metavar="FOLDER",
        help="begin with the weights of this Hugging Face checkpoint, whose sizes and tokenizer take the place of the "
        "config's",
    )
    train.add_argument("--resume", metavar="DIR", help="go on with the run in this folder, from its newest checkpoint")
    train.set_defaults(run=_train)

    generate = commands.add_parser(
        "generate", help="text from a trained model", description="Print text from a trained model as it is generated."
    )
    generate.add_argument(
        "directory", metavar="DIR", help="folder of a run, of one checkpoint of it, or of a Hugging Face checkpoint"
    )
    generate.add_argument("--prompt", default="", help="how the text begins (default: an empty document)")
    generate.add_argument(
        "--max-tokens",
        type=int,
        default=500,
        help="tokens to generate at most; bytes without a tokenizer.json (default: 500)",
    )
    generate.add_argument("--temperature", type=float, default=0.8, help="0 for the most likely token (default: 0.8)")
    generate.add_argument("--top-k", type=int, help="draw from the k most likely tokens only")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the most likely tokens of this probability together"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    generate.add_argument(
        "--drafts",
        type=int,
        default=0,
        help="tokens that the model's multi-token prediction head drafts a step; the text stays the same (default: 0)",
    )
    generate.set_defaults(run=_generate)

    convert = commands.add_parser(
        "convert",
        help="a run, or a Hugging Face checkpoint, to a Hugging Face checkpoint",
        description="Write a Hugging Face checkpoint (config.json and safetensors), which transformers loads.",
    )
    convert.add_argument("source", metavar="FROM", help="a run's folder, or one with config.json and safetensors")
    convert.add_argument("folder", metavar="TO", help="a new or empty folder")
    convert.add_argument("--dtype", help="of the weights, such as bfloat16 (default: as they are)")
    convert.add_argument(
        "--like",
        metavar="FOLDER",
        help="a checkpoint whose names, layout, tokenizer and other tensors are taken (default: FROM, if it is one)",
    )
    convert.add_argument(
        "--text-only", action="store_true", help="without the vision tensors and in the releases' layout of text models"
    )
    convert.set_defaults(run=_convert)

    configs = commands.add_parser(
        "configs",
        help="the ready configs",
        description="List the ready configs, whose names stand for a CONFIG, or print one, to make your own of it.",
    )
    configs.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    configs.set_defaults(run=_configs)

    aot = commands.add_parser(
        "aot",
        help="compile a config's training step for a TPU that is not there",
        description="Compile for a TPU ahead of time, without one, and print memory, kernels, work and roofline time.",
    )
    aot.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    aot.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a value of the config, written as in TOML",
    )
    aot.add_argument(
        "--topology",
        default="tpu7x",
        help="v4, v5e, v5p, v6e or tpu7x, one device of it; also with a shape, v5e:2x4 (default: tpu7x)",
    )
    aot.add_argument(
        "--what",
        choices=("step", "forward"),
        default="step",
        help="an update of the training state, or the loss alone (default: step)",
    )
    aot.add_argument("--json", action="store_true", help="print JSON instead of a table")
    aot.set_defaults(run=_aot)

    benchmarks = _benchmarks()
    bench = commands.add_parser(
        "bench",
        help="measure speed",
        description="Measure speed; everything after NAME goes to the benchmark.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:8s}{told}" for name, told in benchmarks.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=benchmarks, metavar="NAME", help=", ".join(benchmarks))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="see `deltanox bench NAME --help`")
    bench.set_defaults(run=_bench)
    return parser


_CONFIG_HELP = "name of a ready config (see `deltanox configs`) or path of a TOML file"


def _version() -> str:
    """This library's version and those that its results depend on."""
    from deltanox import __version__

    others = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "equinox"))
    return f"deltanox {__version__} ({others}, Python {sys.version.split()[0]})"


def _train(arguments: argparse.Namespace) -> int:
    from deltanox.train import TrainingDiverged, find_checkpoint, find_config, read_config, train
    from deltanox.train._config import apply_overrides, config_from_dict
    from deltanox.train._from import start_from
    from deltanox.train._loop import default_model
    from deltanox.train._sample import sample_text
    from deltanox.train._signals import fatal_interrupt

    if arguments.config is None and arguments.resume is None and arguments.text[-1:]:
        arguments.config = _config_behind_text(arguments)
    if arguments.config is not None:
        config = read_config(arguments.config, arguments.set)
        name = find_config(arguments.config).stem
    elif arguments.resume is not None:
        config = config_from_dict(
            apply_overrides(find_checkpoint(arguments.resume).field("config", dict), arguments.set)
        )
        name = ""
    else:
        raise ValueError(
            "train: give a config, such as qwen3_5_nano (`deltanox configs` lists them), or the folder of a run with "
            "--resume"
        )
    make_model = default_model
    if arguments.start is not None:
        if arguments.resume is not None:
            raise ValueError("train: give --from or --resume, not both: a run that is resumed has its weights already")
        config, make_model = start_from(arguments.start, config)
    try:
        with fatal_interrupt():
            train(
                config,
                text=arguments.text,
                resume=arguments.resume,
                name=name,
                make_model=make_model,
                sample=sample_text,
            )
    except TrainingDiverged as error:
        print(f"deltanox: {error}", file=sys.stderr)
        return 1
    return 0


def _config_behind_text(arguments: argparse.Namespace) -> str | None:
    """The config of `--text PATH ... CONFIG`, which argparse counts among the paths: it leaves them."""
    from deltanox.train import ready_configs

    last = arguments.text[-1]
    if not (last.endswith(".toml") or (last in ready_configs() and not Path(last).exists())):
        return None
    if len(arguments.text) == 1:
        raise ValueError(
            f"train: give a config and text, but `--text {last}` is all there is, and a config by its name: write the "
            "config before --text"
        )
    return arguments.text.pop()


def _generate(arguments: argparse.Namespace) -> int:
    from deltanox.generate import Sampler, make_key
    from deltanox.interop import TOKENIZER, Text, load
    from deltanox.train._sample import load_model, load_vocabulary, stream_text
    from deltanox.train._vocabulary import check_is_bytes

    folder = Path(arguments.directory)
    sampler = Sampler(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p)
    drafts = arguments.drafts
    options = dict(max_tokens=arguments.max_tokens, sampler=sampler, seed=make_key(arguments.seed), drafts=drafts)
    if (folder / "config.json").is_file():
        model = load(folder, mtp=None if drafts else False)[0]
        text = Text.of(folder) if (folder / TOKENIZER).is_file() else None
        if text is None:
            check_is_bytes(folder, model.vocab_size)
    else:
        model, text = load_model(folder), load_vocabulary(folder).text
    if all(device.platform == "cpu" for device in model.embedding.devices()):
        model = model.unstack()
    pieces = (stream_text if text is None else text.stream)(model, arguments.prompt, **options)  # or bytes
    if text is not None and not text.stop_tokens:
        print(
            f"deltanox: no file in `{folder}` names a token that ends a text (`eos_token_id`), so it goes on for "
            f"--max-tokens {arguments.max_tokens}",
            file=sys.stderr,
        )
    say(arguments.prompt, end="")
    for piece in pieces:
        say(piece, end="")
    say("")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from deltanox.interop import TOKENIZER, Text, end_token, load, save
    from deltanox.interop._load import floating_dtype
    from deltanox.train import BYTES
    from deltanox.train._sample import load_parameters, load_vocabulary
    from deltanox.train._vocabulary import keep_text_files

    vocabulary, end = BYTES, None
    dtype = None if arguments.dtype is None else floating_dtype("convert", arguments.dtype)
    source, like = Path(arguments.source), arguments.like
    if (source / "config.json").is_file():
        model, config = load(source)
        like = source if like is None else like
        if arguments.text_only and (source / TOKENIZER).is_file():
            end = end_token(source, Text.read(source / TOKENIZER).tokenizer)
    else:
        model, run = load_parameters(source)
        config, vocabulary = run.model, load_vocabulary(source)
        end = None if vocabulary.text is None else vocabulary.end
    if arguments.text_only:
        if arguments.like is not None:
            raise ValueError("convert: give --like or --text-only, not both: one takes the layout that the other drops")
        like = None
    save(model, config, arguments.folder, like=like, dtype=dtype, end_token=end)
    vocabulary.export(Path(arguments.folder))
    if arguments.text_only and (source / "config.json").is_file():
        keep_text_files(source, Path(arguments.folder))
    sizes = [path.stat().st_size for path in Path(arguments.folder).iterdir()]
    print(f"wrote {len(sizes)} files, {_size(sum(sizes))}, to {arguments.folder}")
    return 0


def _size(count: int) -> str:
    """Bytes in a unit that leaves one to three digits before the point."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def _configs(arguments: argparse.Namespace) -> int:
    from deltanox.train import find_config, ready_configs

    if arguments.name is not None:
        print(find_config(arguments.name).read_text("utf-8"), end="")
        return 0
    for name, path in ready_configs().items():
        print(f"{name:24s}{path.read_text('utf-8').splitlines()[0].removeprefix('# ')}")
    return 0


def _aot(arguments: argparse.Namespace) -> int:
    from deltanox.tools._aot_command import run

    return run(arguments)


def _benchmarks() -> dict[str, str]:
    """The benchmarks by name, and the first sentence of what each says of itself, read without running it."""
    from deltanox import tools

    found = {}
    for module in pkgutil.iter_modules(tools.__path__):
        if module.name.startswith("bench_"):
            source = Path(tools.__path__[0], f"{module.name}.py").read_text("utf-8")
            told = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
            found[module.name.removeprefix("bench_")] = told.removesuffix(".")
    return found


def _bench(arguments: argparse.Namespace) -> int:
    return importlib.import_module(f"deltanox.tools.bench_{arguments.name}").main(arguments.arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
