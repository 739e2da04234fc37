"""What the gateway adds: requests per second and latency in front of an upstream that costs nothing.

    python benchmarks/gateway.py --router VENV --litellm VENV [--seconds 6]

Puts up, one after the other, the bare upstream, vllm-router (Rust), the LiteLLM proxy (Python) and Headrace
with an `http` replica, all in front of the same upstream; then Headrace with a `process` replica on the
simulated engine. Each is loaded by wrk with one connection and with 16, plain and streamed (16 chunks).
Nobody writes a log line per request. Prints the table of targets; needs wrk on the path. The core time
beside each rate, of the server and of its child processes, is what can still be read where other work
disturbs the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16}
KEY = "sk-for-nothing-but-this-benchmark-0123456789abcdef"
ROUNDS = 3

UPSTREAM = """
import json
USAGE = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
BASE = {"id": "c1", "created": 1, "model": "smol"}
def choice(**more): return [{"index": 0, **more}]
FULL = json.dumps({**BASE, "object": "chat.completion", "usage": USAGE, "choices": choice(
    message={"role": "assistant", "content": "hello " * 16}, finish_reason="stop")}).encode()
def event(choices): return b"data: " + json.dumps(
    {**BASE, "object": "chat.completion.chunk", "choices": choices}).encode() + b"\\n\\n"
CHUNK = event(choice(delta={"content": "hello "}, finish_reason=None))
LAST = event(choice(delta={}, finish_reason="stop")) + b"data: [DONE]\\n\\n"
LIST = b'{"object":"list","data":[{"id":"smol","object":"model","created":1,"owned_by":"x"}]}'
async def app(scope, receive, send):
    body, more = b"", scope["type"] == "http"
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    kind = b"text/event-stream" if b'"stream":true' in body.replace(b" ", b"") else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if kind == b"application/json":
        content = LIST if scope["method"] == "GET" else FULL
        await send({"type": "http.response.body", "body": content})
        return
    for _ in range(16):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": LAST})
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What wrk says of one load: requests per second, latency in milliseconds. Core time per request."""

    rate: float
    p50: float
    p99: float
    failed: int
    core_ms: float = 0.0
    """Of the server's own process."""
    children_core_ms: float = 0.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], url: str, folder: pathlib.Path) -> Iterator[int]:
    """Run a server until the end of the block; yield its process id once it answers a chat request."""
    with (folder / f"{pathlib.Path(command[0]).name}-{url[-5:]}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + 120
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} does not serve; see {log.name}")
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wrk(url: str, script: pathlib.Path, clients: int, seconds: int) -> Figures:
    """Load the server and return what wrk measured."""
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--latency", "-s", str(script)]
    out = subprocess.run(
        [*command, f"{url}/v1/chat/completions"], capture_output=True, text=True, check=True
    ).stdout
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None, out
    return Figures(
        float(rate[1]), _latency(out, "50%"), _latency(out, "99%"), int(failed[1]) if failed else 0
    )


def _latency(out: str, share: str) -> float:
    found = re.search(rf"{share}\s+([\d.]+)(us|ms|s)", out)
    assert found is not None, out
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


LOADS = {"plain 1": ("plain", 1), "plain 16": ("plain", 16), "streamed 16": ("streamed", 16)}


def core_seconds(pid: int) -> tuple[float, float]:
    """Return the core time that a process has taken so far, and that of its child processes."""
    own, *children = [
        sum(each.cpu_times()[:2])
        for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]
    return own, sum(children)


def measured(url: str, pid: int, folder: pathlib.Path, seconds: int) -> dict[str, Figures]:
    """Return the best of some rounds for each load: the machine's other work only ever slows one down."""
    best: dict[str, Figures] = {}
    for _ in range(ROUNDS):
        for name, (script, clients) in LOADS.items():
            before = core_seconds(pid)
            figures = wrk(url, folder / f"{script}.lua", clients, seconds)
            own, children = (
                (after - earlier) * 1e3 / max(1.0, figures.rate * seconds)
                for after, earlier in zip(core_seconds(pid), before, strict=True)
            )
            figures = replace(figures, core_ms=own, children_core_ms=children)
            if name not in best or figures.rate > best[name].rate:
                best[name] = figures
    for name, figures in best.items():
        print(
            f"    {name:12} {figures.rate:9.0f}/s   p50 {figures.p50:7.2f} ms   "
            f"p99 {figures.p99:7.2f} ms   failed {figures.failed}   "
            f"core {figures.core_ms:.2f} + {figures.children_core_ms:.2f} ms"
        )
    return best


