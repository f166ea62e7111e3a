"""`python -m benchmarks run dynamic`: nets whose graph differs for each example."""
