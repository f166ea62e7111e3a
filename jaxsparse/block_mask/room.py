"""How many tiles and partial cells the lists of a mask in a program have room for."""

from __future__ import annotations

from jaxsparse.block_mask.words import CELL, TILE, WORDS
from jaxsparse.integers import integer

_MOST_BYTES = 64 * 2**20  # that are taken without being asked for


def tiles_of(shape: tuple[int, int]) -> int:
    """All tiles of a shape."""
    return -(-shape[0] // TILE) * -(-shape[1] // TILE)


def cells_of(shape: tuple[int, int]) -> int:
    """All cells of a shape."""
    return -(-shape[0] // CELL) * -(-shape[1] // CELL)


def _bytes_of(tiles: int, cells: int) -> int:
    return 2 * (8 * tiles + 4 * WORDS * cells)


def takes_much(tiles: int, cells: int) -> bool:
    """Whether room for so many, in both orientations, is taken only where it is asked for."""
    return _bytes_of(tiles, cells) > _MOST_BYTES


def check_room(
    operation: str, max_tiles: int | None, max_cells: int | None, tiles: int, cells: int
) -> tuple[int, int]:
    """The room for tiles and partial cells: what is asked for, else what there can be at most.

    Raises:
        TypeError, ValueError: if a number is not an integer >= 0.
        ValueError: if none is given and the most is much.
    """
    if max_tiles is not None:
        tiles = min(tiles, integer(operation, "max_tiles", max_tiles, 0))
    if max_cells is not None:
        cells = min(cells, integer(operation, "max_cells", max_cells, 0))
    needed = _bytes_of(tiles, cells)
    if takes_much(tiles, cells) and (max_tiles is None or max_cells is None):
        raise ValueError(
            f"{operation}: room for all {tiles} tiles and {cells} partial cells that there may be "
            f"would take {needed / 2**20:.0f} MB: say how many there are at most, by max_tiles=... "
            "and max_cells=..."
        )
    return max(1, tiles), max(1, cells)
