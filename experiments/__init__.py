"""Studies of the papers, on the models of the examples: python -m experiments.<name>.

They run from the root of the repository, with the extra `examples`.
"""
