r"""Train an autoregressive image Transformer with sparse attention, then draw samples from it.

The model predicts a photograph byte by byte (red, green, blue, in raster order), as in section
VII-C of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning". Every position attends to a dense
band of the latest bytes and to random older ones, the likelier the nearer; all heads and layers
share this mask. The score is bits per dimension, of which a uniform guess takes 8.

    python examples/sparse_transformer.py                        # about two minutes on two cores
    python examples/sparse_transformer.py --data my_photographs --size 32 --steps 2000
    python examples/sparse_transformer.py --data imagenet64.npz --size 64 --layers 3 --heads 8 \
        --hidden 1024 --filter 4096 --learning-rate 3e-4 --steps 100000    # the paper's model

Without --data it learns from the colour photographs inside the scikit-image package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from jaxsparse import Topology, masks, sparse_attention

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
SUFFIXES = (".png", ".jpg", ".jpeg")
FEW_IMAGES = 10  # Of fewer, parts are held out rather than whole images.
MAX_DOWNSCALE = 8
EVAL_BATCHES = 8
START = 256  # The token before the first byte; a byte is its own token.

Images = Sequence[np.ndarray]
Attend = Callable[[Array, Array, Array], Array]


class UserError(Exception):
    """A wrong option or unusable data, told in one line."""


# Data


def load_images(path: Path | None) -> list[np.ndarray]:
    """Reads uint8 (height, width, 3) images from a folder, an .npz file or (None) scikit-image."""
    if path is None:
        package = importlib.util.find_spec("skimage")
        if package is None or package.origin is None:
            raise UserError("--data: expected a path, or scikit-image installed, got neither")
        return [read_image(Path(package.origin).parent / "data" / name) for name in PHOTOGRAPHS]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES]
        if not files:
            raise UserError(f"--data {path}: expected .png or .jpg files in the folder, got none")
        return [read_image(file) for file in files]
    if path.suffix == ".npz" and zipfile.is_zipfile(path):
        return read_npz(path)
    actual = "another kind of file" if path.exists() else "nothing at this path"
    raise UserError(f"--data {path}: expected a folder of images or an .npz file, got {actual}")


def read_image(path: Path) -> np.ndarray:
    """Reads a PNG or JPEG image as uint8 (height, width, 3)."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise UserError(f"reading {path}: expected a PNG or JPEG image, got: {error}") from error


def read_npz(path: Path) -> list[np.ndarray]:
    """Reads the first array that holds images: uint8 (N, height, width, 3)."""
    others = []
    try:
        with np.load(path) as archive:
            for name, array in archive.items():
                if array.dtype == np.uint8 and array.shape[3:] == (3,) and array.size:
                    return list(array)
                others.append(f"{name} {array.dtype}{array.shape}")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"reading {path}: expected plain arrays, got: {error}") from error
    actual = ", ".join(others) or "no array"
    raise UserError(f"reading {path}: expected an array uint8(N, H, W, 3), got {actual}")


