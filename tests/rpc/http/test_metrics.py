"""Calls are counted by route and by how they ended."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from tests.rpc.http.conftest import Http


async def counts(http: Http) -> dict[tuple[str, str], float]:
    """Calls by handler and status, those that happened; and of the histogram, with no status."""
    text = (await http.client.get("/metrics")).text
    return {
        (sample.labels["handler"], sample.labels.get("status", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in ("http_requests_total", "http_request_duration_seconds_count") and sample.value
    }


async def test_answers_and_errors_count_and_probes_do_not(http: Http) -> None:
    assert await counts(http) == {}
    for path in ("/health", "/ready", "/version", "/metrics", "/nowhere"):
        await http.client.get(path)
    await http.client.get("/v1/models")
    await http.client.get("/v1/models/nobody's")
    await http.client.post("/tokenize", content=b"not json")
    assert await counts(http) == {
        ("/v1/models", "2xx"): 1, ("/v1/models", ""): 1,
        ("/v1/models/{model:path}", "4xx"): 1, ("/v1/models/{model:path}", ""): 1,
        ("/tokenize", "4xx"): 1, ("/tokenize", ""): 1,
    }  # fmt: skip


async def test_a_client_that_left_before_its_answer_counts_as_4xx(http: Http) -> None:
    call = asyncio.create_task(http.client.post("/v1/completions", json={"prompt": "hi"}))
    await http.next_request()
    call.cancel()
    await http.engine.aborts.get()
    while not (found := await counts(http)):
        pass
    assert found == {("/v1/completions", "4xx"): 1, ("/v1/completions", ""): 1}
