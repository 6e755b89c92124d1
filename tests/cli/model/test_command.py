"""`engine inspect` and `engine models` on the golden models, against numbers worked out by hand."""

import json
import shutil
from pathlib import Path

from tests.conftest import GOLDEN, Run


def test_what_a_model_is(run: Run, tmp_path: Path) -> None:
    """From config.json alone. 512 ids, 128 wide, two layers of 6 heads and 2 of keys, 64 each, an MLP of 256."""
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    code, out, err = run("inspect", str(tmp_path), "--device", "cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    layer = 128 * (6 + 2 + 2) * 64 + 6 * 64 * 128 + 3 * 128 * 256 + 2 * 128 + 2 * 64
    assert found["model"]["parameters"] == 2 * 512 * 128 + 128 + 2 * layer
    assert found["model"]["architecture"] == "Qwen3ForCausalLM" and found["model"]["context"] == 512
    assert found["memory"]["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2  # keys and values, layers, heads, bfloat16
    assert found["memory"]["fits"] and found["memory"]["longest_sequence"] == 512
    assert found["text"]["tokens"] is None and found["text"]["ends"] == [2]


def test_what_fits_is_the_ledgers_answer(run: Run) -> None:
    model = str(GOLDEN / "llama")
    code, out, _ = run("inspect", model, "--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--max-model-len", "256")
    lines = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    assert code == 0 and (lines["fits"], lines["longest sequence"]) == ("yes", "256")
    assert (lines["kv tokens"], lines["such sequences at once"]) == ("1,024", "4.0")
    code, out, _ = run("inspect", model, "--device", "cpu", "--kv-cache-memory-bytes", "100", "--json")
    memory = json.loads(out)["memory"]
    assert code == 0 and memory["fits"] is False and "kv_cache_memory_bytes" in memory["reason"]


def test_what_is_no_model(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", str(tmp_path))
    assert (code, out) == (1, "") and err == f"engine: error: {tmp_path}: has no config.json\n"


def test_the_architectures_are_those_of_the_docs(run: Run) -> None:
    code, out, _ = run("models")
    listed = {line.split()[0] for line in out.splitlines()}
    docs = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert code == 0 and listed == {word for word in listed if f"| `{word}` |" in docs}
    assert docs.count("ForCausalLM` |") == len(listed)
