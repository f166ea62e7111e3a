"""The windows in which a recurrent model reads a text, from its beginning to its end."""

from __future__ import annotations

import numpy as np

# Held-out text is scored in a fixed number of streams, as each begins with a state of 0: scores of
# all batch sizes and lengths compare.
SCORING_STREAMS = 8
SCORING_LENGTH = 64


class Windows:
    """A text cut into equal streams, one for each row of a batch, that are read window by window.

    The end of a window leads to the next one of the same streams, so that a state may be carried
    over: backpropagation through time is truncated at windows, memory is not.
    """

    def __init__(self, tokens: np.ndarray, batch: int, length: int):
        per_stream = (len(tokens) - 1) // batch
        self.length, self.count = length, per_stream // length
        self.inputs = tokens[: batch * per_stream].reshape(batch, per_stream)
        self.targets = tokens[1 : batch * per_stream + 1].reshape(batch, per_stream)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The window of an index from 0; past the end of the streams they begin again."""
        place = index % self.count
        columns = slice(place * self.length, (place + 1) * self.length)
        return {
            "inputs": self.inputs[:, columns],
            "targets": self.targets[:, columns],
            "fresh": np.array(place == 0),
        }


class Passage:
    """A text in windows that hold all of it, whatever the sizes of training are.

    Each token is a target once, in the order of the text from row to row. The last rows are padded.
    """

    def __init__(self, before: np.ndarray, tokens: np.ndarray):
        """Takes the token before the text, which the first one is predicted from."""
        self.size = len(tokens)
        multiple = SCORING_STREAMS * SCORING_LENGTH
        padded = np.pad(np.concatenate([before, tokens]), (0, -self.size % multiple))
        self.windows = Windows(padded, SCORING_STREAMS, SCORING_LENGTH)

    def mean(self, losses: list[np.ndarray]) -> float:
        """The mean over the text of what each window has of its targets."""
        in_order = np.concatenate(losses, axis=1).ravel()
        return float(np.mean(in_order[: self.size], dtype=np.float64))
