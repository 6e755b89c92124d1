"""A peer's side of perf/compare.py: requests as JSON lines on stdin, answers as lines on stdout.

Runs in each peer's own interpreter, so it needs nothing but the standard library. A driver loads its peer, makes one
token and answers; then every line {"prompt": lists of ids, "max_tokens": numbers} is answered with the seconds it took
and the ids that were made. All requests of a line are submitted at once, decoded greedily, EOS ignored.
Read next: perf/compare.py, which starts drivers and asks.
"""

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

ANSWER = "ANSWER "
"""Begins a line that is an answer; whatever else a peer prints is not."""

FIRST_PROMPT = [504, 3575, 282, 4649, 314]

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, max_tokens) -> the ids made for each prompt."""


def serve(
    version: str,
    generate: Generate,
    make_room: Callable[[list[list[int]]], None] = lambda prompts: None,
    process_id: Callable[[], int] = os.getpid,
) -> None:
    """Answer until stdin ends.

    Args:
        make_room: called outside the timing with the prompts that come next.
        process_id: the root of the processes whose memory counts.
    """
    make_room([FIRST_PROMPT])
    generate([FIRST_PROMPT], [1])
    answer({"version": version})
    for line in sys.stdin:
        request = json.loads(line)
        make_room(request["prompt"])
        begin = perf_counter()
        token_ids = generate(request["prompt"], request["max_tokens"])
        seconds = perf_counter() - begin
        assert [len(ids) for ids in token_ids] == request["max_tokens"], "a request ended early"
        answer({"seconds": seconds, "token_ids": token_ids, "process_id": process_id()})


def answer(content: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(content), flush=True)