def write_scripts(folder: pathlib.Path) -> None:
    (folder / "upstream.py").write_text(UPSTREAM)
    for name, body in (("plain", CHAT), ("streamed", {**CHAT, "stream": True})):
        (folder / f"{name}.lua").write_text(
            f"wrk.method = 'POST'\nwrk.body = '{json.dumps(body)}'\n"
            "wrk.headers['Content-Type'] = 'application/json'\n"
            f"wrk.headers['Authorization'] = 'Bearer {KEY}'\n"
        )


def headrace(folder: pathlib.Path, replica: str, model: str) -> tuple[list[str], str]:
    """Return the command and the URL of a Headrace whose model has this replica."""
    port = free_port()
    path = folder / f"headrace-{port}.yaml"
    path.write_text(
        f"gateway: {{port: {port}, grace_period: 0s}}\nlogging: {{level: warning}}\n"
        f"models:\n  - name: smol\n{model}    replicas: [{replica}]\n"
    )
    command = [sys.executable, "-m", "headrace", "serve", "-c", str(path)]
    return command, f"http://127.0.0.1:{port}"


def router_command(venv: str, upstream: str) -> tuple[list[str], str]:
    port, metrics = free_port(), free_port()
    command = [f"{venv}/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", upstream, "--policy", "consistent_hash", "--log-level", "error"]
    return [*command, "--prometheus-port", str(metrics)], f"http://127.0.0.1:{port}"


def litellm_command(venv: str, upstream: str, folder: pathlib.Path) -> tuple[list[str], str]:
    port = free_port()
    (folder / "litellm.yaml").write_text(
        "model_list:\n  - model_name: smol\n    litellm_params:\n      model: openai/smol\n"
        f"      api_base: {upstream}/v1\n      api_key: x\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    command = [f"{venv}/bin/litellm", "--config", "litellm.yaml", "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--num_workers", "1"], f"http://127.0.0.1:{port}"


SIMULATED = """    source: {source}
    backend:
      use: simulated
      options: {{base_seconds: 0, seconds_per_prefill_token: 0, seconds_per_sequence: 0, seconds_per_kv_row: 0}}
    engine: {{num_threads: 1, kv_memory: 512MiB, max_num_sequences: 256}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--router", help="virtual environment with vllm-router")
    parser.add_argument("--litellm", help="virtual environment with litellm[proxy]")
    parser.add_argument(
        "--source", default="smollm2", help="whose tokenizer the process replica has"
    )
    parser.add_argument("--seconds", type=int, default=6, help="of each load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        write_scripts(folder)
        port = free_port()
        upstream = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "uvicorn", "upstream:app", "--port", str(port)]
        command += ["--log-level", "error", "--no-access-log"]
        upstream_pid = stack.enter_context(running(command, upstream, folder))
        remote = headrace(folder, f'{{kind: http, url: "{upstream}"}}', "")
        local = headrace(folder, "{}", SIMULATED.format(source=options.source))
        servers = {"upstream alone": None, "headrace, http": remote, "headrace, process": local}
        if options.router:
            servers["vllm-router"] = router_command(options.router, upstream)
        if options.litellm:
            servers["LiteLLM"] = litellm_command(options.litellm, upstream, folder)
        results = {}
        for title, server in servers.items():
            print(title)
            if server is None:
                results[title] = measured(upstream, upstream_pid, folder, options.seconds)
            else:
                with running(*server, folder) as pid:
                    results[title] = measured(server[1], pid, folder, options.seconds)
        print_targets(results)


def print_targets(results: dict[str, dict[str, Figures]]) -> None:
    """Print each target with the figure, where its peer was measured."""
    ours, bare = results["headrace, http"], results["upstream alone"]
    added = ours["plain 1"].p50 - bare["plain 1"].p50
    rows = [
        ("added p50, 1 client (ms)", added, 1.0, 0.5, False),
        ("process replica, plain, 16 clients (/s)", results["headrace, process"]["plain 16"].rate,
         2000.0, 4000.0, True),
    ]  # fmt: skip
    if "LiteLLM" in results and "vllm-router" in results:
        for load in ("plain 16", "streamed 16"):
            least = 8 * results["LiteLLM"][load].rate
            aim = results["vllm-router"][load].rate / 4
            rows.append((f"http replica, {load} (/s)", ours[load].rate, least, aim, True))
    print(f"\n{'':44}{'figure':>10}{'at least':>10}{'aim':>10}")
    for title, figure, least, aim, more_is_better in rows:
        is_met = [figure >= bound if more_is_better else figure <= bound for bound in (least, aim)]
        verdict = "aim met" if all(is_met) else "met" if is_met[0] else "NOT MET"
        print(f"{title:44}{figure:10.2f}{least:10.2f}{aim:10.2f}  {verdict}")


if __name__ == "__main__":
    main()
