"""Stacks of recurrent layers beside what else runs them: suites of `benchmarks run recurrent`."""
