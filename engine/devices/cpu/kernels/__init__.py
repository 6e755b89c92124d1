"""Compiled code of the cpu device. Nothing outside this folder and the one of the sampler is compiled."""
