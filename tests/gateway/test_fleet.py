"""Replicas come and go through the admin API and a configuration read again; no accepted request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from headrace.config import Config, GatewayConfig, ModelConfig, ReplicaEntry
from headrace.errors import ConfigError
from headrace.gateway.admin import ReplicaAdmin, replica_operations
from headrace.gateway.app import application, operations
from headrace.gateway.fleet import Fleet, Reload, changed_keys
from headrace.gateway.replica import Replica
from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway, RawExchange, parse_events, until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEYS = {"ADMIN": "let-me-in"}


class Managed:
    """A gateway whose replicas are a fleet's, and its admin API on the main port."""

    def __init__(self, replicas: int = 2, grace_period: float = 5.0) -> None:
        admin = msgspec.structs.replace(GatewayConfig().admin, key_env="ADMIN")
        self.gateway = FakeGateway(
            config=GatewayConfig(grace_period=grace_period, admin=admin), environ=KEYS
        )
        self.config = Config(
            gateway=self.gateway.state.config.gateway,
            models=(ModelConfig(name="tiny", replicas=(ReplicaEntry(count=replicas),)),),
        )
        self.made: list[FakeClient] = []
        state = self.gateway.state
        self.fleet = Fleet(self.config, self.gateway.router, self._make, state.texts)
        self.next_config = self.config
        table = replica_operations(ReplicaAdmin(self.fleet, self._read_again), "admin")
        self.app = application(state, [*operations(state), *table])

    def _make(self, config: Config, index: int, entry: ReplicaEntry, name: str) -> Replica:
        if entry.api_key_env == "MISSING":
            raise ConfigError("the environment variable MISSING is not set")
        self.made.append(FakeClient(name))
        return Replica(name, config.models[index].name, self.made[-1], entry)

    async def _read_again(self) -> Reload:
        return self.fleet.reload(self.next_config)

    async def call(self, method: str, path: str, body: object = b"") -> RawExchange:
        headers = {"authorization": "Bearer let-me-in"}
        exchange = RawExchange(self.app, path, body, method=method, headers=headers)
        return await exchange.start().finished()

    async def ids(self) -> dict[str, str]:
        answer = await self.call("GET", "/admin/replicas")
        return {each["id"]: each["state"] for each in answer.json()["replicas"]}

    def ask(self, **more: object) -> RawExchange:
        return RawExchange(self.app, CHAT, {**ASK, **more}).start()


def run(main: Callable[[Managed], Awaitable[None]], **options: Any) -> None:
    async def bounded() -> None:
        managed = Managed(**options)
        async with asyncio.timeout(30):
            assert await managed.fleet.start() == []
            await main(managed)
            await managed.fleet.close()
        managed.gateway.state.observers.close()

    asyncio.run(bounded())


def test_replicas_are_added_drained_resumed_and_removed() -> None:
    async def main(it: Managed) -> None:
        assert await it.ids() == {"tiny-0": "ready", "tiny-1": "ready"}
        added = await it.call("POST", "/admin/replicas", {"model": "tiny", "count": 2})
        assert (added.status, added.json()) == (202, {"added": ["tiny-2", "tiny-3"]})
        await until(lambda: it.gateway.router.replicas()[3].is_ready)
        drained = await it.call("POST", "/admin/replicas/tiny-1/drain")
        assert (drained.status, drained.json()["state"]) == (202, "draining")
        for _ in range(9):
            assert (await it.ask().finished()).status == 200
        served = [len(client.requests) for client in it.made]
        assert served == [3, 0, 3, 3]
        await it.call("POST", "/admin/replicas/tiny-1/resume")
        assert (await it.ids())["tiny-1"] == "ready"
        gone = await it.call("DELETE", "/admin/replicas/tiny-0")
        assert gone.status == 202
        await until(lambda: it.gateway.router.find("tiny-0") is None)
        assert it.made[0].state == "stopped"
        again = await it.call("POST", "/admin/replicas", {"model": "tiny"})
        assert again.json() == {"added": ["tiny-4"]}  # no id is given twice

    run(main)


