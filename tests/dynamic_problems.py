"""Random graphs, cells and operands for the tests of scans over graphs, and a loop over rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import dynamic
from jaxsparse.dynamic import form as forms


def script_of(sources, kinds=None, x_rows=None, *, leaves, used_tiles=None, inputs=0, kind_count=1):
    """The script of rows that are given by their children, (tiles, width, slots).

    It is written word by word, as docs/dynamic.md says, not by the packers.
    """
    sources = np.asarray(sources, np.int32)
    tiles, width, slots = sources.shape
    form = dynamic.Form(leaves, tiles, width, slots, 1, 1, inputs, kind_count)
    used_tiles = tiles if used_tiles is None else used_tiles
    words = np.full(form.words, -1, np.int32)
    used = {"leaves": leaves, "tiles": used_tiles, "graphs": 0, "inputs": inputs}
    words[: forms.SECTION] = 0
    words[0] = forms.VERSION
    words[1:5] = [used[name] for name in forms.USED]
    words[5:14] = [getattr(form, name) for name in forms.SIZES]
    words[form.group_tiles_offset : form.records_offset] = 0
    words[form.group_tiles_offset + 1] = used_tiles
    records = words[form.records_offset : form.roots_offset].reshape(tiles, form.record_words)
    records[:, 0] = 0 if kinds is None else kinds
    records[:, 2 : 2 + width * slots] = sources.reshape(tiles, -1)
    if x_rows is not None:
        records[:, 2 + width * slots :][:, :width] = x_rows
    return dynamic.Script(words, form)
