"""`python -m jaxsparse bench recurrent`: recurrent scans beside what else runs them."""
