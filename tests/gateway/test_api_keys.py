"""The file of keys: what it takes, what it refuses and where, and reading it again."""

from __future__ import annotations

import pathlib

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app as command_line
from headrace.config import GatewayConfig
from headrace.errors import ConfigError
from headrace.gateway.api_keys import ApiKeys, digest_of, new_key
from headrace.gateway.identity import Identity


def read(tmp_path: pathlib.Path, text: str) -> ApiKeys:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return ApiKeys(GatewayConfig(api_keys_file=str(path)), {})


def entry(key: str, *lines: str) -> str:
    rest = "".join(f"    {line}\n" for line in lines)
    return f"  - sha256: {digest_of(key)}\n{rest}"


def test_an_entry_is_an_identity(tmp_path: pathlib.Path) -> None:
    lines = ("tenant: acme", "organization: group", "models: [small]", "min_priority: -1")
    keys = read(tmp_path, "keys:\n" + entry("one", *lines, "max_priority: 4"))
    assert keys.is_required
    assert keys.identify("one") == Identity(
        tenant="acme",
        organization="group",
        cache_salt="acme",
        models=frozenset({"small"}),
        priority_bounds=(-1, 4),
    )


def test_one_bound_of_the_priority_is_enough(tmp_path: pathlib.Path) -> None:
    keys = read(tmp_path, "keys:\n" + entry("one", "tenant: acme", "min_priority: 2"))
    identity = keys.identify("one")
    assert identity is not None and identity.priority_bounds == (2, 2**63 - 1)


@pytest.mark.parametrize("wrong", ["", "on", "onee", "ONE", digest_of("one")])
def test_a_key_that_is_nearly_right_is_nobody(tmp_path: pathlib.Path, wrong: str) -> None:
    assert read(tmp_path, "keys:\n" + entry("one", "tenant: acme")).identify(wrong) is None


def test_an_empty_file_lets_nobody_in(tmp_path: pathlib.Path) -> None:
    keys = read(tmp_path, "")
    assert keys.is_required
    assert keys.identify("anything") is None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("keys:\n  - tenant: acme\n", 2, "keys.0.sha256: is missing"),
        ("keys:\n  - sha256: hr-not-a-digest\n    tenant: acme\n", 2, "64 hexadecimal digits"),
        (f"keys:\n  - sha256: {'a' * 64}\n    tenant: ''\n", 2, "tenant: must not be empty"),
        (f"keys:\n  - sha256: {'a' * 64}\n    tenent: acme\n", 3, "Did you mean 'tenant'?"),
        ("keys:\n" + entry("one", "tenant: a") + entry("one", "tenant: b"), 4, "given before"),
        (
            "keys:\n" + entry("one", "tenant: a", "min_priority: 3", "max_priority: 1"),
            2,
            "3 is above max_priority, 1",
        ),
    ],
)
def test_errors_name_file_line_and_key(
    tmp_path: pathlib.Path, text: str, line: int, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'keys.yaml'}, line {line}, key keys.")
    assert said in str(raised.value)


def test_a_key_in_place_of_its_digest_is_not_repeated(tmp_path: pathlib.Path) -> None:
    """U03: somebody who pastes the key itself does not find it in the log."""
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "keys:\n  - sha256: hr-canary\n    tenant: acme\n")
    assert "canary" not in str(raised.value)


def test_reading_again_changes_all_or_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = read(tmp_path, "keys:\n" + entry("one", "tenant: acme"))
    path.write_text("keys:\n" + entry("two", "tenant: other") + "  - nonsense: 1\n")
    with pytest.raises(ConfigError, match="unknown key"):
        keys.read()
    assert keys.identify("one") is not None and keys.identify("two") is None
    path.write_text("keys:\n" + entry("two", "tenant: other"))
    keys.use(keys.read())
    assert keys.identify("one") is None and keys.identify("two") is not None


def test_keys_of_the_environment() -> None:
    config = GatewayConfig(api_keys_env="KEYS")
    keys = ApiKeys(config, {"KEYS": "plain, acme:secret"})
    plain, acme = keys.identify("plain"), keys.identify("secret")
    assert plain is not None and plain.tenant == "default"
    assert acme is not None and acme.tenant == acme.cache_salt == "acme"
    assert keys.identify("acme:secret") is None


@pytest.mark.parametrize("value", [None, "", " , ", "acme:", ":secret"])
def test_a_variable_without_keys_stops_the_start(value: str | None) -> None:
    environ = {} if value is None else {"KEYS": value}
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_env") as raised:
        ApiKeys(GatewayConfig(api_keys_env="KEYS"), environ)
    assert "secret" not in str(raised.value)


def test_a_shared_prefix_cache_salts_nothing() -> None:
    config = GatewayConfig(api_keys_env="KEYS", shared_prefix_cache=True)
    identity = ApiKeys(config, {"KEYS": "acme:secret"}).identify("secret")
    assert identity is not None and (identity.tenant, identity.cache_salt) == ("acme", "")


def test_new_keys_differ() -> None:
    assert len({new_key() for _ in range(50)}) == 50


def test_the_command_prints_an_entry_that_lets_its_key_in(tmp_path: pathlib.Path) -> None:
    arguments = ["keys", "new", "--tenant", "acme: a", "--organization", "group"]
    result = CliRunner().invoke(command_line, arguments)
    assert result.exit_code == 0
    key = result.stderr.splitlines()[0].rpartition(" ")[2]
    assert key not in result.stdout
    identity = read(tmp_path, "keys:\n" + result.stdout).identify(key)
    assert identity is not None
    assert (identity.tenant, identity.organization) == ("acme: a", "group")
