"""lm-eval, the evaluation harness, against `engine serve`: what it measures is what the golden model gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import GOLDEN_FILE, Addresses

ROOT = Path(__file__).parents[2]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: {metric}}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden texts, cut behind their first word, as the data of two tasks."""
    texts = [str(GOLDEN_FILE[f"text_{k}"]) for k in range(5)]
    cuts = [text.index(" ") for text in texts]
    data = tmp_path / "texts.jsonl"
    lines = [json.dumps({"context": t[:c], "continuation": t[c:]}) for t, c in zip(texts, cuts, strict=True)]
    data.write_text("\n".join(lines))
    for name, kind, metric in (
        ("loglikelihood", "loglikelihood", "perplexity"),
        ("generation", "generate_until", "exact_match"),
    ):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, metric=metric))
    return tmp_path


def test_lm_eval_measures_the_golden_numbers(demo_server: Addresses, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.clients.lm_eval_tasks", demo_server.http, str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    samples = json.loads(ran.stdout.splitlines()[-1])
    for k, ((logprob, _),) in enumerate(samples["loglikelihood"]):
        behind_the_first_word = GOLDEN_FILE[f"prompt_logprobs_{k}"]
        assert logprob == pytest.approx(behind_the_first_word.sum(), abs=0.05)
    texts = [answer for (answer,) in samples["generation"]]
    assert len(texts) == 5 and all(texts) and not any("\n\n" in text for text in texts)
