"""What the server prints for whoever started it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import anyio

from headrace.gateway.replica import Replica
from headrace.types import ModelCard


async def show_progress(replicas: Sequence[Replica], report: Callable[[str, float], None]) -> None:
    """Report how far starting replicas are, until cancelled."""
    while True:
        for replica in replicas:
            progress = replica.client.progress
            if replica.client.state == "starting" and progress.stage:
                report(progress.stage, progress.fraction)
        await anyio.sleep(0.1)


def memory_arithmetic(card: ModelCard) -> str:
    """Say how the memory is used: weights, KV bytes per token x context, how many requests fit."""
    pool_tokens = card.num_blocks * card.block_size
    per_request = card.kv_bytes_per_token * card.max_model_len
    kept = f"in {card.kv_dtype}, " if card.kv_dtype else ""
    return (
        f"{card.name} ({card.architecture}, {card.backend}, {card.dtype}): "
        f"weights {human_bytes(card.weight_bytes)}; "
        f"KV {kept}{human_bytes(card.kv_bytes_per_token)} per token x {card.max_model_len:,} tokens "
        f"= {human_bytes(per_request)} per full-length request; "
        f"pool {human_bytes(pool_tokens * card.kv_bytes_per_token)} "
        f"({pool_tokens:,} tokens in {card.num_blocks:,} blocks) "
        f"-> {pool_tokens // card.max_model_len} full-length requests fit, "
        f"{pool_tokens // min(pool_tokens, 500)} of 500 tokens"
    )


def human_bytes(size: int) -> str:
    """Return a size with three digits and a unit: "97.5 MiB"."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


def curl_line(url: str, model: str) -> str:
    """Return a command that can be pasted."""
    body = (
        f'{{"model": "{model}", "stream": true, "messages": '
        '[{"role": "user", "content": "Name the capital of France."}]}'
    )
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def say(line: str) -> None:
    """Print for whoever started the server."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
