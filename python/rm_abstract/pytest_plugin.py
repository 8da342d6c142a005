"""``pytest -p rm_abstract.pytest_plugin``: runs somebody's tests with rm_abstract switched on.

``--rm-xfail FILE`` names a YAML file with tests that are expected to fail: a list of entries
``{id: <pattern of a node id>, reason: <text>}``, where ``*`` and ``?`` match as in a shell.
``--rm-min-routed SHARE`` fails the run when fewer of all module calls were served by a program.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

import rm_abstract


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(text)  # argparse names the option and the value
    return share


_share.__name__ = "share between 0 and 1"  # as argparse calls it in its message


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rm_abstract")
    group.addoption("--rm-device", default=None, help="device for init(), as auto, cpu or npu:0")
    group.addoption("--rm-xfail", default=None, help="YAML file of tests expected to fail")
    group.addoption(
        "--rm-min-routed",
        type=_share,
        default=None,
        metavar="SHARE",
        help="fail when the share of served module calls (0 to 1) is below",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        rm_abstract.init(config.getoption("--rm-device"))
    except rm_abstract.Error as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_EXPECTED] = _read(config.getoption("--rm-xfail"))


_EXPECTED: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
_UNUSED: pytest.StashKey[list[str]] = pytest.StashKey()  # patterns that no test has


def _read(path: str | None) -> list[tuple[str, str]]:
    """(pattern, reason) of each entry. Raises UsageError for a file that is not such a list."""
    if path is None:
        return []
    try:
        import yaml
    except ImportError:
        raise pytest.UsageError("--rm-xfail needs PyYAML: pip install pyyaml") from None
    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.safe_load(file) or []
        return [(str(entry["id"]), str(entry.get("reason", ""))) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise pytest.UsageError(
            f"--rm-xfail {path}: expected a list of entries with an id, got {error!r}"
        ) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unused = {pattern for pattern, _ in config.stash[_EXPECTED]}
    for item in items:
        for pattern, reason in config.stash[_EXPECTED]:
            if fnmatch.fnmatchcase(item.nodeid, pattern):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
                unused.discard(pattern)
    config.stash[_UNUSED] = sorted(unused)


def _served() -> tuple[int, int]:
    """(calls served by a program, all calls) of models that were seen."""
    report = rm_abstract.explain()
    return report.routed, report.routed + report.eager


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    wanted: Any = session.config.getoption("--rm-min-routed")
    if wanted is None or exitstatus != pytest.ExitCode.OK:
        return
    routed, calls = _served()
    if calls == 0 or routed / calls < wanted:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    routed, calls = _served()
    line = f"rm_abstract: {routed} of {calls} module calls were served by compiled programs"
    wanted: Any = config.getoption("--rm-min-routed")
    if wanted is not None and (calls == 0 or routed / calls < wanted):
        line += f"; --rm-min-routed asks for a share of {wanted:g}"
    terminalreporter.write_line(line)
    for pattern in config.stash.get(_UNUSED, []):
        terminalreporter.write_line(
            f"rm_abstract: --rm-xfail names {pattern!r}, which is no test of this run"
        )
