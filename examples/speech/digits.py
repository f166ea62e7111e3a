"""Made-up speech: digits that formants synthesise, with speakers, tempos, rooms and noise.

It sounds like nobody. What a recogniser reaches on it says nothing about real speech: it is there
so that the example runs without a file. No waveform is made, but the spectrum of each frame, of
which 13 mel-frequency cepstral coefficients (MFCC) are taken as of a recording.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.fft import dct

COEFFICIENTS = 13
CHANNELS = 24  # Of the mel filter bank.
HIGHEST = 8000.0  # Hz.
FRAME_MS = 10.0
MOST_DIGITS = 6  # In an utterance.


class Phone(NamedTuple):
    """A target that the vocal tract moves to."""

    formants: tuple[float, float, float]  # Hz.
    voice: float  # Loudness of the formants, dB.
    noise: float = -40  # Loudness of the hiss, dB.
    hiss: float = 4000  # Where it is, Hz.
    ms: float = 80


# The formants of vowels are the means of men in Peterson and Barney 1952, "Control Methods Used in
# a Study of the Vowels". The consonants are rough.
PHONES = {
    "AA": Phone((730, 1090, 2440), 0),
    "AH": Phone((640, 1190, 2390), 0, ms=70),
    "AO": Phone((570, 840, 2410), 0),
    "EH": Phone((530, 1840, 2480), 0),
    "IH": Phone((390, 1990, 2550), -1, ms=70),
    "IY": Phone((270, 2290, 3010), -2, ms=90),
    "OW": Phone((450, 900, 2300), -1),
    "UW": Phone((300, 870, 2240), -3, ms=90),
    "F": Phone((400, 1300, 2300), -40, -18, 5500, 90),
    "K": Phone((400, 1800, 2300), -40, -8, 2200, 40),
    "N": Phone((280, 1700, 2600), -9, ms=70),
    "R": Phone((310, 1060, 1500), -4, ms=60),
    "S": Phone((400, 1700, 2500), -40, -4, 6000, 110),
    "T": Phone((400, 1800, 2600), -40, -8, 4500, 40),
    "TH": Phone((400, 1400, 2500), -40, -22, 5000, 80),
    "V": Phone((250, 1100, 2200), -12, -22, 5500, 60),
    "W": Phone((290, 610, 2150), -5, ms=60),
    "Z": Phone((250, 1700, 2500), -14, -9, 6000, 80),
    "-": Phone((500, 1500, 2500), -40, ms=50),  # Silence, also that before a burst.
}
WORDS = {
    "ZERO": "Z IH R OW",
    "ONE": "W AH N",
    "TWO": "- T UW",
    "THREE": "TH R IY",
    "FOUR": "F AO R",
    "FIVE": "F AA IY V",
    "SIX": "S IH - K S",
    "SEVEN": "S EH V AH N",
    "EIGHT": "EH IY - T",
    "NINE": "N AA IY N",
}


def generate(count: int, seed: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Frames (frames, 13) of utterances, their offsets (count + 1,), and what is said.

    Each utterance has a speaker of its own.
    """
    rng = np.random.default_rng(seed)
    names = list(WORDS)
    frames, texts = [], []
    for _ in range(count):
        words = [names[i] for i in rng.integers(len(names), size=rng.integers(1, MOST_DIGITS + 1))]
        frames.append(speak(words, rng))
        texts.append(" ".join(words))
    offsets = np.cumsum([0, *map(len, frames)])
    return np.concatenate(frames), offsets, texts


def speak(words: list[str], rng: np.random.Generator) -> np.ndarray:
    """The MFCC frames of some words by a new speaker in a new room."""
    track = movements(words, rng)
    formants, voice, noise, hiss = track[:, :3], track[:, 3], track[:, 4], track[:, 5]
    formants = formants * rng.uniform(0.8, 1.25)  # The shorter the vocal tract, the higher.
    centres = np.linspace(mel(60.0), mel(HIGHEST), CHANNELS)
    hz = 700 * (np.exp(centres / 1127) - 1)
    resonances = np.exp(-0.5 * ((centres - mel(formants)[..., None]) / 110) ** 2)
    weights = np.array([1, 0.5, 0.25])  # High formants are weaker.
    voiced = decibels(voice)[:, None] * np.einsum("k,tkc->tc", weights, resonances)
    hissed = decibels(noise)[:, None] * np.exp(-0.5 * ((hz - hiss[:, None]) / 1200) ** 2)
    background = decibels(rng.uniform(-22, 0) - rng.uniform(0, 15) * np.linspace(0, 1, CHANNELS))
    # A spectrum of one frame scatters, as that of noise does.
    power = (voiced + hissed) * rng.gamma(2, 1 / 2, voiced.shape)
    power += background * rng.gamma(2, 1 / 2, voiced.shape)
    spectrum = np.log(power) + room(rng)
    return dct(spectrum, norm="ortho")[:, :COEFFICIENTS].astype(np.float32)


def movements(words: list[str], rng: np.random.Generator) -> np.ndarray:
    """Formants, loudness and hiss of each frame, which glide from phone to phone."""
    tempo = rng.uniform(0.6, 1.1)
    phones = ["-", *" - ".join(WORDS[word] for word in words).split(), "-"]
    rows = []
    for phone in (PHONES[name] for name in phones):
        frames = max(2, round(phone.ms * tempo * rng.uniform(0.75, 1.3) / FRAME_MS))
        formants = phone.formants * rng.normal(1, 0.07, 3)  # Never twice the same.
        rows += [[*formants, phone.voice, phone.noise, phone.hiss]] * frames
    window = np.hanning(9)[1:-1]
    padded = np.pad(rows, ((3, 3), (0, 0)), mode="edge")
    smooth = [np.convolve(column, window / window.sum(), "valid") for column in padded.T]
    return np.stack(smooth, axis=1)


def room(rng: np.random.Generator) -> np.ndarray:
    """What loudness, microphone and room add to the logarithm of each channel."""
    waves = np.cos(np.pi * np.outer(np.arange(4), np.linspace(0, 1, CHANNELS)))
    return rng.normal(0, [1.0, 0.5, 0.3, 0.3]) @ waves


def mel(hz: np.ndarray | float) -> np.ndarray | float:
    """The mel scale, on which equal steps sound equal."""
    return 1127 * np.log1p(np.asarray(hz) / 700)


def decibels(level: np.ndarray) -> np.ndarray:
    """The power of a level in dB."""
    return 10 ** (np.asarray(level) / 10)
