"""Advice: rules that name what limits a run, and what to try.

A rule is a row of a table: when it applies, what of the report says so, and what follows. The first of
`BOTTLENECKS` that applies is the run's bottleneck, and one always does; every one of `SYMPTOMS` that
applies is listed. Thresholds are shares and ratios, so that they fit any model and machine.
Read next: `engine/cli/profile/report.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.cli.profile.report import Report

Test = Callable[[Report], bool]
Text = Callable[[Report], str]


MIN_FOR_TAIL = 100
"""Iterations of which the slowest 1% are at least one."""


class Rule(NamedTuple):
    """One row of the table."""

    name: str
    applies: Test
    evidence: Text
    advice: Text


class Finding(NamedTuple):
    """A rule that applied."""

    name: str
    evidence: str
    advice: str


HOST_ADVICE = {
    "intake": "Many requests arrive or leave per step: spread arrivals, or run another engine.",
    "schedule": "Deciding a step costs more than running it: make steps longer (--max-num-batched-tokens) or rows "
    "fewer (--max-num-seqs).",
    "launch": "Handing a step to the device costs more than running it: make steps longer by more rows or "
    "prompt tokens.",
    "sample": "Handing over sampling costs more than running the step: ask for fewer logprobs and penalties.",
    "tasks": "Other tasks of the event loop take the time (tokenizing, serving streams): send token ids, read streams "
    "in larger pieces, or put clients on other cores.",
    "settle": "Taking in a step costs more than running it: ask for fewer logprobs, or rows fewer (--max-num-seqs).",
    "publish": "Making text costs more than running a step: fewer stop strings and logprobs, or no detokenizing.",
}


def _kv_is_full(r: Report) -> bool:
    return r.preemptions > 0 or (r.kv_usage.p50 > 0.9 and r.waiting.p50 >= 1)


def _prefill_share(r: Report) -> float:
    return r.device_prefill / r.device_busy if r.device_busy else 0.0


BOTTLENECKS = (
    Rule(
        "load",
        lambda r: r.wall == 0 or r.idle > 0.5 * r.wall,
        lambda r: f"nothing to do for {r.idle / r.wall:.0%} of the time" if r.wall else "no step was run",
        lambda r: "The engine keeps up. Offer more (--request-rate, --num-prompts) to find its limit.",
    ),
    Rule(
        "KV memory",
        _kv_is_full,
        lambda r: f"KV blocks are {r.kv_usage.p50:.0%} used in the median, {r.preemptions} preemptions",
        lambda r: (
            "Sequences wait for blocks or compute tokens twice: give KV more memory "
            "(--kv-cache-memory-bytes), or let fewer sequences run at once (--max-num-seqs)."
        ),
    ),
    Rule(
        "host",
        lambda r: r.share(r.host_exposed) > 0.25,
        lambda r: (
            f"the device waits for the host {r.share(r.host_exposed):.0%} of the time; "
            f"most of the host's goes to {r.slowest_host_phase}"
        ),
        lambda r: HOST_ADVICE[r.slowest_host_phase],
    ),
    Rule(
        "hand-over",
        lambda r: r.share(r.hand_over) > 0.25,
        lambda r: f"for {r.share(r.hand_over):.0%} of the time the device has nothing to do and the host waits for it",
        lambda r: (
            "Messages between host and device are late: leave a core free for the loop (--cpu-threads one "
            "lower), and make steps longer by more rows or prompt tokens."
        ),
    ),
    Rule(
        "device, computing prompts",
        lambda r: _prefill_share(r) > 0.5,
        lambda r: (
            f"the device is busy {r.share(r.device_busy):.0%} of the time, {_prefill_share(r):.0%} of that "
            "with steps that compute prompts"
        ),
        lambda r: (
            "Prompts cost arithmetic: share prefixes (--enable-prefix-caching), send shorter ones, or take a "
            "faster device. Larger steps (--max-num-batched-tokens) help until the device's arithmetic is full."
        ),
    ),
    Rule(
        "device, decoding",
        lambda r: True,
        lambda r: (
            f"the device is busy {r.share(r.device_busy):.0%} of the time, decoding {r.decode_rows.mean:.1f} "
            f"rows on average, of {r.max_num_seqs}"
        ),
        lambda r: (
            "Each step reads all weights for one token per row: more rows at once (more load, --max-num-seqs) "
            "raise throughput; smaller weights or a device with more bandwidth lower the time per token."
        ),
    ),
)

SYMPTOMS = (
    Rule(
        "TTFT: queueing",
        lambda r: r.queue_time.p90 > 0.5 * r.time_to_first_token.p90 and r.queue_time.p90 > 2 * r.iteration.p50,
        lambda r: (
            f"{r.queue_time.p90 * 1e3:.1f} ms of the p90 of {r.time_to_first_token.p90 * 1e3:.1f} ms to the first "
            f"token pass before a request is scheduled; at most {r.running.max:.0f} of {r.max_num_seqs} rows are in use"
        ),
        lambda r: (
            "All rows are taken: raise --max-num-seqs while KV memory lasts, or share the load among engines."
            if r.running.max >= r.max_num_seqs
            else "Rows are free and the wait is for KV blocks or the token budget: --kv-cache-memory-bytes, "
            "--max-num-batched-tokens."
        ),
    ),
    Rule(
        "TTFT: prefill in many steps",
        lambda r: r.prefill_steps.p50 > 4,
        lambda r: (
            f"{r.prefill_steps.p50:.0f} steps settle before a request's first token in the median, with a budget of "
            f"{r.max_num_batched_tokens} tokens a step"
        ),
        lambda r: "Raise --max-num-batched-tokens; share prefixes; it costs the running requests longer steps.",
    ),
    Rule(
        "TPOT: prefill among decodes",
        lambda r: r.time_per_output_token.p50 > 1.5 * r.decode_iteration.p50 > 0,
        lambda r: (
            f"a token takes {r.time_per_output_token.p50 * 1e3:.1f} ms in the median, a step that only decodes "
            f"{r.decode_iteration.p50 * 1e3:.1f} ms"
        ),
        lambda r: "Prompts of others lengthen the steps: lower --max-num-batched-tokens.",
    ),
    Rule(
        "TPOT: many rows",
        lambda r: r.decode_rows.p50 >= 0.9 * r.max_num_seqs > 1,
        lambda r: f"{r.decode_rows.p50:.0f} of {r.max_num_seqs} rows decode in the median step",
        lambda r: "If a token must come sooner, run fewer rows (--max-num-seqs); it costs throughput.",
    ),
    Rule(
        "preemption",
        lambda r: r.preemptions > 0,
        lambda r: f"{r.preemptions} preemptions, for {r.num_requests} requests",
        lambda r: "Each computes a sequence's tokens again: more KV memory, or fewer rows (--max-num-seqs).",
    ),
    Rule(
        "KV slots empty",
        lambda r: 0 < r.kv_fill.p50 < 0.6,
        lambda r: f"{r.kv_fill.p50:.0%} of the slots in used KV blocks hold tokens in the median",
        lambda r: "Sequences are short for the blocks: a smaller --block-size holds more of them.",
    ),
    Rule(
        "tail",
        lambda r: r.num_iterations >= MIN_FOR_TAIL and r.iteration.p99 > 3 * r.iteration.p50,
        lambda r: f"the slowest 1% of iterations take {r.iteration.p99 / r.iteration.p50:.1f} times the median",
        lambda r: (
            "Look at them in --trace: with many prompt tokens, lower --max-num-batched-tokens; with few, other "
            "work on the machine or garbage collection took the time."
        ),
    ),
)


def bottleneck(report: Report) -> Finding:
    """What limits the run."""
    return next(_find(rule, report) for rule in BOTTLENECKS if rule.applies(report))


def symptoms(report: Report) -> list[Finding]:
    """What else stands out."""
    return [_find(rule, report) for rule in SYMPTOMS if rule.applies(report)]


def labelled(report: Report) -> list[tuple[str, Finding]]:
    """The bottleneck and what else stands out, each under its heading."""
    return [("Bottleneck", bottleneck(report)), *(("Also", finding) for finding in symptoms(report))]


def _find(rule: Rule, report: Report) -> Finding:
    return Finding(rule.name, rule.evidence(report), rule.advice(report))
