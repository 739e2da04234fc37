"""Real replicas killed, stopped, added and taken out under load: no accepted request without bytes is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import psutil
import pytest

from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

BODY = {"model": "m", "prompt": "x", "max_tokens": 6, "ignore_eos": True, "seed": 1}
"""Its seed makes the answer the same text on every replica, though no model is computed."""
ADMIN = {"HEADRACE_TEST_ADMIN": "let-me-in"}
KEY = {"Authorization": "Bearer let-me-in"}


@pytest.fixture
def config(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    script = write_script(tmp_path / "script.json", ["x"])

    def write(*replicas: str, name: str = "headrace.yaml") -> pathlib.Path:
        path = tmp_path / name
        path.write_text(
            "gateway: {admin: {key_env: HEADRACE_TEST_ADMIN}}\n"
            f"models:\n  - name: m\n    source: scripted:{script}\n"
            "    backend: {use: simulated, options: {base_seconds: 0.02}}\n"
            f"    engine: {{num_threads: 1, kv_memory: 64MiB}}\n"
            f"    replicas: [{', '.join(replicas)}]\n"
        )
        return path

    return write


class Load:
    """Clients that ask again and again, half of them for streams, and what became of their requests."""

    def __init__(self, url: str, clients: int = 12) -> None:
        self.outcomes: Counter[str] = Counter()
        self.details: list[str] = []
        self._url = url + "/v1/completions"
        self._clients = clients
        self._is_over = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            text = await text_of(session, self._url)
            tasks = [
                asyncio.create_task(self._client(session, text, number % 2 == 0))
                for number in range(self._clients)
            ]
            yield self
            self._is_over = True
            await asyncio.gather(*tasks)

    async def until(self, count: int) -> None:
        """Wait for so many more requests that ended well."""
        wanted = self.outcomes["good"] + count
        while self.outcomes["good"] < wanted:  # noqa: ASYNC110 - counted by other tasks
            await asyncio.sleep(0.02)

    async def _client(self, session: aiohttp.ClientSession, text: str, is_stream: bool) -> None:
        while not self._is_over:
            body = {**BODY, "stream": is_stream}
            async with session.post(self._url, json=body) as response:
                raw = await response.read()
            outcome = judge(response.status, raw, text, is_stream)
            self.outcomes[outcome] += 1
            if outcome == "lost":
                self.details.append(f"{response.status} {raw[:300]!r}")


async def text_of(session: aiohttp.ClientSession, url: str) -> str:
    """Return the answer that every request gets."""
    async with session.post(url, json=BODY) as response:
        return str((await response.json())["choices"][0]["text"])


def judge(status: int, raw: bytes, text: str, is_stream: bool = True) -> str:
    """Return "good", "one error event" (after some text) or "lost"."""
    if status != 200:
        return "lost"
    if not is_stream:
        return "good" if json.loads(raw)["choices"][0]["text"] == text else "lost"
    events = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [event for event in parsed if "error" in event]
    texts = [event["choices"][0]["text"] for event in parsed if event not in errors]
    said = "".join(texts)
    if not errors:
        return "good" if said == text and events[-1] == "[DONE]" else "lost"
    is_fair = len(errors) == 1 and "error" in parsed[-1] and said and text.startswith(said)
    return "one error event" if is_fair else "lost"


def engines(server: StartedServer) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(server.process.pid).children()
    return found


def run(main: Callable[[], Awaitable[None]], seconds: float = 60) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main()

    asyncio.run(bounded())


async def replicas(url: str, headers: dict[str, str] = KEY) -> dict[str, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url + "/admin/replicas") as response,
    ):
        return {each["id"]: each for each in (await response.json())["replicas"]}


async def until_ready(url: str, *, restarts: int, count: int = 2) -> None:
    """Wait until there are so many replicas, all ready, and they have been started again so often."""
    while True:
        now = (await replicas(url)).values()
        are_ready = [each["state"] for each in now] == ["ready"] * count
        if are_ready and sum(each["restarts"] for each in now) == restarts:
            return
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_an_engine_that_dies_or_hangs_under_load_loses_nothing(
    config: Callable[..., pathlib.Path], number: int
) -> None:
    """R07, S12: who has seen text sees one error event at most, everybody else an answer."""
    path = config("{count: 2, hang_timeout: 1s}")
    with started_server(["-c", str(path)], environment=ADMIN) as server:

        async def main() -> None:
            await until_ready(server.url, restarts=0)
            async with Load(server.url).running() as load:
                await load.until(30)
                engines(server)[0].send_signal(number)
                await load.until(30)
                await until_ready(server.url, restarts=1)
                await load.until(30)
            assert load.outcomes["lost"] == 0, load.details
            assert load.outcomes["one error event"] <= 6  # the streams that it served

        run(main)


def test_a_server_behind_that_dies_loses_nothing(config: Callable[..., pathlib.Path]) -> None:
    """One gateway in front of two others: kill -9 of one of them under load."""
    with contextlib.ExitStack() as stack:
        behind = [
            stack.enter_context(
                started_server(["-c", str(config("{}"))], environment=ADMIN, ready=False)
            )
            for _ in range(2)
        ]
        for server in behind:
            server.wait_ready()
        path = config(*(f'{{kind: http, url: "{server.url}"}}' for server in behind), name="g.yaml")
        front = stack.enter_context(started_server(["-c", str(path)], environment=ADMIN))

        async def main() -> None:
            async with Load(front.url).running() as load:
                await load.until(40)
                behind[0].process.kill()
                await load.until(60)
                states = sorted(each["state"] for each in (await replicas(front.url)).values())
                assert states == ["failed", "ready"]
            assert load.outcomes["lost"] == 0, load.details
            assert load.outcomes["one error event"] <= 6

        run(main)


def test_engines_of_every_kind_serve_one_model(config: Callable[..., pathlib.Path]) -> None:
    """in_process, process and http take turns and say the same, while the first is started again."""
    with contextlib.ExitStack() as stack:
        behind = stack.enter_context(started_server(["-c", str(config("{}"))], environment=ADMIN))
        http = f'{{kind: http, url: "{behind.url}"}}'
        path = config("{kind: in_process}", "{kind: process}", http, name="front.yaml")
        arguments = ["-c", str(path), "--set", "routing=round_robin"]
        front = stack.enter_context(started_server(arguments, environment=ADMIN))

        async def main() -> None:
            await until_ready(front.url, restarts=0, count=3)
            async with (
                aiohttp.ClientSession(headers=KEY) as session,
                Load(front.url).running() as load,
            ):
                await load.until(30)
                restart = f"{front.url}/admin/replicas/m-0/restart"
                async with session.post(restart) as response:
                    assert response.status == 202
                await load.until(30)
                await until_ready(front.url, restarts=0, count=3)
            assert set(load.outcomes) == {"good"}, load.details

        run(main)


def test_replicas_change_under_load(config: Callable[..., pathlib.Path]) -> None:
    """By the admin API and by SIGHUP: added, restarted and taken out, and not one request notices."""
    path = config("{count: 2}")
    with started_server(
        ["-c", str(path), "--set", "gateway.grace_period=20s"], environment=ADMIN
    ) as server:

        async def change(
            session: aiohttp.ClientSession, method: str, where: str, **more: Any
        ) -> None:
            async with session.request(method, server.url + where, **more) as response:
                assert response.status == 202, await response.text()

        async def main() -> None:
            await until_ready(server.url, restarts=0)
            async with (
                aiohttp.ClientSession(headers=KEY) as session,
                Load(server.url).running() as load,
            ):
                await load.until(20)
                await change(session, "POST", "/admin/replicas", json={"model": "m"})
                await change(session, "POST", "/admin/replicas/m-0/restart")
                await load.until(20)
                await until_ready(server.url, restarts=0, count=3)
                await change(session, "DELETE", "/admin/replicas/m-1")
                await load.until(20)
                config("{count: 1}")
                server.process.send_signal(signal.SIGHUP)
                await until_ready(server.url, restarts=0, count=1)
                await load.until(20)
            assert set(load.outcomes) == {"good"}, load.details

        run(main)


def test_sigterm_lets_requests_finish(config: Callable[..., pathlib.Path]) -> None:
    """X01: /ready says 503 first, new requests are refused, running ones finish; exit code 0."""
    path = config("{}")
    arguments = ["-c", str(path), "--set", "gateway.grace_period=20s"]
    with started_server(arguments, environment=ADMIN) as server:

        async def main() -> None:
            load = Load(server.url, clients=8)
            async with aiohttp.ClientSession() as session:
                text = await text_of(session, server.url + "/v1/completions")
                body = {**BODY, "stream": True}
                streams = [
                    await session.post(server.url + "/v1/completions", json=body) for _ in range(8)
                ]
                server.process.send_signal(signal.SIGTERM)
                while True:
                    async with session.get(server.url + "/ready") as ready:
                        if ready.status == 503:
                            break
                async with session.post(server.url + "/v1/completions", json=BODY) as refused:
                    assert refused.status == 503 and "Retry-After" in refused.headers
                for stream in streams:
                    load.outcomes[judge(200, await stream.read(), text)] += 1
            assert load.outcomes == {"good": 8}

        run(main)
        assert server.process.wait(20) == 0


LIMITED = ("/bin/sh", "-c", 'ulimit -n "$FILES"; exec "$@"', "sh", sys.executable, "-m", "headrace")


@pytest.mark.parametrize(
    ("clients", "files"),
    [(250, 200), pytest.param(1500, 1024, marks=pytest.mark.slow)],
)
def test_more_streams_than_descriptors(
    config: Callable[..., pathlib.Path], clients: int, files: int
) -> None:
    """O10: some are refused politely, the others finish, the server survives."""
    path = config("{}")
    environment = {**ADMIN, "FILES": str(files)}
    with started_server(["-c", str(path)], environment=environment, command=LIMITED) as server:

        async def one(session: aiohttp.ClientSession, text: str) -> str:
            try:
                body = {**BODY, "stream": True}
                async with session.post(server.url + "/v1/completions", json=body) as response:
                    raw = await response.read()
            except aiohttp.ClientError:
                return "hung up on"
            return "refused" if response.status == 503 else judge(response.status, raw, text)

        async def main() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                text = await text_of(session, server.url + "/v1/completions")
                asked = [one(session, text) for _ in range(clients)]
                outcomes = Counter(await asyncio.gather(*asked))
            assert outcomes["good"] >= 50 and outcomes["lost"] == 0, outcomes
            assert outcomes["refused"] > 0, outcomes
            async with Load(server.url, clients=4).running() as load:
                await load.until(8)
            assert set(load.outcomes) == {"good"}, load.details

        run(main, seconds=120)
        assert server.process.poll() is None


@pytest.mark.slow
def test_engines_that_keep_dying(config: Callable[..., pathlib.Path]) -> None:
    """A minute of kill -9 and kill -STOP of one engine after the other, always with two left."""
    path = config("{count: 3, hang_timeout: 1s}")
    with started_server(["-c", str(path)], environment=ADMIN) as server:

        async def main() -> None:
            await until_ready(server.url, restarts=0, count=3)
            loop = asyncio.get_running_loop()
            end, deaths = loop.time() + 60, 0
            async with Load(server.url, clients=16).running() as load:
                while loop.time() < end:
                    await load.until(20)
                    now = await replicas(server.url)
                    victim = sorted(now)[deaths % 3]
                    number = signal.SIGKILL if deaths % 2 else signal.SIGSTOP
                    os.kill(now[victim]["pid"], number)
                    deaths += 1
                    await until_ready(server.url, restarts=deaths, count=3)
            assert deaths >= 5 and load.outcomes["lost"] == 0, load.details

        run(main, seconds=180)
