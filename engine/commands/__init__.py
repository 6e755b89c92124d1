"""Commands of `engine` that are more than a few lines; `engine/cli.py` registers them."""
