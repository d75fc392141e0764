from __future__ import annotations

import dataclasses

import pytest

from shim import boot
from shim.core import report, settings, values
from shim.core.catalogue import GUARDS
from shim.guards import is_required, settings_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("500ms", 0.5), (" 1S ", 1), ("0", 0)],
)
def test_durations(text, seconds):
    assert values.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "fast", "-1", "1d", "1 2", "nan", "inf", "1e3", "s"])
def test_bad_durations(text):
    with pytest.raises(ValueError, match="accepted: a duration such as 90"):
        values.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("OFF", False), ("no", False), ("1", True), (" yes ", True)]
)
def test_switches(text, value):
    assert values.parse_switch(text) is value


def test_defaults_are_what_the_table_says():
    loaded, bad, unknown = settings.load({})
    assert loaded == settings.Settings()
    assert bad == unknown == []


def test_an_empty_value_is_the_default():
    assert settings.load(
        {"MLX_SHIM_STRICT": " ", "MLX_SHIM_GENERATION_DEATH": ""}
    ) == settings.load({})


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_has_its_switch(guard):
    loaded, bad, unknown = settings.load({f"MLX_SHIM_{guard.upper()}": "0"})
    assert not loaded.guard_is_on(guard)
    assert all(loaded.guard_is_on(other) for other in GUARDS if other != guard)
    assert bad == unknown == []


def test_a_bad_value_says_what_was_given_and_what_is_accepted():
    loaded, bad, _ = settings.load({"MLX_SHIM_DEBUG": "maybe", "MLX_SHIM_STRICT": "3"})
    words = "accepted: 1, on, true, yes, 0, off, false, no"
    assert bad == [
        f"MLX_SHIM_STRICT='3' is not valid; {words}, 2; using the default 0",
        f"MLX_SHIM_DEBUG='maybe' is not valid; {words}; using the default 0",
    ]
    assert loaded.strict == 0
    assert not loaded.debug


def test_a_bad_kill_switch_is_said():
    _, bad, _ = settings.load({"MLX_SHIM": "never"})
    assert bad[0].startswith("MLX_SHIM='never' is not valid; ")


def test_an_unknown_name_is_reported_with_the_nearest():
    _, _, unknown = settings.load({"MLX_SHIM_STRICKT": "1"})
    assert unknown == [
        "MLX_SHIM_STRICKT is not a setting of the shim; the nearest known name is MLX_SHIM_STRICT"
    ]


def test_the_settings_are_frozen():
    with pytest.raises(AttributeError):
        settings.Settings().strict = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512K", 2**19),
        ("64M", 2**26),
        ("1.5g", 3 * 2**29),
        ("12GB", 12 * 2**30),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text, size):
    assert values.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "big", "-1", "1X", "1 G", "nan", "M", "9" * 400, "9" * 400 + "T"]
)
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="accepted: a size such as"):
        values.parse_size(text)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "1e3", "9" * 19])
def test_bad_counts(text):
    with pytest.raises(ValueError, match="accepted: a whole number"):
        values.parse_count(text)


def test_counts_and_names():
    assert values.parse_count(" 32768 ") == 32768
    assert values.parse_names(" a/b, c ,,") == ("a/b", "c")


@pytest.mark.parametrize("text", ["1s", "1999ms", "0.001", "soon"])
def test_a_deadline_that_the_watchdog_cannot_keep(text):
    with pytest.raises(ValueError, match="accepted: "):
        values.parse_deadline(text)


def test_deadlines():
    assert [values.parse_deadline(text) for text in ("0", "2s", "5m")] == [0, 2, 300]


@pytest.mark.parametrize(
    ("guard", "given", "reason"),
    [
        ("exhausted_memory", {}, "MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD are not set"),
        ("exhausted_memory", {"memory_hard": 5}, None),
        ("slow_client", {"read_timeout": 0.0}, "MLX_SHIM_READ_TIMEOUT is not set"),
        ("slow_client", {}, None),
        ("any_model", {}, "MLX_SHIM_ALLOWED_MODELS is not set"),
        ("any_model", {"allowed_models": ("a",)}, None),
        ("hoarded_buffers", {}, "MLX_SHIM_MEMORY_LIMIT and MLX_SHIM_CACHE_LIMIT are not set"),
        ("hoarded_buffers", {"cache_limit": 0}, None),
        ("open_door", {}, "MLX_SHIM_API_KEY_FILE is not set"),
        ("stall", {"guards_off": frozenset({"stall"})}, "MLX_SHIM_STALL is off"),
    ],
)
def test_what_asks_for_a_guard(monkeypatch, guard, given, reason):
    """Only SETTINGS tells. A guard that a setting asks for is probed."""
    probed = []
    monkeypatch.setattr(settings, "current", settings.Settings(**given))
    monkeypatch.setattr(boot._guard(guard), "probe", probed.append)
    monkeypatch.setattr(boot._guard(guard), "apply", lambda module: None)
    state = boot._apply(guard, "the module")
    assert state == (report.State("active") if reason is None else report.State("off", reason))
    assert probed == (["the module"] if reason is None else [])


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_names_settings_that_there_are(guard):
    names = {f.name for f in dataclasses.fields(settings.Settings)}
    assert set(settings_of(guard)) <= names
    assert not is_required(guard) or len(settings_of(guard)) == 1
