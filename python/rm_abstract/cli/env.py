"""`rm-abstract env create VENDOR FOLDER`: the Python environment a vendor's software runs in."""

from __future__ import annotations

from pathlib import Path

import click

from rm_abstract.vendors.environments import create, examine
from rm_abstract.vendors.recipes import RECIPES


@click.group()
def env() -> None:
    """Python environments of vendors' software, beside yours."""


@env.command("create")
@click.argument("vendor", type=click.Choice(sorted(RECIPES)))
@click.argument("folder", type=click.Path(path_type=Path))
def create_command(vendor: str, folder: Path) -> None:
    """Make a new environment in FOLDER with the versions this release was tried with, and say what
    it still lacks."""
    recipe = RECIPES[vendor]
    python = create(recipe, folder.absolute(), lambda line: click.echo(line, err=True))
    for finding in examine(recipe, str(python)):
        if finding.remedy:
            click.echo(f"{finding.detail}\n  fix: {finding.remedy}", err=True)
    click.echo(f"export {recipe.variable}={python}")
