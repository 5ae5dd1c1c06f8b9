"""`prepare`: converts raw click logs to a data set of ids, in a survey that finds partitions and two passes."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa

from cowrec.errors import UserError

from ..dataset.schema import SCHEMA_FILE, Schema, SourceFile, Split, library_versions
from ..dataset.shards import check_replaceable, disk_errors, new_folder
from ..encoding.encoder import Encoder
from ..raw.inputs import Partition, RawFile, Source, find_groups, find_inputs, partitions, stamp
from ..raw.layouts import AVAZU, CRITEO, Layout, LayoutName
from ..raw.parsing import BadRowLedger, check_same_types, check_types
from ..raw.reading import look, survey
from ..raw.schema_file import load_schema_file
from ..remote import Place, RemoteFolder, is_remote, local_path, require_local
from .config import DEFAULT_TEST_FRACTION, OnBadRow, PrepareConfig, seconds_of
from .engines import Engine, LocalEngine, dask_engine
from .passes import FitSettings, WriteSettings, count_times, fit, prepared_schema, sparse_fields, write_splits
from .splits import EVERYTHING_IS_TEST, SplitRule, by_order, by_time, iso

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
Progress = Callable[[int], None]


def prepare(
    layout: LayoutName,
    inputs: Sequence[PathLike],
    output: PathLike,
    config: PrepareConfig | None = None,
    *,
    schema_file: PathLike | None = None,
    like: PathLike | None = None,
    validation: Sequence[PathLike] = (),
    test: Sequence[PathLike] = (),
    keep: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
    scheduler: str | None = None,
) -> Schema:
    """Converts raw files to a data set and returns its schema. Memory grows with the vocabulary, not with the samples.

    Args:
        layout: "criteo", "avazu" or "tabular".
        inputs: files, patterns and folders (`find_inputs`), in order, or URIs: text or JSON lines, compressed or not;
            Parquet; Arrow.
        output: a new or empty folder, or its URI in an object store, created when everything is done.
        config: settings; with `like`, only on_bad_row (by default the earlier one), max_bad_rows and shard_rows count.
        schema_file: TOML file that describes the columns; for "tabular", and not with `like`.
        like: a folder with schema.json and vocabulary/ of an earlier data set, whose vocabularies and dense transforms
            are applied. All samples go to the split "test". Missing and wrong labels become NaN; without any label,
            `Split.labelled` is False. Wrong weights become 0. Times may be absent, unless a field has ages.
        validation, test: files of these splits, in place of the settings of splits; `inputs` are then the training
            samples. Validation needs test. Not with `like`.
        keep: raw columns that predictions show, in addition to those of the schema file.
        progress: called with the number of raw bytes just processed; `work_bytes` returns their sum.
        scheduler: address of a Dask cluster that does the work, with equal bytes as the result. Its machines must be
            able to access inputs and output under the same absolute paths.

    Raises:
        ValueError: invalid settings or data; the message names file, line and column. OSError: the disk is full.
    """
    config, report = config or PrepareConfig(), progress or (lambda _: None)
    groups = find_groups(_paths((inputs, validation, test), scheduler, new=like is None))
    if like is not None:
        like = require_local(like, "like", "its vocabularies are read from there; copy it to this machine first")
    earlier = Schema.load(like) if like is not None else None
    described, sources = _look(_layout(layout, schema_file, earlier), groups, keep, need_label=earlier is None)
    if earlier is None:
        described.check_names(config.dense)
        sparse_fields(described, config)  # refuses what does not go together
        if config.negative_fraction < 1 and (len(described.labels) > 1 or described.labels[0].is_rate):
            other = "several" if len(described.labels) > 1 else "a rate or count, which has both in each sample"
            raise UserError(f"negative_fraction takes one label, whose negatives are left out; the schema has {other}")
    if overwrite:
        _check_outside(output, [source.path for source in sources], like)
    written = output_folder(output, overwrite=overwrite, shared=scheduler is not None)
    with written as folder, _engine(scheduler, folder) as engine:
        work = partial(survey, header=described.header, segment_samples=config.shard_rows)
        files = engine.survey(work, sources, report)
        if not any(file.samples for file in files):
            raise UserError(f"input file {files[0].source.path} has no samples, and neither has any other")
        inherited = earlier.settings.get("prepare", {}).get("on_bad_row") if earlier else None
        on_bad_row = config.on_bad_row or inherited or "error"
        parts, ledger = partitions(files, config.shard_rows), BadRowLedger(on_bad_row, config.max_bad_rows)
        if earlier is None:
            split = _by_files(files, groups) or _split_rule(engine, parts, described, config, on_bad_row, report)
            split = replace(split, negative_fraction=config.negative_fraction)
            encoder = fit(engine, parts, FitSettings(described, config, split), ledger, report)
            skipped = BadRowLedger("skip", ledger.by_path.total())
        else:
            split, encoder, skipped = EVERYTHING_IS_TEST, Encoder.load(Path(like or ""), earlier), ledger
        encoder.save(folder)
        fields = prepared_schema(described, encoder)
        splits = write_splits(engine, parts, WriteSettings(folder, described, encoder, split, fields), skipped, report)
        schema = replace(
            fields,
            splits=splits if earlier else _checked_splits(splits, described, config),
            settings=_settings(config, described, split) if earlier is None else earlier.settings,
            negative_fraction=split.negative_fraction,
            sources=tuple(
                SourceFile(file.source.path, file.source.stamp[0], file.samples, ledger.by_path[file.source.path])
                for file in files
            ),
            bad_rows=dict(ledger.by_reason),
            versions=library_versions(),
        )
        schema.save(folder)
        return schema


def _paths(groups: Sequence[Sequence[PathLike]], scheduler: str | None, *, new: bool) -> list[list[str]]:
    _, validation, test = groups
    if (validation and not test) or (test and not new):
        raise UserError("files of the splits are for a new data set; give those of the test split, or none")
    paths = [[os.fspath(place) for place in group] for group in groups]
    if scheduler is None:
        return paths
    # Workers of a cluster have different working directories.
    return [[path if is_remote(path) else os.path.abspath(local_path(path)) for path in group] for group in paths]


def work_bytes(inputs: Sequence[PathLike], *, like: PathLike | None = None, config: PrepareConfig | None = None) -> int:
    """Returns the sum of all `progress` calls: bytes on disk of the raw files, times the number of passes over them."""
    by_shares_of_time = config is not None and config.split == "time" and config.test_from is None
    passes = 3 + by_shares_of_time if like is None else 2
    return passes * sum(stamp(file)[0] for file in find_inputs([os.fspath(path) for path in inputs]))


def _engine(scheduler: str | None, folder: Path) -> AbstractContextManager[Engine]:
    return nullcontext(LocalEngine()) if scheduler is None else dask_engine(scheduler, folder)


def _layout(name: LayoutName, schema_file: PathLike | None, earlier: Schema | None) -> Layout:
    if (schema_file is not None) != (name == "tabular" and earlier is None):
        raise UserError(
            "the layout tabular needs a schema file (--schema) or an earlier data set (--like), not both; the layouts"
            f" criteo and avazu take no schema file; got the layout {name}"
        )
    if earlier is not None:
        if earlier.name != name:
            raise UserError(f"the earlier data set has the layout {earlier.name!r}, and these files have {name!r}")
        return Layout.from_json(earlier.settings["layout"])
    if schema_file is not None:
        return load_schema_file(schema_file)
    layouts = {"criteo": CRITEO, "avazu": AVAZU}
    if name not in layouts:
        raise UserError(f"layout must be criteo, avazu or tabular, got {name!r}")
    return layouts[name]


def _look(
    layout: Layout, groups: Iterable[Sequence[str]], keep: Sequence[str], *, need_label: bool
) -> tuple[Layout, list[Source]]:
    """Checks the columns of all files before any is read. Returns the layout, with what is `absent`, and the files."""
    looks = [look(file) for file in chain.from_iterable(groups)]
    # A line may lack any column, and so may a file of such lines.
    of_json = tuple({name: None for source, _ in looks if source.format == "json" for name in source.columns})
    looks = [
        (replace(source, columns=of_json) if source.format == "json" else source, types) for source, types in looks
    ]
    described = replace(layout, keep=tuple(dict.fromkeys([*layout.keep, *keep])))
    if not need_label:
        described = _without_absent(described, [source for source, _ in looks], keep)
    sources, schemas = [], {}
    for source, types in looks:
        described.check_columns_of(source)
        if types is not None:
            used = tuple(name for name in source.columns if name in described.used_columns)
            source = replace(source, columns=used)
            schemas[source.path] = types = pa.schema([types.field(name) for name in used])
        check_types(source, types, described)
        sources.append(source)
    check_same_types(schemas, described)
    return described, sources


def _without_absent(layout: Layout, sources: Sequence[Source], keep: Sequence[str]) -> Layout:
    """Returns the layout to predict files by, without the optional columns that all of them lack."""
    loose = replace(layout, absent=layout.optional_columns)
    present = [{*loose.columns_in(source), *dict(source.partition)} for source in sources]
    absent = []
    for name in layout.optional_columns:
        lacking = [source.path for source, columns in zip(sources, present, strict=True) if name not in columns]
        what = "label" if name in layout.label_columns else "column"
        if lacking and len(lacking) < len(sources):
            raise UserError(f"{lacking[0]} has no {what} {name!r}, but other files have; prepare them separately")
        if lacking and name in keep:
            raise UserError(f"no column {name!r} to keep in {lacking[0]}")
        if lacking and name in layout.keep:
            logger.warning("the files have no column %r, which predictions would show", name)
        absent += [name] * bool(lacking)
    of_text = next((loose.columns_in(source) for source in sources if source.format == "text"), ())
    return replace(
        layout,
        columns=of_text if layout.columns else (),
        weight="" if layout.weight in absent else layout.weight,
        time=None if {*layout.time_columns} & {*absent} else layout.time,
        keep=tuple(name for name in layout.keep if name not in absent),
        absent=tuple(name for name in layout.label_columns if name in absent),
        for_prediction=True,
    )


def _check_outside(output: Place, read: Sequence[str], like: PathLike | None) -> None:
    """Raises ValueError if a file that is read, or `like`, is in the output folder; `like` may be that folder."""

    def parts(place: Place) -> tuple[str, ...]:
        text = os.fspath(place)
        return Path(text.partition("?")[0] if is_remote(text) else os.path.realpath(local_path(text))).parts

    folder = parts(output)
    for place in [*read, *([like] if like is not None and parts(like) != folder else [])]:
        if parts(place)[: len(folder)] == folder:
            raise UserError(f"input {place} is in {output}, which would be overwritten; choose another output folder")


def _checked_splits(splits: dict[str, Split], layout: Layout, config: PrepareConfig) -> dict[str, Split]:
    asked = {"validation": config.validation_from or config.validation_fraction, "test": config.test_from}
    for name, size in splits.items():
        if not size.rows and asked.get(name):
            raise UserError(f"no sample is in the split {name}; check {name}_from or {name}_fraction = {asked[name]}")
        for label, positives in zip(layout.labels, size.positives or (), strict=False):
            if size.rows and positives in (0, size.total):
                logger.warning(
                    "label %r: all %s samples of the split %s are %s, so that its AUC cannot be measured",
                    label.column, f"{size.rows:,}", name, "positive" if positives else "not positive",
                )  # fmt: skip
        if size.rows and size.weight == 0:
            raise UserError(f"column {layout.weight!r}: all {size.rows:,} samples of the split {name} have weight 0")
    return splits


def _split_rule(
    engine: Engine,
    parts: Sequence[Partition],
    layout: Layout,
    config: PrepareConfig,
    on_bad_row: OnBadRow,
    report: Progress,
) -> SplitRule:
    test = DEFAULT_TEST_FRACTION[layout.name] if config.test_fraction is None else config.test_fraction
    samples = sum(part.samples for part in parts)
    validation = config.validation_share(samples)
    if config.split == "random":
        return SplitRule("random", config.seed, test, validation)
    if config.split == "order":
        if config.test_rows is not None:
            return by_order(samples, config.test_rows, config.validation_rows or 0)
        return by_order(samples, round(test * samples), round(validation * samples))
    if not layout.time:
        raise UserError('split = "time" needs the times of samples: name their column in the schema file, time = "..."')
    if config.test_from is not None:
        first_test = seconds_of("test_from", config.test_from)
        since = first_test if config.validation_from is None else seconds_of("validation_from", config.validation_from)
        return SplitRule("time", first_test=first_test, first_validation=since)
    ledger = BadRowLedger(on_bad_row, config.max_bad_rows)  # the pass that fits counts bad rows again
    return by_time(count_times(engine, parts, layout, ledger, report), test, validation)


def _by_files(files: Sequence[RawFile], groups: Sequence[Sequence[str]]) -> SplitRule | None:
    """Returns the rule for the files of each split; None without files of the test split."""
    if not groups[2]:
        return None
    samples, sizes = {file.source.path: file.samples for file in files}, []
    for name, paths in zip(("training", "validation", "test"), groups, strict=True):
        sizes.append(sum(samples[path] for path in paths))
        if paths and not sizes[-1]:
            raise UserError(f"the files of the {name} split have no samples: {', '.join(paths)}")
    return by_order(sum(sizes), sizes[2], sizes[1])


def _settings(config: PrepareConfig, layout: Layout, split: SplitRule) -> dict[str, object]:
    settings = {"prepare": asdict(config), "layout": asdict(layout)}
    if split.kind == "time":
        first = {"validation_from": split.first_validation, "test_from": split.first_test}
        settings["split"] = {key: iso(seconds) for key, seconds in first.items() if key[:-5] in split.names}
    return dict(json.loads(json.dumps(settings)))  # turns tuples into lists, as `Schema.load` returns them


@contextmanager
def output_folder(output: Place, *, overwrite: bool, shared: bool) -> Iterator[Path]:
    """Creates a local folder that becomes `output` at the end of the block, or is removed on an exception.

    For an object store it is a temporary folder (in $TMPDIR), uploaded with `schema.json` last, so that an interrupted
    upload leaves no data set. Other machines write to a `shared` folder, which must be local. Raises as `new_folder`
    does.
    """
    if not is_remote(output):
        with new_folder(local_path(output), overwrite=overwrite) as folder:
            yield folder
        return
    uri = os.fspath(output)
    if shared:
        raise UserError(f"output {uri}: the workers of a cluster need a folder that they share; copy it later")
    remote = RemoteFolder(uri)
    existing = remote.list()
    if existing and not overwrite:
        raise UserError(f"{uri} exists and is not empty; choose another folder or remove it (prepare: --overwrite)")
    if existing:
        check_replaceable(uri, existing)
    with tempfile.TemporaryDirectory(prefix="cowrec-prepare-") as parent:
        folder = Path(parent) / "data"
        folder.mkdir()
        with disk_errors(folder):
            yield folder
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        remote.remove(sorted(existing, key=lambda name: name != SCHEMA_FILE))
        remote.upload(folder, sorted(names, key=lambda name: name == SCHEMA_FILE))
