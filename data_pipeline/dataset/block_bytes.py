"""A block of samples as bytes, to be sent to a process that knows its schema and its number of samples."""

from math import prod

import torch

from .sample_block import Bags, SampleBlock, id_dtype
from .schema import Schema

_ALIGNMENT = 8
"""Each column begins at a multiple of it, so that its bytes can be viewed as any type."""


def packed(block: SampleBlock) -> torch.Tensor:
    """Returns the bytes of a block on the CPU: uint8 [n]."""
    columns = [block.dense, block.label, block.ids, block.time, block.true_logit, block.weight]
    for bags in block.bags.values():
        columns += [bags.offsets, bags.values, bags.weights]
    pieces = []
    for column in columns:
        if column is not None:
            content = column.contiguous().view(-1).view(torch.uint8)
            pieces += [content, content.new_zeros(-len(content) % _ALIGNMENT)]
    return torch.cat(pieces)


def unpacked(content: torch.Tensor, schema: Schema, samples: int) -> SampleBlock:
    """Returns the block that :func:`packed` made bytes of, uint8 [n]; it shares their memory."""
    taken = 0

    def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        nonlocal taken
        start, size = taken, prod(shape) * dtype.itemsize
        taken += size + -size % _ALIGNMENT
        return content[start : start + size].view(dtype).view(shape)

    tasks = (len(schema.labels),) if len(schema.labels) > 1 else ()
    lists = [field for field in schema.sparse if field.kind != "categorical"]
    dense = column(torch.float32, samples, len(schema.dense))
    label = column(torch.float32, samples, *tasks)
    ids = column(id_dtype(schema), samples, len(schema.sparse) - len(lists))
    time = column(torch.int64, samples) if schema.timed else None
    true_logit = column(torch.float32, samples) if schema.true_logits else None
    weight = column(torch.float32, samples) if schema.sample_weights else None
    bags = {}
    for field in lists:
        offsets = column(torch.int64, samples + 1)
        values = column(id_dtype(schema), int(offsets[-1]))
        bags[field.name] = Bags(
            values, offsets, column(torch.float32, len(values)) if field.kind == "weighted" else None
        )
    return SampleBlock(dense, label, ids, bags, time, true_logit, weight)
