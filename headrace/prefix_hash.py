"""The hash chain that names a prefix of tokens, the same in gateway and engine.

A block's digest covers its parent's digest, so equal digests mean equal prefixes under equal
settings. Fields are tagged and length-prefixed, so that no two different lists of fields give the
same bytes (a name that ends like another one's salt cannot collide). BLAKE2b (RFC 7693) is
cryptographic: a tenant cannot craft tokens that hit another tenant's blocks.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence

DIGEST_BYTES = 32
TEXT_BLOCK_BYTES = 64
"""About sixteen tokens of English."""


_MAX_KEPT_SALT = 256
"""Characters of a salt, which clients choose; roots of longer ones are not kept."""
_PARENT_HEAD = b"p" + DIGEST_BYTES.to_bytes(8, "little")


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value


def root_digest(
    *, model_revision: str, adapter: str = "", salt: str = "", compaction_id: str = ""
) -> bytes:
    """Return the parent digest of a sequence's first block. [32 bytes]"""
    if len(salt) <= _MAX_KEPT_SALT:
        return _kept_root(model_revision, adapter, salt, compaction_id)
    return _root(model_revision, adapter, salt, compaction_id)


def _root(model_revision: str, adapter: str, salt: str, compaction_id: str) -> bytes:
    fields = (
        _field(b"m", model_revision.encode("utf-8", "surrogatepass")),
        _field(b"a", adapter.encode("utf-8", "surrogatepass")),
        _field(b"s", salt.encode("utf-8", "surrogatepass")),
        _field(b"c", compaction_id.encode("utf-8", "surrogatepass")),
    )
    return hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()


_kept_root = functools.lru_cache(maxsize=1024)(_root)
"""Most requests share one of a few roots."""


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of one full block that follows `parent`. [32 bytes]"""
    if not (isinstance(token_ids, array) and token_ids.typecode == "I"):
        token_ids = array("I", token_ids)
    return packed_block_digest(parent, token_ids.tobytes())


def packed_block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return what `block_digest` does for tokens as an array of typecode I has them in memory."""
    length = len(tokens).to_bytes(8, "little")
    data = b"".join((_PARENT_HEAD, parent, b"t", length, tokens))
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def block_digests(root: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the digest of each full block of `token_ids` in order; a partial tail has none."""
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        yield parent


def text_digests(root: bytes, text: bytes, block_bytes: int = TEXT_BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the digest of each full block of a prompt's text, where nobody here knows its tokens."""
    parent = root
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        data = _field(b"p", parent) + _field(b"x", text[start : start + block_bytes])
        parent = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
        yield parent
