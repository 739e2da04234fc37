"""Time everything around the model: the engine's part of a step, and the gateway's part of a token.

python benchmarks/engine_overhead.py [--tokenizer tokenizer.json] [--rows 1 8 32 64] [--profile 32] [--stop]

The device is simulated and takes no time, so what is left of a step is the engine: planning it, building its
arrays, taking its result (tokens, stops, text), and the frame that carries the news. The gateway's part is
reading that frame and writing each choice's server-sent event, sockets left out.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from headrace.backends.simulated.runner import SimulatedDevice, SimulatedRunner
from headrace.clock import SystemClock
from headrace.engine.engine import Engine
from headrace.engine.intake import ServedModel
from headrace.engine.ipc import decode_from_engine, encode_frame
from headrace.engine.outbox import Outbox
from headrace.gateway.accounting import RequestRecord
from headrace.gateway.answer import Answer
from headrace.gateway.chat import ChatFormat
from headrace.gateway.sse import event_bytes
from headrace.gateway.state import GatewayState
from headrace.policies.scheduling.fcfs import FirstComeFirstServed
from headrace.step_time import StepTimeFormula
from headrace.testing.tokenizers import tiny_special_tokens, tiny_tokenizer_json
from headrace.text.tokenizer import Tokenizer
from headrace.types import (
    EngineSettings,
    GenerationRequest,
    KVGroupSpec,
    SamplingParams,
    StepEvents,
    TokenEvent,
)

CONTEXT = 200
STEPS = 400
GROUP = KVGroupSpec(name="all", layers=(0,), num_kv_heads=3, head_dim=64)


class Parts:
    """Seconds per named part, measured by wrapping the methods that do them."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, holder: Any, method: str, name: str) -> None:
        call = getattr(holder, method)
        spent = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent.append(time.perf_counter() - start)

        setattr(holder, method, timed)

    def milliseconds(self, name: str) -> float:
        spent = self.seconds[name]
        return 1e3 * median(spent) if spent else 0.0


def load_tokenizer(path: Path | None) -> Tokenizer:
    if path is None:
        return Tokenizer(
            tiny_tokenizer_json(), special_tokens=tiny_special_tokens(), add_bos_token=False
        )
    return Tokenizer(path.read_text(), special_tokens={}, add_bos_token=False)


def build(tokenizer: Tokenizer, num_rows: int, **sampling: Any) -> Engine:
    """Return an engine with `num_rows` sequences of CONTEXT tokens, all decoding."""
    settings = EngineSettings(
        max_model_len=2048, block_size=16, max_num_sequences=num_rows, max_batched_tokens=512
    )
    num_blocks = 128 * num_rows
    clock = SystemClock()
    runner = SimulatedRunner(
        groups=(GROUP,),
        vocab_size=tokenizer.vocab_size,
        settings=settings,
        clock=clock,
        device=SimulatedDevice(StepTimeFormula()),
    )
    runner.allocate(num_blocks)
    engine = Engine(
        runner,
        model=ServedModel("m", "revision", tokenizer, (), tokenizer.vocab_size),
        settings=settings,
        num_blocks=num_blocks,
        policy=FirstComeFirstServed(),
        clock=clock,
    )
    params = SamplingParams(temperature=1.0, max_tokens=1500, ignore_eos=True, **sampling)
    for row in range(num_rows):
        prompt = [1 + (row * 7 + place) % 200 for place in range(CONTEXT)]
        engine.submit(
            GenerationRequest(
                request_id=f"request-{row}", model="m", prompt_token_ids=prompt, sampling=params
            )
        )
    while engine.stats().generation_tokens_total < 2 * num_rows:
        engine.step()
    return engine


def frames_of(engine: Engine) -> Callable[[], bytes]:
    """Return a step together with its frame, as the engine process does it."""
    outbox = Outbox()

    def step() -> bytes:
        events = engine.step()
        outbox.put(StepEvents(events, engine.stats(), 0.0))
        return b"".join(encode_frame(frame) for frame in outbox.take())

    return step


