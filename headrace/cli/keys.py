"""`headrace keys new`: a new API key, shown once, and the lines that let it in."""

from __future__ import annotations

import typer

keys = typer.Typer(name="keys", help="API keys of a gateway.", no_args_is_help=True)


@keys.callback()
def _group() -> None:
    """API keys of a gateway."""


@keys.command()
def new(
    tenant: str = typer.Option(..., help="Whom the key stands for: whose limits, whose cache."),
    organization: str = typer.Option("", help="What the tenant belongs to."),
) -> None:
    """Print a new key, and its entry for the file that gateway.api_keys_file names."""
    import json

    from headrace.gateway.api_keys import digest_of, new_key

    key = new_key()
    typer.echo(f"key, shown only now: {key}\n\nunder `keys:` in the file of keys:\n", err=True)
    typer.echo(f"  - sha256: {digest_of(key)}")
    typer.echo(f"    tenant: {json.dumps(tenant)}")
    if organization:
        typer.echo(f"    organization: {json.dumps(organization)}")
