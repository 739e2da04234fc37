"""`headrace serve` as a newcomer meets it: from the bound port to the last signal."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from headrace.errors import ConfigError
from headrace.listening import bind
from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server


def stream_text(url: str, path: str, body: dict[str, object]) -> str:
    pieces = []
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                choices = json.loads(line[6:])["choices"]
                pieces += [
                    c.get("text") or c.get("delta", {}).get("content") or "" for c in choices
                ]
    return "".join(pieces)


@pytest.mark.real_model
def test_the_real_model_knows_the_capital_of_france(real_server: StartedServer) -> None:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "temperature": 0,
        "max_tokens": 32,
    }
    assert "Paris" in stream_text(real_server.url, "/v1/chat/completions", body)
    answer = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=120).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.real_model
def test_the_start_prints_arithmetic_url_and_a_curl_line_that_works(
    real_server: StartedServer,
) -> None:
    printed = "".join(real_server.output)
    assert (
        "KV in " in printed and "per token x" in printed and "full-length requests fit" in printed
    )
    curl = next(line for line in real_server.output if line.strip().startswith("curl "))
    done = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120)
    assert "data: [DONE]" in done.stdout


def test_the_port_answers_before_the_model_is_there(tmp_path: pathlib.Path) -> None:
    path = write_script(tmp_path / "slow.json", ["Hi"], load_delay_seconds=3.0)
    with started_server(["--model", f"scripted:{path}"], ready=False) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503
        assert int(ready.headers["retry-after"]) >= 1
        chat = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": []})
        assert chat.status_code == 503
        assert int(chat.headers["retry-after"]) >= 1
        assert chat.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/models").status_code == 503
        server.wait_ready()
        assert stream_text(server.url, "/v1/completions", {"prompt": "x"}) == "Hi"


def test_a_taken_port_ends_the_start_with_the_reason(tmp_path: pathlib.Path) -> None:
    """X07: a second server on one port."""
    path = write_script(tmp_path / "script.json", ["Hi"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "headrace", "serve", "--port", str(port)]
        done = subprocess.run(
            [*command, "--model", f"scripted:{path}"], capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr and "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["", "a" * 70, "no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_cannot_be_listened_on_is_named_with_what_to_do(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*--host, such as 127\.0\.0\.1"):
        bind(host, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["idle", "loading", "streaming"])
def test_a_signal_ends_it_cleanly(tmp_path: pathlib.Path, number: int, when: str) -> None:
    """X01: whatever it does, with exit code 0 and no traceback; streams end with an error."""
    settings = {"load_delay_seconds": 30.0} if when == "loading" else {"step_delay_seconds": 0.05}
    path = write_script(tmp_path / "script.json", ["Hi"] * 400, **settings)
    with started_server(["--model", f"scripted:{path}"], ready=when != "loading") as server:
        if when == "streaming":
            client = httpx.stream("POST", f"{server.url}/v1/completions", timeout=30,
                                  json={"prompt": "x", "stream": True, "max_tokens": 300})  # fmt: skip
            with client as response:
                stream = response.iter_lines()
                next(stream)
                server.process.send_signal(number)
                lines = list(stream)
            assert any('"error"' in line for line in lines)
        else:
            server.process.send_signal(number)
        assert server.process.wait(10) == 0
        time.sleep(0.2)
    assert "Traceback" not in "".join(server.output)


def test_a_model_that_cannot_be_read_ends_the_start_with_the_reason(tmp_path: pathlib.Path) -> None:
    bad = tmp_path / "model.gguf"
    bad.write_bytes(b"<!DOCTYPE html><html>not found</html>")
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--model", str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert str(bad) in done.stderr and "HTML" in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_beat_the_environment_and_that_the_file(tmp_path: pathlib.Path) -> None:
    """X06: `--set` reaches any key; the port of the flag is taken, not those of file and environment."""
    path = write_script(tmp_path / "script.json", ["Hi"])
    config = tmp_path / "headrace.yaml"
    engine = "{max_model_len: 128, max_num_sequences: 3}"
    config.write_text(
        f"gateway: {{port: 1}}\nmodels:\n- {{source: 'scripted:{path}', name: a, engine: {engine}}}\n"
    )
    environment = {
        "HEADRACE_GATEWAY__PORT": "2",
        "HEADRACE_MODELS__0__NAME": "from-environment",
        "HEADRACE_MODELS__0__ENGINE__MAX_MODEL_LEN": "96",
    }
    arguments = ["--config", str(config), "--set", "models.0.engine.max_model_len=64"]
    with started_server(arguments, environment=environment) as server:
        models = httpx.get(f"{server.url}/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["from-environment"]
        body = {"prompt": [7] * 64, "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        printed = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"^headrace_kv_blocks\{.*\} 12\.0$", printed, re.M)  # 3 sequences of 64


def test_a_broken_template_is_a_warning_at_start_and_a_400_on_chat(tmp_path: pathlib.Path) -> None:
    """T11: said before anybody asks; completions work."""
    path = write_script(tmp_path / "script.json", ["Hi"], chat_template="{% for message in")
    with started_server(["--model", f"scripted:{path}"]) as server:
        deadline = time.monotonic() + 20
        while "cannot be" not in "".join(server.output):
            assert time.monotonic() < deadline, server.output
            time.sleep(0.05)
        warnings = [line for line in server.output if "chat template" in line]
        assert len(warnings) == 1 and "warning" in warnings[0]
        body = {"messages": [{"role": "user", "content": "x"}]}
        chat = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert chat.status_code == 400 and "template" in chat.json()["error"]["message"]
        assert stream_text(server.url, "/v1/completions", {"prompt": "x"}) == "Hi"
