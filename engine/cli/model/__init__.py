"""`engine inspect` and `engine models`: what a model is, before it is loaded."""
