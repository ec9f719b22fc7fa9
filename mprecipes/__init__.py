# SPDX-License-Identifier: Apache-2.0
"""Recipes that survive the loss of the machine, and prove it: the names a recipe uses.

Names are loaded on first use, so that a tool which only reads a run folder does not wait for torch.
Importing the package does one thing: torchao, which transformers imports in every process where it
is installed, loses two kinds of warning that nobody who launches a recipe can act on (`_Unheard`).
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mprecipes.checkpoint.adapter import export_adapter as export_adapter
    from mprecipes.checkpoint.export import export_newest as export_newest
    from mprecipes.checkpoint.manager import CheckpointManager as CheckpointManager
    from mprecipes.checkpoint.policy import checkpoint_policy as checkpoint_policy
    from mprecipes.checkpoint.starting import load_causal_lm as load_causal_lm
    from mprecipes.checkpoint.starting import model_facts as model_facts
    from mprecipes.checkpoint.starting import start_model as start_model
    from mprecipes.compute.architecture import new_model_config as new_model_config
    from mprecipes.compute.attention import model_config_of as model_config_of
    from mprecipes.compute.attention import packed_inputs as packed_inputs
    from mprecipes.compute.launch import Launch as Launch
    from mprecipes.compute.launch import start as start
    from mprecipes.compute.numerics import StepMeter as StepMeter
    from mprecipes.compute.randomness import capture_random_state as capture_random_state
    from mprecipes.compute.randomness import restore_random_state as restore_random_state
    from mprecipes.compute.randomness import seed_everything as seed_everything
    from mprecipes.compute.randomness import seed_micro_batch as seed_micro_batch
    from mprecipes.compute.tuning import lora_options as lora_options
    from mprecipes.compute.tuning import tuning_options as tuning_options
    from mprecipes.compute.watching import watch_numerics as watch_numerics
    from mprecipes.data.answers import ANSWER_COLUMNS as ANSWER_COLUMNS
    from mprecipes.data.answers import greedy_answers as greedy_answers
    from mprecipes.data.chats import read_chats as read_chats
    from mprecipes.data.grouping import chat_order as chat_order
    from mprecipes.data.order import Position as Position
    from mprecipes.data.order import SampleOrder as SampleOrder
    from mprecipes.data.order import eval_batches as eval_batches
    from mprecipes.data.order import micro_batches as micro_batches
    from mprecipes.data.packed import PackedData as PackedData
    from mprecipes.data.packing import prepare_data as prepare_data
    from mprecipes.data.reading import fit_to_data as fit_to_data
    from mprecipes.data.reading import read_data as read_data
    from mprecipes.errors import ConfigError as ConfigError
    from mprecipes.errors import Preempted as Preempted
    from mprecipes.faults import fault_point as fault_point
    from mprecipes.identity.config import option as option
    from mprecipes.identity.config import parse_config as parse_config
    from mprecipes.identity.outcome import exit_codes as exit_codes
    from mprecipes.identity.recipe import Recipe as Recipe
    from mprecipes.identity.run import open_run as open_run
    from mprecipes.observe.board import Board as Board
    from mprecipes.observe.flat import flat_config as flat_config
    from mprecipes.observe.metrics import read_metrics as read_metrics
    from mprecipes.observe.policy import watch_policy as watch_policy
    from mprecipes.observe.tracking import Tracking as Tracking
    from mprecipes.observe.tracking import track as track
    from mprecipes.resume.guard import Guard as Guard
    from mprecipes.resume.journal import Journal as Journal
    from mprecipes.resume.journal import StepRecord as StepRecord
    from mprecipes.resume.journal import read_journals as read_journals
    from mprecipes.resume.observation import Probation as Probation
    from mprecipes.resume.policy import probation_policy as probation_policy
    from mprecipes.resume.probe import Probe as Probe
    from mprecipes.resume.probe import Probed as Probed
    from mprecipes.resume.resumption import resume_run as resume_run
    from mprecipes.resume.resumption import run_facts as run_facts
    from mprecipes.resume.signals import Signals as Signals

_HOMES = {
    "ANSWER_COLUMNS": "data.answers",
    "Board": "observe.board",
    "CheckpointManager": "checkpoint.manager",
    "ConfigError": "errors",
    "Guard": "resume.guard",
    "Journal": "resume.journal",
    "Launch": "compute.launch",
    "PackedData": "data.packed",
    "Position": "data.order",
    "Preempted": "errors",
    "Probation": "resume.observation",
    "Probe": "resume.probe",
    "Probed": "resume.probe",
    "Recipe": "identity.recipe",
    "SampleOrder": "data.order",
    "Signals": "resume.signals",
    "StepMeter": "compute.numerics",
    "StepRecord": "resume.journal",
    "Tracking": "observe.tracking",
    "capture_random_state": "compute.randomness",
    "chat_order": "data.grouping",
    "fit_to_data": "data.reading",
    "checkpoint_policy": "checkpoint.policy",
    "eval_batches": "data.order",
    "exit_codes": "identity.outcome",
    "export_adapter": "checkpoint.adapter",
    "export_newest": "checkpoint.export",
    "fault_point": "faults",
    "flat_config": "observe.flat",
    "greedy_answers": "data.answers",
    "load_causal_lm": "checkpoint.starting",
    "lora_options": "compute.tuning",
    "micro_batches": "data.order",
    "model_config_of": "compute.attention",
    "model_facts": "checkpoint.starting",
    "new_model_config": "compute.architecture",
    "open_run": "identity.run",
    "option": "identity.config",
    "packed_inputs": "compute.attention",
    "parse_config": "identity.config",
    "prepare_data": "data.packing",
    "read_chats": "data.chats",
    "probation_policy": "resume.policy",
    "read_data": "data.reading",
    "read_journals": "resume.journal",
    "read_metrics": "observe.metrics",
    "restore_random_state": "compute.randomness",
    "resume_run": "resume.resumption",
    "run_facts": "resume.resumption",
    "seed_everything": "compute.randomness",
    "seed_micro_batch": "compute.randomness",
    "start": "compute.launch",
    "start_model": "checkpoint.starting",
    "track": "observe.tracking",
    "tuning_options": "compute.tuning",
    "watch_policy": "observe.policy",
    "watch_numerics": "compute.watching",
}

__all__ = sorted(_HOMES)


class _Unheard(logging.Filter):
    """Drops the records of a logger whose message holds this text.

    Source: torchao 0.18, __init__.py, tries extensions of other Python versions and devices, none
    of which Float8Linear needs, and registers enums in a way that torch 2.11 calls deprecated.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return self.name not in record.getMessage()


logging.getLogger("torchao").addFilter(_Unheard("Failed to load "))
logging.getLogger("torch.utils._pytree").addFilter(_Unheard("register_constant() on Enum"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mprecipes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mprecipes.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
