# SPDX-License-Identifier: Apache-2.0
"""Pretrain a causal language model on packed text, recoverably.

Command:   accelerate launch --config_file accelerate_configs/cpu_bf16.yaml \
             recipes/pretrain_causal_lm.py --output_dir runs/tiny \
             --config recipes/configs/pretrain_causal_lm/tiny-cpu.yaml
Hardware:  2 processor cores for tiny-cpu.yaml; any number of GPUs with accelerate_configs/ddp*.yaml
Time:      about 60 s for 300 steps of tiny-cpu.yaml on 2 cores
Expected:  held-out loss from about 5.5 to below 2.3 nats per byte (perplexity below 10)

Launch the same command again after any interruption: it continues where it was.
"""

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import mprecipes as mp
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

RECIPE = mp.Recipe(name="pretrain_causal_lm", version="1.0.0", based_on=None)


@dataclass(kw_only=True)
class Config:
    # what is read
    dataset: str = mp.option("stdlib", help="stdlib, a file, a folder or a hub id", resume="free")
    text_field: str = mp.option("text", help="field that holds the text of a row", resume="free")
    on_bad_rows: Literal["refuse", "skip"] = mp.option(
        "refuse", help="malformed rows", resume="free"
    )
    tokenizer: str = mp.option("bytes", help="bytes, a folder or a hub id", resume="free")
    train_tokenizer_vocab: int | None = mp.option(
        None, help="train a byte-level BPE of this size on the corpus", minimum=258, resume="free"
    )
    seq_length: int = mp.option(256, help="tokens per packed row", minimum=2, resume="free")
    eval_fraction: float | None = mp.option(
        0.01, help="share held out for evaluation", minimum=0.0, maximum=0.5, resume="free"
    )
    # what is trained
    model_name_or_path: str | None = mp.option(None, help="continue from this model", resume="free")
    model_config: dict[str, Any] | None = mp.option(None, help="fields of a new model's config")
    gradient_checkpointing: bool = mp.option(False, help="recompute activations", resume="free")
    torch_compile: bool = mp.option(False, help="compile the model; other dropout masks than eager")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = mp.option(
        "auto", help="auto: what the launcher says, else bf16", resume="free"
    )
    numerics: dict[str, Any] | None = mp.option(None, help="docs/precision.md", resume="free")
    seed: int = mp.option(1234, help="of initial weights, data order and dropout", minimum=0)
    # how much at once
    per_device_train_batch_size: int = mp.option(8, help="per forward", minimum=1, resume="free")
    gradient_accumulation_steps: int | None = mp.option(
        None, help="forwards a step and process", minimum=1, resume="free"
    )
    global_batch_size: int | None = mp.option(
        None, help="sequences an optimizer step, over all processes", minimum=1, resume="free"
    )
    dataloader_num_workers: int = mp.option(0, help="per process", minimum=0, resume="free")
    # how it is optimised
    max_steps: int = mp.option(300, help="optimizer steps of the whole run", minimum=1)
    learning_rate: float = mp.option(2e-3, help="peak", minimum=0.0)
    lr_scheduler_type: Literal["cosine", "linear", "warmup_stable_decay"] = mp.option(
        "cosine", help="shape after the warm-up; all end at zero"
    )
    warmup_steps: int = mp.option(20, help="updates of linear warm-up", minimum=0)
    weight_decay: float = mp.option(0.1, help="of matrices; vectors are not decayed", minimum=0.0)
    max_grad_norm: float | None = mp.option(1.0, help="clipping; none is off", minimum=1e-12)
    # what is kept and shown
    output_dir: str = mp.option(help="the run folder; the same folder resumes", resume="free")
    save_steps: int = mp.option(500, help="steps between checkpoints", minimum=1, resume="free")
    keep_last: int = mp.option(3, help="rolling checkpoints kept", minimum=1, resume="free")
    checkpoint: dict[str, Any] | None = mp.option(None, help="docs/checkpoints.md", resume="free")
    eval_steps: int | None = mp.option(100, help="none is off", minimum=1, resume="free")
    logging_steps: int = mp.option(10, help="steps between log lines", minimum=1, resume="free")
    probation: dict[str, Any] | None = mp.option(None, help="docs/resume.md", resume="free")
    watch: dict[str, Any] | None = mp.option(None, help="docs/guards.md", resume="free")


