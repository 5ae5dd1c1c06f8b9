"""Samples of requests, of which some share fields, such as the candidates of one user; and their encoding.

Shared fields are encoded once for a request. R samples.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.dataset.sample_block import SampleBlock

Fields = Mapping[str, Any]
NOTHING: Fields = {}


class RequestSample(NamedTuple):
    """A sample: its own fields and those that it shares with the others of its request, which have this very object."""

    fields: Fields
    shared: Fields = NOTHING


class SharedProblem(str):
    """What is wrong with the shared fields of a request, and so with each of its samples."""


def parts_of(request: Any) -> tuple[Any, list[Any], bool]:
    """Shared fields and samples of a request's JSON, neither checked, and whether the samples are given as a list.

    Without shared fields they are NOTHING.
    """
    if isinstance(request, dict) and isinstance(request.get("samples"), list) and "shared" in request:
        return request["shared"], request["samples"], True
    if isinstance(request, list):
        return NOTHING, request, True
    return NOTHING, [request], False


def encode_samples(codec: SampleCodec, samples: Sequence[RequestSample]) -> tuple[SampleBlock | None, list[str]]:
    """Encodes samples as if each had all fields; returns the good ones, None if there is none, and each one's problem.

    The problem of a good sample is empty.
    """
    problems: list[str] = []
    blocks = []
    for _, group in itertools.groupby(samples, lambda sample: id(sample.shared)):
        block, found = _encode(codec, list(group))
        problems += found
        if block is not None and len(block):
            blocks.append(block)
    return (blocks[0] if len(blocks) == 1 else SampleBlock.concat(blocks) if blocks else None), problems


def _encode(codec: SampleCodec, samples: list[RequestSample]) -> tuple[SampleBlock | None, list[str]]:
    """Encodes samples that share the same fields."""
    shared = {name: value for name, value in samples[0].shared.items() if name in codec.columns}
    own = {*codec.columns}.difference(shared)
    problems = [
        ""
        if sample.fields.keys() >= own and sample.fields.keys().isdisjoint(shared)
        else _presence(sample.fields, shared, codec.columns)
        for sample in samples
    ]
    complete = [index for index, problem in enumerate(problems) if not problem]
    absent = dict.fromkeys(shared)
    given = [{**absent, **samples[index].fields} if shared else samples[index].fields for index in complete]
    block, bad = codec.encode_request(given)
    for each in bad:
        problems[complete[each.index]] = _with_remedy(each.reason)
    if not shared:
        return block, problems
    once, wrong = codec.encode_request([{**dict.fromkeys(codec.columns), **shared}])
    if wrong:
        return None, [SharedProblem(f"shared: {_with_remedy(wrong[0].reason)}")] * len(samples)
    return _with_shared(codec, block, once, shared), problems


def _with_shared(codec: SampleCodec, block: SampleBlock, once: SampleBlock, shared: Fields) -> SampleBlock:
    """The samples with the shared fields of the one sample ``once``."""
    schema, columns = codec.schema, codec.source_columns
    dense, ids, bags = block.dense.clone(), block.ids.clone(), dict(block.bags)
    for index, number in enumerate(schema.dense):
        if columns[number.source or number.name] in shared:
            dense[:, index] = once.dense[0, index]
    single = 0
    for field in schema.sparse:
        is_shared = columns[field.source or field.name] in shared
        if field.kind != "categorical":
            if is_shared:
                bags[field.name] = once.bags[field.name].take(torch.zeros(len(block), dtype=torch.int64))
            continue
        if is_shared:
            ids[:, single] = once.ids[0, single]
        single += 1
    return SampleBlock(dense, block.label, ids, bags)


def _presence(fields: Fields, shared: Fields, columns: Sequence[str]) -> str:
    """What is wrong with the names of a sample's fields; empty if nothing is."""
    for name in columns:
        if name in shared:
            if name in fields:
                return f"column {name} is in shared too; give it once"
        elif name not in fields:
            return f"column {name} is missing; use null for a missing value"
    return ""


def _with_remedy(reason: str) -> str:
    return f"{reason}; correct the value, or use null if it is missing"
