"""vLLM's side of benchmarks/inference.py on a CPU; run it with the Python of vLLM's own environment.

    PYTHON benchmarks/peers/vllm_server.py MODEL [--prompt 128] [--new 128] [--batch 1 16]      prints one JSON line

Starts vLLM's server with a model folder in fp32, asks over HTTP for random token-id prompts, all requests of a batch at
once, and ends it. `whole` counts the new tokens over the time from sending to the last reply; `decode` leaves out the time
that the same batch takes for one token. Medians of three, after one round that warms up; no prompt comes twice. vLLM gets
what its documentation asks for on a CPU: OpenMP from Intel where installed, compiled unless `--eager`; on few cores that
others use as well, fewer `--threads` may be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READY = b"Application startup complete"
ROUNDS = 3


def environment(threads: int) -> dict[str, str]:
    """Return the settings that vLLM reads from the environment; memory for the cache is in GiB."""
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    given = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)} if threads else {}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    return {**os.environ, **given, **offline} | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def start(asked: argparse.Namespace, log: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start the server and return it, ready, with its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = str(asked.prompt + asked.new)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", asked.model, "--served-model-name", "m",
               "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", context]  # fmt: skip
    command += ["--enforce-eager"] * asked.eager
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment(asked.threads))
    while READY not in Path(log.name).read_bytes():
        if server.poll() is not None:
            sys.exit(f"vLLM did not start: {Path(log.name).read_text(errors='replace')[-2000:]}")
        time.sleep(0.5)
    return server, f"http://127.0.0.1:{port}/v1/completions"


def seconds(url: str, batch: int, prompt: int, new: int, vocabulary: int) -> float:
    """Return how long a batch of new random prompts takes."""

    def ask(ids: list[int]) -> None:
        body = {"model": "m", "prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request) as reply:  # noqa: S310 - our own server
            assert json.load(reply)["usage"]["completion_tokens"] == new

    prompts = [random.choices(range(vocabulary), k=prompt) for _ in range(batch)]  # noqa: S311
    with ThreadPoolExecutor(batch) as pool:
        began = time.perf_counter()
        list(pool.map(ask, prompts))
        return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=0, help="0: as vLLM chooses")
    parser.add_argument("--eager", action="store_true", help="not compiled")
    asked = parser.parse_args()
    vocabulary = json.loads(Path(asked.model, "config.json").read_text())["vocab_size"]
    results: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile() as log:
        began = time.perf_counter()
        server, url = start(asked, log)
        try:
            results["start_seconds"] = round(time.perf_counter() - began, 1)
            for batch in asked.batch:
                rounds = [
                    [seconds(url, batch, asked.prompt, new, vocabulary) for new in (asked.new, 1)]
                    for _ in range(ROUNDS + 1)
                ]
                whole, first = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
                results[f"batch_{batch}"] = {
                    "whole": round(batch * asked.new / whole, 1),
                    "decode": round(batch * (asked.new - 1) / (whole - first), 1),
                    "first_token_seconds": round(first, 3),
                }
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"engine": "vllm", **vars(asked), **results}))


if __name__ == "__main__":
    main()
