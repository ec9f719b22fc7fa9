# SPDX-License-Identifier: Apache-2.0
"""The option `watch` is strict, and so is what a run reports to."""

import importlib.util
from types import SimpleNamespace

import pytest

from mprecipes import ConfigError
from mprecipes.observe.policy import WatchPolicy, needing_trackers, watch_policy


def policy(watch):
    return watch_policy(SimpleNamespace(watch=watch))


def test_nothing_said_is_the_local_file_alone():
    """Without the option a run reports to metrics.jsonl."""
    assert policy(None) == WatchPolicy(report_to=("jsonl",), project=None, entity=None)


def test_a_name_alone_is_a_list_of_one():
    """`report_to: wandb` and `report_to: [wandb]` are the same."""
    assert policy({"report_to": "wandb"}) == policy({"report_to": ["wandb"]})
    assert policy({"report_to": "wandb", "project": "p"}).project == "p"


def test_an_unknown_name_is_refused_with_the_nearest():
    """`reportto` is answered with report_to."""
    with pytest.raises(ConfigError) as error:
        policy({"reportto": ["wandb"]})
    assert error.value.found == "unknown name reportto"
    assert error.value.expected.endswith("the nearest is report_to")
    assert error.value.where == "option watch"
    assert error.value.action == "write report_to, or remove it"


@pytest.mark.parametrize("watch", [{"report_to": 3}, {"report_to": [True]}, {"project": False}])
def test_a_value_of_another_type_is_refused(watch):
    """A number, a list of truth values, and a word that YAML read as one."""
    (name,) = watch
    with pytest.raises(ConfigError) as error:
        policy(watch)
    assert error.value.found == f"{name} is {watch[name]!r}"
    assert error.value.expected == ("a list of names" if name == "report_to" else "text")
    assert error.value.where == f"{name} in option watch"
    assert error.value.action.startswith("correct its type")


@pytest.mark.parametrize("names", [["wandbb"], ["none", "wandb"], []])
def test_only_known_names_and_none_alone(names):
    """A misspelt name, "none" beside another, and an empty list are refused."""
    with pytest.raises(ConfigError) as error:
        needing_trackers(names)
    assert error.value.found == f"report_to is {names}"
    assert error.value.expected == "some of wandb, tensorboard, jsonl, or none alone"
    assert error.value.where == "report_to in option watch"
    assert error.value.action in ("remove 'wandbb'", "name what is to be reported to")


def test_the_local_file_and_none_need_no_tracker():
    """Of wandb and jsonl only wandb does; a name said twice counts once."""
    assert needing_trackers(["wandb", "jsonl", "wandb"]) == ["wandb"]
    assert needing_trackers(["none"]) == []


def test_a_sink_that_cannot_be_used_is_refused_with_the_options():
    """Not when the run folder is there already: `--dry_run` sees it."""
    with pytest.raises(ConfigError) as error:
        policy({"report_to": ["wandb", "none"]})
    assert error.value.where == "report_to in option watch"


def test_tensorboard_must_be_installed(monkeypatch):
    """With neither package there, the option is refused before anything starts."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        needing_trackers(["tensorboard"])
    assert error.value.found == "report_to names tensorboard, which is not installed"
    assert error.value.expected == "the package tensorboard or tensorboardX"
    assert error.value.where == "report_to in option watch"
    assert error.value.action == "pip install tensorboard, or remove it from report_to"


def test_what_guards_a_run_has_defaults():
    """A spike stops the run, replicas are compared every 500 steps; each may be switched off."""
    found = policy(None)
    assert (found.on_spike, found.spike_window, found.spike_mads) == ("stop", 128, 6.0)
    assert (found.spike_updates, found.replica_check_steps) == (3, 500)
    off = {"on_spike": None, "replica_check_steps": None, "plateau_updates": None}
    assert policy(off).on_spike is policy(off).replica_check_steps is None
    assert policy({"spike_mads": 4, "on_spike": "rollback"}).spike_mads == 4


@pytest.mark.parametrize(
    ("watch", "expected"),
    [
        ({"on_spike": "halt"}, "stop, rollback or null"),
        ({"on_spike": 1}, "text"),
        ({"spike_window": 7}, "8 or more"),
        ({"spike_window": 64.0}, "a whole number"),
        ({"spike_window": None}, "a whole number"),
        ({"spike_mads": True}, "a number"),
        ({"spike_mads": float("inf")}, "1.0 or more"),
        ({"max_rollbacks": -1}, "0 or more"),
        ({"replica_check_steps": 0}, "1 or more"),
    ],
)
def test_a_guard_that_cannot_be_is_refused(watch, expected):
    """Unknown words, numbers out of range and of another kind."""
    (name,) = watch
    with pytest.raises(ConfigError) as error:
        policy(watch)
    assert error.value.found == f"{name} is {watch[name]!r}"
    assert error.value.expected == expected
    assert error.value.where == f"{name} in option watch"
    assert error.value.action.startswith(("write", "correct its type"))
