"""Programs that a user would run: python -m examples.<name>, from the root of the repository."""
