"""`prepare`: converts raw click logs to a data set of ids, in a survey that finds partitions and two passes."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cowrec.data_pipeline.dataset.schema import Schema, SourceFile, library_versions
from cowrec.data_pipeline.dataset.writer import new_folder
from cowrec.data_pipeline.encoding.encoder import Encoder
from cowrec.data_pipeline.raw.bad_rows import BadRowLedger
from cowrec.data_pipeline.raw.layouts import AVAZU, CRITEO, Layout, LayoutName, load_csv_schema
from cowrec.data_pipeline.raw.partitions import RawFile, check_inputs, partitions, read_first_line, survey

from .config import DEFAULT_TEST_FRACTION, PrepareConfig
from .engine import Engine, LocalEngine
from .fit_pass import FitPlan, fit
from .splitting import EVERYTHING_IS_TEST, SplitRule
from .write_pass import WritePlan, write_splits

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
    scheduler: str | None = None,
) -> Schema:
    """Converts raw files to a data set and returns its schema. Memory grows with the vocabulary, not with the samples.

    Args:
        layout: "criteo", "avazu" or "csv".
        inputs: raw files, plain or compressed, in order.
        output: a new or empty folder, created atomically when everything is done.
        config: settings; with `like`, only on_bad_row, max_bad_rows and shard_rows have an effect.
        csv_schema: TOML file that describes the columns; for "csv", and not with `like`.
        like: a folder with schema.json and vocabulary/ of an earlier data set, whose vocabularies and dense transforms
            are applied. All samples go to the split "test", and the label may be absent: then `Split.labelled` is False
            and labels are NaN.
        overwrite: replace an existing data set.
        progress: called with the number of raw bytes just processed; `work_bytes` returns their sum.
        scheduler: address of a Dask cluster that does the work instead of this machine's cores; the result has the same
            bytes. Its machines must be able to access inputs and output under the same absolute paths.

    Raises:
        ValueError: invalid settings or data; the message names file, line and column. OSError: the disk is full.
    """
    config = config or PrepareConfig()
    report = progress or (lambda _: None)
    # Workers of a cluster have different working directories.
    paths = [os.fspath(path) if scheduler is None else os.path.abspath(path) for path in inputs]
    earlier = Schema.load(like) if like is not None else None
    described = _layout(layout, csv_schema, earlier)
    check_inputs(paths)
    described = described.resolve(read_first_line(paths[0]), paths[0], need_label=earlier is None)
    ledger = BadRowLedger(config.on_bad_row, config.max_bad_rows)
    with new_folder(output, overwrite=overwrite) as folder, _engine(scheduler, folder) as engine:
        work = partial(survey, header=described.header, segment_lines=config.shard_rows)
        files = engine.survey(work, paths, report)
        _check_headers(files, described)
        parts = partitions(files, config.shard_rows)
        if earlier is None:
            split = _split_rule(layout, config, files)
            encoder = fit(engine, parts, FitPlan(described, config, split), ledger, report)
            skipped = BadRowLedger("skip", ledger.by_path.total())
        else:
            assert like is not None
            split, encoder, skipped = EVERYTHING_IS_TEST, Encoder.load(Path(like), earlier), ledger
        encoder.save(folder)
        splits = write_splits(engine, parts, WritePlan(folder, described, encoder, split), skipped, report)
        settings = _settings(config, described) if earlier is None else earlier.settings
        schema = Schema(layout, encoder.dense, encoder.sparse, splits, bool(described.time), settings=settings,
                        sources=_sources(files, ledger), versions=library_versions())  # fmt: skip
        schema.save(folder)
    return schema


def work_bytes(inputs: Sequence[PathLike], *, like: PathLike | None = None) -> int:
    """Returns the sum of all `progress` calls: bytes on disk of the raw files, times the number of passes over them."""
    passes = 3 if like is None else 2
    return passes * sum(os.stat(path).st_size for path in inputs)


@contextmanager
def _engine(scheduler: str | None, folder: Path) -> Iterator[Engine]:
    if scheduler is None:
        yield LocalEngine()
        return
    from .dask_engine import dask_engine

    with dask_engine(scheduler, folder) as engine:
        yield engine


def _layout(name: LayoutName, csv_schema: PathLike | None, earlier: Schema | None) -> Layout:
    if (csv_schema is not None) != (name == "csv" and earlier is None):
        raise ValueError("a schema file is for the layout csv only, and not with an earlier data set (like)")
    if earlier is not None:
        if earlier.name != name:
            raise ValueError(
                f"the earlier data set has the layout {earlier.name!r}; {name!r} cannot be prepared like it"
            )
        return Layout.from_json(earlier.settings["layout"])
    if csv_schema is not None:
        return load_csv_schema(csv_schema)
    layouts = {"criteo": CRITEO, "avazu": AVAZU}
    if name not in layouts:
        raise ValueError(f"layout must be criteo, avazu or csv, got {name!r}")
    return layouts[name]


def _check_headers(files: Sequence[RawFile], layout: Layout) -> None:
    for file in files if layout.header else ():
        if file.first_line != files[0].first_line:
            raise ValueError(f"{file.path}, line 1: header differs from that of {files[0].path}")


def _split_rule(layout: str, config: PrepareConfig, files: Sequence[RawFile]) -> SplitRule:
    if config.split == "random":
        fraction = DEFAULT_TEST_FRACTION[layout] if config.test_fraction is None else config.test_fraction
        return SplitRule(config.seed, fraction)
    assert config.test_rows is not None
    samples = sum(file.samples for file in files)
    if config.test_rows >= samples:
        raise ValueError(f"test_rows must be less than the {samples:,} samples in the files, got {config.test_rows:,}")
    return SplitRule(first_test_sample=samples - config.test_rows)


def _settings(config: PrepareConfig, layout: Layout) -> dict[str, object]:
    # Later files may order their columns differently, so columns are read from their header again.
    described = dataclasses.replace(layout, columns=() if layout.header else layout.columns)
    settings = {"prepare": dataclasses.asdict(config), "layout": dataclasses.asdict(described)}
    return dict(json.loads(json.dumps(settings)))  # turns tuples into lists, as `Schema.load` returns them


def _sources(files: Sequence[RawFile], ledger: BadRowLedger) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(file.path, file.segments[0].stamp[0], file.sha256, file.samples, ledger.by_path[file.path])
        for file in files
    )
