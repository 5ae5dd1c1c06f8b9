"""Online training: samples from a stream in the order of their time, each predicted before it is trained on.

Every checkpoint holds the stream's position, from which the stream gives the same batches again: a run that was killed
continues bit-identical to an uninterrupted one.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cowrec.data_pipeline import (
    Batch,
    Position,
    SampleCodec,
    SampleSource,
    SampleStream,
    Schema,
    StreamBatch,
    open_source,
)
from cowrec.data_pipeline.urls import without_credentials
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.config.run import RunConfig, with_defaults
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.runs.run_dir import write_report
from cowrec.trainer.runtime.processes import Process, from_first, on_first, process_group
from cowrec.trainer.runtime.stopping import StopRequest, stop_requests
from cowrec.trainer.sharded_model.run_plan import RunPlan, Schedule
from cowrec.trainer.sharded_model.sharding import describe_sharding, save_sharding, sharding_table
from cowrec.trainer.training.trainer import Trainer, require_run_dir

from .measurements import Measurements
from .metrics_endpoint import metrics_endpoint
from .publication import Due, OnlinePublication
from .quarantine import quarantine
from .snapshots import Snapshots
from .stream_report import StreamReport
from .turns import Decision, Turn, Turns

JOURNAL = "journal"
_POLL_SECONDS = 0.2
"""Longest wait for a batch before publications and snapshots that are due are done."""


def online(
    config: RunConfig,
    data_dir: Path,
    source: str,
    run_dir: Path,
    *,
    publish: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains on a stream until it ends or the run is asked to stop; returns the report that ``run_dir`` then holds.

    Under torchrun all processes call it, and share the model's tables; the first one alone reads the source.

    Args:
        config: of the run; ``[online]`` holds the settings of the stream.
        data_dir: prepared data set whose fields, scales and vocabularies decode the samples.
        source: of samples, as :func:`open_source` takes it.
        run_dir: folder of the run, new or empty unless it is resumed.
        publish: target of publications, as :func:`open_target` takes it.
        resume: continue from the newest checkpoint in that folder, or start if there is none.

    Raises:
        ValueError: a setting, data set, source or target does not work.
        NonFiniteLoss: the loss became NaN or infinite; the last checkpoint is kept, and nothing later was published.
        ProcessLost: another process hangs or has ended.
        Interrupted: the run was asked to stop and has saved a checkpoint.
    """
    if config.train.batch_ramp:
        raise ValueError(
            f"train.batch_ramp = {config.train.batch_ramp} is for the first epoch of a data set, and a stream has none;"
            " add --set train.batch_ramp=0"
        )
    if config.train.accumulation > 1:
        given = f"train.accumulation = {config.train.accumulation}"
        raise ValueError(f"{given} is for data sets, not for streams; add --set train.accumulation=1")
    data = dataclasses.replace(config.data, dir=str(data_dir))
    size = config.train.batch_size or config.optimizer.base_batch_size
    config = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, batch_size=size))
    config = with_defaults(config, Schema.load(data_dir).split("train").rows)
    with process_group(config.train.device, config.train.timeout_seconds) as process:
        require_run_dir(run_dir, config, process, resume)
        run = _OnlineRun(config, run_dir, process)
        run.open_source(source)
        with run.trainer.running(resume):
            on_first(process, lambda: save_sharding(run_dir, run.sharding))
            run.say(run.summary(source))
            report = run.follow(publish, resume)
            on_first(process, lambda: write_report(run_dir, report))
        return report


