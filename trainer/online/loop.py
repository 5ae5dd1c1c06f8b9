"""Online training: samples from a stream in the order of their time, each predicted before it is trained on.

Every checkpoint holds the stream's position, from which the stream gives the same batches again: a run that was killed
continues bit-identical to an uninterrupted one.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather
from torch import Tensor

from cowrec.data_pipeline import Batch, Position, SampleCodec, SampleSource, SampleStream, StreamBatch, open_source
from cowrec.data_pipeline.codec import ID_COLUMN, sample_block
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.streams.chunks import MissingValues
from cowrec.data_pipeline.streams.malformed import MalformedPolicy
from cowrec.data_pipeline.streams.position import POSITION_FILE
from cowrec.errors import UserError
from cowrec.files import replacing
from cowrec.urls import without_credentials

from ..config.run import RunConfig, checked_config, load_config, with_defaults, with_values
from ..config.sections import seconds
from ..runs.checkpoint import checkpoint_name, list_checkpoints
from ..runs.local_copy import RunPlace
from ..runs.metrics_log import MetricsLog
from ..runs.run_dir import CONFIG, JOURNAL, MALFORMED, REPORT, write_json
from ..runtime.processes import Peers, Process, from_first, on_first, process_group
from ..sharded_model.build import has_batch_norm
from ..sharded_model.check_run import check_run
from ..sharded_model.run_plan import LrSchedule, RunPlan
from ..sharded_model.step import even_slice
from ..training.active_run import ActiveRun, StopRequest, require_run_dir, stop_requests
from ..training.warm_start import warm_start
from .measurements import WINDOW_FILE, Measurements, metrics_endpoint
from .publication import Due, OnlinePublication

QUARANTINE = "quarantine"
_POLL_SECONDS = 0.2
"""Longest wait for a batch before publications and snapshots that are due are done."""


def online(
    config: RunConfig, data_dir: Path, source: str, run_dir: Path, *, publish: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Trains on a stream until it ends or the run is asked to stop; returns the report that ``run_dir`` then holds.

    Under torchrun all processes call it, and share the model's tables; the first one alone reads the source.

    Args:
        data_dir: prepared data set whose fields, scales and vocabularies decode the samples.
        source: of samples, as :func:`open_source` takes it.
        publish: target of publications, as :func:`open_target` takes it.
        run_dir, resume: as of :func:`cowrec.trainer.training.trainer.train`, but a local folder.

    Raises:
        ValueError: a setting, data set, source or target does not work.
        NonFiniteLoss: the loss became NaN or infinite; the last checkpoint is kept, and nothing later was published.
        Interrupted: the run was asked to stop and has saved a checkpoint.
    """
    config = checked_config(config)
    size = config.train.batch_size if config.train.batch_size > 0 else config.optimizer.base_batch_size
    config = with_values(config, data={"dir": str(data_dir)}, train={"batch_size": size})
    begun = load_config(run_dir / CONFIG) if resume and (run_dir / CONFIG).is_file() else None
    schema = Schema.load(data_dir)
    config = with_defaults(config, schema.split("train").rows, begun, stream=True)
    with process_group(config.train.device, config.train.timeout_seconds) as process:
        check_run(config, schema, process, stream=True)
        require_run_dir(run_dir, config, process, resume)
        trainer = _OnlineTrainer(config, RunPlace(run_dir, resume=resume), process)
        on_first(process, lambda: trainer.open_source(source))
        with trainer.run.running(resume):
            trainer.say(trainer.summary(source))
            trainer.warn_of_vocabularies()
            trainer.warn_of_unused()
            report = trainer.follow(publish, resume)
            on_first(process, lambda: write_json(run_dir / REPORT, report))
        return report


