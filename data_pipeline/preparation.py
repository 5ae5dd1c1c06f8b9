"""`prepare`: raw click logs to a data set of ids, in two streaming passes."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from .bad_rows import BadRow, BadRowLedger
from .encoding import Encoder
from .fitting import fit
from .layouts import AVAZU, CRITEO, Layout, LayoutName, load_csv_schema
from .output import ShardWriter, new_folder
from .parallel import ordered_map
from .parsing import parse
from .prepare_config import DEFAULT_TEST_FRACTION, PrepareConfig
from .schema import Schema, SourceFile, Split, library_versions
from .sources import Block, RawFiles
from .splitting import EVERYTHING_IS_TEST, SplitRule

PathLike = str | os.PathLike[str]
Progress = Callable[[int], None]


def prepare(
    layout: LayoutName,
    inputs: Sequence[PathLike],
    output: PathLike,
    config: PrepareConfig | None = None,
    *,
    csv_schema: PathLike | None = None,
    like: PathLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Schema:
    """Turns raw files into a data set. Memory grows with the vocabulary, not with the number of rows.

    Args:
        layout: "criteo", "avazu" or "csv".
        inputs: raw files, plain or compressed, in order.
        output: a new or empty folder; it appears when everything is done, or not at all.
        config: how; with `like`, only its on_bad_row, max_bad_rows and shard_rows count.
        csv_schema: TOML file that describes the columns; for "csv", and not with `like`.
        like: a folder with schema.json and vocabulary/ of an earlier data set: its ids and dense maps are applied,
            every row goes to the split "test", and the label may be absent. Then `Split.labelled` is False and labels
            are NaN.
        overwrite: replace a data set that is there.
        progress: called with the number of raw bytes just done; `work_bytes` gives their sum.

    Returns:
        The schema.

    Raises:
        ValueError: anything wrong with the settings or the data, with file, line and column. OSError: the disk is full.
    """
    config = config or PrepareConfig()
    report = progress or (lambda _: None)
    past = Schema.load(like) if like is not None else None
    described = _layout(layout, csv_schema, past)
    files = RawFiles(inputs, header=described.header)
    described = described.resolve(files.first_line(), files.paths[0], need_label=past is None)
    ledger = BadRowLedger(config.on_bad_row, config.max_bad_rows)
    with new_folder(output, overwrite=overwrite) as folder:
        if past is None:
            split = _split_rule(layout, config, files, report)
            encoder = fit(files.blocks(checksum=True), described, config, split, ledger, report)
            skipped = BadRowLedger("skip", ledger.by_path.total())
        else:
            assert like is not None
            split, encoder, skipped = EVERYTHING_IS_TEST, Encoder.load(Path(like), past), ledger
        blocks = files.blocks(checksum=past is not None)
        splits = _write(folder, blocks, described, encoder, split, config.shard_rows, skipped, report)
        encoder.save(folder)
        schema = Schema(
            name=layout,
            dense=encoder.dense,
            sparse=encoder.sparse,
            splits=splits,
            settings=_settings(config, described) if past is None else past.settings,
            sources=_sources(files, ledger),
            versions=library_versions(),
        )
        schema.save(folder)
    return schema


def work_bytes(inputs: Sequence[PathLike], config: PrepareConfig, *, like: PathLike | None = None) -> int:
    """What the calls of `progress` add up to: bytes on disk of the raw files, once for each time they are read."""
    passes = 1 if like is not None else 3 if config.split == "tail" else 2
    return passes * sum(os.stat(path).st_size for path in inputs)


def _layout(name: LayoutName, csv_schema: PathLike | None, past: Schema | None) -> Layout:
    if (csv_schema is not None) != (name == "csv" and past is None):
        raise ValueError("a schema file goes with the layout csv, and only where no earlier data set is applied")
    if past is not None:
        if past.name != name:
            raise ValueError(f"the earlier data set has the layout {past.name!r}; {name!r} cannot be prepared like it")
        return Layout.from_json(past.settings["layout"])
    if csv_schema is not None:
        return load_csv_schema(csv_schema)
    layouts = {"criteo": CRITEO, "avazu": AVAZU}
    if name not in layouts:
        raise ValueError(f"layout must be criteo, avazu or csv, got {name!r}")
    return layouts[name]


def _split_rule(layout: str, config: PrepareConfig, files: RawFiles, report: Progress) -> SplitRule:
    if config.split == "random":
        fraction = DEFAULT_TEST_FRACTION[layout] if config.test_fraction is None else config.test_fraction
        return SplitRule(config.seed, fraction)
    assert config.test_rows is not None
    rows = 0
    for block in files.blocks():
        rows += block.lines
        report(block.file_bytes)
    if config.test_rows >= rows:
        raise ValueError(f"test_rows must be less than the {rows:,} rows there are, got {config.test_rows:,}")
    return SplitRule(first_test_row=rows - config.test_rows)


def _write(
    folder: Path,
    blocks: Iterable[Block],
    layout: Layout,
    encoder: Encoder,
    split: SplitRule,
    shard_rows: int,
    ledger: BadRowLedger,
    report: Progress,
) -> dict[str, Split]:
    """The second pass: encodes every block and writes its rows to their split."""

    def encoded(block: Block) -> tuple[pa.Table, pa.Table, list[BadRow], int]:
        parsed = parse(block, layout)
        table, test = encoder.encode(parsed), split.is_test(parsed.rows)
        return table.filter(pa.array(~test)), table.filter(pa.array(test)), parsed.bad, block.file_bytes

    fields = Schema(layout.name, encoder.dense, encoder.sparse, {})
    labelled = layout.label in layout.columns
    writers = [ShardWriter(folder, name, fields, shard_rows, labelled=labelled) for name in ("train", "test")]
    with closing(ordered_map(encoded, blocks)) as results:
        for train, test, bad, file_bytes in results:
            ledger.add(bad)
            writers[0].write(train)
            writers[1].write(test)
            report(file_bytes)
    return {"train": writers[0].close(), "test": writers[1].close()}


def _settings(config: PrepareConfig, layout: Layout) -> dict[str, object]:
    # The header of files to come may order its columns differently, so it is asked again.
    described = dataclasses.replace(layout, columns=() if layout.header else layout.columns)
    settings = {"prepare": dataclasses.asdict(config), "layout": dataclasses.asdict(described)}
    return json.loads(json.dumps(settings))  # lists for tuples, as they will be read back


def _sources(files: RawFiles, ledger: BadRowLedger) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(path, os.stat(path).st_size, files.checksums[path], files.rows[path], ledger.by_path[path])
        for path in files.paths
    )
