"""llama.cpp's llama-server over loopback HTTP. Usage: llama_server.py SERVER GGUF

A server has its slots from its start, so requests that want another number get another server, started outside the
timing. A prompt may take over what its slot holds (`cache_prompt`) but not what another holds, so prompts with a common
prefix are fastest one after the other in one slot (bf16 on 2 cores: 7.0 s for 16; 33 s in 16 slots), and others in
8 slots (104 output tokens/s; 90 in 32 slots, 85 with one cache for all slots).
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

from driver import serve

PORT = 18080
MAX_SLOTS = 8
COMMON_PREFIX = 32  # prompts that begin with as many equal tokens share a slot
SLOT_TOKENS = 2048
OPTIONS = ["-t", "2", "-tb", "2", "-b", "2048", "-ub", "512", "--host", "127.0.0.1", "--port", str(PORT)]


class Server:
    """llama-server with the slots that suit the prompts of the last `make_room`."""

    def __init__(self, program: str, gguf: str) -> None:
        self._command = [program, "-m", gguf, *OPTIONS]
        self._slots = 0
        self._process: subprocess.Popen[bytes] | None = None

    def make_room(self, prompts: list[list[int]]) -> None:
        slots = min(len({tuple(prompt[:COMMON_PREFIX]) for prompt in prompts}), MAX_SLOTS)
        if slots == self._slots:
            return
        self.close()
        self._slots = slots
        options = ["-np", str(slots), "-c", str(slots * SLOT_TOKENS), "-no-kvu"]
        self._process = subprocess.Popen(
            [*self._command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self._healthy():
            if self._process.poll() is not None:
                raise SystemExit("llama-server ended before it was ready")
            time.sleep(0.01)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(_complete, prompts, max_tokens))

    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", PORT, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _complete(prompt: list[int], max_tokens: int) -> list[int]:
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": True,
        "return_tokens": True,
    }
    connection = HTTPConnection("127.0.0.1", PORT, timeout=600)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        tokens: list[int] = json.loads(connection.getresponse().read())["tokens"]
        return tokens
    finally:
        connection.close()


def main(program: str, gguf: str) -> None:
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stderr.splitlines()[0]
    server = Server(program, gguf)
    try:
        serve(version, server.generate, server.make_room, server.process_id)
    finally:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
