from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from kit import harness, selection
from kit.harness import LINES
from shim.cli import tiny_model
from shim.core.catalogue import GUARDS

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs like this, and each server of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup starts its program like this.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples each time, so that a failure comes from the change. tests/bench/fuzz.py takes
# others.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


harness.forking = not os.environ.get("MLX_LM_SHIM_TEST_FRESH")


def pytest_sessionfinish():
    harness.close_fork_servers()


def pytest_addoption(parser):
    parser.addoption(
        "--guard",
        action="append",
        choices=GUARDS,
        metavar="NAME",
        help="run only the tests marked with this guard, its controls included; may be given again",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="run the unit tests, and of each guard a test and a control, on the newest line",
    )


def pytest_collection_modifyitems(config, items):
    kept = list(items)
    if wanted := config.getoption("--guard"):
        kept = selection.of_guards(kept, set(wanted))
    if config.getoption("--quick"):
        kept = selection.quick(kept)
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = selection.order(kept)


@pytest.fixture(params=LINES)
def line(request):
    """Each of the two lines of mlx-lm."""
    return request.param


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("models") / "tiny")


class FaultyModel:
    """A model folder whose forward pass misbehaves after `fire()`."""

    def __init__(self, folder: Path, **fault: object) -> None:
        self.trigger = folder.with_suffix(".trigger")
        self.counted = folder.with_suffix(".counted")
        self.loaded = folder.with_suffix(".loaded")
        self.hurried = folder.with_suffix(".hurried")
        files = {
            name: str(getattr(self, name)) for name in ("trigger", "counted", "loaded", "hurried")
        }
        self.path = tiny_model.make(folder, model_file="model.py", fault=files | fault)
        shutil.copy(
            Path(__file__).parent / "kit" / "models" / "faulty_model.py", folder / "model.py"
        )
        self.args = ("--trust-remote-code",)

    def fire(self) -> None:
        self.trigger.touch()

    def hurry(self) -> None:
        """Delay nothing from now on, so that the test need not wait for a slow stream to end."""
        self.hurried.touch()

    def take_its_time(self) -> None:
        """Delay again, after `hurry`."""
        self.hurried.unlink()

    @property
    def loads(self) -> int:
        return self.loaded.stat().st_size


@pytest.fixture
def faulty(tmp_path):
    """Make a FaultyModel: faulty(kind="RuntimeError")."""

    def make(**fault: object) -> FaultyModel:
        return FaultyModel(tmp_path / "faulty", **fault)

    return make


@pytest.fixture
def killable(monkeypatch):
    """Let a bad request reach the generation thread, for a test that needs a death."""
    for guard in ("BAD_REQUEST", "KILLER_REQUEST"):
        monkeypatch.setitem(harness.always, f"MLX_SHIM_{guard}", "0")
