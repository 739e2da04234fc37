"""The examples with replicas are started as they are, but for ports and the model."""

from __future__ import annotations

import pathlib

import httpx

from headrace.testing.script_file import write_script
from headrace.testing.server import started_server

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


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