def measure(tokenizer: Tokenizer, num_rows: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds per step by part; "engine" is all but the device."""
    step = frames_of(build(tokenizer, num_rows, **sampling))
    totals = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        totals.append(time.perf_counter() - start)
    parts = Parts()
    engine = build(tokenizer, num_rows, **sampling)
    inside: Any = engine
    parts.wrap(inside._scheduler, "schedule", "plan")
    parts.wrap(inside._launcher._batches, "build", "arrays")
    parts.wrap(inside._outcome, "apply", "outcome")
    parts.wrap(inside, "step", "step")
    parts.wrap(inside._runner, "execute", "device")
    step = frames_of(engine)
    whole = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        whole.append(time.perf_counter() - start)
    found = {name: parts.milliseconds(name) for name in parts.seconds}
    found["frame"] = 1e3 * median(whole) - found["step"]
    found["other"] = found["step"] - sum(
        found[name] for name in ("plan", "arrays", "outcome", "device")
    )
    found["engine"] = 1e3 * median(totals) - found["device"]
    return found


class _Quiet:
    """Stands for the metrics, whose cost is prometheus_client's."""

    def request_started(self, model: str, endpoint: str) -> None: ...

    def inter_token(self, model: str, seconds: float) -> None: ...


def gateway_microseconds(tokenizer: Tokenizer, num_rows: int) -> float:
    """Return the gateway's microseconds per streamed token: frame in, server-sent events out."""
    step = frames_of(build(tokenizer, num_rows))
    frames = [step()[4:] for _ in range(200)]
    state = cast(GatewayState, SimpleNamespace(metrics=_Quiet(), clock=SystemClock()))
    answers: dict[str, tuple[Answer, RequestRecord]] = {}
    for row in range(num_rows):
        record = RequestRecord(state, "/v1/chat/completions", f"request-{row}", 0.0)
        record.begin("m", [CONTEXT], 1)
        envelope = {"id": f"chatcmpl-{row}", "object": "", "created": 1, "model": "m"}
        answer = Answer(ChatFormat(False), record, num_choices=1, envelope=envelope)
        answers[f"request-{row}"] = answer, record
    num_tokens = 0
    start = time.process_time()
    for frame in frames:
        read = decode_from_engine(frame)
        assert isinstance(read, StepEvents)
        for event in read.events:
            num_tokens += len(event.token_ids)
            _write(*answers[event.request_id], event)
    return 1e6 * (time.process_time() - start) / num_tokens


def _write(answer: Answer, record: RequestRecord, event: TokenEvent) -> bytes:
    record.take(0, [event])
    return event_bytes(answer.chunks(0, [event]))


def profile(tokenizer: Tokenizer, num_rows: int) -> None:
    step = frames_of(build(tokenizer, num_rows))
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; else a tiny one")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--profile", type=int, help="profile steps of so many sequences instead")
    parser.add_argument("--stop", action="store_true", help="each request has a stop string")
    parser.add_argument("--logprobs", type=int, help="each request asks for so many")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    if options.profile:
        profile(tokenizer, options.profile)
        return
    sampling: dict[str, Any] = {"stop": ("\n\nHuman:",)} if options.stop else {}
    if options.logprobs is not None:
        sampling["logprobs"] = options.logprobs
    names = ("engine", "plan", "arrays", "outcome", "other", "frame", "device")
    print("milliseconds per step; engine = all but the device")
    print("sequences  " + "".join(f"{name:>9}" for name in names) + "   gateway us/token")
    for num_rows in options.rows:
        found = measure(tokenizer, num_rows, sampling)
        cells = "".join(f"{found[name]:9.3f}" for name in names)
        gateway = gateway_microseconds(tokenizer, num_rows)
        print(f"{num_rows:9}  {cells}   {gateway:16.1f}")


if __name__ == "__main__":
    main()
