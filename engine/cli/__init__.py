"""The command `engine`: the composition root, and the only part of the engine that may import rpc."""
