"""Reading of raw files of any format: a survey finds their segments, which are then read in any order."""

from collections.abc import Generator, Iterable

import pyarrow as pa

from .column_file import ColumnReader, look_at_columns, survey_columns
from .inputs import Block, FileFormat, InputFile, RawFile, Report, Segment, Source, open_file
from .text import BLOCK_BYTES, TextReader, look_at_text, survey_text

MAGIC: dict[bytes, FileFormat] = {b"PAR1": "parquet", b"ARROW1": "arrow"}
REFUSED = {
    b"FEA1": "a file of Feather's first version; write it with pyarrow.feather.write_feather(version=2)",
    b"\xff\xff\xff\xff": "an Arrow stream; write it as an Arrow file with pyarrow.ipc.new_file",
    b"PARE": "an encrypted Parquet file; decrypt it first",
    b"ORC": "an ORC file; convert it to Parquet",
    b"Obj\x01": "an Avro file; convert it to Parquet",
    b"SQLite format": "an SQLite database; export the table to Parquet or CSV",
    b"\x89HDF": "an HDF5 file; convert it to Parquet",
}


def look(file: InputFile) -> tuple[Source, pa.Schema | None]:
    """Reads the beginning of a file, text or, recognized by its first bytes, Parquet or Arrow IPC (Feather).

    Returns:
        What reading it takes; and the types of its columns, None for text.

    Raises:
        ValueError: a truncated or damaged file, or one of another format.
    """
    with open_file(file.path) as opened:
        first = opened.read(16)
    for magic, what in REFUSED.items():
        if first.startswith(magic):
            raise ValueError(f"input file {file.path} is {what}. Text, Parquet and Arrow files are read")
    for magic, kind in MAGIC.items():
        if first.startswith(magic):
            return look_at_columns(file, kind)
    return look_at_text(file), None


def survey(
    source: Source, report: Report, *, header: bool, segment_samples: int, block_bytes: int = BLOCK_BYTES
) -> RawFile:
    """Reads a file once to compute its checksum and find its segments.

    Args:
        source: the file, as `look` returned it.
        report: called with the number of bytes on disk just read.
        header: True if the first line of text is a header.
        segment_samples: largest number of samples of a segment; one ends at every multiple of it.
        block_bytes: largest size of a line, and approximate largest size of a segment.

    Raises:
        ValueError: a truncated or damaged file, a line longer than a block, or text without samples.
    """
    if source.format == "text":
        return survey_text(source, report, header=header, segment_samples=segment_samples, block_bytes=block_bytes)
    return survey_columns(source, report, segment_samples=segment_samples, block_bytes=block_bytes)


def blocks(segments: Iterable[Segment]) -> Generator[Block, None, None]:
    """Reads segments; a compressed file is decompressed again for every segment that is out of order.

    Raises:
        ValueError: a file is missing or has changed since the survey.
    """
    reader: TextReader | ColumnReader | None = None
    try:
        for segment in segments:
            if reader is None or reader.source != segment.source or segment.offset < reader.offset:
                if reader is not None:
                    reader.close()
                reader = _open(segment.source)
            data = reader.read(segment)
            yield Block(segment.source, data, segment.first_place, segment.first_sample, segment.samples)
    finally:
        if reader is not None:
            reader.close()


def _open(source: Source) -> TextReader | ColumnReader:
    try:
        return TextReader(source) if source.format == "text" else ColumnReader(source)
    except FileNotFoundError:
        raise ValueError(f"input file {source.path} was deleted after the survey; restore it and run again") from None
