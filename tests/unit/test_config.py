"""Settings: precedence, and errors that name the source and the accepted values."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rm_abstract as rm
from rm_abstract.base import config


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_argument_beats_environment_beats_project_file_beats_user_file(alone, monkeypatch):
    assert config.resolve({}).text("precision") == "auto"
    (alone / "user" / "rm_abstract.toml").write_text('precision = "int4"\n')
    assert config.resolve({}).text("precision") == "int4"
    (alone / "rm_abstract.toml").write_text('[compile_options]\nprecision = "bf16"\n')
    found = config.resolve({})
    assert found.text("precision") == "bf16"
    assert found.source("precision").endswith("rm_abstract.toml")
    monkeypatch.setenv("RM_PRECISION", "int8")
    assert config.resolve({}).source("precision") == "environment RM_PRECISION"
    given = config.resolve({"compile_options": {"precision": "auto"}})
    assert (given.text("precision"), given.source("precision")) == ("auto", "argument")


def test_the_project_file_is_found_from_a_folder_below_but_not_beyond_the_project(
    alone, monkeypatch
):
    (alone / "rm_abstract.toml").write_text("verbose = 1\n")
    below = alone / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert config.resolve({}).integer("verbose") == 1
    (below / ".git").mkdir()
    assert config.resolve({}).integer("verbose") == 0


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ({"device": "tpu"}, ["tpu", "cpu", "argument"]),
        ({"inference_engine": "tensorrt"}, ["tensorrt", "native", "argument"]),
        ({"inference_engine": "torhc"}, ["torhc", "try 'torch'"]),
        ({"inference_engine": " Nativ "}, ["try 'native'"]),
        ({"inference_engine": "mlx"}, ["mlx", "try 'auto'"]),
        ({"compile_options": {"precision": "itn8"}}, ["itn8", "try 'int8'"]),
        ({"fallback": "maybe"}, ["maybe", "warn", "argument"]),
        ({"verify": "p=2"}, ["p=2", "argument"]),
        ({"verbose": "loud"}, ["loud", "argument"]),
        ({"compile_options": {"presicion": "bf16"}}, ["presicion", "try 'precision'"]),
        ({"compile_options": {"autotuning": "quick"}}, ["autotuning", "try '"]),
        ({"compile_options": {"device": "cpu"}}, ["device", "init(device=...)"]),
        ({"compile_options": {"precision": "fp12"}}, ["fp12", "bf16", "argument"]),
        ({"compile_options": {"batch_size": [0]}}, ["argument"]),
        ({"compile_options": ["bf16"]}, ["compile_options", "list"]),
        ({"cache_dir": frozenset()}, ["cache_dir", "frozenset"]),
    ],
    ids=str,
)
def test_a_value_that_is_not_understood_is_an_error_that_says_what_is(arguments, mentions):
    with pytest.raises(rm.ConfigError) as error:
        rm.init(**arguments)
    for word in mentions:
        assert word in str(error.value)
    assert isinstance(error.value, ValueError) and not rm.is_initialized()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RM_DEVICE", "gpuu"), ("RM_CACHE_MODE", "write"), ("RM_FALLBACK", "error:nothing")],
)
def test_a_bad_environment_value_names_the_variable(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(rm.ConfigError, match=variable):
        rm.init()


def test_a_bad_file_is_an_error_that_names_it(alone):
    path = alone / "rm_abstract.toml"
    for text in ("device = ", 'devise = "cpu"\n', "precision = 'fp7'\n"):
        path.write_text(text)
        with pytest.raises(rm.ConfigError, match=r"rm_abstract\.toml"):
            config.resolve({})


def test_fallback_policies_apply_to_their_groups():
    policy = config.resolve({"fallback": "error:capture,device"}).fallback_for
    assert [policy("capture"), policy("device"), policy("routing")] == ["error", "error", "warn"]
    assert config.resolve({"fallback": "allow"}).fallback_for("compile") == "allow"
    assert config.resolve({"fallback": "error"}).fallback_for("compile") == "error"


def test_settings_are_equal_by_value_and_not_by_source(monkeypatch):
    first = config.resolve({"compile_options": {"batch_size": [8, 1]}})
    monkeypatch.setenv("RM_BATCH_SIZE", "1,8")
    assert first.same_as(config.resolve({}))
    assert first.integers("batch_size") == [1, 8]
    assert not first.same_as(config.resolve({"device": "cpu"}))


def test_init_is_quick_and_imports_neither_torch_nor_transformers():
    code = (
        "import sys, time\n"
        "import rm_abstract\n"
        "best = 1e9\n"
        "for _ in range(5):\n"
        "    start = time.perf_counter()\n"
        "    rm_abstract.init()\n"
        "    best = min(best, time.perf_counter() - start)\n"
        "    rm_abstract.shutdown()\n"
        "heavy = {'torch', 'transformers', 'numpy', 'click', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(best)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05


def test_init_twice_with_equal_settings_is_one_session_and_with_others_a_change():
    first = rm.init("cpu")
    try:
        assert rm.init("cpu") is first
        assert rm.init("cpu", fallback="allow") is first
        assert first.settings.text("fallback") == "allow"
        assert rm.current_device() == "cpu"
    finally:
        rm.shutdown()
    assert not rm.is_initialized()
    with pytest.raises(rm.Error, match=r"rm_abstract\.init"):
        rm.current_device()


def test_a_device_that_is_not_there_is_reported_or_raised_as_asked():
    with pytest.warns(rm.RoutingWarning, match="RM40"):
        session = rm.init("furiosa")
    assert session.device == "cpu"
    with pytest.raises(rm.DeviceUnavailableError) as error:
        rm.init("rbln", fallback="error")
    assert error.value.code.startswith("RM4") and error.value.remedy
    assert rm.current_device() == "cpu"
    rm.shutdown()
    rm.init("furiosa", fallback="allow")  # silent
    rm.shutdown()


def test_a_session_is_a_context_manager():
    with rm.init("cpu") as session:
        assert rm.is_initialized() and session.device == "cpu"
        assert "cpu" in rm.devices()
        assert rm.get_device_info()["device"] == "cpu"
        assert any(row["name"] == "cpu" and row["available"] for row in rm.backends())
    assert not rm.is_initialized()


def test_the_package_version_is_the_projects(repository):
    assert f'version = "{rm.__version__}"' in (repository / "pyproject.toml").read_text()


def test_every_exported_name_exists():
    for name in rm.__all__:
        assert getattr(rm, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        rm.no_such_name  # noqa: B018


def test_a_path_may_start_with_the_home_and_is_nothing_but_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert config.resolve({"cache_dir": "~/cache"}).text("cache_dir") == "/somewhere/cache"
    with pytest.raises(rm.ConfigError, match=r"cache_dir.*expected a path.*int"):
        config.resolve({"cache_dir": 5})


@pytest.mark.parametrize(
    "option",
    ["dynamic", "autotune", "deterministic", "memory_budget", "rbln", "furiosa"],
)
def test_an_option_that_would_do_nothing_is_unknown(alone, option):
    with pytest.raises(rm.ConfigError, match=f"got '{option}'"):
        rm.init(compile_options={option: "1"})
    (alone / "rm_abstract.toml").write_text(f'{option} = "1"\n')
    with pytest.raises(rm.ConfigError, match=rf"rm_abstract\.toml, got '{option}'; try '"):
        config.resolve({})


def test_accelerating_what_is_no_module_says_so():
    rm.init("cpu")
    try:
        with pytest.raises(rm.Error, match=r"accelerate.*int: not an nn\.Module"):
            rm.accelerate(1)
    finally:
        rm.shutdown()
