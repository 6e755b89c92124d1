"""`python -m tests.clients.lm_eval_tasks URL FOLDER`: runs lm-eval's tasks of FOLDER and prints their samples as JSON.

`loglikelihood` asks completions, `generation` asks chat completions. The tokenizer is the server's, which lm-eval
finds by itself (/tokenizer_info), so it needs neither torch nor transformers.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.conftest import MODEL


def main(url: str, folder: str) -> None:
    tasks = TaskManager(include_path=folder, include_defaults=False)
    samples = {}
    for name, model, path in (
        ("loglikelihood", "local-completions", "completions"),
        ("generation", "local-chat-completions", "chat/completions"),
    ):
        found = simple_evaluate(
            model=model,
            model_args={"model": MODEL, "base_url": f"{url}/v1/{path}", "eos_string": "<|im_end|>"},
            tasks=[name],
            task_manager=tasks,
            batch_size=2 if name == "loglikelihood" else 1,
            apply_chat_template=name == "generation",
            bootstrap_iters=0,
        )
        samples[name] = [sample["filtered_resps"] for sample in found["samples"][name]]
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(json.dumps(samples))


if __name__ == "__main__":
    main(*sys.argv[1:])
