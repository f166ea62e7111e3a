"""`python -m jaxsparse bench`: named problems, each measured beside its peers, as JSON."""
