"""`python -m engine.devices.cpu.warmup`: compile the kernels into the on-disk cache, as `make setup` does.

Runs one step of a random one-layer model, so that the first real start finds everything compiled.
"""

import sys

import numpy as np

from engine.devices.cpu.executor import CpuExecutor
from engine.devices.cpu.model import ModelShape
from engine.plan import BlockUpdate, RowState, SampleBatch, StepPlan
from loader.decoder import DecoderConfig, RopeConfig
from loader.weights import dummy_weights

TINY = DecoderConfig(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    attention_scale=0.25,
    layer_windows=(None,),
    rope=RopeConfig(kind="default", theta=10000.0),
)


def main() -> None:
    shape = ModelShape(
        decoder=TINY,
        dtype="bfloat16",
        num_blocks=4,
        block_size=16,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        threads=1,
    )
    print("compiling the cpu device's kernels, once per version", file=sys.stderr)
    executor = CpuExecutor(shape, dummy_weights(TINY, seed=0))
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    state = RowState(0, 0.0, 0, 1.0, 0.0, 0, 0, (), 0, 1, 1)
    executor.forward(StepPlan(0, zero, zero, one, one, one, (state,), (BlockUpdate(0, 0, 0, (0,)),)))
    executor.sample(SampleBatch(0, zero))
    executor.close()


if __name__ == "__main__":
    main()
