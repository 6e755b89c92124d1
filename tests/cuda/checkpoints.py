"""Checkpoints small enough to be run through PTX on a CPU."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from loader.checkpoint import open_checkpoint
from loader.parameters import parameter_table
from loader.safetensors_writer import write_bfloat16
from loader.weights import plan_weights

LAYERS, VOCAB = 2, 2048


def cut_smollm2(source: Path, target: Path) -> Path:
    """SmolLM2's first two layers over the first 2,048 ids, in the folder `target`."""
    checkpoint = open_checkpoint(source)
    weights = plan_weights(source, checkpoint.decoder)
    windows = checkpoint.decoder.layer_windows[:LAYERS]
    small = replace(checkpoint.decoder, num_hidden_layers=LAYERS, vocab_size=VOCAB, layer_windows=windows)
    table = parameter_table(small)
    tensors = (weights.tensor(name)[: shape[0]].astype(np.float32) for name, shape in table.items())
    target.mkdir(parents=True, exist_ok=True)
    write_bfloat16(target / "model.safetensors", table, tensors)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 256}
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "generation_config.json", target)
    return target
