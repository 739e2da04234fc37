"""The Redis example as it is, with two gateways and a Redis of the test's own that dies and comes back."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from headrace.testing.redis_server import RedisServer
from headrace.testing.script_file import write_script
from headrace.testing.server import started_server

pytestmark = pytest.mark.skipif(
    not RedisServer.is_installed(), reason="redis-server is not installed"
)
CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "redis.yaml"
BODY = {"prompt": "hi", "max_tokens": 8}


@pytest.fixture
def redis_server(tmp_path: pathlib.Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path).start()
    yield server
    server.kill()


def test_gateways_share_limits_and_survive_their_redis(
    redis_server: RedisServer, tmp_path: pathlib.Path
) -> None:
    script = write_script(tmp_path / "script.json", ["Hello", " world"])
    arguments = ["--config", str(CONFIG), "--set", f"models.0.source=scripted:{script}"]
    arguments += ["--set", "models.0.replicas=1", "--set", "models.0.engine.num_threads=1"]
    environment = {"REDIS_URL": redis_server.url, "HEADRACE_API_KEYS": "acme:key-1,other:key-2"}
    with ExitStack() as stack:
        pair = [
            stack.enter_context(started_server(arguments, environment=environment, ready=False))
            for _ in range(2)
        ]
        for server in pair:
            server.wait_ready()
        client = stack.enter_context(httpx.Client(timeout=30))

        def ask(number: int, key: str = "key-1") -> httpx.Response:
            return client.post(
                f"{pair[number % 2].url}/v1/completions",
                json=BODY,
                headers={"Authorization": f"Bearer {key}"},
            )

        answers = [ask(number) for number in range(12)]
        assert [answer.status_code for answer in answers[:10]] == [200] * 10
        left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers[:10]]
        assert left[0] == 9 and left[9] < left[0]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and refused[0].json()["error"]["reason"] == "requests"
        assert ask(0, "key-2").status_code == 200, "another tenant has limits of his own"
        assert ask(0, "wrong").status_code == 401

        redis_server.kill()
        assert [ask(number).status_code for number in range(20)] == [200] * 20
        redis_server.start()

        def is_limited() -> bool:
            return ask(0).status_code == 429

        assert any(is_limited() for _ in range(2000)), "limits hold again"
        assert ask(1).status_code in (200, 429)
        assert all(server.stop() == 0 for server in pair)
