"""Memory of a resident split: bytes needed and bytes available."""

import torch

from cowrec.data_pipeline.dataset.schema import Schema


def resident_bytes(schema: Schema, split: str = "train") -> int:
    """Returns the bytes that `Reader(resident=True)` stores for a split.

    4 for each label, sample weight, true logit, dense value and id (8 if ids are raw), 4 for each weight of an id, 8
    for each time and list offset.
    """
    size = schema.split(split)
    id_bytes = 8 if schema.has_raw_ids else 4
    numbers = len(schema.labels) + schema.sample_weights + schema.true_logits + len(schema.dense)
    total = size.rows * (4 * numbers + 8 * schema.timed)
    for field in schema.sparse:
        if field.kind == "categorical":
            total += id_bytes * size.rows
        else:
            value_bytes = id_bytes + (4 if field.kind == "weighted" else 0)
            total += 8 * (size.rows + 1) + value_bytes * size.values.get(field.name, 0)
    return total


def available_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of the GPU's or the machine's memory; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_fits(schema: Schema, split: str, device: torch.device) -> None:
    """Raises ValueError with the bytes needed and available if a split does not fit on `device`."""
    needed, available = resident_bytes(schema, split), available_bytes(device)
    if available is not None and needed > available:
        raise ValueError(
            f"resident: the {split} split needs {needed:,} bytes on {device}, {available:,} are available; "
            "stream it instead (resident = false)"
        )
