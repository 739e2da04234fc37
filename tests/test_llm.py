"""`headrace.LLM`: the offline library, and the commands that stand on it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.backends.cpu.fast.runner import FastRunner
from headrace.errors import HeadraceError, InvalidRequest, ModelError
from headrace.testing.script_file import write_script
from headrace.testing.tiny_models import write_tiny_checkpoint

TEXT = "Hello brave new world!"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("script") / "hello.json"
    return write_script(path, ["Hello", " brave", " new", " world", "!"])


@pytest.fixture(scope="module")
def llm(script: pathlib.Path) -> Iterator[LLM]:
    with LLM(f"scripted:{script}", max_num_sequences=4, max_queued_requests=4) as llm:
        yield llm


def test_one_prompt_and_a_batch(llm: LLM) -> None:
    assert [result.text for result in llm.generate("x", progress=False)] == [TEXT]
    many = llm.generate([f"prompt {number}" for number in range(40)], progress=False)
    assert [result.text for result in many] == [TEXT] * 40
    assert all(result.choices[0].finish_reason == "stop" for result in many)


def test_token_ids_and_messages_are_prompts_too(llm: LLM) -> None:
    ids = llm.encode("abc")
    assert llm.generate(ids, progress=False)[0].prompt_token_ids == ids
    chat = llm.generate([{"role": "user", "content": "hi"}], progress=False)
    assert [result.text for result in chat] == [TEXT]


def test_choices_stream_and_limits(llm: LLM) -> None:
    three = llm.generate("x", llm.sampling(n=3, max_tokens=2), progress=False)[0]
    assert [choice.text for choice in three.choices] == ["Hello brave"] * 3
    assert {choice.finish_reason for choice in three.choices} == {"length"}
    assert "".join(llm.stream("x")) == TEXT
    stream = llm.stream("x")
    assert next(stream) == "Hello"
    stream.close()  # type: ignore[attr-defined]
    assert [result.text for result in llm.generate("x", progress=False)] == [TEXT]


def test_a_bad_prompt_refuses_the_batch_before_any_of_it_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        llm.generate([[1, 2], [10**6]], progress=False)
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=-1)
    with pytest.raises(InvalidRequest, match="no sampling parameter"):
        llm.sampling(temprature=1)
    assert [result.text for result in llm.generate("x", progress=False)] == [TEXT]


def test_streams_and_batches_side_by_side_lose_nothing(llm: LLM) -> None:
    first, second, left = llm.stream("x"), llm.stream("y"), llm.stream("z")
    assert next(left) == "Hello"
    pieces = [next(first), next(second), next(first)]
    assert [result.text for result in llm.generate(["a", "b"], progress=False)] == [TEXT] * 2
    left.close()  # type: ignore[attr-defined]
    assert pieces[0] + pieces[2] + "".join(first) == TEXT
    assert pieces[1] + "".join(second) == TEXT
    assert llm._news == {}


def test_what_is_no_prompt_or_no_sampling_is_refused_by_name(llm: LLM) -> None:
    for prompt in (None, 5, b"abc", ["a", 3], [1, "a"], {"role": "user"}):
        with pytest.raises(InvalidRequest, match="a prompt is text"):
            llm.generate(prompt, progress=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"LLM\.sampling\(\.\.\.\) returns, got dict"):
        llm.generate("x", {"temperature": 0}, progress=False)  # type: ignore[arg-type]
    ids = np.array(llm.encode("abc"))
    assert llm.generate(ids, progress=False)[0].prompt_token_ids == ids.tolist()  # type: ignore[arg-type]


def test_a_failing_model_raises_with_its_reason(tmp_path: pathlib.Path) -> None:
    path = write_script(tmp_path / "fails.json", ["a", "b", "c"], fail_after=2)
    with LLM(f"scripted:{path}") as llm, pytest.raises(HeadraceError, match="NaN"):
        llm.generate("x", progress=False)


def test_a_broken_template_is_an_obstacle_to_chats_alone(tmp_path: pathlib.Path) -> None:
    path = write_script(tmp_path / "broken.json", ["Hello"], chat_template="{% for %}")
    with LLM(f"scripted:{path}") as llm:
        assert llm.generate("x", progress=False)[0].text == "Hello"
        with pytest.raises(HeadraceError, match="the chat template cannot be parsed"):
            llm.generate([{"role": "user", "content": "x"}], progress=False)


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_generate_prints_the_text(script: pathlib.Path) -> None:
    done = run("generate", "x", "--model", f"scripted:{script}")
    assert (done.returncode, done.stdout) == (0, TEXT + "\n")
    done = run("generate", "-", "--model", f"scripted:{script}", "--max-tokens", "2", text="x")
    assert (done.returncode, done.stdout) == (0, "Hello brave\n")


def test_chat_talks_in_a_terminal(script: pathlib.Path) -> None:
    done = run("chat", "--model", f"scripted:{script}", text="hi\nand again\n\n")
    assert (done.returncode, done.stdout) == (0, f"{TEXT}\n{TEXT}\n")


def test_a_wrong_source_is_one_line(tmp_path: pathlib.Path) -> None:
    done = run("generate", "x", "--model", str(tmp_path / "nothing.gguf"))
    assert done.returncode == 1
    assert "nothing.gguf" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "nonsense", "http://[", "http://127.0.0.1:x"]
)
def test_chat_with_a_server_that_is_not_there_is_one_line(url: str) -> None:
    done = run("chat", "--url", url, text="hi\n")
    assert done.returncode == 1
    assert "Give --url the address" in done.stderr and "Traceback" not in done.stderr


def test_a_bench_whose_figures_have_no_place_does_not_run(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "nowhere" / "figures.json"
    done = run("bench", "--url", "http://127.0.0.1:1", "--requests", "1", "--json", str(place))
    assert done.returncode == 1
    assert "is no folder" in done.stderr and "first failure" not in done.stdout


def test_what_cannot_be_built_leaves_no_runner_open(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads, its memory and who compiles for it would stay with a program that goes on."""
    closed = []
    close = FastRunner.close

    def noted(runner: FastRunner) -> None:
        closed.append(runner)
        close(runner)

    monkeypatch.setattr(FastRunner, "close", noted)
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", "llama")
    with pytest.raises(ModelError, match="kv_memory"):
        LLM(str(checkpoint), dtype="bfloat16", kv_memory="1KB")
    assert len(closed) == 1
