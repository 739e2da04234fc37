"""OpenVINO GenAI's continuous batching under the load that servers get: runs in OpenVINO's environment.

Reads one JSON object per line from standard input, {"concurrency": n, "output_tokens": m, "prompts":
[[token ids], ...]}, keeps n prompts in the pipeline until all are done, and answers with one line:
[{"ttft": s, "e2e": s, "tokens": n}, ...] and the wall seconds. Needs openvino-genai, nothing of Headrace.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def open_pipeline(path: str, cache_gib: int) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gib
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    return genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": 2})


def run(pipeline: genai.ContinuousBatchingPipeline, job: dict) -> dict:
    """Serve a job's prompts and return what it took."""
    config = genai.GenerationConfig()
    config.max_new_tokens = job["output_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    waiting = [
        openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in reversed(job["prompts"])
    ]
    running, found, next_id = {}, [], 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < job["concurrency"]:
            sent = time.perf_counter()
            handle = pipeline.add_request(next_id, waiting.pop(), config)
            running[next_id] = {"handle": handle, "sent": sent, "first": None, "tokens": 0}
            next_id += 1
        pipeline.step()
        now = time.perf_counter()
        for name, request in list(running.items()):
            while request["handle"].can_read():
                for output in request["handle"].read().values():
                    request["tokens"] += len(output.generated_ids)
                request["first"] = request["first"] or now
            if request["tokens"] >= job["output_tokens"]:
                sent = request["sent"]
                found.append(
                    {
                        "ttft": request["first"] - sent,
                        "e2e": now - sent,
                        "tokens": request["tokens"],
                    }
                )
                del running[name]
    return {"requests": found, "wall": time.perf_counter() - start}


def main() -> None:
    pipeline = open_pipeline(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