async def start_long(it: Managed) -> RawExchange:
    """Return a request that runs on the first replica until that may step."""
    it.made[0].may_step.clear()
    running = it.ask(stream=True)
    await until(lambda: it.made[0].requests)
    return running


def test_reading_the_same_file_again_changes_nothing() -> None:
    """A replica that an operator drained or that is being restarted is one of the file's."""

    async def main(it: Managed) -> None:
        await it.call("POST", "/admin/replicas/tiny-1/drain")
        running = await start_long(it)
        await it.call("POST", "/admin/replicas/tiny-0/restart")
        again = await it.call("POST", "/admin/reload")
        assert again.json() == {"added": [], "removed": [], "needs_restart": []}
        it.made[0].may_step.set()
        await running.finished()
        await until(lambda: len(it.made) == 3 and it.gateway.router.replicas()[-1].is_ready)
        assert await it.ids() == {"tiny-1": "draining", "tiny-0": "ready"}
        fewer = ModelConfig(name="tiny", replicas=(ReplicaEntry(),))
        it.next_config = msgspec.structs.replace(it.config, models=(fewer,))
        assert (await it.call("POST", "/admin/reload")).json()["removed"] == ["tiny-1"]

    run(main)


def test_of_two_orders_removal_counts() -> None:
    async def main(it: Managed) -> None:
        running = await start_long(it)
        one = "/admin/replicas/tiny-0"
        assert (await it.call("POST", f"{one}/restart")).status == 202
        assert (await it.call("POST", f"{one}/restart")).status == 202
        assert (await it.call("POST", f"{one}/resume")).status == 409
        assert (await it.call("DELETE", one)).status == 202
        assert (await it.call("DELETE", one)).status == 202
        for refused in ("restart", "resume"):
            answer = await it.call("POST", f"{one}/{refused}")
            assert (answer.status, answer.json()["error"]["code"]) == (409, "replica_is_leaving")
        it.made[0].may_step.set()
        assert (await running.finished()).status == 200
        await until(lambda: it.made[0].state == "stopped")
        assert await it.ids() == {"tiny-1": "ready"}
        assert len(it.made) == 2

    run(main)


@pytest.mark.parametrize("how", ["DELETE", "restart"])
def test_what_runs_there_finishes_first(how: str) -> None:
    async def main(it: Managed) -> None:
        first = it.made[0]
        first.may_step.clear()
        running = it.ask(stream=True)
        await until(lambda: first.requests)
        path = "/admin/replicas/tiny-0"
        await it.call("DELETE", path) if how == "DELETE" else await it.call(
            "POST", path + "/restart"
        )
        for _ in range(4):
            assert (await it.ask().finished()).status == 200
        assert len(first.requests) == 1 and first.state == "ready"
        first.may_step.set()
        assert parse_events((await running.finished()).body)[-1] == "[DONE]"
        await until(lambda: first.state == "stopped")
        if how == "restart":
            await until(lambda: len(it.made) == 3 and it.made[2].state == "ready")
            assert (await it.ids())["tiny-0"] == "ready"

    run(main)


