"""`rm-abstract`: the command line; `doctor`, `devices`, `backends`, `cache` work without torch."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import click

from rm_abstract._version import __version__
from rm_abstract.base.errors import Error


class _Lazy(click.Group):
    """Finds a subcommand's module when it is asked for, so that `--help` stays quick and a broken
    part does not take the others down."""

    commands_at: ClassVar[dict[str, tuple[str, str]]] = {
        "bench": ("rm_abstract.bench.cli", "bench"),
        "check": ("rm_abstract.cli.check", "check"),
        "cache": ("rm_abstract.cli.cache", "cache"),
        "compile": ("rm_abstract.cli.compile", "compile_command"),
        "doctor": ("rm_abstract.cli.doctor", "doctor"),
        "env": ("rm_abstract.cli.env", "env"),
        "run": ("rm_abstract.cli.run_onnx", "run_onnx"),
        "serve": ("rm_abstract.cli.serve", "serve"),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        from importlib.util import find_spec

        lazy = [name for name, (module, _) in self.commands_at.items() if find_spec(module)]
        return sorted([*super().list_commands(ctx), *lazy])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from importlib import import_module

        if name not in self.commands_at or name not in self.list_commands(ctx):
            return super().get_command(ctx, name)
        module, attribute = self.commands_at[name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Error as error:
            raise click.ClickException(f"{error.code} {error}".strip()) from None


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="rm-abstract")
def cli() -> None:
    """Run, inspect and prepare models for the best device of this machine."""


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--sim-npu", is_flag=True, help="count the simulated NPU, as RM_SIM_NPU=1 does")
def devices(as_json: bool, sim_npu: bool) -> None:
    """Usable devices, best first, and why the others are not."""
    from rm_abstract import _core
    from rm_abstract import device as found

    usable = found.devices(sim_npu)
    missing = []
    for kind in ("cuda", "rbln", "furiosa", "cpu"):
        notes = _core.control.why_not(kind, sim_npu, found.hardware_root())
        missing += [{"device": kind, **dict(note)} for note in notes]
    if as_json:
        click.echo(json.dumps({"usable": usable, "not_usable": missing}, indent=2))
        return
    for place, name in enumerate(usable):
        click.echo(f"{name}{'  (auto)' if place == 0 else ''}")
    for note in missing:
        click.echo(f"{note['device']}: {note['code']} {note['message']}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def backends(as_json: bool) -> None:
    """Backend plugins: version, score, devices, and why one cannot be used."""
    from rm_abstract import device as found

    found.import_torch_if_installed()
    rows = found.backends()
    if as_json:
        click.echo(json.dumps(rows, indent=2, default=str))
        return
    for row in rows:
        state = f"score {row['score']}, {len(row['devices'])} devices"
        if not row["available"]:
            state = f"not usable: {row['code']} {row['reason']}".replace("  ", " ")
        click.echo(f"{row['name']} {row['version']}: {state}")
        click.echo(f"    {row['path']}")


def main() -> None:
    """The console script."""
    sys.exit(cli(prog_name="rm-abstract"))


if __name__ == "__main__":
    main()
