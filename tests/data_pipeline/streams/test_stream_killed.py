"""A process that reads a stream is killed repeatedly: each batch is the same whenever it is returned."""

import multiprocessing
import os
import time

from stream_cases import make_codec, numbers, sample, write_file

BATCH, FILE = 5, 4
"""Samples per batch and per file."""


def read(folder):
    """Logs every batch and resumes from the newest snapshot.

    A snapshot of every fourth batch is saved once the next batch is logged, so that after a kill at least one batch
    is returned again.
    """
    from cowrec.data_pipeline import Position, SampleCodec, SampleStream, open_source

    snapshots = sorted(folder.glob("snapshot-*"), key=lambda path: int(path.name.partition("-")[2]))
    previous = Position.load(snapshots[-1]) if snapshots else None
    stream = SampleStream(
        open_source(str(folder / "in")),
        SampleCodec.load(folder / "data"),
        batch_size=BATCH,
        lateness_seconds=4,
        max_wait_seconds=0.03,
        late="train",
        journal=folder / "journal",
        position=previous,
    )
    with (folder / "log").open("a", buffering=1) as log:
        for batch in stream:
            number = batch.end.counters["batches"]
            print(number, *numbers(batch), file=log)
            snapshot = folder / f"snapshot-{number - 1}"
            if number > 1 and number % 4 == 1 and not snapshot.exists():
                partial = folder / f"partial-{number}-{os.getpid()}"
                partial.mkdir()
                previous.save(partial)
                partial.rename(snapshot)
                stream.trim(previous)
            previous = batch.end
        print("end", file=log)


class Reader:
    """The process that runs `read`, and the writer of its files."""

    def __init__(self, folder):
        self.folder, self.files = folder, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["cowrec.data_pipeline"])  # imported once, not at every start

    def start(self):
        self.process = self.context.Process(target=read, args=(self.folder,))
        self.process.start()

    def log(self):
        """Complete lines of the log."""
        path = self.folder / "log"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def write(self):
        first = FILE * self.files
        write_file(self.folder / "in", f"{self.files:05d}.arrow", [sample(n, n) for n in range(first, first + FILE)])
        self.files += 1

    def wait_until(self, happened, step=lambda: None):
        """Repeats a step until something happened."""
        deadline = time.monotonic() + 300
        while not happened():
            assert time.monotonic() < deadline, "the reader makes no progress"
            assert self.process.is_alive()
            step()
            time.sleep(0.01 * (1 + self.files % 5))

    def wait_until_drained(self):
        """Waits, without another file, until all samples were returned: the last ones by a flush."""
        self.wait_until(lambda: len({n for line in self.log() for n in line.split()[1:]}) == FILE * self.files)


def test_every_batch_is_the_same_each_time_it_is_returned(tmp_path):
    """Files arrive while the reader runs and while it does not, so flushes and kills fall at arbitrary moments.

    Before every second kill the stream is drained twice: the samples of the last file, fewer than a batch, are then
    flushed as short batches, which the next reader returns again.
    """
    make_codec(tmp_path)
    (tmp_path / "in").mkdir()
    reader = Reader(tmp_path)
    for kill in range(4):
        enough = len(reader.log()) + 6 + 3 * kill
        reader.start()
        reader.wait_until(lambda enough=enough: len(reader.log()) >= enough, reader.write)
        for _ in range(2 * (kill % 2)):
            reader.write()
            reader.wait_until_drained()
        reader.process.kill()
        reader.process.join()
    (tmp_path / "in" / "_END").touch()
    reader.start()
    reader.process.join(300)
    assert reader.process.exitcode == 0
    *lines, last = reader.log()
    assert last == "end"
    batches, repeated = {}, []
    for line in lines:
        number, _, content = line.partition(" ")
        repeated += [content.split()] if number in batches else []
        assert batches.setdefault(number, content) == content
    assert any(len(samples) < BATCH for samples in repeated)
    assert any(len(samples) == BATCH for samples in repeated)
    assert list(batches) == [str(number) for number in range(1, len(batches) + 1)]
    returned = [int(number) for content in batches.values() for number in content.split()]
    assert sorted(returned) == list(range(FILE * reader.files))
