"""Every rule: a report that it applies to, one step away from one that it does not."""

from dataclasses import replace
from typing import Any

import pytest

from engine.cli.profile.advice import BOTTLENECKS, HOST_ADVICE, SYMPTOMS, bottleneck, symptoms
from engine.cli.profile.report import HOST_PHASES, Distribution, Report, make_report
from engine.config import EngineConfig
from engine.observe.records import Profile


def flat(value: float, **others: float) -> Distribution:
    """The same everywhere, but for `others`."""
    return Distribution(*[value] * 6)._replace(**others)


BUSY = replace(
    make_report(Profile(0.0, 0.0, [], []), EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=512)),
    wall=100.0,
    host=10.0,
    device_wait=90.0,
    device_busy=95.0,
    device_prefill=10.0,
    iteration=flat(0.010),
    decode_iteration=flat(0.010),
    decode_rows=flat(20.0),
    running=flat(20.0),
    kv_usage=flat(0.5),
    kv_fill=flat(0.9),
    queue_time=flat(0.001),
    prefill_steps=flat(4.0),
    time_to_first_token=flat(0.020),
    time_per_output_token=flat(0.011),
    num_iterations=1000,
    num_requests=10,
)
"""A run that the device limits, decoding, and that has no other symptom."""


@pytest.mark.parametrize(
    ("name", "changes", "evidence"),
    [
        ("load", {"idle": 60.0}, "60%"),
        ("load", {"wall": 0.0}, "no step"),
        ("KV memory", {"preemptions": 3}, "3 preemptions"),
        ("KV memory", {"kv_usage": flat(0.95), "waiting": flat(2.0)}, "95%"),
        ("host", {"host_exposed": 30.0}, "30%"),
        ("hand-over", {"hand_over": 40.0}, "40%"),
        ("device, computing prompts", {"device_prefill": 76.0}, "80%"),
        ("device, decoding", {}, "20.0 rows"),
        ("device, decoding", {"idle": 40.0}, "158%"),
        ("device, decoding", {"kv_usage": flat(0.95)}, ""),
        ("device, decoding", {"host_exposed": 20.0, "hand_over": 20.0}, ""),
    ],
)
def test_the_bottleneck_is_named(name: str, changes: dict[str, Any], evidence: str) -> None:
    found = bottleneck(replace(BUSY, **changes))
    assert found.name == name
    assert evidence in found.evidence and found.advice


@pytest.mark.parametrize("phase", HOST_PHASES)
def test_a_host_bottleneck_is_blamed_on_its_slowest_phase(phase: str) -> None:
    phases = {name: flat(0.0) for name in HOST_PHASES} | {phase: flat(5.0)}
    found = bottleneck(replace(BUSY, host_exposed=50.0, phases=phases))
    assert phase in found.evidence and found.advice == HOST_ADVICE[phase]


def test_a_clean_run_has_no_symptom() -> None:
    assert symptoms(BUSY) == []


@pytest.mark.parametrize(
    ("name", "changes", "evidence"),
    [
        ("TTFT: queueing", {"queue_time": flat(0.5), "time_to_first_token": flat(0.6)}, "500.0 ms"),
        ("TTFT: prefill in many steps", {"prefill_steps": flat(5.0)}, "5 steps"),
        ("TPOT: prefill among decodes", {"time_per_output_token": flat(0.016)}, "16.0 ms"),
        ("TPOT: many rows", {"decode_rows": flat(60.0)}, "60 of 64"),
        ("preemption", {"preemptions": 3}, "3 preemptions"),
        ("KV slots empty", {"kv_fill": flat(0.5)}, "50%"),
        ("tail", {"iteration": flat(0.010, p99=0.040)}, "4.0 times"),
    ],
)
def test_symptoms(name: str, changes: dict[str, Any], evidence: str) -> None:
    (found,) = symptoms(replace(BUSY, **changes))
    assert found.name == name
    assert evidence in found.evidence and found.advice


def test_queueing_advice_depends_on_whether_rows_are_free() -> None:
    late: dict[str, Any] = {"queue_time": flat(0.5), "time_to_first_token": flat(0.6)}
    (rows_free,) = symptoms(replace(BUSY, **late))
    (rows_taken,) = symptoms(replace(BUSY, **late, running=flat(64.0)))
    assert "--kv-cache-memory-bytes" in rows_free.advice
    assert "--max-num-seqs" in rows_taken.advice


def test_a_short_run_has_no_tail() -> None:
    assert symptoms(replace(BUSY, iteration=flat(0.010, p99=0.040), num_iterations=99)) == []


def test_every_rule_works_on_an_empty_report() -> None:
    empty: Report = make_report(Profile(0.0, 0.0, [], []), EngineConfig(model="m", max_num_batched_tokens=512))
    assert bottleneck(empty).name == "load"
    assert symptoms(empty) == []
    assert len({r.name for r in (*BOTTLENECKS, *SYMPTOMS)}) == len(BOTTLENECKS) + len(SYMPTOMS)
