"""The script runner behind `python -m rm_abstract`.

Grammar: options of ours, then exactly what follows `python`: a script, a folder or zip with a
`__main__`, `-m module`, `-c code` or `-` (standard input), then the script's own arguments, which
are never looked at.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass, field

import click

USAGE = """\
usage: python -m rm_abstract [options] script.py | -m module | -c code | - [arguments]

options:
  --device D             device string: auto, cpu, gpu[:N], npu[:N], rbln[:N], furiosa[:N], sim[:N]
  --explain[=json]       print what ran where, and why not, on stderr when the script ends
  --fail-if-not-routed   exit with status 3 when no call was run by a compiled program
  -h, --help             this text
  --include-dir          print the folder of the headers that a plugin is compiled with
  -V, --version          the version
"""

# Options that print something and run nothing.
INFORMATION = {
    "-h": "help",
    "--help": "help",
    "-V": "version",
    "--version": "version",
    "--include-dir": "include dir",
}
NOT_ROUTED = 3  # exit status of --fail-if-not-routed
BAD_USAGE = 2


@dataclass
class Command:
    """What was asked for; `kind` is script, module, code, stdin or a value of INFORMATION."""

    kind: str = ""
    target: str = ""
    arguments: list[str] = field(default_factory=list)
    device: str | None = None
    explain: str = ""  # "", "text" or "json"
    fail_if_not_routed: bool = False


class UsageError(Exception):
    """The command line is not understood."""


def parse(argv: list[str]) -> Command:
    """Reads our options up to the target. Raises UsageError."""
    command = Command()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, separator, value = word.partition("=")
        if word in INFORMATION:
            command.kind = INFORMATION[word]
            return command
        if name == "--device":
            command.device = value if separator else _next(rest, name)
        elif name == "--explain":
            if value not in ("", "json", "text"):
                raise UsageError(f"[run] expected --explain or --explain=json, got {word!r}")
            command.explain = value or "text"
        elif word == "--fail-if-not-routed":
            command.fail_if_not_routed = True
        elif word in ("-m", "-c"):
            command.kind = "module" if word == "-m" else "code"
            command.target, command.arguments = _next(rest, word), rest
            return command
        elif word == "-":
            command.kind, command.target, command.arguments = "stdin", "-", rest
            return command
        elif word == "--" and rest:
            command.kind, command.target, command.arguments = "script", rest.pop(0), rest
            return command
        elif word.startswith("-"):
            raise UsageError(f"[run] expected one of our options or a script, got {word!r}")
        else:
            command.kind, command.target, command.arguments = "script", word, rest
            return command
    raise UsageError("[run] expected a script, -m module, -c code or -, got nothing")


def _next(rest: list[str], option: str) -> str:
    if not rest:
        raise UsageError(f"[run] expected a value after {option}, got nothing")
    return rest.pop(0)


def _information(kind: str, version: str) -> str:
    if kind == "include dir":
        from rm_abstract.base.headers import include_dir

        return include_dir()
    return USAGE.rstrip() if kind == "help" else version


def main(argv: list[str]) -> int:
    """Runs the command; the exit status is the script's own unless a check of ours fails."""
    from rm_abstract._version import __version__
    from rm_abstract.base.errors import Error

    try:
        command = parse(argv)
    except UsageError as error:
        print(f"{error}\n{USAGE}", end="", file=sys.stderr)
        return BAD_USAGE
    if command.kind in INFORMATION.values():
        print(_information(command.kind, __version__))
        return 0
    if command.kind == "script" and not os.path.exists(command.target):
        print(_absent(command.target), file=sys.stderr)
        return BAD_USAGE
    if command.kind == "module" and not _is_module(command.target):
        print(f"{sys.executable}: No module named {command.target}", file=sys.stderr)
        return 1  # what `python -m` says and returns
    import rm_abstract

    if command.device is not None:
        os.environ["RM_DEVICE"] = command.device  # children of the script inherit it
    try:
        rm_abstract.init()
    except Error as error:
        said = str(error)
        if command.device is not None:  # the environment only carried it
            said = said.replace("from environment RM_DEVICE", "from --device")
        print(f"{error.code} {said}".strip(), file=sys.stderr)
        return BAD_USAGE
    try:
        _run(command)
    except SystemExit as leaving:
        return _after(command, leaving.code)
    except BaseException:
        _after(command, 1)
        raise
    return _after(command, 0)


def _is_module(name: str) -> bool:
    """Whether `python -m` finds it or the package it is in, which is not imported here."""
    sys.path[0] = os.getcwd()
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _absent(target: str) -> str:
    from rm_abstract.cli.main import cli

    message = f"[run] expected a script, got {target!r}: there is no such file"
    if target in cli.list_commands(click.Context(cli)):
        message += f"; try `rm-abstract {target}`, the command line's own program"
    return message


def _run(command: Command) -> None:
    if command.kind == "module":
        sys.argv = [command.target, *command.arguments]
        sys.path[0] = os.getcwd()
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
    elif command.kind == "script":
        sys.argv = [command.target, *command.arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(command.target))
        runpy.run_path(command.target, run_name="__main__")
    else:
        name = "<stdin>" if command.kind == "stdin" else "<string>"
        code = sys.stdin.read() if command.kind == "stdin" else command.target
        sys.argv = ["-" if command.kind == "stdin" else "-c", *command.arguments]
        sys.path[0] = ""
        main_module = type(sys)("__main__")
        main_module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main_module
        exec(compile(code, name, "exec"), main_module.__dict__)


def _after(command: Command, status: object) -> int:
    """Report and checks once the script has ended; the script's own failure wins."""
    from rm_abstract import report, session

    code = _exit_code(status)
    active = session.current()
    found = report.build(active) if active is not None else None
    if command.explain and found is not None:
        text = found.to_json() if command.explain == "json" else str(found)
        print(text, file=sys.stderr)
    if code == 0 and command.fail_if_not_routed and (found is None or found.routed == 0):
        print("[run] expected accelerated calls, got none; try --explain", file=sys.stderr)
        return NOT_ROUTED
    return code


def _exit_code(status: object) -> int:
    """As the interpreter maps sys.exit's argument."""
    if status is None:
        return 0
    if isinstance(status, int):
        return status
    print(status, file=sys.stderr)
    return 1
