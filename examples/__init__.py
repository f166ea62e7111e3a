"""Programs that a user would run: python -m examples.<name>, from the root of the repository.

Each is five files to copy from. What they share in ``common`` surrounds a program and no more.
"""
