"""pytest runs the `>>>` examples of these pages (pyproject.toml, --doctest-glob)."""

# Its operation is an example: the package does not have it.
collect_ignore = ["adding_an_op.md"]