def test_what_does_not_finish_within_the_grace_period_moves() -> None:
    async def main(it: Managed) -> None:
        it.made[0].may_step.clear()
        running = it.ask(stream=True)
        await until(lambda: it.made[0].requests)
        await it.call("DELETE", "/admin/replicas/tiny-0")
        assert parse_events((await running.finished()).body)[-1] == "[DONE]"
        assert len(it.made[1].requests) == 1

    run(main, grace_period=0.05)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/admin/replicas", {"model": "nobody"}, 404, "does not exist"),
        ("POST", "/admin/replicas", {"model": "tiny", "kind": "http"}, 400, "url: is missing"),
        ("POST", "/admin/replicas", {"model": "tiny", "kind": "ray"}, 400, "'ray'"),
        ("POST", "/admin/replicas", {"model": "tiny", "count": 0}, 400, "from 1 to 64"),
        ("POST", "/admin/replicas", {"model": "tiny", "cuont": 1}, 400, "cuont"),
        (
            "POST",
            "/admin/replicas",
            {"model": "tiny", "kind": "http", "url": "http://h", "api_key_env": "MISSING"},
            400,
            "MISSING is not set",
        ),
        ("POST", "/admin/replicas/x/drain", b"", 404, "Known: tiny-0, tiny-1"),
        ("DELETE", "/admin/replicas/x", b"", 404, "no replica 'x'"),
    ],
)
def test_what_cannot_be_done_says_why(
    method: str, path: str, body: object, status: int, words: str
) -> None:
    async def main(it: Managed) -> None:
        answer = await it.call(method, path, body)
        assert answer.status == status and words in answer.body.decode()
        assert await it.ids() == {"tiny-0": "ready", "tiny-1": "ready"}

    run(main)


def test_without_the_admin_key_nothing_is_told() -> None:
    async def main(it: Managed) -> None:
        for key in ("", "wrong"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            exchange = RawExchange(it.app, "/admin/replicas", b"", method="GET", headers=headers)
            answer = await exchange.start().finished()
            assert answer.status == 401 and "tiny-0" not in answer.body.decode()

    run(main)


def test_a_configuration_read_again_changes_replicas_and_names_the_rest() -> None:
    async def main(it: Managed) -> None:
        model = it.config.models[0]
        far = ReplicaEntry(kind="http", url="http://127.0.0.1:9")
        changed = msgspec.structs.replace(model, replicas=(ReplicaEntry(), far), source="other")
        gateway = msgspec.structs.replace(it.config.gateway, keepalive_interval=3.0)
        it.next_config = msgspec.structs.replace(it.config, models=(changed,), gateway=gateway)
        outcome = (await it.call("POST", "/admin/reload")).json()
        assert outcome == {
            "added": ["tiny-2"],
            "removed": ["tiny-1"],
            "needs_restart": ["gateway", "models (tiny).source"],
        }
        await until(lambda: it.gateway.router.find("tiny-1") is None)
        again = (await it.call("POST", "/admin/reload")).json()
        assert (again["added"], again["removed"]) == ([], [])

    run(main)


def test_a_configuration_that_cannot_be_had_changes_nothing() -> None:
    async def main(it: Managed) -> None:
        bad = ReplicaEntry(kind="http", url="http://h", api_key_env="MISSING")
        model = msgspec.structs.replace(it.config.models[0], replicas=(bad,))
        it.next_config = msgspec.structs.replace(it.config, models=(model,))
        with pytest.raises(ConfigError):
            it.fleet.reload(it.next_config)
        assert await it.ids() == {"tiny-0": "ready", "tiny-1": "ready"}

    run(main)


def test_models_that_come_or_go_wait_for_a_restart() -> None:
    old = Config(models=(ModelConfig(name="a"), ModelConfig(name="b")))
    new = Config(models=(ModelConfig(name="b"), ModelConfig(name="c")))
    assert changed_keys(old, new) == ["models (a)", "models (c)"]


def test_a_stopping_server_refuses_and_says_so_in_ready() -> None:
    """X01: readiness 503 first, new requests refused with 503, running ones finish."""

    async def main(it: Managed) -> None:
        it.made[0].may_step.clear()
        running = it.ask()
        await until(lambda: it.made[0].requests)
        it.gateway.state.lifecycle.stop()
        ready = await it.call("GET", "/ready")
        assert ready.status == 503 and ready.json()["stopping"] is True
        assert (await it.call("GET", "/health")).status == 200
        refused = await it.ask().finished()
        assert refused.status == 503 and refused.json()["error"]["code"] == "stopping"
        assert "retry-after" in refused.headers
        it.made[0].may_step.set()
        assert (await running.finished()).status == 200

    run(main)
