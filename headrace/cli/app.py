"""The table of sub-commands."""

from __future__ import annotations

import typer

from headrace.cli.bench import bench
from headrace.cli.chat import chat
from headrace.cli.check_config import check_config
from headrace.cli.generate import generate
from headrace.cli.keys import keys
from headrace.cli.plugins import plugins
from headrace.cli.policies import policies
from headrace.cli.pull import pull
from headrace.cli.replicas import replicas
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate
from headrace.cli.tune import tune

app = typer.Typer(
    name="headrace",
    help="Serve large language models; every decision a plugin.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(serve)
app.command()(chat)
app.command()(generate)
app.command()(bench)
app.command()(simulate)
app.command()(tune)
app.command()(pull)
app.command("check-config")(check_config)
app.command()(plugins)
app.add_typer(policies)
app.add_typer(replicas)
app.add_typer(keys)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit()
