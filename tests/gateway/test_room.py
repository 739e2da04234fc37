"""How many tokens an answer may get, and what is said where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "hi"}}


class TestRoom:
    """max_tokens against the context of 256: explicit excess is refused, what is open is cut."""

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_explicit(self, client: TestClient, engine: FakeClient, path: str) -> None:
        """P14: one documented rule for both endpoints."""
        prompt = len(self.tokens(client, engine, path))
        room = 256 - prompt
        for asked in (1, room):
            assert client.post(path, json={**BASE[path], "max_tokens": asked}).status_code == 200
            assert engine.requests[-1].sampling.max_tokens == asked
        for asked in (room + 1, 10**9, 10**30):
            response = client.post(path, json={**BASE[path], "max_tokens": asked})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
            for number in (asked, prompt, 256, room):
                assert str(number) in error["message"]

    def tokens(self, client: TestClient, engine: FakeClient, path: str) -> list[int]:
        client.post(path, json=BASE[path])
        return engine.requests[-1].prompt_token_ids

    def test_left_out(self, client: TestClient, engine: FakeClient) -> None:
        prompt = self.tokens(client, engine, CHAT)
        assert engine.requests[-1].sampling.max_tokens == 256 - len(prompt)
        self.tokens(client, engine, COMPLETIONS)
        assert engine.requests[-1].sampling.max_tokens == 16
        client.post(COMPLETIONS, json={"prompt": [5] * 250})
        assert engine.requests[-1].sampling.max_tokens == 6

    @pytest.mark.parametrize("length", [255, 256, 257])
    def test_a_prompt_at_the_edge(
        self, client: TestClient, engine: FakeClient, length: int
    ) -> None:
        """P14: the numbers in the refusal are right."""
        response = client.post(COMPLETIONS, json={"prompt": [5] * length})
        if length < 256:
            assert response.status_code == 200
            assert engine.requests[-1].sampling.max_tokens == 1
        else:
            error = response.json()["error"]
            assert response.status_code == 400
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert f"{length} tokens" in error["message"] and "256" in error["message"]
            assert f"by {length - 255} tokens" in error["message"]

    def test_a_long_prompt_is_a_true_400_on_streams_too(self, client: TestClient) -> None:
        response = client.post(COMPLETIONS, json={"prompt": [5] * 300, "stream": True})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"

    def test_the_newer_name_wins(self, client: TestClient, engine: FakeClient) -> None:
        """P15: alone and in conflict."""
        for fields in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
            client.post(CHAT, json={**BASE[CHAT], **fields})
            assert engine.requests[-1].sampling.max_tokens == 5
