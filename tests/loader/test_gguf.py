"""GGUF import: a round trip of the golden Llama, the real SmolLM2 file, and refusals by name."""

import itertools
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.decoder import RopeConfig
from loader.errors import CheckpointError
from loader.gguf import import_gguf
from loader.weights import plan_weights
from tests.loader.files import GOLDEN, LLAMA, read_tensors
from tests.loader.gguf_files import METADATA, golden_tensors, sentencepiece_vocab, write_gguf
from tests.reference import reference_frequencies

WORDS = ["▁t", "he", "▁the", "ne", "in", "▁", "t", "h", "e", "i", "n", "▁i", "th", "nin", "eth"]
VOCAB = sentencepiece_vocab(WORDS)


def imported(tmp_path: Path, metadata: Mapping[str, Any] = METADATA | VOCAB, **options: Any) -> Checkpoint:
    options = {"tensors": golden_tensors()} | options
    source = write_gguf(tmp_path / "model.gguf", metadata, **options)
    return open_checkpoint(import_gguf(source, tmp_path / "imported"))


def problems(tmp_path: Path, metadata: Mapping[str, Any] = METADATA | VOCAB, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path, metadata, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"], "a failed import leaves nothing behind"
    return caught.value.problems


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in (METADATA | VOCAB).items() if name not in names}


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama-mha-tied"])
def test_round_trip_is_bit_exact(tmp_path: Path, name: str) -> None:
    """Permutation of weights and biases undone, embeddings tied where there is no output."""
    expected = open_checkpoint(GOLDEN / name)
    size = expected.decoder.head_dim
    sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
    sizes["attention.head_count_kv"] = expected.decoder.num_key_value_heads
    metadata = METADATA | VOCAB | {f"llama.{key}": value for key, value in sizes.items()}
    found = imported(tmp_path, metadata, tensors=golden_tensors(GOLDEN / name, size))
    assert found.decoder == expected.decoder
    assert found.generation.eos_token_ids == (2,) and found.generation.bos_token_id == 1
    weights = plan_weights(found.path, found.decoder)
    for parameter, array in read_tensors(GOLDEN / name / "model.safetensors").items():
        assert weights.tensor(parameter).dtype == ml_dtypes.bfloat16
        assert weights.tensor(parameter).tobytes() == array.tobytes(), parameter


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
def test_quantized_weights_come_close(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    found = imported(tmp_path, kind=kind)
    weights = plan_weights(found.path, found.decoder)
    tolerance = {"Q8_0": 0.02, "Q4_1": 0.2, "F16": 0.005}[kind.name]
    for parameter, array in read_tensors(LLAMA / "model.safetensors").items():
        exact = array.astype(np.float32)
        error = np.abs(weights.tensor(parameter).astype(np.float32) - exact).max()
        assert error <= tolerance * np.abs(exact).max(), parameter


def test_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    found = imported(tmp_path)
    assert sorted(p.name for p in found.path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert found.chat_template == VOCAB["tokenizer.chat_template"]
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    with (found.path / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    assert length % 8 == 0, "the data section is aligned"
    config = json.loads((found.path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5, "not the float32's 9.999999747378752e-06"


def naive_sentencepiece(text: str) -> list[str]:
    """Join the neighbours whose piece scores highest, leftmost first, until none joins; then bytes for the rest."""
    score = {word: -i for i, word in enumerate(WORDS)}
    parts = list("▁" + text.replace(" ", "▁"))
    while joins := [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]:
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [t for p in parts for t in ([p] if p in score else [f"<0x{byte:02X}>" for byte in p.encode()])]


@pytest.mark.parametrize(
    "text",
    ["inth", "the", "in the net", "tenth  nine", "hé the 🙂", "nininine ethet", " the ", "inininnen", "日本 in\nthe"],
)
def test_sentencepiece_tokens(tmp_path: Path, text: str) -> None:
    tokenizer = imported(tmp_path).load_tokenizer()
    assert tokenizer is not None
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *naive_sentencepiece(text)]
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("</s>the", add_special_tokens=False).tokens[0] == "</s>"


def test_padding_rows_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = imported(tmp_path).load_tokenizer()
    assert tokenizer is not None and tokenizer.get_vocab_size() == 259 + len(WORDS)
    assert tokenizer.decode([500]) == ""


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_tokens_around_a_text(tmp_path: Path, bos: bool, eos: bool) -> None:
    metadata = METADATA | VOCAB | {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    tokenizer = imported(tmp_path, metadata).load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("the").tokens == ["<s>"] * bos + ["▁the"] + ["</s>"] * eos


def test_end_of_turn_ends_too(tmp_path: Path) -> None:
    found = imported(tmp_path, METADATA | VOCAB | {"tokenizer.ggml.eot_token_id": 7})
    assert found.generation.eos_token_ids == (2, 7)


BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<|end|>", *"abc123'Ġ", "12", "123", "Ġa", "ab", "Ġab"],
    "tokenizer.ggml.token_type": [3, *[1] * 13],
    "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "a b", "Ġ ab"],
    "tokenizer.ggml.eos_token_id": 0,
}


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["ab", "123", "123", "Ġa", "<|end|>"]),
        ("smollm", ["ab", "1", "2", "3", "1", "2", "3", "Ġa", "<|end|>"]),
        ("llama-bpe", ["ab", "123", "123", "Ġa", "<|end|>"]),
    ],
)
def test_byte_level_pre_tokenizers(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    tokenizer = byte_level(tmp_path, pre)
    assert tokenizer.encode("ab123123 a<|end|>").tokens == tokens
    assert tokenizer.decode(tokenizer.encode("ab123 a").ids) == "ab123 a"


def byte_level(tmp_path: Path, pre: str) -> Tokenizer:
    metadata = METADATA | BYTE_LEVEL | {"tokenizer.ggml.pre": pre}
    tokenizer = imported(tmp_path, metadata).load_tokenizer()
    assert tokenizer is not None
    return tokenizer


def test_llama3_words_need_no_merges(tmp_path: Path) -> None:
    """ "Ġab" is in the vocabulary, but the merge "Ġ a" comes first and leads away from it."""
    for name in ("llama-bpe", "gpt-2"):
        (tmp_path / name).mkdir()
    assert byte_level(tmp_path / "llama-bpe", "llama-bpe").encode("c ab").tokens == ["c", "Ġab"]
    assert byte_level(tmp_path / "gpt-2", "gpt-2").encode("c ab").tokens == ["c", "Ġa", "b"]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rope.scaling.type": "none"}, {"kind": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"kind": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any]) -> None:
    metadata = METADATA | VOCAB | {f"llama.{key}": value for key, value in extra.items()}
    rope = imported(tmp_path, metadata).decoder.rope
    assert {name: getattr(rope, name) for name in expected} == expected and rope.theta == 10000.0


def test_llama3_factors_become_parameters(tmp_path: Path) -> None:
    rope = RopeConfig(kind="llama3", theta=5e5, factor=32.0, original_max_position_embeddings=8192)
    plain = reference_frequencies(RopeConfig(kind="default", theta=5e5), 64)
    factors = (plain / reference_frequencies(rope, 64)).astype(np.float32)
    metadata = METADATA | VOCAB | {"llama.rope.freq_base": 5e5}
    tensors = golden_tensors() | {"rope_freqs.weight": factors}
    assert imported(tmp_path, metadata, tensors=tensors).decoder.rope == rope


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    tensors = golden_tensors() | {"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}
    assert problems(tmp_path, tensors=tensors)[0].startswith("rope_freqs.weight: ")


def test_no_experts_are_no_obstacle(tmp_path: Path) -> None:
    """Some converters write the keys of a mixture into every file."""
    imported(tmp_path, METADATA | VOCAB | {"llama.expert_count": 0, "llama.expert_used_count": 0})


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.expert_used_count": 2}, "llama.expert_used_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"split.count": 2}, "split.count"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: 'tekken'"),
        ({"tokenizer.ggml.eos_token_id": 512}, "tokenizer.ggml.eos_token_id: 512"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores: has 1 entries"),
        ({"tokenizer.ggml.tokens": ["a", "a", *VOCAB["tokenizer.ggml.tokens"][2:]]}, "tokenizer.ggml.tokens: 'a'"),
    ],
)
def test_what_is_not_carried_over_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], name: str) -> None:
    assert any(problem.startswith(name) for problem in problems(tmp_path, METADATA | VOCAB | extra))


