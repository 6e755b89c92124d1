"""Structured output: a compiled grammar per output, and the masks of a step."""
