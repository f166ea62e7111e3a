r"""Train recurrent language models dense and pruned, and compare them at equal numbers of weights.

Each model predicts a text character by character, as that of python -m examples.char_rnn does, by
the recipe of Zhu et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip",
appendix B. The table, like table 2 of the paper, has large sparse models beside small dense ones;
the score is bits per character on held-out text.

    python -m experiments.char_rnn                               # about two minutes on two cores
    python -m experiments.char_rnn --hidden 256:0.0625 256:0.0625:unstructured
    python -m experiments.char_rnn --data book.txt --hidden 128 512:0.0625 --cell gru
    python -m experiments.char_rnn --preset h200                 # the sizes of the paper, for a GPU

--hidden names the models: units, after a colon the density to prune to, and after another one the
structure of the masks, where it is not that of --structure. Without --data they learn from the help
texts that come with Python (pydoc_data.topics). --data takes any text file, in UTF-8 or, with
--tokens bytes, of any kind.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there: finished models
are kept, the result is that of an unbroken run, to the last bit on a CPU, and --hidden may name
further models. The text must be the same.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

from examples.char_rnn.model import Hidden
from examples.char_rnn.options import (
    MEMORY_OPTIONS,
    NAME,
    add_options,
    check_options,
    load_corpus,
    parse_hidden,
    parts_of,
    print_setup,
)
from examples.common.errors import UserError, memory_errors
from examples.common.program import (
    Parser,
    describe,
    number,
    parse_with_presets,
    run_program,
    to_json,
    write_json,
)
from examples.common.text import Corpus, printable

from .drawing import draw
from .report import table
from .study import open_models, result_of

PRESETS: dict[str, dict[str, Any]] = {
    # Three sparse models with as many recurrent weights as the smallest dense one. What is not here
    # is as in the example.
    "quick": {
        "hidden": [
            *map(Hidden, (64, 128, 256)),
            Hidden(128, 0.25),
            Hidden(256, 0.0625),
            Hidden(256, 0.0625, "unstructured"),
        ],
        "speed_batches": [8],
    },
    # The sizes and densities of the paper's table 2, in the layers of its network.
    "h200": {
        "hidden": [
            *map(Hidden, (256, 362, 512, 768, 1024, 1448)),
            Hidden(256, 0.125),
            Hidden(512, 0.0625),
            Hidden(768, 0.0417),
            Hidden(1024, 0.047),
            Hidden(1024, 0.125),
            Hidden(1448, 0.047),
            Hidden(1024, 0.047, "unstructured"),
        ],
        "layers": 2,
        "embedding": 512,
        "batch": 64,
        "length": 128,
        "steps_per_epoch": None,  # A pass over the text.
        "eval_every": 50,
        "checkpoint_every": 200,
        "learning_rate": 2e-3,
        "dtype": "bfloat16",
        "speed_batches": [1, 8, 64],
    },
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser("python -m experiments.char_rnn", __doc__)
    add, quick = parser.add_argument, PRESETS["quick"]
    models = " ".join(hidden.name for hidden in quick["hidden"])
    add("--preset", choices=PRESETS, default="quick", help="others override it (quick)")
    add(
        "--hidden",
        type=parse_hidden,
        nargs="+",
        metavar="UNITS[:DENSITY[:STRUCTURE]]",
        help=f"one model each ({models})",
    )
    add(
        "--speed-batches",
        type=number(int, 1, 2**31),
        nargs="+",
        help=f"batches at which speed is measured ({quick['speed_batches'][0]})",
    )
    add_options(parser)
    parser.set_defaults(output="char_rnn_study_out")
    args = parse_with_presets(parser, argv, PRESETS)
    names = [hidden.name for hidden in args.hidden]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--hidden: expected each model once, got {repeated[0]} twice")
    # With --structure unstructured two models of a preset are the same: it is trained once.
    args.hidden = list(dict.fromkeys(x.with_structure(args.structure) for x in args.hidden))
    check_options(args)
    return args


def run(args: argparse.Namespace) -> None:
    """Trains the models, one after the other, and writes what came out."""
    corpus = load_corpus(args)
    check_speed_batches(args, corpus)
    prompt = corpus.held_out[:1] if args.prompt is None else corpus.encode(args.prompt)
    runs = open_models(NAME, corpus, args)
    if not args.quiet:
        print_setup(args, corpus)
    results = []
    for each, hidden in zip(runs, args.hidden, strict=True):
        with memory_errors(f"training with {hidden.name} units", MEMORY_OPTIONS):
            results.append(result_of(each, hidden, corpus, prompt, args))
    best = best_of(results)
    options = to_json(args) | {"hidden": [hidden.name for hidden in args.hidden]}
    about = describe(options, jax.local_devices()[:1]) | {"text": corpus.identity}
    picture = args.output / "char_rnn.png"
    draw(picture, results, parts_of(args)["masks change"])
    write_json(args.output / "metrics.json", about | {"best": best["name"], "models": results})
    print(table(results))
    print(f"\npicture: {picture}")
    print(f"drawn from {best['name']} at temperature {args.temperature:g}:\n")
    print(printable(best["sample"]))


def check_speed_batches(args: argparse.Namespace, corpus: Corpus) -> None:
    """Raises a UserError if the text has no window for a batch."""
    most = (len(corpus.train) - 1) // args.length
    if max(args.speed_batches) > most:
        raise UserError(
            f"--speed-batches: expected at most {most}, for which there is text, got "
            f"{max(args.speed_batches)}"
        )


def best_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The best sparse model, or the best one if all are dense."""
    sparse = [result for result in results if result["density"] < 1]
    return min(sparse or results, key=lambda result: result["bits_per_character"])


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
