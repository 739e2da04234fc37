"""The real worker around the real engine on the simulated backend, as `headrace serve` runs it."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
from typing import Any

import msgspec
import pytest

from headrace.config import load_config, replica_config
from headrace.engine.client import ProcessEngine
from headrace.errors import EngineFailed, RemoteError
from headrace.testing.driving import collect, plain_request, run_bounded, started, until
from headrace.testing.tiny_models import write_tiny_checkpoint
from headrace.types import GenerationRequest, TokenEvent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def engine(source: pathlib.Path, **settings: Any) -> ProcessEngine:
    flags = {"models.0.source": str(source), "models.0.backend": "simulated"}
    flags.update({f"models.0.engine.{key}": value for key, value in settings.items()})
    return ProcessEngine("m-0", replica_config(load_config(None, flags=flags).config, 0))


def request(name: str, *, num_prompt_tokens: int = 20, max_tokens: int = 20) -> GenerationRequest:
    numbers = random.Random(name)
    return msgspec.structs.replace(
        plain_request(name, max_tokens=max_tokens),
        prompt_token_ids=[numbers.randrange(300) for _ in range(num_prompt_tokens)],
    )


async def read(client: ProcessEngine, wanted: GenerationRequest, num_events: int) -> None:
    """Read some events and leave."""
    async with client.stream(wanted) as events:
        async for _ in events:
            num_events -= 1
            if num_events <= 0:
                return


def test_a_card_and_a_request_come_through_the_real_process(checkpoint: pathlib.Path) -> None:
    async def main() -> None:
        async with started(engine(checkpoint, max_model_len=256)) as client:
            assert client.card is not None
            assert client.card.max_model_len == 256 and client.card.backend == "simulated"
            assert client.stats.num_free_blocks == client.stats.num_blocks > 0
            events = await collect(client, request("a"))
            assert sum(len(event.token_ids) for event in events) == 20
            assert events[-1].timings is not None and events[-1].usage is not None
            with pytest.raises(RemoteError) as refusal:
                await collect(client, request("b", num_prompt_tokens=300))
            assert refusal.value.info().code == "context_length_exceeded"

    run_bounded(main())


def test_aborts_at_random_stages_leave_all_blocks_free(checkpoint: pathlib.Path) -> None:
    async def main() -> None:
        limits = {"max_num_sequences": 8, "max_model_len": 256, "kv_memory": "256KiB"}
        async with started(engine(checkpoint, **limits)) as client:
            numbers = random.Random(7)
            kept: list[asyncio.Task[list[TokenEvent]]] = []
            left: list[asyncio.Task[None]] = []
            for place in range(120):
                wanted = request(f"r{place}", num_prompt_tokens=numbers.randrange(1, 120))
                if numbers.random() < 0.3:
                    task = asyncio.create_task(read(client, wanted, numbers.randrange(1, 8)))
                    left.append(task)
                    if numbers.random() < 0.5:
                        asyncio.get_running_loop().call_later(0.3 * numbers.random(), task.cancel)
                else:
                    kept.append(asyncio.create_task(collect(client, wanted)))
            for events in await asyncio.gather(*kept):
                assert sum(len(event.token_ids) for event in events) == 20
            await asyncio.gather(*left, return_exceptions=True)
            await until(lambda: client.stats.num_running + client.stats.num_waiting == 0)
            assert client.stats.num_free_blocks == client.stats.num_blocks

    run_bounded(main())


def test_a_killed_engine_is_replaced_by_one_that_serves(checkpoint: pathlib.Path) -> None:
    async def main() -> None:
        async with started(engine(checkpoint)) as client:
            running = [
                asyncio.create_task(collect(client, request(f"r{place}", max_tokens=2000)))
                for place in range(8)
            ]
            await until(lambda: client.stats.num_running == 8)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(2):
                results = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(result, EngineFailed) for result in results)
            before = client.stats
            await until(lambda: client.state == "ready")
            await collect(client, request("again"))
            assert client.stats.generation_tokens_total == before.generation_tokens_total + 20

    run_bounded(main())


@pytest.mark.parametrize(
    ("settings", "reason"), [({}, "nowhere"), ({"max_model_len": 16, "kv_memory": "1KiB"}, "block")]
)
def test_a_start_that_cannot_succeed_says_why(
    checkpoint: pathlib.Path, settings: dict[str, Any], reason: str
) -> None:
    async def main() -> None:
        source = checkpoint if settings else checkpoint / "nowhere"
        client = engine(source, **settings)
        try:
            with pytest.raises(EngineFailed, match=reason):
                await client.start()
            assert client.state == "failed" and client.restarts_total == 0
        finally:
            await client.close()

    run_bounded(main())
