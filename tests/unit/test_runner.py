"""`python -m rm_abstract`: the grammar of its command line, and that scripts run as in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rm_abstract.cli.run import UsageError, parse


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("script.py --device x -m y", ("script", "script.py", ["--device", "x", "-m", "y"])),
        ("-m pkg.mod -c 1", ("module", "pkg.mod", ["-c", "1"])),
        ("-c code a b", ("code", "code", ["a", "b"])),
        ("- one", ("stdin", "-", ["one"])),
        ("--device cpu --explain script.py", ("script", "script.py", [])),
        ("-- -odd-name.py x", ("script", "-odd-name.py", ["x"])),
        ("--help", ("help", "", [])),
        ("-V", ("version", "", [])),
        ("--include-dir", ("include dir", "", [])),
    ],
)
def test_options_of_ours_end_where_the_script_begins(line, expected):
    command = parse(line.split())
    assert (command.kind, command.target, command.arguments) == expected


def test_options_are_read_in_both_spellings():
    for line in ("--device gpu:1 --explain=json --fail-if-not-routed x", "--device=gpu:1 x"):
        assert parse(line.split()).device == "gpu:1"
    assert parse(["--explain=json", "x"]).explain == "json"
    assert parse(["--explain", "x"]).explain == "text"
    assert parse(["--fail-if-not-routed", "x"]).fail_if_not_routed


@pytest.mark.parametrize("line", ["", "-m", "-c", "--device", "--nonsense x", "--explain=xml x"])
def test_a_line_that_is_not_understood_is_a_usage_error(line):
    with pytest.raises(UsageError, match=r"\[run\]"):
        parse(line.split())


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "rm_abstract", *map(str, arguments)],
        capture_output=True,
        text=True,
        **options,
    )


def test_a_script_sees_what_python_would_give_it(tmp_path):
    script = tmp_path / "script.py"
    (tmp_path / "neighbour.py").write_text("value = 41\n")
    script.write_text(
        "import sys, json, neighbour, rm_abstract\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], neighbour.value,\n"
        "                  rm_abstract.is_initialized()]))\n"
    )
    done = run("--device", "cpu", script, "--explain", "x")
    name, argv, path, value, initialised = json.loads(done.stdout)
    assert (name, argv, value, initialised) == (
        "__main__",
        [str(script), "--explain", "x"],
        41,
        True,
    )
    assert path == str(tmp_path) and done.stderr == "" and done.returncode == 0


def test_a_plugin_compiles_from_the_installed_headers_alone(tmp_path):
    done = run("--include-dir")
    source = tmp_path / "plugin.cpp"
    source.write_text(
        "#include <rm/plugin.hpp>\n#include <rm/kernels.h>\n#include <rm/host_executor.h>\n"
        "int version = DLPACK_MAJOR_VERSION;\n"
    )
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{done.stdout.strip()}", str(source)]
    assert done.returncode == 0 and subprocess.run(command).returncode == 0


def test_modules_code_and_standard_input_run_too(tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    assert run("-m", "tool", "a", cwd=tmp_path).stdout == "__main__ ['a']\n"
    code = "import sys; print(__name__, sys.argv)"
    assert run("-c", code, "a").stdout == "__main__ ['-c', 'a']\n"
    assert run("-", "a", input=code).stdout == "__main__ ['-', 'a']\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(7)", 7), ("raise SystemExit", 0), ("1/0", 1), ("exit('no')", 1)],
)
def test_the_exit_status_is_the_scripts(code, status):
    done = run("-c", code)
    assert done.returncode == status
    assert ("ZeroDivisionError" in done.stderr) == ("1/0" in code)


@pytest.mark.parametrize("target", ["absent.py", "bench"])
def test_a_script_that_is_not_there_is_told_in_two_lines(target, tmp_path):
    done = run(target, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert f"expected a script, got '{target}'" in done.stderr and "Traceback" not in done.stderr
    assert ("rm-abstract bench" in done.stderr) == (target == "bench")


def test_a_module_that_is_not_there_is_told_as_python_tells_it(tmp_path):
    done = run("-m", "absent_module", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("No module named absent_module\n")
    assert done.stderr.count("\n") == 1


def test_a_wrong_form_of_the_report_is_named_with_the_right_ones():
    done = run("--explain=yaml", "-c", "pass")
    assert done.returncode == 2 and "expected --explain or --explain=json" in done.stderr


def test_a_script_without_a_routed_call_fails_when_asked_to():
    assert run("-c", "pass").returncode == 0
    done = run("--fail-if-not-routed", "-c", "pass")
    assert done.returncode == 3 and "expected accelerated calls" in done.stderr
    assert run("--fail-if-not-routed", "-c", "raise SystemExit(5)").returncode == 5


def test_the_report_is_printed_as_text_or_json_on_stderr():
    done = run("--explain=json", "-c", "print('mine')")
    assert done.stdout == "mine\n"
    assert json.loads(done.stderr)["routed"] == 0
    assert "no model was caught" in run("--explain", "-c", "pass").stderr


def test_the_device_is_inherited_by_children_and_a_bad_one_is_an_error():
    child = "import os; print(os.environ['RM_DEVICE'])"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run("--device", "cpu", "-c", code).stdout == "cpu\n"
    done = run("--device", "tpu", "-c", "print(1)")
    assert done.returncode == 2 and "'tpu' from --device" in done.stderr and done.stdout == ""
    assert "RM_DEVICE" not in done.stderr
    assert run("--what").returncode == 2 and "usage:" in run("--what").stderr
