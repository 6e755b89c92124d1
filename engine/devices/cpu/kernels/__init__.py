"""Compiled code of the cpu device. Nothing outside this folder and engine/sampling is compiled."""
