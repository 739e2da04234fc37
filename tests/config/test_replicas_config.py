"""A model's replicas as a list: kinds side by side, each with its own keys, and errors that name them."""

from __future__ import annotations

import pathlib
import textwrap

import pytest

from headrace.config import LoadedConfig, load_config, replica_config
from headrace.config.render import render
from headrace.errors import ConfigError


def load(tmp_path: pathlib.Path, text: str) -> LoadedConfig:
    path = tmp_path / "headrace.yaml"
    path.write_text(textwrap.dedent(text))
    return load_config(path, environ={})


def test_replicas_may_be_a_list_of_kinds(tmp_path: pathlib.Path) -> None:
    loaded = load(
        tmp_path,
        """\
        models:
          - name: a
            replicas:
              - {count: 2, hang_timeout: 3s}
              - {kind: http, url: "http://h:1", model: b, api_key_env: KEY, idle_timeout: 2s}
          - replicas: [{kind: http, url: "https://h/base", model: org/far}]
        """,
    )
    mixed, far = loaded.config.models
    kinds = [(entry.kind, entry.count, entry.hang_timeout) for entry in mixed.replica_entries]
    assert kinds == [("process", 1, 3.0), ("process", 1, 3.0), ("http", 1, 10.0)]
    assert (far.name, far.is_remote, mixed.is_remote) == ("org/far", True, False)
    assert replica_config(loaded.config, 0)["replicas_on_host"] == 2
    (tmp_path / "printed.yaml").write_text(render(loaded))
    assert load_config(tmp_path / "printed.yaml", environ={}).config.models == loaded.config.models


WRONG_REPLICAS = [
    (
        "{kind: ray}",
        "models.0.replicas.0.kind: must be one of process, http, in_process, got 'ray'",
    ),
    ("{kind: http}", "models.0.replicas.0.url: is missing; a replica of kind http needs one"),
    ("{kind: http, url: ftp://x}", "must start with http:// or https:// and name a host"),
    ('{kind: http, url: "http://a b"}', "must have no spaces or control characters"),
    ('{kind: http, url: "http://x\\x01y"}', "must have no spaces or control characters"),
    ("{kind: http, url: 'http://u@h'}", "must have no user, query or fragment"),
    ("{kind: http, url: 'http://h:99999'}", "is no URL"),
    (
        "{url: 'http://h'}",
        "line 1, key models.0.replicas.0.url: a replica of kind process has no url",
    ),
    ("{kind: in_process, hang_timeout: 3s}", "of kind in_process has no hang_timeout"),
    ("{count: 0}", "count: must be a whole number from 1 to 64, got 0"),
    ("{kin: http}", "unknown key. Did you mean 'kind'"),
    ("", "replicas: must have at least one entry"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG_REPLICAS, ids=lambda text: str(text)[:30])
def test_a_replica_that_cannot_work_is_refused_with_its_key(
    tmp_path: pathlib.Path, entry: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, f"models: [{{name: a, replicas: [{entry}]}}]")
    assert message in str(refusal.value)
