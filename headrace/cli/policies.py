"""`headrace policies`: write one, check it, swap it into a running server."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.table import print_table
from headrace.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

policies = typer.Typer(
    name="policies",
    help="Write a policy in one file, check it, swap it into a running server.",
    no_args_is_help=True,
)
KINDS = ("scheduling", "eviction", "routing", "admission", "quantization")
Kind = Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option: -o patience=2s. Repeatable."),
]


@policies.command("list")
def list_policies() -> None:
    """List every policy there is: its kind, name, who brought it, and what it is for."""
    registries = _registries()
    rows = [("KIND", "NAME", "ORIGIN", "WHAT IT DOES")]
    for kind in KINDS:
        registry = registries.of(kind)
        rows += [
            (kind, entry.name, entry.origin, _first_line(registry.get(entry.name)))
            for entry in registry
        ]
    print_table(rows)


@policies.command("new")
def new(kind: Kind, file: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Write a working policy of a kind, with comments, to start from."""
    _check_kind(kind)
    if file.suffix != ".py":
        raise ConfigError(f"{file}: a policy is a Python file; give it the ending .py")
    starter = Path(__file__).parent / "starters" / f"{kind}.txt"
    words = [word for word in re.split(r"[^A-Za-z0-9]+", file.stem) if word]
    name = "_".join(words).lower() or kind
    class_name = "".join(word.capitalize() for word in words) or "MyPolicy"
    if not class_name.isidentifier():
        class_name = f"Policy{class_name}"
    text = starter.read_text(encoding="utf-8")
    text = text.replace("CLASS", class_name).replace("NAME", name).replace("FILE", str(file))
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; nothing was written") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    typer.echo(
        f"{file}: {_article(kind)} {kind} policy, {class_name}. Check it with: headrace policies check {file}"
    )


@policies.command("check")
def check(
    use: Annotated[str, typer.Argument(help="./file.py, ./file.py:Class, or a name.")],
    kind: Annotated[str, typer.Option(help="Its kind, where that cannot be seen.")] = "",
    options: Options = None,
) -> None:
    """Run the contract's checks on a policy and say what was found. Exit code 1: a promise is broken."""
    from headrace.plugins.script import is_script
    from headrace.testing.policy_report import examine

    registries = _registries()
    given = _parse_options(options)
    if is_script(use):
        use = with_class(use)
    kind = kind or _kind_of(registries, use)
    _check_kind(kind)
    make: Callable[[], Any] = lambda: registries.create(kind, use, given, Path())  # noqa: E731
    name = make().name
    typer.echo(f"{kind} policy '{name}' ({use})")
    findings = examine(kind, make)
    for finding in findings:
        mark = "BROKEN" if finding.breach else "ok"
        measured = f" ({finding.measured})" if finding.measured else ""
        typer.echo(f"  {mark:<6}  {finding.promise}{measured}")
        if finding.breach:
            typer.echo(f"          {finding.breach}")
    broken = sum(bool(finding.breach) for finding in findings)
    if broken:
        typer.echo(f"{broken} of {len(findings)} promises are broken")
        raise typer.Exit(1)
    typer.echo("every promise is kept")


@policies.command("swap")
def swap(
    kind: Kind,
    use: Annotated[str, typer.Argument(help="A name, or a script: ./file.py:Class.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Whose engines; left out: every model's.")] = "",
    key_env: Annotated[
        str, typer.Option(help="The environment variable that holds the admin key.")
    ] = "HEADRACE_ADMIN_KEY",
    options: Options = None,
) -> None:
    """Put a policy in the place of the one in force, in a running server, losing no request."""
    from headrace.plugins.script import is_script

    _check_kind(kind)
    if is_script(use):
        use = _absolute(with_class(use))
    body = {"use": use, "options": _parse_options(options), "model": model}
    answer = _post(f"{url.rstrip('/')}/admin/policies/{kind}", body, os.environ.get(key_env, ""))
    where = ", ".join(answer["replicas"]) or "the gateway"
    typer.echo(f"{kind}: {use} is in force in {where} ({answer['seconds'] * 1000:.0f} ms)")


def _post(url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.post(url, json=body, headers=headers, timeout=60.0)
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
        raise ConfigError(f"{url}: no answer that can be read: {error}") from None
    if response.status_code != 200:
        message = answer.get("error", {}).get("message", response.text)
        sys.stderr.write(f"headrace: refused ({response.status_code}): {message}\n")
        raise typer.Exit(1)
    return answer


def _registries() -> Any:
    from headrace.plugins.manager import create_plugin_manager
    from headrace.plugins.registry import Registries

    return Registries.from_manager(create_plugin_manager())


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _check_kind(kind: str) -> None:
    from headrace.errors import did_you_mean

    if kind not in KINDS:
        raise ConfigError(f"no kind of policy named '{kind}'. {did_you_mean(kind, KINDS)}")


def _parse_options(options: list[str] | None) -> dict[str, Any]:
    """Return `name=value` pairs, each value read as YAML reads it."""
    import yaml

    parsed = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--option {option}: write it as name=value")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--option {option}: the value cannot be read as YAML") from None
    return parsed


def with_class(use: str) -> str:
    """Add the class to a script reference without one, where the file leaves no choice."""
    from headrace.plugins.script import policy_classes

    if not use.endswith(".py"):
        return use
    found = policy_classes(Path(use))
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise PluginError(f"{use}: say which class as {use}:Class; with a `name` it has: {names}")
    return f"{use}:{found[0]}"


def _absolute(use: str) -> str:
    """Return the reference with an absolute path: the server has another working directory."""
    from headrace.plugins.script import script_path

    return f"{script_path(use, Path())}:{use.rpartition(':')[2]}"


def _kind_of(registries: Any, use: str) -> str:
    """Return the kind whose contract the class keeps, or which has a policy of that name."""
    fitting, reasons = [], []
    for kind in KINDS:
        try:
            registries.resolve(kind, use, Path())
            fitting.append(kind)
        except PluginError as error:
            reasons.append(str(error))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise PluginError(f"'{use}' may be of kind {' or '.join(fitting)}: say which with --kind")
    raise PluginError(
        f"'{use}' keeps no kind's contract; say with --kind which it should be. As scheduling: {reasons[0]}"
    )


def _first_line(cls: type[Any]) -> str:
    """Return the first sentence of the class's or its module's documentation."""
    text = cls.__doc__ or sys.modules[cls.__module__].__doc__ or ""
    return text.strip().split("\n")[0]
