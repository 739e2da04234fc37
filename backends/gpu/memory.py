"""How much of a GPU is left for keys and values: measured by the largest step there can be, not guessed.

A step's activations cannot be known from the model alone: torch's products, a gathered prefill and the draw
have scratch memory of their own. So the largest step is run once, over a pool of one block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from headrace.backends.batches import SequenceStep, forward_batch, sampling_batch
from headrace.types import DeviceMemory, EngineSettings, ForwardBatch

if TYPE_CHECKING:
    from headrace.backends.gpu.device import Device

MOST_LOGPROBS = 20


def largest_step(settings: EngineSettings, num_groups: int, vocab_size: int) -> ForwardBatch:
    """Return a step of max_batched_tokens tokens over max_num_sequences sequences, each max_model_len long.

    One chunk is as long as can be, the others are decodes; every row draws with filters and log
    probabilities. All blocks are block 0 and nothing is written: the smallest pool will do.
    """
    longest = settings.max_model_len
    num_sequences = min(settings.max_num_sequences, settings.max_batched_tokens)
    room = min(settings.max_batched_tokens, num_sequences * longest) - num_sequences
    counts = []
    for _ in range(num_sequences):
        extra = min(room, longest - 1)
        counts.append(1 + extra)
        room -= extra
    blocks = [0] * -(-longest // settings.block_size)
    steps = [SequenceStep([0] * count, longest - count, blocks) for count in counts]
    columns = {
        "temperature": np.ones(num_sequences),
        "top_k": np.full(num_sequences, min(50, vocab_size)),
        "top_p": np.full(num_sequences, 0.9),
        "min_p": np.full(num_sequences, 0.01),
        "repetition_penalty": np.full(num_sequences, 1.1),
        "num_logprobs": np.full(num_sequences, min(MOST_LOGPROBS, vocab_size)),
    }
    batch = forward_batch(
        steps,
        block_size=settings.block_size,
        num_groups=num_groups,
        sampling=sampling_batch(num_sequences, columns, histories=[{0: 1}] * num_sequences),
    )
    return dataclasses.replace(batch, slots=np.full_like(batch.slots, -1))


def device_memory(
    device: Device,
    *,
    weight_bytes: int,
    activation_bytes: int,
    graph_bytes: int,
    memory_share: float,
    num_replicas: int,
) -> DeviceMemory:
    """Return the arithmetic, with nothing running and no pool allocated.

    A replica may use its part of `memory_share`, as long as that much is free: other processes on the
    device, and what the driver takes for itself, are seen in `free_bytes`.
    """
    total, free = device.total_bytes(), device.free_bytes()
    kept_free = total - int(total * memory_share)
    running = activation_bytes + graph_bytes
    part = (total - kept_free) // num_replicas
    return DeviceMemory(
        total_bytes=total,
        free_bytes=free,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        kept_free_bytes=kept_free,
        num_replicas=num_replicas,
        most_kv_bytes=max(0, free - running),
        kv_bytes=max(0, min(free - running - kept_free, part - weight_bytes - running)),
    )
