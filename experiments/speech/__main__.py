r"""Train speech recognisers of several depths and skips, and compare their error rates.

The table is like table 1 of Diamos et al. 2016, "Persistent RNNs: Stashing Weights On-Chip": deep
stacks of plain recurrent layers without skips and with skips of 1 to 8 layers, and skips of 4 in
stacks of 8, 24 and 48, all with at most 800 ms of future context. The recogniser is that of
python -m examples.speech. The paper's data, 500 hours, are not public: compare the order of the
models, not their error rates.

    python -m experiments.speech                                 # a few small models, for a CPU
    python -m experiments.speech --preset paper --data an4.npz   # the paper's depths, for a GPU
    python -m experiments.speech --models 16 16:4 --seeds 0 1 2 --cell gru --hidden 64

--models names them: layers, and after a colon the skip; without one there are no skips. Each is
trained once for each of --seeds. The other options, and the data, are those of the example.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there: finished runs are
kept, the result is that of an unbroken study, to the last bit on a CPU, and --models and --seeds
may name further ones. On several GPUs start one program for each with some of the models, all with
one --output; when they are done, --resume with all models makes the table. A run whose loss stops
being finite counts as one with all wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

from examples.common.errors import UserError, memory_errors
from examples.common.program import (
    Parser,
    describe,
    number,
    parse_with_presets,
    replacing,
    run_program,
    to_json,
    write_json,
)
from examples.speech.options import (
    MEMORY_OPTIONS,
    NAME,
    add_options,
    check_skip,
    load_corpus,
    print_setup,
)

from .drawing import draw
from .report import PAPER, summaries, table
from .study import Model, open_models, parse_model, result_of

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "models": [Model(4, 4), Model(12), Model(12, 1), Model(12, 4)],
        "seeds": [0],
        "cell": "rnn_tanh",
        "direction": "forward",
        "hidden": 64,
        "steps": 400,
        "buckets": 1,
    },
    # The models of the paper's table 1, of 256 units instead of its many more. On a GPU layers with
    # such norms, batch and dtype run at once, as waves.
    "paper": {
        "models": [Model(48, n) for n in range(9)] + [Model(8, 4), Model(24, 4)],
        "seeds": [0, 1, 2],
        "cell": "rnn_tanh",
        "direction": "forward",
        "lookahead": 25,
        "norm": "rms",
        "hidden": 256,
        "batch": 16,
        "dtype": "bfloat16",
        "steps": 1200,
        "buckets": 1,
        "learning_rate": 1e-3,
        "checkpoint_every": 400,
    },
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser("python -m experiments.speech", __doc__)
    add, quick = parser.add_argument, PRESETS["quick"]
    models = " ".join(model.name for model in quick["models"])
    add("--preset", choices=PRESETS, default="quick", help="others override it (quick)")
    add(
        "--models",
        type=parse_model,
        nargs="+",
        metavar="LAYERS[:SKIP]",
        help=f"to train ({models})",
    )
    seed = number(int, 0, 2**32)
    add("--seeds", type=seed, nargs="+", help="of parameters: a run of each model for each (0)")
    add("--seed", type=seed, default=0, help="of generated digits (0)")
    add_options(parser)
    parser.set_defaults(output="speech_study_out")
    args = parse_with_presets(parser, argv, PRESETS)
    for option, names in (("models", [x.name for x in args.models]), ("seeds", args.seeds)):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"--{option}: expected each once, got {repeated[0]} twice")
    for model in args.models:
        check_skip("--models", model.layers, model.skip)
    return args


def run(args: argparse.Namespace) -> None:
    """Trains the models, one after the other, and writes what came out."""
    corpus = load_corpus(args)
    runs = open_models(NAME, corpus, args)
    if not args.quiet:
        print_setup(args, corpus)
    results = []
    for each in runs:
        with memory_errors(f"training {each.run.name}", MEMORY_OPTIONS):
            results.append(result_of(each, corpus))
    options = to_json(args) | {"models": [model.name for model in args.models]}
    about = describe(options, jax.local_devices()[:1]) | {"data": corpus.identity}
    rows = summaries(results)
    write_json(args.output / "metrics.json", about | {"paper": PAPER, "models": rows})
    picture = args.output / "speech.png"
    with replacing(picture) as aside:
        draw(rows).savefig(aside, dpi=85)
    print(table(rows))
    print(f"\npicture: {picture}")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
