"""Load plans: everything accounted for before a tensor is read, or one error with everything wrong."""

import math
import operator
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.parameters import parameter_table
from loader.weights import LoadPlan, WeightSource, dummy_weights, plan_weights
from tests.loader.files import GOLDEN, LLAMA, copy_checkpoint, raw_file, read_tensors, tensor_file, write_json

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TIED = GOLDEN / "llama-mha-tied"


def plan(path: Path) -> LoadPlan:
    return plan_weights(path, open_checkpoint(path).decoder)


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        plan(path)
    assert str(path) in str(caught.value)
    return caught.value.problems


def edited(source: Path, target: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """The golden folder `source` with its tensors changed by `edit`."""
    folder = copy_checkpoint(source, target)
    tensors = read_tensors(source / FILE)
    edit(tensors)
    tensor_file(folder / FILE, tensors)
    return folder


def sharded(target: Path) -> tuple[Path, dict[str, str]]:
    """The golden Llama in two shards, without its single file; and the index's weight_map."""
    folder = copy_checkpoint(LLAMA, target)
    tensors = read_tensors(folder / FILE)
    (folder / FILE).unlink()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(where.values()):
        tensor_file(folder / shard, {name: tensors[name] for name in tensors if where[name] == shard})
    write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": where})
    return folder, where


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama-mha-tied"])
def test_every_tensor_is_assigned_once(name: str) -> None:
    found, expected = plan(GOLDEN / name), read_tensors(GOLDEN / name / FILE)
    assert sorted(found.names) == sorted(expected)
    assert found.nbytes == sum(array.nbytes for array in expected.values())
    for parameter, array in expected.items():
        assert found.tensor(parameter).tobytes() == array.tobytes()


def test_parameter_table_shapes() -> None:
    for name in ("llama", "llama-bias", "llama-mha-tied"):
        table = parameter_table(open_checkpoint(GOLDEN / name).decoder)
        assert table == {key: array.shape for key, array in read_tensors(GOLDEN / name / FILE).items()}


def test_shards_give_the_same_tensors(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "m")
    single, found = plan(LLAMA), plan(folder)
    assert found.names == single.names and found.nbytes == single.nbytes
    assert all(found.tensor(name).tobytes() == single.tensor(name).tobytes() for name in found.names)


def test_l08_missing_shard_is_listed_with_its_tensors(tmp_path: Path) -> None:
    folder, where = sharded(tmp_path / "m")
    lost = "model-00002-of-00002.safetensors"
    (folder / lost).unlink()
    (problem,) = problems(folder)
    assert problem.startswith(f"{lost}: the file is missing")
    assert all(name in problem for name, shard in where.items() if shard == lost)


def test_l08_every_broken_shard_is_listed(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "m")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").mkdir()
    first, second = problems(folder)
    assert first.startswith("model-00001-of-00002.safetensors: truncated")
    assert second.startswith("model-00002-of-00002.safetensors: the file is missing")


def test_l08_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder, where = sharded(tmp_path / "m")
    other = {shard: other for shard in where.values() for other in where.values() if shard != other}
    write_json(folder / INDEX, {"weight_map": where | {EMBED: other[where[EMBED]], NORM: "../m/x.safetensors"}})
    found = problems(folder)
    assert f"{EMBED}: the index places it in {other[where[EMBED]]}, which lacks it" in found
    assert f"{EMBED}: is in {where[EMBED]}, where the index has none" in found
    assert "weight_map: '../m/x.safetensors' is not the name of a file in the folder" in found


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_l08_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    folder, _ = sharded(tmp_path / "m")
    write_json(folder / INDEX, {"weight_map": weight_map})
    assert "weight_map" in problems(folder)[0]


def test_l08_no_weights_at_all(tmp_path: Path) -> None:
    folder = copy_checkpoint(LLAMA, tmp_path / "m")
    (folder / FILE).rename(folder / "pytorch_model.bin")
    (problem,) = problems(folder)
    assert FILE in problem and INDEX in problem and "pytorch_model.bin" in problem
    (folder / FILE).mkdir()
    assert "cannot be read" in problems(folder)[0]


def test_l13_rotary_buffers_are_ignored_and_other_tensors_are_not(tmp_path: Path) -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(LLAMA, tmp_path / "a", lambda t: t.update({buffer: np.ones(32, np.float32)}))
    assert plan(folder).names == plan(LLAMA).names
    unknown = {"model.layers.0.unknown.weight": np.ones(1, np.float32), "x": np.ones(1, np.float32)}
    folder = edited(LLAMA, tmp_path / "b", lambda t: t.update(unknown))
    assert problems(folder) == tuple(f"{name}: is not a parameter of this model" for name in unknown)


def test_shapes_and_missing_tensors_are_listed_together(tmp_path: Path) -> None:
    """L15: a projection that does not fit head_dim is named, with both shapes."""
    folder = copy_checkpoint(LLAMA, tmp_path / "m", head_dim=32, num_hidden_layers=3)
    found = problems(folder)
    assert "model.layers.0.self_attn.q_proj.weight: expected shape [128, 128], found [256, 128]" in found
    assert "model.layers.0.self_attn.o_proj.weight: expected shape [128, 128], found [128, 256]" in found
    assert "model.layers.2.mlp.up_proj.weight: is missing, expected shape [256, 128]" in found
    assert len(found) == 2 * 4 + 9


def test_l10_tied_checkpoint_without_a_head_has_no_head_parameter() -> None:
    assert HEAD not in plan(TIED).names


def test_weights_that_are_no_part_of_the_model_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = sharded(tmp_path / "m")
    plan(folder)
    assert not caplog.records
    for i in range(7):
        (folder / f"extra-{i}.safetensors").write_bytes(b"")
    plan(folder)
    (record,) = caplog.records
    assert record.getMessage().endswith("extra-3.safetensors, extra-4.safetensors and 2 more")


def test_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = edited(LLAMA, tmp_path / "m", lambda t: operator.delitem(t, HEAD))
    assert problems(folder) == (f"{HEAD}: is missing, expected shape [512, 128]",)


def test_tied_checkpoint_may_repeat_its_embedding_but_not_contradict_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = edited(TIED, tmp_path / "same", lambda t: t.update({HEAD: t[EMBED]}))
    assert plan(folder).names == plan(TIED).names
    (told,) = [record.getMessage() for record in caplog.records if record.name == "loader.weights"]
    assert told.endswith(f"{HEAD} repeats {EMBED}, and is not loaded")

    def contradict(tensors: dict[str, np.ndarray]) -> None:
        tensors[HEAD] = tensors[EMBED].copy()
        tensors[HEAD][-1, -1] += 1

    assert "differs" in problems(edited(TIED, tmp_path / "other", contradict))[0]
    folder = edited(TIED, tmp_path / "cut", lambda t: t.update({HEAD: t[EMBED][1:]}))
    assert "differs" in problems(folder)[0]


def test_l29_dtypes_may_be_mixed(tmp_path: Path) -> None:
    def mix(tensors: dict[str, np.ndarray]) -> None:
        tensors[NORM] = tensors[NORM].astype(np.float32)
        tensors[EMBED] = tensors[EMBED].astype(np.float16)

    found, plain = plan(edited(LLAMA, tmp_path / "m", mix)), plan(LLAMA)
    assert found.tensor(NORM).dtype == np.float32 and found.tensor(EMBED).dtype == np.float16
    assert np.array_equal(found.tensor(NORM), plain.tensor(NORM).astype(np.float32))
    assert found.nbytes == plain.nbytes + 2 * 128


def test_planning_reads_no_tensor_data(tmp_path: Path) -> None:
    """A sparse file of half a terabyte of weights plans at once: only its header is read."""
    folder = copy_checkpoint(LLAMA, tmp_path / "m", vocab_size=1 << 30)
    tensors = read_tensors(LLAMA / FILE)
    table = {name: (1 << 30, 128) if name in (EMBED, HEAD) else array.shape for name, array in tensors.items()}
    sparse_file(folder / FILE, table)
    assert plan(folder).nbytes == sum(2 * math.prod(shape) for shape in table.values()) > 1 << 39


def sparse_file(path: Path, table: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in table.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw_file(path, header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end)


def test_dummy_weights_follow_config_and_seed() -> None:
    decoder = open_checkpoint(GOLDEN / "llama-bias").decoder
    source: WeightSource = dummy_weights(decoder, seed=7)
    again, other = dummy_weights(decoder, seed=7), dummy_weights(decoder, seed=8)
    assert source.names == plan(GOLDEN / "llama-bias").names
    assert source.nbytes == plan(GOLDEN / "llama-bias").nbytes
    for name, shape in parameter_table(decoder).items():
        tensor = source.tensor(name)
        assert tensor.shape == shape and tensor.dtype == ml_dtypes.bfloat16 and not tensor.flags.writeable
        assert tensor.tobytes() == again.tensor(name).tobytes()
    assert np.all(source.tensor(NORM) == 1) and not np.any(source.tensor("model.layers.0.mlp.up_proj.bias"))
    embedding = source.tensor(EMBED).astype(np.float32)
    assert embedding.std() == pytest.approx(0.02, rel=0.02) and abs(embedding.mean()) < 1e-3
    assert source.tensor(EMBED).tobytes() != other.tensor(EMBED).tobytes()
    assert source.tensor(EMBED).tobytes() != source.tensor(HEAD).tobytes()


def test_fused_tensors_are_taken_apart(tmp_path: Path) -> None:
    """Rows of queries, keys and values lie one behind another, as Phi-3 has them; without a copy."""

    def fuse(tensors: dict[str, np.ndarray]) -> None:
        for layer in range(2):
            for whole, members in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                room = whole.partition(".")[0]
                names = [f"model.layers.{layer}.{room}.{member}_proj.weight" for member in members]
                tensors[f"model.layers.{layer}.{whole}_proj.weight"] = np.concatenate([tensors.pop(n) for n in names])

    folder = edited(LLAMA, tmp_path / "fused", fuse)
    found, expected = plan(folder), plan(LLAMA)
    assert found.names == expected.names and found.nbytes == expected.nbytes
    assert all(found.tensor(name).tobytes() == expected.tensor(name).tobytes() for name in found.names)

    def shorten(tensors: dict[str, np.ndarray]) -> None:
        fuse(tensors)
        name = "model.layers.1.self_attn.qkv_proj.weight"
        tensors[name] = tensors[name][1:]

    told = problems(edited(LLAMA, tmp_path / "short", shorten))
    assert "model.layers.1.self_attn.qkv_proj.weight: is not a parameter of this model" in told
    assert sum("is missing" in problem for problem in told) == 3
