"""`rm-abstract env create VENDOR FOLDER`: the Python environment a vendor's software runs in."""

from __future__ import annotations

from pathlib import Path

import click

from rm_abstract.vendors.environments import RECIPES, create, missing_tools


@click.group()
def env() -> None:
    """Python environments of vendors' software, beside yours."""


@env.command("create")
@click.argument("vendor", type=click.Choice(sorted(RECIPES)))
@click.argument("folder", type=click.Path(path_type=Path))
def create_command(vendor: str, folder: Path) -> None:
    """Make a new environment in FOLDER with the versions this release was tried with."""
    recipe = RECIPES[vendor]
    python = create(recipe, folder.absolute(), lambda line: click.echo(line, err=True))
    for tool in missing_tools(recipe):
        click.echo(f"{tool.program} is missing: apt-get install {tool.debian}", err=True)
    for requirement in recipe.by_hand:
        click.echo(f"install {requirement}.* in it, from the vendor's own package index", err=True)
    click.echo(f"export {recipe.variable}={python}")
