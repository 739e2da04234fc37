"""Engine processes die, hang, refuse and outlive nobody: what happens to requests and to what is left."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any

import psutil
import pytest
import structlog

from headrace.engine.child import ChildProcess
from headrace.engine.client import ProcessEngine, RestartRule
from headrace.errors import EngineFailed, Unavailable
from headrace.testing.driving import collect, plain_request, run_bounded, started, until
from headrace.testing.fake_worker import FAKE_WORKER
from headrace.types import (
    Ready,
    StartEngine,
    Stop,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="engine processes need Unix sockets")
IMPATIENT = RestartRule(first_delay_seconds=0.05, max_delay_seconds=0.1)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test ends without engine processes, sockets or folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("headrace-*")) == []
    for child in psutil.Process().children(recursive=True):
        assert "fake_worker" not in " ".join(child.cmdline()), child


def engine(restarts: RestartRule = IMPATIENT, **config: Any) -> ProcessEngine:
    return ProcessEngine("m-0", config, command=FAKE_WORKER, restarts=restarts)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, r"signal 9 \(SIGKILL\)"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_killing_the_engine_under_load_fails_its_requests_and_starts_it_again(
    number: signal.Signals, how: str
) -> None:
    async def main() -> None:
        async with started(engine(step_seconds=0.005)) as client:
            first = client.pid
            assert first is not None
            running = [
                asyncio.create_task(collect(client, plain_request(f"r{i}", max_tokens=100_000)))
                for i in range(8)
            ]
            await until(lambda: client.stats.num_running == 4 and client.stats.num_waiting == 4)
            os.kill(first, number)
            async with asyncio.timeout(2):
                results = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(result, EngineFailed) for result in results), results
            with pytest.raises(EngineFailed, match=f"'m-0' was killed by .*{how}"):
                raise results[0]  # type: ignore[misc]
            assert client.state == "starting"
            assert client.stats.num_running == client.stats.num_waiting == 0
            with pytest.raises(Unavailable, match="is starting"):
                await collect(client, plain_request())

            await until(lambda: client.state == "ready")
            assert client.pid != first and client.restarts_total == 1 and client.failure is None
            assert len(await collect(client, plain_request())) > 0
            assert client.stats.generation_tokens_total > 4

    run_bounded(main())


def test_an_engine_whose_step_hangs_can_still_be_closed_and_killed() -> None:
    async def main() -> None:
        client = engine(step_seconds=600)
        await client.start()
        pid = client.pid
        assert pid is not None
        task = asyncio.create_task(collect(client, plain_request()))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2.5):
            await client.close()
        assert not is_alive(pid)
        with pytest.raises(Unavailable, match="stopping"):
            await task

    run_bounded(main())


def test_an_engine_that_is_stopped_and_deaf_is_killed_on_close() -> None:
    async def main() -> None:
        client = engine()
        await client.start()
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(3):
            await client.close()
        assert not is_alive(pid)

    run_bounded(main())


def test_an_idle_engine_leaves_of_its_own_accord_when_told_to_stop() -> None:
    async def main() -> None:
        lines: list[str] = []
        child = await ChildProcess.spawn(FAKE_WORKER, lines.append)
        try:
            child.send(StartEngine(config={}))
            while not isinstance(await child.receive(), Ready):
                pass
            child.send(Stop())
            assert await child.wait_exit(5)
            assert child.exit_code == 0 and lines == []
        finally:
            await child.close()

    run_bounded(main())


def test_closing_an_idle_engine_is_silent_and_quick() -> None:
    async def main() -> None:
        client = engine()
        await client.start()
        with structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(2):
                await client.close()
        assert logs == [] and client.pid is None

    run_bounded(main())


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has no build for it")
def test_it_works_on_uvloop_as_on_asyncio() -> None:
    import uvloop

    async def main() -> None:
        async with asyncio.timeout(30), started(engine()) as client:
            assert client.pid is not None
            assert len(await collect(client, plain_request(max_tokens=1))) == 1
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.restarts_total == 1 and client.state == "ready")
            assert len(await collect(client, plain_request(max_tokens=1))) == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_sigterm_ends_an_engine_cleanly_and_ctrl_c_does_not_reach_it() -> None:
    async def main() -> None:
        async with started(engine(restarts=IMPATIENT)) as client:
            first = client.pid
            assert first is not None
            os.kill(first, signal.SIGINT)
            assert len(await collect(client, plain_request())) > 0
            assert client.pid == first
            with structlog.testing.capture_logs() as logs:
                os.kill(first, signal.SIGTERM)
                await until(lambda: client.restarts_total == 1)
            (died,) = [entry for entry in logs if "died" in entry["event"]]
            assert "exited with code 0" in died["reason"]
            await until(lambda: client.state == "ready")

    run_bounded(main())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"step_seconds": 600},
        {"load_seconds": 600},
        pytest.param(
            {"deaf_load": True},
            marks=pytest.mark.skipif(
                not sys.platform.startswith("linux"), reason="only Linux kills orphans itself"
            ),
        ),
    ],
    ids=["idle", "in a step", "loading", "loading in C"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_does_not_outlive_its_parent(
    config: dict[str, Any], number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    """Whatever it is doing, and be it C code that neither ends nor lets other threads run."""
    code = f"""
        import asyncio
        from headrace.engine.client import ProcessEngine
        from headrace.testing.fake_worker import FAKE_WORKER
        from headrace.types import GenerationRequest, SamplingParams

        async def main():
            client = ProcessEngine("m-0", {config!r}, command=FAKE_WORKER)
            starting = asyncio.create_task(client.start())
            while client.pid is None:
                await asyncio.sleep(0.01)
            if not any("load" in key for key in {config!r}):
                await starting
            print(client.pid, flush=True)
            if client.state == "ready":
                request = GenerationRequest(
                    request_id="r", model="m", prompt_token_ids=[1], sampling=SamplingParams()
                )
                async with client.stream(request) as events:
                    async for some in events:
                        pass
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        time.sleep(0.2)  # it is inside its step or its load by now
        parent.send_signal(number)
        parent.wait(10)
        deadline = time.monotonic() + 2
        while is_alive(child):
            assert time.monotonic() < deadline, f"engine {child} is still there"
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_model_that_cannot_be_served_is_said_once_and_not_tried_again() -> None:
    async def main() -> None:
        client = engine(refuse="model: '/x' is not a file")
        with pytest.raises(EngineFailed, match="'/x' is not a file"):
            await client.start()
        assert client.state == "failed" and client.failure == "model: '/x' is not a file"
        assert client.restarts_total == 0 and client.pid is None
        with pytest.raises(Unavailable, match="has failed"):
            await collect(client, plain_request())
        await client.close()

    run_bounded(main())


