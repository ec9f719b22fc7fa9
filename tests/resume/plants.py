# SPDX-License-Identifier: Apache-2.0
"""Faults for a resume: each changes the recipe's module, or what it gets, behind the run's back.

A function takes the recipe's module and is called in every rank before `main()`. `PLANTS` says for
each which check owns it, how many processes it needs, and the precision it is seen in.
"""

import os
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

import mprecipes as mp
from mprecipes.checkpoint.digests import kind_and_name
from mprecipes.checkpoint.fragments import name_of
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.resume import resumption


@dataclass(frozen=True)
class Plant:
    """What is known of a fault before it is planted.

    Attributes:
        owner: the check that must find it.
        world_size: processes it needs.
        precision: of the run it is planted in.
    """

    name: str
    title: str
    owner: str
    world_size: int = 1
    precision: str = "fp32"


PLANTS = [
    Plant("weight_off_by_one_ulp", "one weight 1 ulp off after loading", "weights"),
    Plant("moments_zeroed", "Adam moments zeroed", "optimizer"),
    Plant("step_count_reset", "optimizer step counter reset", "optimizer"),
    Plant("schedule_shifted", "learning-rate schedule shifted by one step", "data_order"),
    Plant("position_zero", "position set to 0", "data_order"),
    Plant("position_off_by_one", "position off by one micro-batch", "data_order"),
    Plant("seed_changed", "seed of the data order changed", "data_order"),
    Plant("other_tokenizer", "another tokenizer", "data_order"),
    Plant("other_data", "another data file of the same length", "data_order"),
    Plant("streams_swapped", "saved random streams of two ranks swapped", "data_order", 2),
    Plant("rank_one_is_behind", "rank 1 loaded the previous checkpoint", "weights", 2),
    Plant("dropout_off", "dropout off", "optimizer"),
    Plant("precision_changed", "precision changed (FP32 run in BF16)", "optimizer"),
    Plant("reduced_in_16_bit", "gradients reduced in 16 bit", "communication", 2),
    Plant("rank_one_slow", "rank 1 slowed by 30 %", "throughput", 2),
    Plant("collective_hangs", "a collective that hangs", "communication", 2),
    Plant("matmul_lowered", "FP32 matmul lowered to BF16", "communication"),
    Plant("other_probe_batch", "wrong probe batch", "data_order"),
]
STEP_SECONDS = 0.1


def rank_one_built_otherwise(recipe) -> None:
    """Rank 1 draws other initial weights; no resume is needed."""
    original = recipe.build_model

    def build_model(config):
        torch.manual_seed(torch.initial_seed() + int(os.environ["RANK"]))
        return original(config)

    recipe.build_model = build_model


def nothing(recipe) -> None:
    """The clean resume."""


def paced(recipe) -> None:
    """Every forward takes a fixed time, and the clock of steps knows nothing else."""
    _pace(recipe, STEP_SECONDS, STEP_SECONDS)


def rank_one_slow(recipe) -> None:
    """Rank 1 takes 30 % longer, and with it each step of all."""
    slower = 1.3 * STEP_SECONDS
    _pace(recipe, slower if os.environ["RANK"] == "1" else STEP_SECONDS, slower)


def _pace(recipe, own_seconds: float, step_seconds: float) -> None:
    compute_loss, board, now = recipe.compute_loss, mp.Board, [0.0]

    def paced_loss(model, batch):
        end = time.perf_counter() + own_seconds
        loss = compute_loss(model, batch)
        time.sleep(max(0.0, end - time.perf_counter()))
        now[0] += step_seconds
        return loss

    recipe.compute_loss = paced_loss
    mp.Board = lambda *args, **kwargs: board(*args, **kwargs, clock=lambda: now[0])


def _after_loading(change) -> None:
    """Calls `change(model, optimizer, manifest)` when a checkpoint has been restored."""
    original = mp.CheckpointManager.restore_newest

    def restore_newest(self, check):
        manifest, state = original(self, check)
        if manifest is not None:
            with torch.no_grad():
                change(self.model, self.optimizer, manifest)
        return manifest, state

    mp.CheckpointManager.restore_newest = restore_newest


def _state(model, optimizer, kinds):
    """What this rank holds of the masters or moments, as any engine keeps them; in place."""
    live = live_tensors(model, optimizer)
    return [tensor for key, tensor in live.items() if kind_and_name(name_of(key))[0] in kinds]


def weight_off_by_one_ulp(recipe) -> None:
    def change(model, optimizer, manifest):
        weight = _state(model, optimizer, ("weights",))[0].view(-1)
        weight[7] = torch.nextafter(weight[7], torch.tensor(2.0))

    _after_loading(change)


def moments_zeroed(recipe) -> None:
    def change(model, optimizer, manifest):
        for moment in _state(model, optimizer, ("exp_avg", "exp_avg_sq")):
            moment.zero_()

    _after_loading(change)


