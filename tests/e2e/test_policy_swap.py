"""Policies swapped in a running server, under load: no request lost, and all replicas or none."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import time
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from headrace.testing.script_file import write_script
from headrace.testing.server import StartedServer, started_server

ADMIN = {"HEADRACE_TEST_ADMIN": "let-me-in"}
KEY = {"authorization": "Bearer let-me-in"}
OLDEST = """
class Oldest:
    name = "oldest"

    def rank_waiting(self, waiting, view):
        return sorted(waiting, key=lambda request: request.arrival_time)

    def choose_victim(self, running, view):
        return running[-1]

    def prefill_budget(self, view):
        {budget}
"""


@pytest.fixture
def policy(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "oldest.py"
    path.write_text(OLDEST.format(budget="return view.token_budget"))
    return path


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    script = write_script(tmp_path / "script.json", ["x"])
    path = tmp_path / "headrace.yaml"
    path.write_text(
        "gateway: {admin: {key_env: HEADRACE_TEST_ADMIN}}\n"
        f"models:\n  - name: m\n    source: scripted:{script}\n"
        "    backend: {use: simulated, options: {base_seconds: 0.005}}\n"
        "    engine: {num_threads: 1, kv_memory: 64MiB, max_num_sequences: 2}\n"
        "    replicas: 2\n"
    )
    return path


def in_force(server: StartedServer, kind: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/admin/policies", headers=KEY, timeout=30)
    assert answer.status_code == 200
    return [each for each in answer.json()["policies"] if each["kind"] == kind]


def swap(server: StartedServer, kind: str, use: str, **options: Any) -> httpx.Response:
    body = {"use": use, "options": options}
    url = f"{server.url}/admin/policies/{kind}"
    return httpx.post(url, json=body, headers=KEY, timeout=60)


def wait_for(server: StartedServer, names: list[str], kind: str = "scheduling") -> None:
    deadline = time.monotonic() + 60
    while [each["name"] for each in in_force(server, kind)] != names:
        assert time.monotonic() < deadline, in_force(server, kind)
        time.sleep(0.05)


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    body = {"model": "m", "prompt": "x", "max_tokens": 6, "ignore_eos": True, "seed": 1}
    async with session.post(url + "/v1/completions", json=body) as response:
        answer = await response.json()
        text = answer["choices"][0]["text"] if response.status == 200 else str(answer)
        return response.status, text


async def load_and_swap(server: StartedServer, uses: list[str]) -> list[tuple[int, str]]:
    answers: list[tuple[int, str]] = []
    is_over = False

    async def client(session: aiohttp.ClientSession) -> None:
        while not is_over:
            answers.append(await ask(session, server.url))

    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(client(session)) for _ in range(10)]
        for use in uses:
            seen = len(answers)
            await asyncio.gather(*[ask(session, server.url) for _ in range(10)])
            assert len(answers) > seen
            url = f"{server.url}/admin/policies/scheduling"
            async with session.post(url, json={"use": use}, headers=KEY) as response:
                assert response.status == 200, await response.text()
        is_over = True
        await asyncio.gather(*clients)
    return answers


def test_swaps_under_load_lose_nothing_and_a_refusal_changes_nothing(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    with started_server(["-c", str(config)], environment=ADMIN) as server:
        uses = [f"{policy}:Oldest", "fair_share", "slo", "./oldest.py:Oldest"]
        answers = asyncio.run(load_and_swap(server, uses))
        assert {status for status, _ in answers} == {200}
        assert len({text for _, text in answers}) == 1
        wait_for(server, ["oldest", "oldest"])

        for use, reason in (
            ("./nowhere.py:Policy", "nowhere.py: cannot be read"),
            ("./oldest.py:Missing", "has no class 'Missing'"),
            ("shortest_frist", "Did you mean 'shortest_first'"),
        ):
            refused = swap(server, "scheduling", use)
            assert refused.status_code == 400
            assert reason in refused.json()["error"]["message"]
        assert swap(server, "scheduling", "slo", ttft="fast").status_code == 400
        assert swap(server, "quantization", "int8").status_code == 400
        wait_for(server, ["oldest", "oldest"])

        assert swap(server, "routing", "least_loaded").status_code == 200
        assert [each["name"] for each in in_force(server, "routing")] == ["least_loaded"]
        assert swap(server, "eviction", "lfu", half_life="2m").status_code == 200
        assert [each["options"] for each in in_force(server, "eviction")] == [
            {"half_life": "2m"},
            {"half_life": "2m"},
        ]

        child = psutil.Process(server.process.pid).children()[0]
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
        server.wait_ready()
        wait_for(server, ["oldest", "oldest"])
        assert [each["name"] for each in in_force(server, "eviction")] == ["lfu", "lfu"]


def test_saving_a_script_swaps_it_in_and_a_broken_one_changes_nothing(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    with config.open("a") as out:
        out.write("    policies: {scheduling: ./oldest.py:Oldest}\n")
    with started_server(["-c", str(config), "--watch"], environment=ADMIN) as server:
        wait_for(server, ["oldest", "oldest"])
        policy.write_text("class Oldest:\n    pass\n")
        while not any("policy_not_reloaded" in line for line in server.output):
            time.sleep(0.05)
        wait_for(server, ["oldest", "oldest"])
        changed = OLDEST.format(budget="return view.token_budget").replace('"oldest"', '"saved"')
        policy.write_text(changed)
        wait_for(server, ["saved", "saved"])
        other = policy.with_name("other.py")
        other.write_text(changed.replace('"saved"', '"other"'))
        assert swap(server, "scheduling", "./other.py:Oldest").status_code == 200
        policy.write_text(changed.replace('"saved"', '"saved_when_replaced"'))
        other.write_text(changed.replace('"saved"', '"other_saved"'))
        wait_for(server, ["other_saved", "other_saved"])
        assert not any("saved_when_replaced" in line for line in server.output)


ONE_PLACE = """
class OnePlace:
    name = "{name}"

    def choose(self, request, replicas, now):
        return sorted(each.id for each in replicas)[{place}]