def build_model(config: Config) -> PreTrainedModel:
    """Gives the model in FP32, its masters in every precision mode."""
    model = mp.start_model(config)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if config.torch_compile:
        model.compile()  # in place: parameter names stay as they are
    return model


def build_optimizer(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """Gives AdamW; matrices decay, biases and norms do not; fused."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True
    )


def learning_rate(config: Config, updates: int) -> float:
    """Gives the learning rate of update number `updates` (the first is 0), whatever came between.

    Source: the shapes of transformers `get_*_schedule_with_warmup`; the stable phase of
    warmup_stable_decay ends after 80 % of the steps that follow the warm-up.
    """
    if updates < config.warmup_steps:
        return config.learning_rate * updates / config.warmup_steps
    progress = (updates - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * min(1.0, (1.0 - progress) / 0.2)


def next_token_logits(
    model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives FP32 logits (batch * (seq - 1), vocabulary) and the labels they are for."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    return logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten()


def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gives the FP32 sum of the cross entropy over valid targets, in nats; not the mean."""
    return F.cross_entropy(*next_token_logits(model, batch), reduction="sum")


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, heldout: mp.PackedData, launch: mp.Launch, config: Config
) -> dict[str, float]:
    """Collective: every held-out row once; loss in nats per target, perplexity, token accuracy."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=launch.device)
    size = config.per_device_train_batch_size
    for batch in mp.eval_batches(heldout, batch_size=size, ranks=launch.ranks):
        logits, labels = next_token_logits(model, batch.to(launch.device).tensors)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(dim=-1) == labels).sum()
        sums[2] += (labels != -100).sum()
    model.train()
    loss, correct, targets = launch.ranks.sum(sums.tolist())
    return {
        "eval/loss": loss / targets,
        "eval/perplexity": math.exp(min(loss / targets, 700.0)),
        "eval/token_accuracy": correct / targets,
        "eval/tokens": int(targets),
    }


def measure(
    probe: mp.Probe, model: torch.nn.Module, optimizer: Any, launch: mp.Launch, config: Config
) -> mp.Probed:
    """Collective: forward and backward of a probe, as in training; its gradients are dropped."""
    with probe.measuring(model):  # and random streams and buffers put back
        for batch in probe.batches():
            mp.seed_micro_batch(config.seed, batch.first_sample)
            loss_sum = compute_loss(model, batch.tensors)
            probe.add(loss_sum)
            launch.accelerator.backward(loss_sum * probe.scale)
        probed = probe.result(model)
    optimizer.zero_grad()
    return probed


def main() -> None:
    config, origins = mp.parse_config(Config)
    policy, trial = mp.checkpoint_policy(config), mp.probation_policy(config)
    watch = mp.watch_policy(config)
    with (
        mp.Signals() as signals,  # first in, last out: a signal never cuts the record of the end
        mp.start(config, origins) as launch,
        mp.open_run(config, origins, RECIPE, launch.ranks) as run,
        mp.track(run, config) as tracking,
    ):
        accelerator, plan = launch.accelerator, launch.plan
        data = mp.read_data(config, launch.ranks, should_stop=signals.watch(run))
        mp.seed_everything(config.seed, launch.ranks.rank)
        model = launch.convert(build_model(config), run.recipe)
        mp.fit_to_data(model, data)
        model, optimizer = accelerator.prepare(model, build_optimizer(model, config))
        launch.check_masters(model)

        manager = mp.CheckpointManager(
            run, launch.ranks, model, optimizer, policy=policy, scaler=launch.scaler,
            device=launch.device, tokenizer_dir=data.tokenizer_dir,
        )  # fmt: skip
        facts = mp.run_facts(run, launch, data, config)
        tracking.begin(mp.flat_config(facts))
        position, probation = mp.resume_run(
            run, launch, manager, facts, config, origins, trial, tracking
        )
        order, workers = mp.SampleOrder(len(data.train), config.seed), config.dataloader_num_workers
        batches = mp.micro_batches(data.train, order, plan, start=position, num_workers=workers)
        numerics, max_norm = mp.watch_numerics(launch, model), config.max_grad_norm or math.inf
        meter = mp.StepMeter(launch.ranks, numerics, refuse=watch.on_spike != "rollback")
        journal = mp.Journal(run.journal, run.attempt, run.writes_here)
        board = mp.Board(run, config, position.step, tracking=tracking)
        guard = mp.Guard(launch, manager, journal, probation, watch, facts=facts, alert=board.alert)
        with manager, closing(batches), journal, probation, board:
            if position.step == 0 and data.heldout is not None and config.eval_steps:
                board.log(0, evaluate(model, data.heldout, launch, config))
            # region: probation
            if probation.wants_warm_up:  # what the save measured comes out again, or it halts here
                probe = probation.probe(launch, data.train, order, position)
                probation.warm_up(measure(probe, model, optimizer, launch, config))
            # endregion
            while position.step < config.max_steps:
                # region: optimizer_step
                step = position.step + 1
                rate = learning_rate(config, position.updates) * launch.learning_rate_factor
                for group in optimizer.param_groups:
                    group["lr"] = rate
                rows = order.rows(position, plan.global_batch)
                num_targets = data.train.num_targets(rows)
                for _ in range(plan.accumulation):
                    batch = next(batches).to(launch.device)
                    mp.seed_micro_batch(config.seed, batch.first_sample)
                    with accelerator.accumulate(model):
                        loss_sum = compute_loss(model, batch.tensors)
                        # accelerate divides by the accumulation, the engine by the processes
                        scale = plan.accumulation * plan.world_size / num_targets
                        accelerator.backward(loss_sum * scale)
                    meter.add(batch.first_sample, batch.tensors, loss_sum)
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                seen = meter.reduce(
                    step,
                    num_targets=num_targets,
                    grad_norm=norm,
                    stop=bool(signals.requested) or manager.must_stop,
                    save=manager.wants_save(step),
                )  # raises when numbers are not finite, or says to leave the update out
                if guard.trips(position, seen):  # a loss spike: this update is not made
                    optimizer.zero_grad()
                    with board.paused():
                        position = guard.roll_back()  # all state is that of a checkpoint before it
                        batches.seek(position)  # on from there, without the samples of the spike
                    continue
                if not seen.skipped:
                    optimizer.step()
                optimizer.zero_grad()
                position = position.advance(plan.global_batch, num_targets, not seen.skipped)
                # endregion
                record = journal.write(
                    position, seen, tokens=num_targets, learning_rate=rate, step_seconds=board.lap()
                )
                run.step = step
                probation.observe(record)
                board.step(record, meter.traffic.news(), seen.notes)
                board.numerics(step, numerics.measured())
                measured = {}
                if data.heldout is not None and step % (config.eval_steps or math.inf) == 0:
                    with board.paused():
                        measured = evaluate(model, data.heldout, launch, config)
                    board.log(step, measured)
                is_last = seen.stop or step == config.max_steps
                guard.check_replicas(step, saving=seen.save or is_last)
                if seen.save or is_last:
                    with board.paused():
                        probe = mp.Probe(launch, data.train, order, position)
                        probed = measure(probe, model, optimizer, launch, config)
                        manager.save(
                            position,
                            facts=guard.facts() | probation.save_facts(probed),
                            rank_state={"random": mp.capture_random_state(launch.device)},
                            metrics=measured,
                            milestone="pretrain-end" if step == config.max_steps else None,
                            wait=is_last,  # else training goes on while it is written
                        )
                board.saved(manager.finished(), step, manager.counts)
                mp.fault_point("step", step)
                if seen.stop and step < config.max_steps:
                    raise signals.preempted(step)
        if launch.is_main:
            mp.export_newest(run)  # to model/, as FP32


if __name__ == "__main__":
    with mp.exit_codes():
        main()