class _OnlineRun:
    """A run over a stream: its trainer, its measurements and its snapshots."""

    def __init__(self, config: RunConfig, run_dir: Path, process: Process) -> None:
        self.config, self.run_dir, self.process = config, run_dir, process
        self.codec = SampleCodec.load(config.data.dir)
        self.codec.require_trainable()
        plan = RunPlan.of(config, self.codec.schema, process, schedule=Schedule(config.online.warmup_steps))
        # A batch is not taken before the one before it was trained on, which would postpone its predictions.
        self.trainer = Trainer(plan, run_dir, config.online.on_nonfinite, reads_ahead=False)
        self.state, self.say = self.trainer.state, self.trainer.say
        self.sharding = describe_sharding(self.state.model)
        self.measured = Measurements(self.trainer)
        self.snapshots = Snapshots(self.trainer, self.measured)
        self.source: SampleSource | None = None
        self.stream: SampleStream | None = None
        """On the first process, which alone reads."""
        self.publication: OnlinePublication | None = None

    def open_source(self, source: str) -> None:
        """Opens the source of samples, on the first process."""

        def open_first() -> None:
            self.source = open_source(source, damaged=self.config.online.damaged_files)  # the stream closes it

        on_first(self.process, open_first)

    def follow(self, publish: str | None, resume: bool) -> dict[str, Any]:
        """Runs from the first sample, or from the newest checkpoint, to the end of the stream."""
        position = self.snapshots.resume() if resume else None
        with ExitStack() as opened:
            on_first(self.process, lambda: opened.enter_context(self.opened_stream(position)))
            if publish:
                publication = OnlinePublication(publish, self.state, self.run_dir, self.trainer.warn)
                self.publication = opened.enter_context(closing(publication))
            on_first(self.process, lambda: opened.enter_context(self.served_metrics()))
            log = opened.enter_context(self.trainer.open_log(self.config.online.metrics_file_bytes))
            stop = opened.enter_context(stop_requests(self.process))
            self.train(log, stop)
            self.snapshots.save(self.stream)
            self.trainer.checkpoints.finish()
        return self.report()

    def train(self, log: MetricsLog, stop: StopRequest) -> None:
        """Trains on every batch of the stream; publishes and saves when due, also while no batch comes."""
        turns = Turns(self.stream, self.trainer.schema, self.process)
        report = StreamReport(self.stream, self.trainer, log, self.config.online.report_seconds)
        ended = False
        while not ended:
            turn = turns.next(_POLL_SECONDS, self.decide)
            self.measured.reading_seconds = turns.seconds
            if turn.batch is not None:
                self.step(turn, turn.batch, turns, log)
                if self.trainer.steps == 1 or self.trainer.steps % self.config.train.log_every == 0:
                    self.measured.write(log, self.stream)
            self.publish(turn.decision.publishes)
            report.write_if_due()
            if turn.decision.saves:
                self.snapshots.save(self.stream)
            if stop.agreed():
                self.snapshots.save(self.stream)
                raise self.trainer.interrupted()
            ended = turn.ends
        self.measured.close_window(log)
        report.write()
        self.measured.write(log, self.stream)
        if self.publication:
            self.publication.finish()

    def decide(self, ended: bool) -> Decision:
        """What to do in a turn beside training; on the first process."""
        publishes = self.publication.due(last=ended) if self.publication else Due.NOTHING
        return Decision(self.snapshots.is_overdue, publishes)

    def step(self, turn: Turn, batch: Batch, turns: Turns, log: MetricsLog) -> None:
        """Trains on a batch; the logits of the step, from the weights before its update, are its predictions.

        A batch that would make the model non-finite changes the id tables only.
        """
        started = time.perf_counter()
        translated = self.state.ids.training(batch)
        step = self.trainer.step(iter((translated.batch,)))
        logits = turns.logits(turn, step.logits)
        if step.set_aside:
            if turn.arrived:
                self.set_aside(turn.arrived, logits, step.set_aside, log)
        else:
            self.measured.samples += sum(turn.sizes)
            if turn.arrived:
                self.measured.add(turn.arrived, logits, log)
            self.measured.trained_seconds += time.perf_counter() - started
        if self.publication:
            self.publication.mark(translated.batch.sparse)

    def set_aside(self, arrived: StreamBatch, logits: Tensor, reason: str, log: MetricsLog) -> None:
        """Keeps the samples of a batch that was not trained on, and says so; on the first process."""
        try:
            kept = f"its samples are in {quarantine(self.run_dir, arrived, logits, reason)}"
        except OSError as error:
            kept = f"its samples could not be saved: {error}"
        batch, samples = arrived.end.counters["batches"], len(logits)
        log.write("set_aside", self.trainer.steps, batch=batch, samples=samples, reason=reason)
        self.trainer.warn(
            f"warning: batch {batch} ({samples:,} samples) is set aside, as it would make the model non-finite:"
            f" {reason}; {kept}"
        )

    def publish(self, due: Due) -> None:
        """Publishes what is due, after checking that the losses were finite."""
        if self.publication and due:
            self.trainer.require_finite()
            self.publication.publish(due, self.trainer.steps, self.measured.newest_time or None)

    @contextmanager
    def opened_stream(self, position: Position | None) -> Iterator[None]:
        """Opens the stream at a position, at its beginning if None."""
        assert self.source is not None
        online = self.config.online
        self.stream = SampleStream(
            self.source,
            self.codec,
            batch_size=self.config.train.batch_size,
            lateness_seconds=seconds(online.lateness, "online.lateness"),
            late=online.late,
            duplicates_window=online.duplicates_window,
            max_wait_seconds=online.max_wait_seconds,
            ahead_seconds=seconds(online.ahead, "online.ahead"),
            most_waiting=max(online.most_waiting, self.config.train.batch_size),
            journal=self.run_dir / JOURNAL,
            position=position,
        )
        with closing(self.stream):
            yield

    @contextmanager
    def served_metrics(self) -> Iterator[None]:
        """Serves the metrics, if the run has a port for them."""
        online = self.config.online
        assert self.stream is not None
        read = partial(self.measured.readings, self.stream, self.publication)
        with metrics_endpoint(online.metrics_host, online.metrics_port, read) if online.metrics_port else nullcontext():
            yield

    def report(self) -> dict[str, Any]:
        """Summarizes the run, on all processes alike."""
        id_tables = self.state.id_tables.counters() if self.state.id_tables else None
        shared = {"world_size": self.process.world_size, "id_tables": id_tables, **self.trainer.report()}
        return from_first(self.process, lambda: {**self.measured.report(self.stream), **shared})

    def summary(self, source: str) -> str:
        """Describes source and settings, for the terminal."""
        return (
            f"{self.config.model.name} on {self.trainer.schema.name}, following {without_credentials(source)}\n"
            f"batch {self.config.train.batch_size}, {self.trainer.describe_settings()}"
            + (f"\n{sharding_table(self.sharding)}" if self.process.world_size > 1 else "")
        )
