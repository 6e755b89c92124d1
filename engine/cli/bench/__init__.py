"""`engine bench`: an open load on a running server, and what its clients saw of it.

    workload.py, recording.py  what is sent and when: random lengths and arrivals, or those of a file
    load.py                    sends it on time, whatever the answers do
    openai.py                  the HTTP way to send; the gRPC one is engine/cli/bench/grpc_backend.py
    metrics.py, goodput.py     numbers, under vLLM's names
    display.py, page.py        a table, and an HTML report

Read next: `load.py`; `docs/bench.md` shows how to use it.
"""
