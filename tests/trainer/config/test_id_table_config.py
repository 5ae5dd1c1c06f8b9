"""`[id_table]`: the settings of each table, and errors."""

import pytest

from cowrec.data_pipeline import Schema, SparseField
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.config.run import config_from
from cowrec.trainer.sharded_model.tables import table_specs


def test_times() -> None:
    texts = {"": 0, "90s": 90, "5m": 300, "2h": 7200, "30d": 2592000}
    assert {text: seconds(text, "key") for text in texts} == texts


@pytest.mark.parametrize("text", ["30", "d", "-3d", "1.5h", "0d", "3 months"])
def test_invalid_times(text: str) -> None:
    with pytest.raises(ValueError, match=r'id_table.expire_after must be a whole number and a unit .* such as "30d"'):
        config_from({"id_table": {"kind": "collisionless", "expire_after": text}})


def schema(**fields: dict) -> Schema:
    return Schema("tabular", (), tuple(SparseField(name, 10, **given) for name, given in fields.items()), {})


def test_a_table_is_a_field_unless_fields_share_it() -> None:
    config = config_from(
        {
            "model": {"embedding_dims": {"user": 4, "author": 4}},
            "id_table": {
                "kind": "collisionless",
                "capacity": 100,
                "tables": {"people": {"fields": ["user", "author"], "capacity": 50}, "day": {"kind": "rows"}},
            },
        }
    )
    specs = table_specs(schema(user={}, day={}, item={}, author={}), config)
    found = {spec.name: ([field.name for field in spec.fields], spec.ids.kind, spec.ids.capacity) for spec in specs}
    assert found == {
        "people": (["user", "author"], "collisionless", 50),
        "day": (["day"], "rows", 100),
        "item": (["item"], "collisionless", 100),
    }
    assert [spec.num_embeddings >= 2 + spec.ids.capacity for spec in specs] == [True, False, True]
    assert next(spec for spec in specs if spec.name == "day").num_embeddings == 10
    assert [spec.embedding_dim for spec in specs] == [4, 10, 10]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"capacity": 0}, r"id_table.capacity must be at least 1, got 0"),
        ({"kind": "hash", "expire_after": "3d"}, r"id_table.expire_after = '3d' has no meaning for .*\"hash\""),
        ({"tables": {"day": {"admission": "count"}}}, r"id_table.tables.day.admission = 'count' has no meaning"),
        ({"tables": {"day": {"capacty": 4}}}, r"id_table.tables.day.capacty"),
    ],
)
def test_invalid_sections_are_refused(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from({"id_table": section})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"kind": "hash", "tables": {"dya": {"capacity": 4}}},
            r"names 'dya', which is not a sparse field; did you mean",
        ),
        ({"tables": {"both": {"fields": ["day", "user"]}}}, r"row numbers mean different ids"),
        (
            {"kind": "hash", "tables": {"a": {"fields": ["day"]}, "b": {"fields": ["day"]}}},
            r"id_table.tables.b and id_table.tables.a both name field 'day'",
        ),
        ({"kind": "hash", "tables": {"a": {"fields": ["day", "tags"]}}}, r"one is pooled by sum, the other by mean"),
        (
            {"kind": "hash", "tables": {"both": {"fields": ["day", "item"]}}},
            r"'day' and 'item' share table 'both', but their embeddings are 10 and 3 wide",
        ),
    ],
)
def test_sections_that_do_not_fit_the_data_are_refused(section: dict, message: str) -> None:
    fields = schema(day={}, user={}, item={}, tags={"kind": "multi", "pooling": "mean"})
    with pytest.raises(ValueError, match=message):
        table_specs(fields, config_from({"id_table": section, "model": {"embedding_dims": {"item": 3}}}))


def test_names_and_raw_ids_that_have_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.embedding_dims names 'usr', .* did you mean 'user'?"):
        table_specs(schema(user={}), config_from({"model": {"embedding_dims": {"usr": 3}}}))
    raw = Schema("tabular", (), (SparseField("user", 0, encoding="raw"),), {})
    with pytest.raises(ValueError, match="field 'user' has raw ids"):
        table_specs(raw, config_from({}))