def step_count_reset(recipe) -> None:
    def change(model, optimizer, manifest):
        for count in _state(model, optimizer, ("step",)):
            count.zero_()

    _after_loading(change)


def schedule_shifted(recipe) -> None:
    original = recipe.learning_rate
    recipe.learning_rate = lambda config, updates: original(config, updates + 1)


def _moved(recipe, move) -> None:
    original = mp.resume_run

    def resume_run(*args, **kwargs):
        position, probation = original(*args, **kwargs)
        return replace(position, samples_seen=move(position.samples_seen)), probation

    mp.resume_run = resume_run


def position_zero(recipe) -> None:
    _moved(recipe, lambda samples: 0)


def position_off_by_one(recipe) -> None:
    _moved(recipe, lambda samples: samples + 4)


def seed_changed(recipe) -> None:
    original = mp.SampleOrder
    mp.SampleOrder = lambda rows, seed: original(rows, seed + 1)


class Changed:
    """The training data with other tokens or other rows under the same numbers."""

    is_deterministic = True

    def __init__(self, data, row=lambda i, n: i, token=lambda ids: ids):
        self._data, self._row, self._token = data, row, token

    def __len__(self):
        return len(self._data)

    def __getattr__(self, name):
        return getattr(self._data, name)

    def __getitems__(self, indices):
        return [self[int(index)] for index in indices]

    def __getitem__(self, index):
        item = dict(self._data[self._row(index, len(self))])
        for name in ("input_ids", "labels"):
            item[name] = self._token(item[name])
        return item


def _with_data(**changes) -> None:
    original = mp.read_data

    def read_data(*args, **kwargs):
        data = original(*args, **kwargs)
        facts = {name: getattr(data, name) for name in data.__dataclass_fields__}
        return SimpleNamespace(**{**facts, "train": Changed(data.train, **changes)})

    mp.read_data = read_data


def other_tokenizer(recipe) -> None:
    _with_data(token=lambda ids: torch.where(ids < 256, (ids * 3 + 7) % 256, ids))


def other_data(recipe) -> None:
    _with_data(row=lambda index, rows: rows - 1 - index)


def streams_swapped(recipe) -> None:
    import torch.distributed as dist

    original = resumption.restore_random_state

    def restore(state, device):
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        original(states[1 - dist.get_rank()], device)

    resumption.restore_random_state = restore


def rank_one_is_behind(recipe) -> None:
    def change(model, optimizer, manifest):
        from safetensors.torch import load_file

        if os.environ["RANK"] != "1":
            return
        before = sorted(manifest.folder.parent.glob("step-*"))
        folder = before[before.index(manifest.folder) - 1]
        stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for key, tensor in live_tensors(model, optimizer).items():
            if key.startswith("weights/"):
                tensor.copy_(stored[key])

    _after_loading(change)


def dropout_off(recipe) -> None:
    original = recipe.build_model

    def build_model(config):
        model = original(config)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return model

    recipe.build_model = build_model


def precision_changed(recipe) -> None:
    original = recipe.compute_loss

    def compute_loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return original(model, batch)

    recipe.compute_loss = compute_loss


def reduced_in_16_bit(recipe) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from accelerate import Accelerator  # isort: skip

    original = Accelerator.prepare

    def prepare(self, model, *rest, **kwargs):
        found = original(self, model, *rest, **kwargs)
        found[0].register_comm_hook(None, fp16_compress_hook)
        return found

    Accelerator.prepare = prepare


def collective_hangs(recipe) -> None:
    original = resumption.try_collectives

    def hang(*args):
        if os.environ["RANK"] == "1":
            time.sleep(600)  # killed by who watches the ranks
        return original(*args)

    resumption.try_collectives = hang


def matmul_lowered(recipe) -> None:
    original = recipe.build_model

    def build_model(config):
        torch.set_float32_matmul_precision("medium")
        return original(config)

    recipe.build_model = build_model


def other_probe_batch(recipe) -> None:
    original = mp.Probe.__init__

    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._first += self._size

    mp.Probe.__init__ = begin


def other_torch(recipe) -> None:
    """The environment is another one: what is recorded of it says so."""
    original = mp.run_facts

    def run_facts(*args):
        facts = original(*args)
        return {**facts, "environment": {**facts["environment"], "torch": "2.99.0"}}

    mp.run_facts = run_facts


def other_torch_with_drift(recipe) -> None:
    """And its losses are 0.1 % off, where the profile of FP32 allows 0.001 %."""
    other_torch(recipe)
    original = recipe.compute_loss
    recipe.compute_loss = lambda model, batch: original(model, batch) * 1.001


def of_the_variable(recipe) -> None:
    """What MPRECIPES_PLANTED says: the bad arms of a comparison."""
    from tests.planted_recipe import plant

    plant(recipe)