def split(images: Images, size: int) -> tuple[Images, Images]:
    """Splits images into those to train on and those held out: every tenth one.

    Of few images one alone would make a biased score, so the right fifth of each is held out.
    """
    factor = 2 if len(images) < FEW_IMAGES else 1
    for height, width, _ in (image.shape for image in images):
        if height < size or width < factor * size:
            raise UserError(
                f"cropping {len(images)} images: expected each to be at least {factor * size} "
                f"pixels wide and {size} high, got {width} x {height}; lower --size"
            )
    if factor == 1:
        return [x for i, x in enumerate(images) if i % 10], images[::10]
    cuts = [x.shape[1] - max(size, x.shape[1] // 5) for x in images]
    pairs = list(zip(images, cuts, strict=True))
    return [x[:, :cut] for x, cut in pairs], [x[:, cut:] for x, cut in pairs]


def crops(
    images: Images, size: int, batch: int, scales: int, rng: np.random.Generator
) -> Iterator[Array]:
    """Yields batches of random crops, downscaled 1 to ``scales`` times, as int32 (batch, length).

    The length is 3 size**2. Half of the crops are mirrored.
    """
    while True:
        batch_of_crops = np.empty((batch, size, size, 3), np.int32)
        for crop in batch_of_crops:
            image = images[int(rng.integers(len(images)))]
            scale = int(rng.integers(1, scales + 1))
            side = scale * size
            top, left = rng.integers(np.subtract(image.shape[:2], side) + 1)
            window = image[top : top + side, left : left + side]
            pixels = window.reshape(size, scale, size, scale, 3).mean((1, 3)).round()
            crop[:] = pixels[:, :: rng.choice((-1, 1))]
        yield jnp.asarray(batch_of_crops.reshape(batch, -1))


# Model


def smooth_codes(key: Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> Array:
    """Initializes an embedding of bytes by sine waves, so that near values start out alike.

    The model need not learn the order of 256 brightnesses first, which shortens training a lot.
    """
    values, features = shape
    octave, phase = jax.random.uniform(key, (2, features))
    waves = 2 ** (6 * octave - 1) * jnp.arange(values)[:, None] / 256 + phase
    return jnp.sin(2 * jnp.pi * waves).astype(dtype) / math.sqrt(2)


class Block(nnx.Module):
    """A pre-norm Transformer layer, which leaves to its caller how queries meet keys and values.

    So training, on whole sequences, and sampling, byte by byte on a cache, share the layer.
    """

    def __init__(self, hidden: int, heads: int, mlp: int, dtype: Any, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.merge = nnx.Linear(hidden, hidden, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(hidden, mlp, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(mlp, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, attend: Attend) -> Array:
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3 * self.heads, -1)
        query, key, value = jnp.split(qkv, 3, axis=2)  # Each (batch, length, heads, features).
        x = x + self.merge(attend(query, key, value).reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Predicts each byte of an image from the bytes before it."""

    def __init__(
        self, *, size: int, layers: int, heads: int, hidden: int, mlp: int, dtype: Any, seed: int
    ):
        rngs = nnx.Rngs(seed)
        self.size, self.hidden, self.dtype = size, hidden, dtype
        small = nnx.initializers.normal(0.5)
        self.byte = nnx.Embed(
            START + 1, hidden, embedding_init=smooth_codes, dtype=dtype, rngs=rngs
        )
        self.row = nnx.Embed(size, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.column = nnx.Embed(size, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.channel = nnx.Embed(3, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(hidden, heads, mlp, dtype, rngs) for _ in range(layers)])
        # In float32, as the softmax is. The zero scale starts from the uniform guess.
        self.norm = nnx.LayerNorm(hidden, scale_init=nnx.initializers.zeros, rngs=rngs)
        self.head = nnx.Embed(256, hidden, embedding_init=smooth_codes, rngs=rngs)

    def embed(self, previous: Array, position: Array) -> Array:
        """Embeds the previous byte and the place in the image of the one to predict."""
        pixel, channel = jnp.divmod(position, 3)
        row, column = jnp.divmod(pixel, self.size)
        return self.byte(previous) + self.row(row) + self.column(column) + self.channel(channel)

    def predict(self, x: Array) -> Array:
        """The logits of the next byte."""
        return self.head.attend(self.norm(x))

    def __call__(self, tokens: Array, topology: Topology) -> Array:
        """The logits (batch, length, 256) of all bytes, each from the tokens before it."""
        previous = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        x = self.embed(previous, jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, lambda q, k, v: sparse_attention(q, k, v, topology))
        return self.predict(x)


# Training


def bits_per_dim(model: Transformer, tokens: Array, topology: Topology) -> Array:
    """The mean loss per byte, in bits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens, topology), tokens)
    return losses.mean() / math.log(2)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, tokens: Array, topology: Topology
) -> Array:
    """Updates the model and the optimizer in place; returns the loss before."""
    loss, grads = nnx.value_and_grad(bits_per_dim)(model, tokens, topology)
    optimizer.update(model, grads)
    return loss


eval_step = nnx.jit(bits_per_dim)


class LineWriter(io.TextIOBase):
    """Makes lines of the redraws of a progress bar, for a stderr that is not a terminal."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(steps: int, quiet: bool) -> tqdm:
    """A bar on a terminal, else a line every ten seconds."""
    file, interval = (sys.stderr, 0.1) if sys.stderr.isatty() else (LineWriter(), 10)
    return tqdm(total=steps, disable=quiet, file=file, mininterval=interval, miniters=1)


@contextlib.contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """Lets the first Ctrl-C set a flag, so that it cuts no step in two; the second one quits."""
    flag = threading.Event()

    def on_interrupt(*_: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)


def train(
    model: Transformer,
    topology: Topology,
    batches: Iterator[Array],
    held_out: Sequence[Array],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Trains for ``args.steps``, or until Ctrl-C; returns the loss curve and the throughput."""

    def score() -> float:
        return float(np.mean([eval_step(model, tokens, topology) for tokens in held_out]))

    warmup = min(1000, args.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.01)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
    curve: list[dict[str, Any]] = [{"step": 0, "train": None, "held_out": score()}]
    losses: list[float] = []
    seconds = timed = speed = 0.0
    tokens = next(batches)
    with interrupt_flag() as interrupted, progress_bar(args.steps, args.quiet) as bar:
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            loss = train_step(model, optimizer, tokens, topology)
            tokens = next(batches)  # While the device works: the step above is only enqueued.
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise UserError(
                    f"training: expected a finite loss, got {losses[-1]} at step {step}; "
                    f"lower --learning-rate"
                )
            if step == 2:  # The first step was mostly compilation.
                seconds = timed = 0
            seconds += time.perf_counter() - start
            timed += tokens.size
            speed = timed / seconds
            last = step == args.steps or interrupted.is_set()
            if last or step % args.eval_every == 0:
                mean = float(np.mean(losses[curve[-1]["step"] :]))
                curve.append({"step": step, "train": mean, "held_out": score()})
            bar.set_postfix_str(
                f"{np.mean(losses[-20:]):.2f} bits/dim, held out {curve[-1]['held_out']:.2f}, "
                f"{speed:,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
            if last:
                break
    return {"steps": step, "curve": curve, "tokens_per_second": speed}


# Sampling


def padded_rows(topology: Topology) -> tuple[Array, Array]:
    """The columns of every row, padded to a rectangle, and where they are no padding."""
    lengths = np.diff(np.asarray(topology.row_offsets))
    stored = np.arange(lengths.max()) < lengths[:, None]
    columns = np.zeros(stored.shape, np.int32)
    columns[stored] = np.asarray(topology.column_indices)[: topology.nnz]
    return jnp.asarray(columns), jnp.asarray(stored)


@nnx.jit
def sample(
    model: Transformer, tokens: Array, known: Array, rows: tuple[Array, Array], key: Array
) -> Array:
    """Draws the tokens that are not ``known``, in order; ``rows`` are from :func:`padded_rows`.

    The keys and values of past positions are cached. Each new one reads those its row of the
    topology names, so a whole image costs about as much as one pass over it.
    """
    batch, length = tokens.shape
    heads = model.blocks[0].heads
    empty = jnp.zeros((batch, length, heads, model.hidden // heads), model.dtype)

    def step(carry: Any, inputs: Any) -> Any:
        previous, caches = carry
        position, (columns, stored), given, is_known, step_key = inputs
        new_caches: list[Array] = []

        def attend(query: Array, key: Array, value: Array) -> Array:
            cache = caches[len(new_caches)].at[:, :, position].set(jnp.stack([key, value])[:, :, 0])
            new_caches.append(cache)
            keys, values = cache[:, :, columns]
            return jax.nn.dot_product_attention(query, keys, values, mask=stored[None, None, None])

        x = model.embed(previous[:, None], position[None])
        for block in model.blocks:
            x = block(x, attend)
        drawn = jax.random.categorical(step_key, model.predict(x)[:, 0])
        token = jnp.where(is_known, given, drawn)
        return (token, new_caches), token

    start = (jnp.full(batch, START), [jnp.stack([empty, empty])] * len(model.blocks))
    inputs = (jnp.arange(length), rows, tokens.T, known.T, jax.random.split(key, length))
    return jax.lax.scan(step, start, inputs)[1].T


# Program


def draw(
    path: Path, rows: dict[str, Array], size: int, topology: Topology, curve: list[Any]
) -> None:
    """Draws titled rows of images, given as tokens, above the mask and the loss curve."""
    images = np.stack(list(rows.values())).reshape(len(rows), -1, size, size, 3).astype(np.uint8)
    gap = max(1, size // 16)
    framed = np.pad(images, ((0, 0), (0, 0), (gap, gap), (gap, gap), (0, 0)), constant_values=255)
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplot_mosaic([["images", "images"], ["mask", "loss"]])
    mosaic = framed.swapaxes(1, 2).reshape(len(rows) * framed.shape[2], -1, 3)
    axes["images"].imshow(mosaic, interpolation="nearest")
    axes["images"].set_xticks([])
    axes["images"].set_yticks((np.arange(len(rows)) + 0.5) * framed.shape[2], list(rows))
    axes["images"].spines[:].set_visible(False)
    topology.plot(ax=axes["mask"])
    axes["mask"].set_title("attention mask")
    for name in ("train", "held_out"):
        label = name.replace("_", " ")
        axes["loss"].plot([x["step"] for x in curve], [x[name] for x in curve], "o-", label=label)
    axes["loss"].set(xlabel="step", title="bits per dimension")
    axes["loss"].grid(alpha=0.3)
    axes["loss"].legend()
    figure.savefig(path, dpi=120)


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Returns a parser of an int or float from ``low`` up to, but not including, ``high``."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) < high:
                return value
        raise argparse.ArgumentTypeError(
            f"expected {kind.__name__} in [{low:g}, {high:g}), got {text}"
        )

    return parse


class Parser(argparse.ArgumentParser):
    """Leaves out the usage text when an option is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options, and derives the defaults that depend on others."""
    description = argparse.RawDescriptionHelpFormatter
    parser = Parser("sparse_transformer", description=__doc__, formatter_class=description)
    add, count = parser.add_argument, number(int, 1, 2**31)
    add("--data", type=Path, help="folder of .png or .jpg, or .npz with a uint8 (N, H, W, 3)")
    add("--output", type=Path, default="sparse_transformer_out", help="folder to write to")
    add("--size", type=count, default=16, help="side of the crops, in pixels (16)")
    add("--layers", type=count, default=2, help="Transformer layers (2)")
    add("--heads", type=count, default=4, help="attention heads (4)")
    add("--hidden", type=count, default=128, help="hidden features (128)")
    add("--filter", type=count, help="features inside the MLP (4 x hidden)")
    add("--band", type=count, help="width of the dense band (4 x size: 1 1/3 rows of pixels)")
    add("--sparsity", type=number(float, 0, 1), default=0.95, help="outside the band (0.95)")
    add("--batch", type=count, default=4, help="crops per step (4)")
    add("--steps", type=count, default=800, help="training steps (800)")
    add("--learning-rate", type=number(float, 0), default=3e-3, help="the highest (3e-3)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    add("--eval-every", type=count, default=100, help="steps between held-out scores (100)")
    add("--samples", type=count, default=8, help="images to complete, and to generate (8)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of the data, mask and model (0)")
    add("--quiet", action="store_true", help="print only the last line")
    args = parser.parse_args(argv)
    if args.hidden % args.heads:
        raise UserError(f"--hidden: expected a multiple of --heads {args.heads}, got {args.hidden}")
    args.filter = args.filter or 4 * args.hidden
    args.band = args.band or 4 * args.size
    return args


def run(args: argparse.Namespace) -> None:
    """Trains, samples, and writes the picture and the metrics."""
    images = load_images(args.data)
    train_images, eval_images = split(images, args.size)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {args.output}: expected a folder, got: {error}") from error

    # One range for both parts, as the loss depends on it: detail grows with the downscaling.
    smallest = min(min(x.shape[:2]) for x in (*train_images, *eval_images))
    scales = min(MAX_DOWNSCALE, smallest // args.size)
    train_rng, eval_rng = np.random.default_rng(args.seed).spawn(2)
    batches = crops(train_images, args.size, args.batch, scales, train_rng)
    eval_batches = crops(eval_images, args.size, args.batch, scales, eval_rng)
    held_out = [next(eval_batches) for _ in range(EVAL_BATCHES)]
    originals = next(crops(eval_images, args.size, args.samples, scales, eval_rng))

    length = 3 * args.size**2
    older = masks.random(args.sparsity, length, band_width=args.band, seed=args.seed)
    mask = (masks.band(args.band) | older) & masks.causal()
    topology = Topology.from_mask(mask, (length, length))
    model = Transformer(
        size=args.size,
        layers=args.layers,
        heads=args.heads,
        hidden=args.hidden,
        mlp=args.filter,
        dtype=jnp.dtype(args.dtype),
        seed=args.seed,
    )
    device = jax.devices()[0].device_kind
    if not args.quiet:
        parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        part = len(eval_images) if len(images) >= FEW_IMAGES else "the right fifth of each"
        print(
            f"device: {device}\n"
            f"data: {args.data or 'scikit-image'}, {len(images)} photographs, {part} held out, "
            f"downscaled 1 to {scales} times\n"
            f"model: {parameters:,} parameters on sequences of {length:,} bytes\n"
            f"mask: {topology}",
            flush=True,
        )
    results = train(model, topology, batches, held_out, args)

    known = jnp.zeros((2 * args.samples, length), bool)
    known = known.at[: args.samples, : args.size // 2 * args.size * 3].set(True)
    key, rows = jax.random.key(args.seed), padded_rows(topology)
    drawn = sample(model, jnp.tile(originals, (2, 1)), known, rows, key)
    completed, generated = jnp.split(drawn, 2)
    picture = args.output / "sparse_transformer.png"
    titles = ("held out", "lower half\ngenerated", "all\ngenerated")
    titled = dict(zip(titles, (originals, completed, generated), strict=True))
    draw(picture, titled, args.size, topology, results["curve"])

    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    versions = {name: version(name) for name in ("jax", "flax", "optax", "jaxsparse")}
    metrics = {"options": options, "device": device, "versions": versions, **results}
    (args.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    before, after = (results["curve"][i]["held_out"] for i in (0, -1))
    print(
        f"held out: {before:.3f} -> {after:.3f} bits/dim in {results['steps']} steps, "
        f"{results['tokens_per_second']:,.0f} tokens/s; picture: {picture}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    try:
        run(parse_args(argv))
    except UserError as error:
        print(f"sparse_transformer: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparse_transformer: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
