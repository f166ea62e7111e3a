"""The shape of a mask, and how many tiles and partial cells its lists have room for."""

from __future__ import annotations

from typing import Any

from jaxsparse.block_mask.words import CELL, TILE, WORDS
from jaxsparse.integers import INT32_MAX, integer

_MOST = INT32_MAX - TILE  # so that no position of a tile is beyond int32
_MOST_BYTES = 64 * 2**20  # that are taken without being asked for


def check_shape(operation: str, shape: Any) -> tuple[int, int]:
    """The shape ``(T, S)`` that is asked for.

    Raises:
        TypeError, ValueError: if it is not two integers in [0, 2**31 - 128).
    """
    try:
        T, S = shape
    except (TypeError, ValueError):
        raise ValueError(f"{operation}: shape must be (T, S), got {shape!r}") from None
    return integer(operation, "T", T, 0, _MOST), integer(operation, "S", S, 0, _MOST)


def check_rooms(
    operation: str, max_tiles: int | None, max_cells: int | None
) -> tuple[int | None, int | None]:
    """The room that is asked for.

    Raises:
        TypeError, ValueError: if a number is not an integer >= 0.
    """

    def check(name: str, room: int | None) -> int | None:
        return None if room is None else integer(operation, name, room, 0)

    return check("max_tiles", max_tiles), check("max_cells", max_cells)


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
        ValueError: if none is given and the most is much.
    """
    tiles = tiles if max_tiles is None else min(tiles, max_tiles)
    cells = cells if max_cells is None else min(cells, max_cells)
    needed = _bytes_of(tiles, cells)
    if takes_much(tiles, cells) and (max_tiles is None or max_cells is None):
        raise ValueError(
            f"{operation}: room for all {tiles} tiles and {cells} partial cells that there may be "
            f"would take {needed / 2**20:.0f} MB: say how many there are at most, by max_tiles=... "
            "and max_cells=..."
        )
    return max(1, tiles), max(1, cells)
