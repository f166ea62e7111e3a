"""Programs that a user would run: python -m examples.<name>, from the root of the repository.

Each is five or six files to copy from. What they share in ``common`` surrounds a program, no more.
"""
