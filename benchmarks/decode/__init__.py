"""Attention of few queries to many keys: what a step of decoding takes."""
