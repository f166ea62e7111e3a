"""The extension module (ffi/module.cc)."""

from collections.abc import Sequence
from typing import Any

def operations() -> list[dict[str, Any]]: ...
def choose_cpu_variant(
    operation: str,
    operands: Sequence[tuple[str, Sequence[int]]],
    results: Sequence[tuple[str, Sequence[int]]],
    attributes: dict[str, bool | int | float | str],
) -> tuple[str, list[tuple[str, float]]]: ...
def choose_cuda_variant(
    operation: str,
    operands: Sequence[tuple[str, Sequence[int]]],
    results: Sequence[tuple[str, Sequence[int]]],
    attributes: dict[str, bool | int | float | str],
    *,
    compute_capability: int,
    multiprocessors: int,
    shared_bytes: int,
) -> tuple[str, list[tuple[str, float]]]: ...
def kernels_on_cuda(
    operation: str,
    operands: Sequence[tuple[str, Sequence[int]]],
    results: Sequence[tuple[str, Sequence[int]]],
    attributes: dict[str, bool | int | float | str],
    *,
    compute_capability: int,
    multiprocessors: int,
    shared_bytes: int,
) -> list[tuple[str, str, str]]: ...
def workspace_bytes(
    operation: str,
    operands: Sequence[tuple[str, Sequence[int]]],
    results: Sequence[tuple[str, Sequence[int]]],
    attributes: dict[str, bool | int | float | str],
) -> int: ...
def tile_starts_shape(rows: int, columns: int, nse: int) -> tuple[int, ...]: ...
def row_units(rows: int, columns: int, nse: int) -> int: ...
def cpu_isa() -> str: ...
def pack_streams(
    row_offsets: Any,
    column_indices: Any,
    row_order: Any,
    *,
    columns: int,
    cell: int,
    parts: int,
    bits: int = 16,
) -> tuple[Any, Any, Any, Any]: ...
def order_for_gaps(
    row_offsets: Any, column_indices: Any, row_order: Any, *, columns: int, parts: int
) -> Any: ...
def pack_gaps(
    row_offsets: Any, column_indices: Any, row_order: Any, *, columns: int, parts: int
) -> tuple[Any, Any, Any]: ...
def configure_compiler(source_folder: str, libraries: list[str]) -> None: ...
def compile_kernel(file: str, expression: str, architecture: str, text: str = "") -> bytes: ...
def load_kernel(file: str, expression: str, text: str, device: int = 0) -> None: ...
def nvrtc_version() -> str: ...
def cuda_devices() -> list[tuple[str, int, int, int]]: ...
def take_scan_failures() -> list[int]: ...
def architecture_name(compute_capability: int) -> str: ...
def plan_sparse_layout(
    *,
    products: int,
    state_parts: int,
    hidden: int,
    nnz: int,
    batch: int,
    state_bytes: int,
    multiprocessors: int,
) -> dict[str, int]: ...
def lay_out_sparse(
    row_offsets: Any,
    column_indices: Any,
    permutation: Any,
    *,
    hidden: int,
    products: int,
    state_parts: int,
    blocks: int,
    cluster: int,
    most_threads: int,
    fewest_threads: int,
    entries: int,
    group: int,
    piece_bytes: int,
    bank_aware: bool,
) -> dict[str, Any]: ...
def sizes_of_layout(form: dict[str, int]) -> dict[str, int]: ...
def widest_piece(batch: int, state_bytes: int) -> int: ...
def most_pairs_batch(state_bytes: int) -> int: ...
def scan_variants() -> list[tuple[str, str, bool, bool]]: ...
def plan_scan(
    variant: str,
    *,
    products: int,
    states: int,
    inputs: int,
    outputs: int,
    hidden: int,
    batch: int,
    length: int,
    state_dtype: str,
    weight_dtype: str,
    sparse: bool,
    layout_form: dict[str, int] | None,
    not_laid_out: str,
    directions: int,
    loops: int,
    multiprocessors: int,
    shared_bytes: int,
) -> tuple[dict[str, Any] | None, str, int, float]: ...
def plan_wave(
    variant: str,
    *,
    layers: int,
    products: int,
    states: int,
    own_products: int,
    own_states: int,
    below_products: int,
    below_states: int,
    skip: tuple[int, int] | None,
    means: Sequence[tuple[int, bool, int]],
    scales: bool,
    inputs: int,
    outputs: int,
    hidden: int,
    batch: int,
    length: int,
    state_dtype: str,
    weight_dtype: str,
    compute_capability: int,
    multiprocessors: int,
    shared_bytes: int,
) -> tuple[dict[str, Any] | None, str]: ...
def plan_teams(
    variant: str,
    *,
    emits: bool,
    products: int,
    slots: int,
    kinds: int,
    carries: int,
    arrays: int,
    hidden: int,
    tiles: int,
    groups: int,
    dtype: str,
    multiprocessors: int,
    shared_bytes: int,
) -> tuple[dict[str, Any] | None, str]: ...
def plan_loss(
    variant: str,
    *,
    products: int,
    slots: int,
    carries: int,
    arrays: int,
    emit_arrays: int,
    hidden: int,
    tiles: int,
    groups: int,
    classes: int,
    dtype: str,
    multiprocessors: int,
    shared_bytes: int,
) -> tuple[dict[str, Any] | None, str]: ...
def team_workspace_bytes(*, teams: int, sums: int, rows: int, hidden: int) -> int: ...
def loss_workspace_bytes(
    *,
    teams: int,
    sums: int,
    carries: int,
    rows: int,
    hidden: int,
    saved_bytes: int,
    blocks: int,
    threads: int,
    classes: int,
) -> int: ...
def make_graphs(
    offsets: Any,
    children: Any,
    kinds: Any,
    roots: Any,
    has_input: Any,
    channels: Sequence[tuple[int, bool, Any]],
) -> tuple[Any, Any, Any]: ...
def pack_graphs(
    graphs: Any,
    batches: Any,
    *,
    width: int,
    slots: int,
    groups: int,
    kinds: int,
    room: tuple[int, int, int, int] | None,
) -> tuple[tuple[int, int, int, int], Any]: ...
def parse_brackets(
    text: str, *, slots: int, vocabulary: Sequence[str], closed: bool
) -> tuple[Any, Any, Any, Any, list[str]]: ...
def cache_folder() -> str: ...
def cache_limit() -> int: ...

NO_TILE_STARTS: int
PLACES_OF_UNIT: int
PLACES_OF_ROW: int
MOST_OF_WHOLE_ROW: int
SCAN_DTYPES: dict[str, str]
SCAN_MOST_ARRAYS: int
LOSS_MOST_CLASSES: int
TEAM_MOST_ARRAYS: int
TEAM_TILE_ROWS: int
WAVE_MMA_MOST_ROWS: int
WAVE_MOST_MEANS: int
WAVE_VARIANTS: dict[str, str]
