"""The alphabet of byte-level BPE: each of the 256 bytes as one printable character.

The order is GPT-2's: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _alphabet() -> str:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_CHARACTERS: str = _alphabet()
"""BYTE_CHARACTERS[b] is the character that stands for byte b."""

CHARACTER_BYTES: Mapping[str, int] = MappingProxyType(
    {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
)


def to_characters(data: bytes) -> str:
    """Return how a byte-level vocabulary writes these bytes."""
    return "".join(BYTE_CHARACTERS[byte] for byte in data)


def to_bytes(token: str) -> bytes | None:
    """Return the bytes a byte-level vocabulary entry stands for; None where it is not written so."""
    try:
        return bytes([CHARACTER_BYTES[character] for character in token])
    except KeyError:
        return None
