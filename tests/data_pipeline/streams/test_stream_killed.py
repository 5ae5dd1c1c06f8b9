"""A process that reads a stream is killed again and again: what it does after each start is what it did before."""

import multiprocessing
import os
import time

from stream_cases import make_codec, numbers, sample, write_file


def read(folder):
    """Logs every batch, and keeps a snapshot after every fourth; goes on from the newest."""
    from cowrec.data_pipeline import Position, SampleCodec, SampleStream, open_source

    snapshots = sorted(folder.glob("snapshot-*"), key=lambda path: int(path.name.partition("-")[2]))
    stream = SampleStream(
        open_source(str(folder / "in")),
        SampleCodec.load(folder / "data"),
        batch_size=5,
        lateness_seconds=4,
        max_wait_seconds=0.03,
        late="train",
        journal=folder / "journal",
        position=Position.load(snapshots[-1]) if snapshots else None,
    )
    with (folder / "log").open("a", buffering=1) as log:
        for batch in stream:
            number = batch.end.counters["batches"]
            print(number, *numbers(batch), file=log)
            if number % 4 == 0 and not (folder / f"snapshot-{number}").exists():
                partial = folder / f"partial-{number}-{os.getpid()}"
                partial.mkdir()
                batch.end.save(partial)
                partial.rename(folder / f"snapshot-{number}")
                stream.cut(batch.end)
        print("end", file=log)


def written(folder):
    """Whole lines of the log."""
    path = folder / "log"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_every_batch_is_the_same_each_time_it_is_handed_out(tmp_path):
    """Files come while the reader lives, dies and is away, so that flushes fall where chance has it."""
    make_codec(tmp_path)
    (tmp_path / "in").mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cowrec.data_pipeline"])  # imported once, not at every start
    made = 0

    def more():
        nonlocal made
        write_file(tmp_path / "in", f"{made:05d}.arrow", [sample(4 * made + n, 4 * made + n) for n in range(4)])
        made += 1

    def started():
        reader = context.Process(target=read, args=(tmp_path,))
        reader.start()
        return reader

    for kill in range(4):
        seen, reader = len(written(tmp_path)), started()
        deadline = time.monotonic() + 60
        while len(written(tmp_path)) < seen + 6 + 3 * kill:
            assert time.monotonic() < deadline, "the reader does nothing"
            assert reader.is_alive()
            more()
            time.sleep(0.01 * (1 + made % 5))  # as samples come: sometimes longer than the reader waits
        reader.kill()
        reader.join()
    (tmp_path / "in" / "_END").touch()
    reader = started()
    reader.join(60)
    assert reader.exitcode == 0
    *lines, last = written(tmp_path)
    assert last == "end"
    batches = {}
    repeated = 0
    for line in lines:
        number, _, content = line.partition(" ")
        repeated += number in batches
        assert batches.setdefault(number, content) == content
    assert repeated > 0, "or nothing is shown"
    assert list(batches) == [str(number) for number in range(1, len(batches) + 1)]
    handed = [int(number) for content in batches.values() for number in content.split()]
    assert sorted(handed) == list(range(4 * made))
    assert {len(content.split()) for content in batches.values()} > {5}, "some batches were short"
