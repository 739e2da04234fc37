"""The API keys a gateway knows: of each only its SHA-256 digest, and whom it stands for.

A key is a long random text (`headrace keys new` makes one), so a plain digest cannot be reversed by
trying. A key that is presented is digested before anything is compared: how long that takes says nothing
about a key, because nobody can choose a key whose digest begins like another's.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
import re
import secrets
from collections.abc import Iterable, Mapping

import msgspec

from headrace.config import GatewayConfig, load_table
from headrace.errors import ConfigError
from headrace.gateway.identity import Identity

_PREFIX = "hr-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENVIRONMENT_TENANT = "default"
KnownKeys = dict[str, tuple[str, Identity]]
"""By digest: the digest and whom it stands for."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file."""

    sha256: str
    """Digest of the key, 64 hexadecimal digits."""
    tenant: str
    """Whom it stands for; several keys may share a tenant, its limits and its cache."""
    organization: str = ""
    """What the tenant belongs to."""
    models: tuple[str, ...] = ()
    """Models it may use; empty is all."""
    min_priority: int | None = None
    """Lowest `priority` that its requests may carry."""
    max_priority: int | None = None
    """Highest `priority` that its requests may carry."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of keys."""

    keys: tuple[KeyEntry, ...] = ()


def new_key() -> str:
    """Return a new random key with 256 bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return what the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class ApiKeys:
    """The keys of one gateway; the file can be read again while it serves.

    `environ` is where `gateway.api_keys_env` is looked up, once. ConfigError names file, line and key.
    """

    def __init__(self, config: GatewayConfig, environ: Mapping[str, str]) -> None:
        self._path = pathlib.Path(config.api_keys_file) if config.api_keys_file else None
        self._is_cache_shared = config.shared_prefix_cache
        self._of_environment = dict(self._from_environment(config.api_keys_env, environ))
        self._identities = self.read()

    @property
    def is_required(self) -> bool:
        """Whether callers need a key at all. An empty file lets nobody in."""
        return self._path is not None or bool(self._of_environment)

    def identify(self, key: str) -> Identity | None:
        """Return whom a key stands for; None where nobody has it."""
        digest = digest_of(key)
        found = self._identities.get(digest)
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    def use(self, known: KnownKeys) -> None:
        """Know these keys from now on."""
        self._identities = known

    def read(self) -> KnownKeys:
        """Return the keys as the file and the environment have them now; `use` puts them in force.

        ConfigError where the file is wrong.
        """
        identities = dict(self._of_environment)
        if self._path is None:
            return identities
        file, origins = load_table(self._path, KeyFile)
        for index, entry in enumerate(file.keys):
            where = f"{origins.get(f'keys.{index}.sha256', self._path)}, key keys.{index}"
            digest = entry.sha256.lower()
            _check_entry(entry, where)
            if digest in identities:
                raise ConfigError(
                    f"{where}.sha256: this key was given before; remove one of the two"
                )
            identities[digest] = digest, self._identity(entry)
        return identities

    def _identity(self, entry: KeyEntry) -> Identity:
        low, high = entry.min_priority, entry.max_priority
        bounds = None
        if low is not None or high is not None:
            bounds = (-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        return Identity(
            tenant=entry.tenant,
            organization=entry.organization,
            cache_salt="" if self._is_cache_shared else entry.tenant,
            models=frozenset(entry.models) or None,
            priority_bounds=bounds,
        )

    def _from_environment(
        self, variable: str, environ: Mapping[str, str]
    ) -> Iterable[tuple[str, tuple[str, Identity]]]:
        if not variable:
            return
        given = [part.strip() for part in environ.get(variable, "").split(",")]
        if not any(given):
            raise ConfigError(
                f"gateway.api_keys_env: the environment variable {variable} is not set; it takes a "
                "key, or several as tenant:key with commas between"
            )
        for part in filter(None, given):
            tenant, colon, key = part.rpartition(":")
            if not key or (colon and not tenant):
                raise ConfigError(
                    f"gateway.api_keys_env: an entry of {variable} is not a key and not tenant:key"
                )
            entry = KeyEntry(sha256=digest_of(key), tenant=tenant or _ENVIRONMENT_TENANT)
            yield entry.sha256, (entry.sha256, self._identity(entry))


def _check_entry(entry: KeyEntry, where: str) -> None:
    if not _DIGEST.fullmatch(entry.sha256.lower()):
        raise ConfigError(
            f"{where}.sha256: must be 64 hexadecimal digits, the SHA-256 digest of a key; "
            "`headrace keys new` prints such a line. The key itself does not belong here"
        )
    if not entry.tenant:
        raise ConfigError(f"{where}.tenant: must not be empty")
    low, high = entry.min_priority, entry.max_priority
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{where}.min_priority: {low} is above max_priority, {high}")
