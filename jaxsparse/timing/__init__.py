"""How long a program of any framework takes, by the clock and on a GPU."""

from jaxsparse.timing.measurement import Program, Timing, measure, measure_in_turns

__all__ = ["Program", "Timing", "measure", "measure_in_turns"]