def test_missing_facts_are_listed_together(tmp_path: Path) -> None:
    found = problems(tmp_path, without("llama.block_count", "llama.context_length"))
    assert [p.split(":")[0] for p in found] == ["llama.block_count", "llama.context_length"]


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, architecture="mamba") == (
        "general.architecture: 'mamba' is not supported, expected 'llama'",
    )


def test_tensors_must_fit_the_parameter_table(tmp_path: Path) -> None:
    tensors = golden_tensors() | {"blk.0.attn_rot.weight": np.ones(3, np.float32)}
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][1:]
    del tensors["output_norm.weight"]
    assert set(problems(tmp_path, tensors=tensors)) == {
        "blk.0.attn_rot.weight: is not a parameter of this model",
        "blk.1.ffn_up.weight: expected shape [256, 128], found [255, 128]",
        "model.norm.weight: is missing, expected shape [128]",
    }


@pytest.mark.parametrize("content", [b"", b"GGUF", b"version https://git-lfs.github.com/spec/v1\n" * 9])
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is not a complete GGUF file"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_cut_files(tmp_path: Path, share: float) -> None:
    whole = write_gguf(tmp_path / "model.gguf", METADATA | VOCAB, golden_tensors()).read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"is not a complete GGUF file"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")


def test_existing_target_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="exists already"):
        imported(tmp_path)
    assert [p.name for p in (tmp_path / "imported").iterdir()] == ["mine"]


def test_missing_package_has_an_install_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "model.gguf", METADATA | VOCAB, golden_tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install"):
        import_gguf(source, tmp_path / "imported")


def test_interrupted_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loader.gguf._unpermute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_smollm2_tokenizer_and_template(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    golden = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")
    for k in range(5):
        assert tokenizer.encode(str(golden[f"text_{k}"])).ids == golden[f"prompt_{k}"].tolist()
        assert tokenizer.decode(golden[f"prompt_{k}"].tolist()) == str(golden[f"text_{k}"])
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert checkpoint.special_tokens["eos_token"] == "<|im_end|>"
    assert checkpoint.chat_template is not None and "<|im_start|>" in checkpoint.chat_template
    assert checkpoint.generation.eos_token_ids == (2, 0)  # <|im_end|>, which the file names, and <|endoftext|>
