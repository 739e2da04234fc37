"""What a relay reads of a request's body, and the body as the other server gets it.

Only a few fields are looked at. All others travel as the bytes they came as: what they may be is that
server's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.errors import InvalidRequest
from headrace.gateway.json_body import decode_body


class RelayedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that routing, admission and the relay itself need."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


MAX_CHOICES = 128
"""Of one prompt."""
MAX_CHOICES_OF_ALL = 2048
"""Of all prompts of a call."""
_FIELDS = msgspec.json.Decoder(RelayedFields)
_PROMPTS = msgspec.json.Decoder(list[msgspec.Raw])
_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TRUE = msgspec.Raw(b"true")


@dataclass(frozen=True, slots=True)
class RelayedBody:
    """One body, bytes and the fields read of it."""

    raw: bytes
    fields: RelayedFields
    num_prompts: int = 1

    @property
    def wants_usage(self) -> bool:
        """Whether the caller asked for the usage chunk of a stream."""
        options = self.fields.stream_options or {}
        return options.get("include_usage") == _TRUE

    @property
    def max_output_tokens(self) -> int:
        """Of all choices together; 0 where the other server decides."""
        fields = self.fields
        most = fields.max_completion_tokens or fields.max_tokens or 0
        return max(0, most) * self.num_choices

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return self.num_prompts * max(1, self.fields.n or 1)

    def bytes_for(self, model: str, cache_salt: str = "") -> bytes:
        """Return the body with the other server's name of the model, and with usage asked for.

        A `cache_salt` replaces the caller's own, of which it is made.
        """
        asks_usage = bool(self.fields.stream) and not self.wants_usage
        if self.fields.model == model and not asks_usage and not cache_salt:
            return self.raw
        table = _TABLE.decode(self.raw)
        table["model"] = msgspec.Raw(msgspec.json.encode(model))
        if cache_salt:
            table["cache_salt"] = msgspec.Raw(msgspec.json.encode(cache_salt))
        if asks_usage:
            options = {**(self.fields.stream_options or {}), "include_usage": _TRUE}
            table["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
        return msgspec.json.encode(table)


def read_relayed(raw: bytes) -> RelayedBody:
    """Return the body with its fields. Raises InvalidRequest where it is no JSON object of theirs."""
    fields = decode_body(raw, _FIELDS)
    if fields.n is not None and not 1 <= fields.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be from 1 to {MAX_CHOICES}, got {fields.n}", param="n")
    num_prompts = _count_prompts(bytes(fields.prompt))
    if num_prompts * (fields.n or 1) > MAX_CHOICES_OF_ALL:
        raise InvalidRequest(
            f"prompt: {num_prompts} prompts with {fields.n or 1} choices each are too many; one call "
            f"may have at most {MAX_CHOICES_OF_ALL} choices",
            param="prompt",
        )
    return RelayedBody(raw, fields, num_prompts)


def _count_prompts(prompt: bytes) -> int:
    """Return how many prompts a completions body has: a list of texts or of token lists is several."""
    if not prompt.startswith(b"[") or not prompt[1:64].lstrip().startswith((b'"', b"[")):
        return 1
    return len(decode_body(prompt, _PROMPTS))