"""


def test_saving_a_routing_script_sends_the_next_requests_elsewhere(
    config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "one_place.py"
    script.write_text(ONE_PLACE.format(name="first", place=0))
    with config.open("a") as out:
        out.write("routing: ./one_place.py:OnePlace\n")

    def replicas_of_four_answers(server: StartedServer) -> set[str]:
        def finished() -> list[str]:
            return [
                line.split("replica=")[1].split()[0]
                for line in server.output
                if "request finished" in line and "replica=" in line
            ]

        before = len(finished())
        for _ in range(4):
            body = {"model": "m", "prompt": "x", "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        deadline = time.monotonic() + 60
        while len(finished()) < before + 4:
            assert time.monotonic() < deadline, server.output
            time.sleep(0.05)
        return set(finished()[before:])

    with started_server(["-c", str(config), "--watch"], environment=ADMIN) as server:
        wait_for(server, ["first"], "routing")
        before = replicas_of_four_answers(server)
        script.write_text("class OnePlace: what?\n")
        while not any("policy_not_reloaded" in line for line in server.output):
            time.sleep(0.05)
        assert replicas_of_four_answers(server) == before
        script.write_text(ONE_PLACE.format(name="last", place=-1))
        wait_for(server, ["last"], "routing")
        after = replicas_of_four_answers(server)
        assert len(before) == len(after) == 1
        assert before != after


def test_a_policy_that_does_not_come_back_is_benched_and_no_request_is_lost(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    hangs = OLDEST.format(budget="while True: pass")
    policy.write_text(hangs)
    with started_server(["-c", str(config)], environment=ADMIN) as server:
        assert swap(server, "scheduling", "./oldest.py:Oldest").status_code == 200
        answers = asyncio.run(load_and_swap(server, []))
        assert {status for status, _ in answers} <= {200}
        body = {"model": "m", "prompt": "x", "max_tokens": 6}
        for _ in range(12):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
        benched = in_force(server, "scheduling")
        assert all(each["is_benched"] for each in benched), benched
        assert "cut off after 100 ms" in benched[0]["last_failure"]
        metrics = httpx.get(f"{server.url}/metrics").text
        line = next(
            line
            for line in metrics.splitlines()
            if line.startswith('headrace_policy_failures_total{kind="scheduling"')
        )
        assert float(line.split()[-1]) == 3.0


@pytest.mark.slow
def test_a_policy_stuck_in_compiled_code_costs_a_restart_and_its_requests_learn_why(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    policy.write_text(OLDEST.format(budget="import time; time.sleep(3600)"))
    with started_server(["-c", str(config)], environment=ADMIN) as server:
        assert swap(server, "scheduling", "./oldest.py:Oldest").status_code == 200
        body = {"model": "m", "prompt": "x", "max_tokens": 6}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
        assert answer.status_code >= 500
        assert "inside one call of compiled code" in answer.text
        for _ in range(2):  # the other replica is stuck once too
            server.wait_ready()
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
        server.wait_ready()
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=90).status_code == 200


def test_an_engine_that_a_policy_hung_is_started_again_without_it(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    """A sum in compiled code keeps the interpreter's lock: nothing in the process can stop it."""
    policy.write_text(OLDEST.format(budget="return sum(range(10**12))"))
    text = config.read_text().replace(
        "replicas: 2", "replicas: [{kind: process, hang_timeout: 2s}]"
    )
    config.write_text(f"{text}    policies: {{scheduling: ./oldest.py:Oldest}}\n")
    body = {"model": "m", "prompt": "x", "max_tokens": 6}
    with started_server(["-c", str(config)], environment=ADMIN) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
        assert answer.status_code >= 500
        assert "inside its scheduling policy" in answer.text
        server.wait_ready()
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=90).status_code == 200
        (state,) = in_force(server, "scheduling")
        assert (state["name"], state["is_benched"]) == ("oldest", True)
        assert "gave no sign of life" in state["last_failure"]
        assert swap(server, "scheduling", "slo").status_code == 200
        assert not in_force(server, "scheduling")[0]["is_benched"]


def test_an_engine_whose_swapped_script_is_gone_comes_back_with_the_configured_policy(
    config: pathlib.Path, policy: pathlib.Path
) -> None:
    config.write_text(config.read_text().replace("replicas: 2", "replicas: 1"))
    with started_server(["-c", str(config)], environment=ADMIN) as server:
        assert swap(server, "scheduling", "./oldest.py:Oldest").status_code == 200
        policy.unlink()
        psutil.Process(server.process.pid).children()[0].kill()
        wait_for(server, ["fcfs"])
        lost = next(line for line in server.output if "policy_swap_lost" in line)
        assert "oldest.py: cannot be read" in lost
