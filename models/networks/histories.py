"""Which sequences of a front are histories, for the networks that read them."""

from cowrec.models.front import Front


def targets_of(front: Front, name: str) -> dict[str, str]:
    """The sequences that share a field's table, and that field. Raises ValueError, for a network, if there are none."""
    targets = {field: each.shares for field, each in front.sequences.items() if each.shares}
    if not targets:
        raise ValueError(
            f'model.name = "{name}" needs a field of kind sequence that shares the table of a categorical field; add'
            " one to the schema file, with shares, or choose a network for fields without order"
        )
    return targets


def require_heads(front: Front, heads: int) -> None:
    """Raises ValueError unless the embeddings can be split into so many heads."""
    if front.embedding_dim % heads:
        raise ValueError(
            f"model.options.heads = {heads} must divide model.embedding_dim = {front.embedding_dim}; change one"
        )