class _OnlineTrainer:
    """Trains a run on a stream: its measurements, its publication, and the checkpoints to resume it from."""

    def __init__(self, config: RunConfig, place: RunPlace, process: Process) -> None:
        self.config, self.run_dir, self.process = config, place.folder, process
        self.codec = SampleCodec.load(config.data.dir)
        self.codec.require_trainable()
        plan = RunPlan.of(config, self.codec.schema, process, schedule=LrSchedule())
        # A batch is not taken before the one before it was trained on, which would postpone its predictions.
        self.run = ActiveRun(plan, place, config.online.on_nonfinite, reads_ahead=False)
        self.state, self.say = self.run.state, self.run.say
        self.measured = Measurements(self.run)
        self.source: SampleSource | None = None
        self.stream: SampleStream | None = None
        """On the first process, which alone reads."""
        self.publication: OnlinePublication | None = None
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._first_entries: dict[str, int] = {}
        """First entry of the journal that each checkpoint needs, by its name."""
        self._journal_begin = 0

    def open_source(self, source: str) -> None:
        online = self.config.online
        self.source = open_source(  # the stream closes it
            source, damaged=online.damaged_files, order=online.file_order, grace=online.file_grace_seconds
        )

    def follow(self, publish: str | None, resume: bool) -> dict[str, Any]:
        """Runs from the first sample, or from the newest checkpoint, to the end of the stream."""
        position = self.resume() if resume else None
        if self.config.train.warm_start and not self.run.steps:
            warm_start(self.state, timed=True)
        with ExitStack() as opened:
            on_first(self.process, lambda: self.open_stream(position, opened))
            if publish:
                publication = OnlinePublication(publish, self.state, self.run_dir)
                self.publication = opened.enter_context(closing(publication))
            on_first(self.process, lambda: self.serve_metrics(opened))
            log = opened.enter_context(self.run.open_log(self.config.online.metrics_file_bytes, may_drop=True))
            stop = opened.enter_context(stop_requests(self.process))
            self.train(log, stop)
            self._saved_step = 0  # a snapshot of this step has the window open that is closed now
            self.save()
            self.run.checkpoints.finish()
        return self.report()

    def train(self, log: MetricsLog, stop: StopRequest) -> None:
        """Trains on every batch of the stream; publishes and saves when due, also while no batch comes."""
        turns = Turns(self.stream, self.codec.schema, self.process)
        usual = MissingValues(self.codec).usual_shares(Path(self.config.data.dir)) if self.stream else {}
        self.measured.start(self.stream, usual)
        ended = False
        while not ended:
            self.measured.turned_at = time.monotonic()
            turn = turns.next(_POLL_SECONDS, self.decide)
            self.measured.reading_seconds = turns.seconds
            if turn.batch is not None:
                self.step(turn, turn.batch, turns, log)
                if self.run.steps == 1 or self.run.steps % self.config.train.log_every == 0:
                    self.measured.write(log, self.stream)
            self.publish(turn.publishes)
            self.measured.write_stream(log, self.stream)
            if turn.saves:
                self.save()
            if stop.agreed():
                self.save()
                raise self.run.interrupted()
            ended = turn.ends
        self.measured.finish(log, self.stream)

    def decide(self, ended: bool) -> tuple[bool, Due]:
        publishes = self.publication.due(last=ended) if self.publication else Due.NOTHING
        return time.monotonic() - self._saved_at >= self.config.online.snapshot_seconds, publishes

    def step(self, turn: "Turn", batch: Batch, turns: "Turns", log: MetricsLog) -> None:
        """Trains on a batch; the logits of the step, from the weights before its update, are its predictions.

        A batch that would make the model non-finite changes the id tables only.
        """
        started = time.perf_counter()
        translated = self.state.ids.training(batch)
        step = self.run.step(iter((translated,)))
        logits = turns.logits(step.logits)
        if step.set_aside:
            if turn.arrived:
                self.set_aside(turn.arrived, logits, step.set_aside, log)
        else:
            if turn.arrived:
                self.measured.add(turn.arrived, logits, log)
            self.measured.has_trained(sum(turn.sizes), time.perf_counter() - started)
        if self.publication:
            self.publication.mark(translated.sparse)

    def set_aside(self, arrived: StreamBatch, logits: Tensor, reason: str, log: MetricsLog) -> None:
        """Keeps the samples of a batch that was not trained on, and says so; on the first process."""
        try:
            kept = f"its samples are in {quarantine(self.run_dir, arrived, logits, reason)}"
        except OSError as error:
            kept = f"its samples could not be saved: {error}"
        batch, samples = arrived.end.counters["batches"], len(logits)
        log.write("set_aside", self.run.steps, batch=batch, samples=samples, reason=reason)
        self.run.warn(
            f"warning: batch {batch} ({samples:,} samples) is set aside, as it would make the model non-finite:"
            f" {reason}; {kept}"
        )

    def resume(self) -> Position | None:
        """Loads the newest checkpoint of the run; returns its position in the stream on the first process.

        The position is None on the others, and if there is no checkpoint.
        """
        progress = self.state.resume(self.run.checkpoints)
        if progress is None:
            return None
        path = self.run.checkpoints.latest
        assert path is not None
        self._saved_step = progress.step
        self.measured.resume(progress.samples, progress.seconds)
        found: list[Position] = []

        def load() -> None:
            if not (path / POSITION_FILE).exists():
                raise UserError(
                    f"{path} has no position in a stream: it is of a run of cowrec train; give online a new --run-dir,"
                    f" and begin from these weights by --set train.warm_start={self.run_dir}"
                )
            found.append(Position.load(path))
            self.measured.quality.load(path)
            # Entries of damaged checkpoints, which were skipped, are kept too.
            self._first_entries = {checkpoint.name: 0 for checkpoint in list_checkpoints(path.parent)}
            self._first_entries[path.name] = found[0].entry

        on_first(self.process, load)
        self.say(f"continuing from {path}: step {progress.step}, {self.measured.samples:,} samples")
        return found[0] if found else None

    def save(self) -> None:
        """Saves a checkpoint from which the stream can be continued, unless the last one is of this step."""
        run, measured, stream = self.run, self.measured, self.stream
        if run.steps == self._saved_step:
            return
        run.require_finite()
        files = partial(_write_files, stream.position, measured.quality.frozen()) if stream else None
        run.save(files, samples=measured.samples, seconds=measured.trained_seconds)
        self._saved_step, self._saved_at = run.steps, time.monotonic()
        if stream:
            self._first_entries[checkpoint_name(self._saved_step)] = stream.position.entry
            self._trim_journal(stream)

    def _trim_journal(self, stream: SampleStream) -> None:
        """Removes what no checkpoint needs any more; if the disk is full, after a later snapshot."""
        kept = list_checkpoints(self.run.checkpoints.folder)
        oldest = min((self._first_entries[checkpoint.name] for checkpoint in kept), default=0)
        if oldest > self._journal_begin:
            try:
                stream.trim(Position(entry=oldest))
            except OSError as error:
                self.run.warn(f"warning: {JOURNAL} is shortened after a later snapshot only: {error}")
            else:
                self._journal_begin = oldest

    def publish(self, due: Due) -> None:
        if self.publication and due:
            self.run.require_finite()
            self.publication.publish(due, self.run.steps, self.measured.quality.newest_time or None)

    def open_stream(self, position: Position | None, opened: ExitStack) -> None:
        """Opens the stream at a position, at its beginning if None; on the first process."""
        assert self.source is not None
        online = self.config.online
        self.stream = SampleStream(
            self.source,
            self.codec,
            batch_size=self.config.train.batch_size,
            fewest=2 if has_batch_norm(self.state.model) else 1,
            lateness_seconds=seconds(online.lateness, "online.lateness"),
            late=online.late,
            duplicates_window=online.duplicates_window,
            max_wait_seconds=online.max_wait_seconds,
            ahead_seconds=seconds(online.ahead, "online.ahead"),
            most_waiting=max(1 << 20, self.config.train.batch_size),
            malformed=MalformedPolicy(
                online.max_malformed_share, online.on_malformed, self.run_dir / MALFORMED, online.malformed_file_bytes
            ),
            journal=self.run_dir / JOURNAL,
            position=position,
            lost=online.on_lost_samples,
        )
        opened.enter_context(closing(self.stream))

    def serve_metrics(self, opened: ExitStack) -> None:
        online = self.config.online
        assert self.stream is not None
        if online.metrics_port:
            read = partial(self.measured.readings, self.stream, self.publication)
            longest = self.config.train.timeout_seconds
            opened.enter_context(
                metrics_endpoint(
                    online.metrics_host,
                    online.metrics_port,
                    read,
                    lambda: time.monotonic() - self.measured.turned_at < longest,
                )
            )

    def report(self) -> dict[str, Any]:
        id_tables = self.state.id_tables.counters() if self.state.id_tables else None
        shared = {
            "world_size": self.process.world_size,
            "id_tables": id_tables,
            "batches_set_aside": self.state.set_aside,
            **self.run.report(),
        }
        return from_first(self.process, lambda: {**self.measured.report(self.stream), **shared})

    def warn_of_vocabularies(self) -> None:
        """Warns of collisionless tables that no new id can enter."""
        tables = (table for table in self.run.plan.tables if table.ids.kind == "collisionless")
        fixed = [field.name for table in tables for field in table.fields if field.encoding == "vocabulary"]
        if fixed:
            self.run.warn(
                f"warning: ids of the fields {fixed} that are not in their vocabularies get no rows in their"
                " collisionless tables; prepare the data set with --raw-ids, so that new ids do"
            )

    def warn_of_unused(self) -> None:
        """Warns of settings that are for data sets: a stream has no epochs, and its checkpoints go by time."""
        train, checkpoint = self.config.train, self.config.checkpoint
        of_data_sets = {
            "train": (train, "patience validation_fraction average"),
            "checkpoint": (checkpoint, "every_steps keep_best"),
        }
        unused = [
            f"{section}.{name} = {value!r}"
            for section, (own, names) in of_data_sets.items()
            for name in names.split()
            if (value := getattr(own, name)) != getattr(type(own), name)
        ]
        if unused:
            self.run.warn(
                f"warning: without effect on a stream, which has no epochs: {', '.join(unused)};"
                " online.snapshot_seconds is the time between two checkpoints"
            )

    def summary(self, source: str) -> str:
        return (
            f"{self.config.model.name} on {self.codec.schema.name}, following {without_credentials(source)}\n"
            f"batch {self.config.train.batch_size}, {self.run.settings_summary()}"
        )


