"""`python -m benchmarks`: named problems, each measured beside its peers, as JSON."""
