"""Device code made at run time from what a user's function computes."""