@dataclass(frozen=True)
class Turn:
    """What all processes do in one turn; the first process decides what depends on time, as clocks differ.

    Attributes:
        saves, publishes: whether it is time for a snapshot, and for which publications.
        ends: whether the stream has ended, with this turn's batch if there is one.
        sizes: samples of each process's slice, without padding.
        batch: this process's slice of the samples to train on, from :func:`even_slice`; None if no samples have come.
        arrived: the complete batch, on the first process.
    """

    saves: bool
    publishes: Due
    ends: bool
    sizes: tuple[int, ...]
    batch: Batch | None = None
    arrived: StreamBatch | None = None


class Turns:
    """The turns of a run, decided by the first process, which alone reads; all processes call each method together.

    ``seconds`` is the CPU time that the first process's thread takes to read, encode and share out samples.
    """

    def __init__(self, stream: SampleStream | None, schema: Schema, process: Process) -> None:
        self._stream, self._schema, self._peers = stream, schema, Peers(process)
        self.seconds = 0.0

    def next(self, timeout: float, decide: Callable[[bool], tuple[bool, Due]]) -> Turn:
        """Waits for samples, at most about ``timeout`` seconds, and returns the next turn.

        ``decide`` is called on the first process, with whether the stream has ended; it returns whether to save and
        what to publish.

        Raises:
            ValueError: the source cannot be read, or cannot repeat what the journal records; on all processes.
            OSError: the journal cannot be written; on all processes.
        """
        began, arrived = time.thread_time(), None
        parts: list[Any] | None = None
        if self._stream is not None:
            try:
                arrived = self._stream.next_batch(timeout)
                samples, count = 0 if arrived is None else len(arrived.table), self._peers.count
                # The slices are those of a reader of a data set.
                sizes = tuple(
                    end - begin for begin, end in pairwise(rank * samples // count for rank in range(count + 1))
                )
                parts = self._parts(Turn(*decide(self._stream.ended), self._stream.ended, sizes), arrived)
            except (ValueError, OSError) as error:
                parts = [error] * self._peers.count
        part = self._peers.scattered(parts)
        if isinstance(part, Exception):
            raise part
        turn: Turn
        turn, content = part
        batch = arrived.batch if arrived is not None else None
        if content is not None:
            block = sample_block(pa.ipc.open_stream(content).read_all(), self._schema)
            batch = even_slice(block.batch(self._schema, sum(turn.sizes)), self._peers.count)
        if self._stream is not None:
            self.seconds += time.thread_time() - began
        return dataclasses.replace(turn, batch=batch, arrived=arrived)

    def logits(self, own: Tensor) -> Tensor:
        """Logits of all samples of a turn on the first process, from those of this process's samples, [B]."""
        return self._peers.gathered(own.cpu())

    def _parts(self, turn: Turn, arrived: StreamBatch | None) -> list[tuple[Turn, bytes | None]]:
        """The turn for each process, with its slice of the samples in Arrow's stream format if there are several."""
        if arrived is None or self._peers.count == 1:
            return [(turn, None)] * self._peers.count
        table, begin, parts = arrived.table.drop_columns([ID_COLUMN]), 0, list[tuple[Turn, bytes | None]]()
        for size in turn.sizes:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table.slice(begin, size))
            parts.append((turn, sink.getvalue().to_pybytes()))
            begin += size
        return parts


def _write_files(position: Position, window: pa.Table, folder: Path) -> None:
    position.save(folder)
    feather.write_feather(window, folder / WINDOW_FILE, compression="zstd")


def quarantine(run_dir: Path, batch: StreamBatch, logits: Tensor, reason: str) -> Path:
    """Writes the samples of a batch to ``run_dir/quarantine/batch_N.parquet``; N is the batch's number in the stream.

    A resumed run writes the same file again. The columns are those of a data set, as the model reads them, ``time``,
    ``sample_id``, ``logit``, which is what the model predicted, [B], and ``reason``.
    """
    columns = {name.removeprefix("#"): batch.table[name] for name in batch.table.column_names}
    columns["logit"] = pa.chunked_array([pa.array(logits.double().cpu().numpy())])
    columns["reason"] = pa.chunked_array([pa.repeat(pa.scalar(reason), len(batch.table))])
    path = run_dir / QUARANTINE / f"batch_{batch.end.counters['batches']:09d}.parquet"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        pq.write_table(pa.table(columns), file)
    return path