def test_an_engine_that_dies_at_every_start_is_given_up_with_its_last_words() -> None:
    async def main() -> None:
        client = engine(exit=7)
        with pytest.raises(EngineFailed, match=r"(?s)exited with code 7.*last words"):
            await client.start()
        assert client.restarts_total == IMPATIENT.max_failed_starts - 1
        assert client.state == "failed"
        await client.close()

    run_bounded(main())


def test_a_command_that_does_not_exist_is_given_up() -> None:
    async def main() -> None:
        client = ProcessEngine("m-0", {}, command=["/nonexistent/python"], restarts=IMPATIENT)
        with pytest.raises(EngineFailed, match="/nonexistent/python"):
            await client.start()
        await client.close()

    run_bounded(main())


def test_an_engine_that_cannot_start_again_has_failed_after_some_tries(
    tmp_path: pathlib.Path,
) -> None:
    async def main() -> None:
        marker = tmp_path / "device"
        marker.touch()
        async with started(engine(marker=str(marker))) as client:
            marker.unlink()
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state == "failed")
            assert client.failure is not None and "exited with code 3" in client.failure
            assert client.restarts_total == IMPATIENT.max_failed_starts

    run_bounded(main())


def test_progress_is_seen_while_it_starts_and_closing_stops_a_load() -> None:
    async def main() -> None:
        client = engine(load_seconds=600)
        starting = asyncio.create_task(client.start())
        await until(lambda: client.progress.stage == "load")
        with pytest.raises(Unavailable, match=r"is starting \(load, 0%\)"):
            await collect(client, plain_request())
        pid = client.pid
        assert pid is not None
        async with asyncio.timeout(2):
            await client.close()
        with pytest.raises(EngineFailed, match="stopped while starting"):
            await starting
        assert not is_alive(pid)

    run_bounded(main())


def test_closing_before_the_process_has_connected_leaves_nothing() -> None:
    async def main() -> None:
        client = engine()
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(EngineFailed):
            await starting

    run_bounded(main())


def test_an_engine_is_not_slowed_by_a_gateway_that_does_not_read() -> None:
    """The whole event loop sleeps: frames merge in the engine's outbox, and nothing is lost."""

    async def main() -> None:
        async with started(engine(step_seconds=0.0005)) as client:
            async with client.stream(plain_request("slow", max_tokens=600)) as events:
                first = await anext(events)
                time.sleep(1.0)  # noqa: ASYNC251
                rest = [some async for some in events]
            tokens = [token for some in [first, *rest] for token in some[0].token_ids]
            assert tokens == [*range(1, 601)]
            assert len(rest) < 300

    run_bounded(main())


def test_what_an_engine_prints_reaches_our_log() -> None:
    async def main() -> None:
        with structlog.testing.capture_logs() as logs:
            client = engine(exit=7, restarts=RestartRule(max_failed_starts=1))
            with pytest.raises(EngineFailed):
                await client.start()
            await client.close()
        assert {"last words"} <= {entry["event"] for entry in logs}
        assert all(entry["replica"] == "m-0" for entry in logs)

    run_bounded(main())


def test_an_engine_that_is_stopped_is_killed_and_started_again() -> None:
    """No sign of life for the hang timeout: its requests end with that reason, and a new one serves."""

    async def main() -> None:
        hung = ProcessEngine(
            "m-0", {"step_seconds": 0.01}, command=FAKE_WORKER, restarts=IMPATIENT, hang_seconds=0.4
        )
        async with started(hung):
            first = hung.pid
            assert first is not None
            with pytest.raises(EngineFailed, match="no sign of life for .* and was killed"):
                async with hung.stream(plain_request("a", max_tokens=10_000)) as events:
                    await anext(events)
                    os.kill(first, signal.SIGSTOP)
                    async for _ in events:
                        pass
            await until(lambda: hung.state == "ready" and hung.pid != first)
            assert not is_alive(first) and hung.restarts_total == 1
            async with hung.stream(plain_request("b", max_tokens=3)) as events:
                assert [event async for event in events]

    run_bounded(main())


def test_a_quiet_engine_is_no_hung_one() -> None:
    async def main() -> None:
        quiet = ProcessEngine("m-0", {}, command=FAKE_WORKER, restarts=IMPATIENT, hang_seconds=1.0)
        async with started(quiet):
            first = quiet.pid
            await asyncio.sleep(1.5)
            assert quiet.pid == first and quiet.state == "ready"

    run_bounded(main())
