"""The examples with replicas are started as they are, but for ports and the model."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import httpx

from headrace.testing.script_file import write_script
from headrace.testing.server import started_server

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}


def simulated(tmp_path: pathlib.Path, index: int = 0) -> list[str]:
    """Return flags that let a model of the configuration start without weights."""
    script = write_script(tmp_path / "script.json", ["x"])
    keys = {"source": f"scripted:{script}", "backend": "simulated", "engine.kv_memory": "64MiB"}
    flags = [f"models.{index}.{key}={value}" for key, value in keys.items()]
    return [word for flag in flags for word in ("--set", flag)]


def test_two_replicas(tmp_path: pathlib.Path) -> None:
    arguments = ["-c", str(CONFIGS / "two-replicas.yaml"), *simulated(tmp_path)]
    with started_server(arguments) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=60)
        assert answer.status_code == 200
        ready = httpx.get(f"{server.url}/ready").json()
        assert ready["ready"] is True and list(ready["models"]) == ["smollm2"]


def test_http_upstream(tmp_path: pathlib.Path) -> None:
    """One of its two servers is there, under the name that the example gives; the other is not."""
    name = ["--set", "models.0.name=smollm2"]
    with started_server([*simulated(tmp_path), *name]) as behind:
        arguments = ["-c", str(CONFIGS / "http-upstream.yaml")]
        arguments += ["--set", f"models.0.replicas.0.url={behind.url}"]
        arguments += ["--set", "models.0.replicas.1.url=http://127.0.0.1:9/v1"]
        with started_server(arguments) as front:
            for _ in range(4):
                answer = httpx.post(f"{front.url}/v1/chat/completions", json=ASK, timeout=60)
                assert answer.status_code == 200 and answer.json()["model"] == "assistant"
                assert answer.json()["usage"]["completion_tokens"] == 3


def test_replicas_from_a_shell(tmp_path: pathlib.Path) -> None:
    environment = {"HEADRACE_ADMIN_KEY": "let-me-in"}
    flags = [*simulated(tmp_path), "--set", "models.0.name=m"]
    flags += ["--set", "gateway.admin.key_env=HEADRACE_ADMIN_KEY"]
    with started_server(flags, environment=environment) as server:

        def headrace(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "headrace", "replicas", *words, "--url", server.url]
            env = {**os.environ, **environment, **more}
            return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)

        added = headrace("add", "m", "--set", "kind=http", "--set", f"url={server.url}")
        assert added.stdout == "m-1\n", added.stderr
        assert headrace("drain", "m-1").stdout == "m-1: draining\n"
        listed = headrace("list").stdout.splitlines()
        assert [line.split()[:3] for line in listed[1:]] == [
            ["m-0", "process", "ready"],
            ["m-1", "http", "draining"],
        ]
        unknown = headrace("remove", "m-7")
        assert unknown.returncode == 1 and "Known: m-0, m-1" in unknown.stderr
        refused = headrace("list", HEADRACE_ADMIN_KEY="wrong")
        assert refused.returncode == 1 and "admin key" in refused.stderr
