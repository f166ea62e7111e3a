"""`python -m benchmarks run recurrent`: recurrent scans beside what else runs them."""
