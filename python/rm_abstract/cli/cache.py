"""`rm-abstract cache …`: look at the compile cache and look after it; every command has --json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from rm_abstract import cache as library
from rm_abstract.base.errors import Error
from rm_abstract.cli.compile import ahead_options

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Errors of the library become one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Error as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group, name="cache")
def cache() -> None:
    """Show, verify and clean the compile cache."""


def _json_option(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def size_text(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age_text(seconds: float) -> str:
    """90 -> "1m"; a time in the future is "now"."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    try:
        return [row["name"][:16] for row in library.entries() if row["name"].startswith(incomplete)]
    except Error:  # completion has nowhere to say why
        return []


@cache.command("path")
@_json_option
def path_command(as_json: bool) -> None:
    """Print the cache directory."""
    directory = library.path()
    _print_json({"path": directory}) if as_json else click.echo(directory)


@cache.command("stats")
@_json_option
def stats_command(as_json: bool) -> None:
    """Entries, hit rate and time saved, over all processes."""
    stats = library.stats()
    if as_json:
        return _print_json(stats)
    click.echo(f"directory  {stats['directory']}")
    if stats["problem"]:
        click.echo(f"problem    {stats['problem']}")
    click.echo(f"entries    {stats['entries']}, {size_text(stats['bytes'])}")
    for kind, row in sorted(stats["kinds"].items()):
        click.echo(f"  {kind:<11} {row['entries']}, {size_text(row['bytes'])}")
    if stats["hit_rate"] is not None:
        click.echo(f"hit rate   {stats['hit_rate']:.1%}")
    click.echo(
        f"compiled   {stats['compile_ms'] / 1e3:.1f} s, saved {stats['saved_ms'] / 1e3:.1f} s"
    )
    for name, value in sorted(stats["counters"].items()):
        if value:
            click.echo(f"  {name:<24} {value}")
    return None


@cache.command("ls")
@click.option("--kind", help="Only entries of this kind (plan, vendor, kernel, …).")
@_json_option
def ls_command(kind: str | None, as_json: bool) -> None:
    """List entries, most recently used first."""
    rows = [row for row in library.entries() if kind in (None, row["kind"])]
    if as_json:
        return _print_json(rows)
    now = time.time()
    for row in rows:
        used, cost = age_text(now - row["used"]), row["compile_ms"] / 1e3
        guards = " guarded" if row["guards"] else ""
        click.echo(
            f"{row['name'][:16]}  {row['kind']:<11} {size_text(row['size']):>10}  "
            f"used {used:>4} ago  compiled in {cost:.2f} s  {row['producer']}{guards}"
        )
    return None


@cache.command("show")
@click.argument("key", shell_complete=_complete_key)
@_json_option
def show_command(key: str, as_json: bool) -> None:
    """Show one entry: what made it and the digest of every field of its key."""
    row = library.show(key)
    if as_json:
        return _print_json(row)
    for name in ("key", "kind", "path", "producer", "compat", "guards"):
        if row[name]:
            click.echo(f"{name:<10} {row[name]}")
    click.echo(f"size       {size_text(row['size'])}")
    age = age_text(time.time() - row["created"])
    click.echo(f"compiled   in {row['compile_ms'] / 1e3:.2f} s, {age} ago")
    for field, digest in row["fields"].items():
        click.echo(f"  {field:<10} {digest[:16]}")
    return None


@cache.command("explain")
@click.argument("key", required=False, shell_complete=_complete_key)
@click.argument("other", required=False, shell_complete=_complete_key)
@click.option("--last-miss", is_flag=True, help="Explain why the last lookup that missed did.")
@_json_option
def explain_command(key: str | None, other: str | None, last_miss: bool, as_json: bool) -> None:
    """Say which fields of two keys differ (with one key: from the closest entry)."""
    report = library.explain(key, other, last_miss=last_miss)
    if as_json:
        return _print_json(report)
    click.echo(f"{report['kind']} {report['key'][:16]}")
    if report["other"] is None:
        click.echo("there is no other entry of this kind")
    elif report["differing"]:
        click.echo(f"differs from {report['other'][:16]} in: {', '.join(report['differing'])}")
    else:
        click.echo(f"has the same fields as {report['other'][:16]}")
    return None


@cache.command("verify")
@click.option("--remove", is_flag=True, help="Move bad entries to quarantine.")
@_json_option
def verify_command(remove: bool, as_json: bool) -> None:
    """Read every entry whole; exit code 1 when one is not sound."""
    report = library.verify(remove)
    if as_json:
        _print_json(report)
    else:
        for file, why in report["bad"]:
            click.echo(f"{file}: {why}")
        click.echo(f"{report['sound']} sound, {len(report['bad'])} bad")
    if report["bad"]:
        raise SystemExit(1)


@cache.command("gc")
@click.option("--max-size", help="Such as 10G (default: cache_max_size).")
@click.option("--max-age", help="Such as 30d (default: cache_max_age).")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_json_option
def gc_command(max_size: str | None, max_age: str | None, dry_run: bool, as_json: bool) -> None:
    """Evict the least recently used entries."""
    report = library.gc(max_size, max_age, dry_run)
    if as_json:
        return _print_json(report)
    if report["busy"]:
        click.echo("another process is collecting")
    verb = "would remove" if dry_run else "removed"
    click.echo(
        f"{verb} {report['evicted']} of {report['entries']} entries, "
        f"{size_text(report['before'])} -> {size_text(report['after'])}; "
        f"{report['temporary_files']} abandoned temporary files"
    )
    return None


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_json_option
def clear_command(yes: bool, as_json: bool) -> None:
    """Remove every entry. Running processes keep what they use."""
    if not yes:
        click.confirm(f"Remove every entry of {library.path()}?", abort=True, err=True)
    count = library.clear()
    _print_json({"removed": count}) if as_json else click.echo(f"removed {count} entries")


@cache.command("export")
@click.argument("bundle", type=click.Path(dir_okay=False, writable=True))
@click.argument("keys", nargs=-1, shell_complete=_complete_key)
@_json_option
def export_command(bundle: str, keys: tuple[str, ...], as_json: bool) -> None:
    """Write entries (default: all) into one file."""
    count = library.export_bundle(bundle, keys)
    _print_json({"exported": count}) if as_json else click.echo(f"exported {count} entries")


@cache.command("warm")
@ahead_options
def warm_command(as_json: bool, **sizes: Any) -> None:
    """Compile a transformers model folder into the cache ahead of the run that needs it."""
    report = library.warm(**sizes)
    if as_json:
        return _print_json(report)
    for row in report["programs"]:
        click.echo(f"{row['cache']:<6} {row['signature']}  ({row['compile_ms'] / 1e3:.2f} s)")
    new = ", ".join(f"{count} {kind}" for kind, count in sorted(report["new"].items()))
    click.echo(f"new entries: {new or 'none'}; {report['seconds']:.1f} s on {report['device']}")
    return None


@cache.command("import")
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False))
@_json_option
def import_command(bundle: str, as_json: bool) -> None:
    """Store the sound entries of a bundle. They are programs: import only what you trust."""
    report = library.import_bundle(bundle)
    if as_json:
        _print_json(report)
    else:
        for name, why in report["refused"]:
            click.echo(f"refused {name}: {why}", err=True)
        click.echo(f"imported {report['imported']}, already there {report['known']}")
    if report["refused"]:
        raise SystemExit(1)
