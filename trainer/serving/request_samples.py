"""Samples of requests, of which some share fields, such as the candidates of one user; and their encoding.

Shared fields are encoded once for a request. R samples.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import torch

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.raw.json_lines import abbreviated

Fields = Mapping[str, Any]
NOTHING: Fields = {}

_LONG_INTEGER = re.compile(rb"[\[,:\s](?:\d{20}|-\d{19})")
"""Not within quotes; shorter ones have 64 bits at most."""
_MANY_DIGITS = b" " + b"0" * 19
_AS_ZEROS = bytes(48 if 48 <= byte < 58 else 46 if byte == 46 else 32 for byte in range(256))
"""Translates digits to zeros, and all but points to spaces. A search for :data:`_MANY_DIGITS` then finds what may be a
long integer ten times as fast as the pattern does; the digits of a fraction follow a point."""
MOST_SHARED_IDS = 1 << 21
"""Ids of all samples of a request that are in its shared fields: they are given once, but looked up for each sample."""


class RequestSample(NamedTuple):
    """A sample: its own fields and those that it shares with the others of its request, which have this very object."""

    fields: Fields
    shared: Fields = NOTHING


class SharedProblem(str):
    """What is wrong with the shared fields of a request, and so with each of its samples."""

    status, reason = 400, "bad_sample"


class TooManyIds(SharedProblem):
    """A problem of the samples' number too."""

    status, reason = 413, "too_many_ids"


class Rejected(Exception):
    """Raised for a request that is answered with an error.

    Attributes:
        status: HTTP status, 4xx or 503.
        reason: label for the metrics.
        headers: of the response.
    """

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] = NOTHING) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers


def samples_of(body: bytes, limit: int) -> tuple[list[RequestSample], bool]:
    """The samples of a request, and whether they were given as a list.

    Raises:
        Rejected: the body is not JSON, has more than ``limit`` samples, or something else in place of a sample.
    """
    try:
        parsed = orjson.loads(body)
        # orjson reads a long integer as a float, and so as another id.
        if _MANY_DIGITS in body.translate(_AS_ZEROS) and _LONG_INTEGER.search(body):
            parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Rejected(400, "bad_json", f"the body is not JSON: {error}") from None
    shared, many = NOTHING, isinstance(parsed, list)
    if isinstance(parsed, dict) and isinstance(parsed.get("samples"), list) and "shared" in parsed:
        shared, parsed, many = parsed["shared"], parsed["samples"], True
        _check("shared", shared)
    found = parsed if many else [parsed]
    if len(found) > limit:
        message = f"a request has {len(found):,} samples, the limit is {limit:,}; split it into several requests"
        raise Rejected(413, "too_many_samples", message)
    if {*map(type, found)} - {dict}:
        for index, sample in enumerate(found):
            _check(f"sample {index}", sample)
    return [*map(RequestSample, found, itertools.repeat(shared))], many


def encode_samples(codec: SampleCodec, samples: Sequence[RequestSample]) -> tuple[SampleBlock | None, list[str]]:
    """Encodes samples as if each had all fields.

    Returns:
        The good samples, None if there is none, and the problem of each sample, empty for a good one.
    """
    problems: list[str] = []
    blocks = []
    for _, group in itertools.groupby(samples, lambda sample: id(sample.shared)):
        block, found = _encode(codec, list(group))
        problems += found
        if block is not None and len(block):
            blocks.append(block)
    return (blocks[0] if len(blocks) == 1 else SampleBlock.concat(blocks) if blocks else None), problems


def _check(name: str, fields: Any) -> None:
    if not isinstance(fields, dict):
        message = f"{name} must be a JSON object of fields and their values, got {abbreviated(fields)}"
        raise Rejected(400, "bad_sample", message)


def _encode(codec: SampleCodec, samples: list[RequestSample]) -> tuple[SampleBlock | None, list[str]]:
    shared = {name: value for name, value in samples[0].shared.items() if name in codec.columns}
    own = {*codec.columns}.difference(shared)
    for columns in codec.together:
        if len(columns.intersection(shared)) == 1 < len(columns):
            names = " and ".join(sorted(columns))
            return None, [SharedProblem(f"shared: {names} go along with each other; share both or none")] * len(samples)
    fields = [sample.fields for sample in samples]
    problems = [""] * len(fields)
    for index, given in enumerate(fields):
        if not given.keys() >= own or (shared and not given.keys().isdisjoint(shared)):
            problems[index] = _presence(given, shared, codec.columns)
    complete = [index for index, problem in enumerate(problems) if not problem]
    absent = dict.fromkeys(shared)
    block, bad = codec.encode_request([{**absent, **fields[index]} if shared else fields[index] for index in complete])
    for row in bad:
        problems[complete[row.index]] = _with_remedy(row.reason)
    if not shared:
        return block, problems
    once, wrong = codec.encode_request([{**dict.fromkeys(codec.columns), **shared}])
    if wrong:
        return None, [SharedProblem(f"shared: {_with_remedy(wrong[0].reason)}")] * len(samples)
    ids = len(samples) * sum(len(bags.values) for bags in once.bags.values())
    if ids > MOST_SHARED_IDS:
        message = (
            f"{len(samples):,} samples with the shared fields have {ids:,} ids, the limit is {MOST_SHARED_IDS:,}; send"
            " fewer samples in a request, or shorter lists"
        )
        return None, [TooManyIds(message)] * len(samples)
    return _with_shared(codec, block, once, shared), problems


def _with_shared(codec: SampleCodec, block: SampleBlock, once: SampleBlock, shared: Fields) -> SampleBlock:
    """The samples with the shared fields of the one sample ``once``."""
    schema, singles, columns = codec.schema, codec.schema.singles, codec.source_columns
    dense, ids, bags = block.dense.clone(), block.ids.clone(), dict(block.bags)
    for index, number in enumerate(schema.dense):
        if columns[number.source or number.name] in shared:
            dense[:, index] = once.dense[0, index]
    for field in schema.sparse:
        if columns[field.source or field.name] not in shared:
            continue
        if field.is_list:
            bags[field.name] = once.bags[field.name].take(torch.zeros(len(block), dtype=torch.int64))
        else:
            single = singles.index(field.name)
            ids[:, single] = once.ids[0, single]
    return SampleBlock(dense, block.label, ids, bags)


def _presence(fields: Fields, shared: Fields, columns: Sequence[str]) -> str:
    """What is wrong with the names of a sample's fields; empty if nothing is."""
    twice = [name for name in columns if name in shared and name in fields]
    missing = [name for name in columns if name not in shared and name not in fields]
    if twice:
        return f"{_columns(twice)} in shared too; give each once"
    return f"{_columns(missing)} missing; use null for a missing value" if missing else ""


def _columns(names: Sequence[str]) -> str:
    return f"column {names[0]} is" if len(names) == 1 else f"columns {', '.join(names)} are"


def _with_remedy(reason: str) -> str:
    return f"{reason}; correct the value, or use null if it is missing"
