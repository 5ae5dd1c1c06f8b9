"""The run's configuration: error messages, overrides, saving, derived values, id tables, and written templates."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from commands.command_line import Cowrec
from cowrec.data_pipeline import Schema, SparseField
from cowrec.sparse_opt import PRESETS
from cowrec.trainer.config.reference import OWN_DATA, presets, run_file
from cowrec.trainer.config.run import (
    RunConfig,
    config_from,
    few_steps_warning,
    load_config,
    save_config,
    with_defaults,
    with_values,
)
from cowrec.trainer.config.sections import TrainConfig, seconds
from cowrec.trainer.runs.run_dir import require_own
from cowrec.trainer.sharded_model.check_run import check_settings, check_tables
from cowrec.trainer.sharded_model.run_plan import Scaled, TableSpec, table_specs
from cowrec.trainer.training.trainer import train
from refusal import refused

CONFIGS = Path(__file__).resolve().parents[3] / "trainer" / "configs"


def load(folder: Path, toml: str, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(toml)
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[train]\nbatchsize = 5", "unknown key train.batchsize (= 5); did you mean train.batch_size?"),
        ("[trian]\nseed = 5", "unknown key trian (= {'seed': 5}); did you mean train?"),
        ("[train]\nbatch_size = -2", 'train.batch_size must be at least 0, or "auto", in Python -1, got -2'),
        ("[train]\nlearning_rate = 1", "did you mean optimizer.embedding_lr or optimizer.dense_lr?"),
        ("train = 5", "train = 5 must be a section"),
        ('[train]\nbatch_size = "8Q"', "train.batch_size must be a whole number such as 512, 64K or 1M (K is 1,024"),
        ("[train]\nbatch_size = true", "train.batch_size = True: input should be a valid integer"),
        ('[train]\ndevice = "tpu"', "train.device = 'tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("[optimizer]\ndense_lr = -1.0", "optimizer.dense_lr must be at least 0 and finite, got -1.0"),
        ('[optimizer]\nscaling = "sqrt_sta"', "optimizer.scaling = 'sqrt_sta' is not known; did you mean 'sqrt_star'?"),
        ("[optimizer]\nlr_decay = 0.0", "optimizer.lr_decay must be a word or above 0 and finite, got 0.0"),
        ('[optimizer]\nembedding = "sgd"\nweight_decay = 0.1',
         'optimizer.weight_decay = 0.1 needs optimizer.embedding = "adam", got \'sgd\'; use optimizer.l2'),
        ("[optimizer]\nwide_alpha = 0.0", "optimizer.wide_alpha must be above 0 and finite, got 0.0"),
        ('[clip]\nrule = "field"', "clip.rule = 'field' needs clip.max_norm"),
        ("[clip]\nr = 0.0", "clip.r must be > 0"),
        ('[clip]\nrule = "cow_clip"', "clip.rule = 'cow_clip' is not known; did you mean 'cowclip'?"),
        ("[prepare]\nmin_count = 0", "[prepare] min_count must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_messages_name_key_value_and_remedy(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(tmp_path, toml)
    assert str(tmp_path / "run.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    absent = r"none\.toml does not exist; cowrec config init --output .* writes one"
    refused(absent, load_config, tmp_path / "none.toml")
    refused("cannot be read: Is a directory", load_config, tmp_path)


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    for overrides, expected in (
        (["train.batch_size=63", "train.batch_size=64"], {"batch_size": 64}),
        (["train.batch_size=64K"], {"batch_size": 65536}),
        (["train.batch_size='1m'"], {"batch_size": 1 << 20}),
        (["train.device=cpu"], {"device": "cpu"}),
        (['train.trackers=["wandb"]'], {"trackers": ("wandb",)}),
        ([" train.cuda_graph = false "], {"cuda_graph": False}),
    ):
        config = load(tmp_path, "[train]\nbatch_size = 5\nseed = 7", *overrides, "optimizer.betas=[0.5, 1e-1]")
        assert config.train == replace(TrainConfig(batch_size=5, seed=7), **expected)
        assert config.optimizer.betas == (0.5, 0.1)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[optimizer]\nembedding = "fbgemm_cowclip"', "does its own clipping, not clip.rule = 'cowclip'; set"),
        ('[clip]\nrule = "global"\nmax_norm = 1.0', "'replay' computes absent rows later; set it to 'lazy'"),
        ("[train]\npatience = 1", "train.patience = 1 needs the best epoch's checkpoint; set checkpoint.keep_best"),
    ],
)
def test_sections_that_exclude_each_other_are_refused(tmp_path: Path, toml: str, message: str) -> None:
    refused(message, check_settings, load(tmp_path, toml))


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["train.seed=1", "train.epoch=5"], "--set train.epoch=5: unknown key train.epoch"),
        (["train.epochs=0", "train.seed=1"], "--set train.epochs=0: train.epochs must be at least 1"),
        (["clip.r=0"], "--set clip.r=0: "),
        (["optimizer.cross_l2=1", "optimizer.embedding=sgd", "optimizer.weight_decay=2"],
         "--set optimizer.embedding=sgd, --set optimizer.weight_decay=2: optimizer.weight_decay = 2.0 needs"),
        (["train.seed=1"], "{file}: model.name is"),
        *(([text], "--set takes section.key=value, got") for text in ("train.seed", "seed=5", "=5", "train.=5", "")),
    ],
)  # fmt: skip
def test_the_flag_that_causes_an_error_is_blamed(tmp_path: Path, overrides: list[str], blamed: str) -> None:
    toml = '[model]\nname = "none"' if "{file}" in blamed or "model" in overrides[0] else ""
    refused("^" + re.escape(blamed.format(file=tmp_path / "run.toml")), load, tmp_path, toml, *overrides)


@pytest.mark.parametrize("batch_size", [1024, 8192, 65536, 131072])
@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_example_files_agree_with_the_presets(name: str, batch_size: int) -> None:
    """Avazu's file is for batches between 2K and 128K, as in its comments; elsewhere the reference deviates."""
    config = load_config(CONFIGS / f"{name}.toml", [f"train.batch_size={batch_size}"])
    preset = PRESETS[name](batch_size)
    assert config.train.epochs == preset.epochs
    assert config.optimizer.warmup_epochs == preset.warmup_epochs
    assert config.optimizer.embedding_init_std == preset.embedding_init_std
    assert (config.optimizer.eps, config.optimizer.adam_epsilon) == (1e-7, "keras")
    if name == "criteo" or 2048 < batch_size < 131072:
        assert config.clip.build() == preset.clip
        derived, published = (vars(values) for values in (Scaled.of(config).hyperparameters, preset.hyperparameters))
        for key, value in published.items():
            assert derived[key] == pytest.approx(value, rel=1e-12), key


def test_default_rates_follow_the_samples(tmp_path: Path) -> None:
    """Adam's rate falls with the root of the samples, and without the mean decays; saved, kept when resumed; given
    rates stay.
    """

    def found(toml: str, samples: int, begun: RunConfig | None = None) -> tuple[float | None, Any]:
        config = with_values(load(tmp_path, toml), train={"average": False})
        optimizer = with_defaults(config, samples, begun, fixed=True).optimizer
        return optimizer.embedding_lr, optimizer.lr_decay

    for samples, lr in ((0, 2e-3), (2_000_000, 2e-3), (8_000_000, 1e-3), (200_000_000, 2e-4)):
        assert found("", samples) == (pytest.approx(lr), "linear" if samples else "none")
    assert [found("", samples)[1] for samples in (99_999, 100_000)] == ["none", "linear"]
    sizes = {size: found(f"[train]\nbatch_size = {size}", 1_600_000)[1] for size in (1 << 14, 1 << 15, 1 << 16)}
    assert sizes == {1 << 14: "linear", 1 << 15: "none", 1 << 16: "none"}  # 196, 98 and 50 steps
    given = {
        '[optimizer]\nembedding = "adagrad"': (2e-3, "none"),
        "[optimizer]\nembedding_lr = 3e-3": (3e-3, "none"),
        "[optimizer]\nembedding_lr = 0.0": (0.0, "none"),
        '[optimizer]\nembedding_lr = 3e-3\nlr_decay = "cosine"': (3e-3, "cosine"),
        '[optimizer]\nlr_decay = "none"': (pytest.approx(1e-3), "none"),
        '[train]\npatience = 1\n[checkpoint]\nkeep_best = "auc"': (pytest.approx(1e-3), "none"),
    }
    assert {toml: found(toml, 8_000_000) for toml in given} == given
    assert [with_defaults(RunConfig(), size).optimizer.lr_decay for size in (2_000_000, 2_000_001)] == [
        "none",
        "linear",
    ]
    begun = with_defaults(RunConfig(), 8_000_000)
    save_config(begun, tmp_path / "saved.toml")
    assert found("", 300, load_config(tmp_path / "saved.toml")) == (begun.optimizer.embedding_lr, "linear")
    (tmp_path / "run").mkdir()
    save_config(begun, tmp_path / "run" / "config.toml")
    longer = with_defaults(load(tmp_path, "[train]\nepochs = 3"), 8_000_000, begun)
    message = r'epochs = 2, but 3 is requested; .* another run with optimizer.lr_decay = "none"'
    refused(message, require_own, tmp_path / "run", longer)


def test_batch_size_and_l2_follow_the_samples(tmp_path: Path) -> None:
    """At least 100 steps an epoch; 20 / N for each epoch, without the mean one less; saved, and kept when the run is
    resumed.
    """
    for samples, size, l2 in ((0, 64, 1e-2), (12_799, 64, 40 / 12_799), (12_800, 128, 40 / 12_800), (10**9, 512, 1e-6)):
        found = with_defaults(RunConfig(), samples, fixed=True)
        assert (found.train.batch_size, found.optimizer.l2) == (size, pytest.approx(l2))
    for epochs, l2, without in ((1, 1e-4, 1e-6), (2, 2e-4, 1e-4), (3, 3e-4, 2e-4), (50, 4e-4, 2e-4)):
        for average, expected in (("true", l2), ("false", without)):
            found = with_defaults(load(tmp_path, f"[train]\nepochs = {epochs}\naverage = {average}"), 200_000)
            assert found.optimizer.l2 == pytest.approx(expected)
    stream = with_defaults(RunConfig(), 200_000, stream=True).optimizer
    assert (stream.l2, stream.lr_decay) == (1e-6, "none")
    own = with_defaults(load(tmp_path, "[optimizer]\nl2 = 0.0\n[train]\nbatch_size = 7"), 200_000)
    assert (own.train.batch_size, own.optimizer.l2) == (7, 0)
    save_config(with_defaults(RunConfig(), 200_000, fixed=True), tmp_path / "saved.toml")
    begun = load_config(tmp_path / "saved.toml")
    assert (begun.train.batch_size, begun.optimizer.l2) == (512, pytest.approx(2e-4))
    assert with_defaults(load(tmp_path, "[train]\nepochs = 9"), 300, begun).optimizer == begun.optimizer


def test_epochs_of_auto_end_by_the_validation_quality(tmp_path: Path) -> None:
    """The quality decides if there are validation samples, constant rates, and ids that keep their rows."""

    def found(toml: str, samples: int = 200_000, **more: Any) -> tuple[Any, ...]:
        config = with_defaults(load(tmp_path, toml), samples, **more)
        train, keep = config.train, config.checkpoint.keep_best
        return train.epochs, train.average, train.patience, train.validation_fraction, keep, config.optimizer.lr_decay

    assert found("") == (2, True, 0, 0, "none", "none")
    held_out, by_quality = "[train]\nvalidation_fraction = 0.2\n", (50, True, 1, 0.2, "logloss", "none")
    assert found(held_out) == found(held_out + 'epochs = "auto"') == found(held_out + "epochs = -1") == by_quality
    assert found("", validated=True) == (50, True, 1, 0, "logloss", "none")
    assert found("", 2_000_000, validated=True)[0] == 50
    of_sizes = [f"[train]\nbatch_size = {size}" for size in (1_024, 2_048, 4_096, 65_536)]  # 100, 50, 25 and 2 steps
    assert [found(toml, 102_400, validated=True)[2] for toml in of_sizes] == [1, 2, 4, 4]
    assert found("", 0, validated=True)[2] == 4  # refused later, with a message
    assert found("", 2_000_001, validated=True)[:3] == (2, False, 0)
    assert found("[train]\nepochs = 2", validated=True)[:3] == (2, True, 0)
    assert found(held_out, fixed=True) == (2, True, 0, 0.2, "none", "none")
    assert found(held_out, stream=True)[:5] == (2, None, 0, 0.2, "none")
    for toml in (
        '[optimizer]\nlr_decay = "cosine"', '[id_table]\nkind = "collisionless"', '[sharding]\nmemory = "uvm"'
    ):  # fmt: skip
        assert found(toml, validated=True)[:3] == (2, False, 0), toml
    assert found("[train]\naverage = false", validated=True) == (2, False, 0, 0, "none", "linear")
    own = "[train]\npatience = 3\n[checkpoint]\nkeep_best = 'auc'"
    assert found(own, validated=True) == (50, True, 3, 0, "auc", "none")
    defaults = with_defaults(RunConfig(), 200_000, validated=True)
    assert defaults.optimizer.l2 == pytest.approx(80 / 200_000)
    save_config(defaults, tmp_path / "saved.toml")
    assert with_defaults(RunConfig(), 300, load_config(tmp_path / "saved.toml")) == defaults


@pytest.mark.parametrize("samples", [100, 12_800, 51_200, 102_399, 102_401, 300_000, 7_000_000, 50_000_000])
def test_a_batch_size_of_auto_is_the_largest_with_200_steps_in_an_epoch(tmp_path: Path, samples: int) -> None:
    config = load(tmp_path, '[train]\nbatch_size = "auto"\nvalidation_fraction = 0.5')
    by_default = with_defaults(load(tmp_path, "[train]\nvalidation_fraction = 0.5"), 2 * samples).train.batch_size
    enough = [1 << power for power in range(17) if math.ceil(samples / (1 << power)) >= 200]
    assert with_defaults(config, 2 * samples).train.batch_size == max([*enough, by_default])


@pytest.mark.parametrize(("samples", "epochs"), [(100, 2), (70_001, 1), (300_000, 2), (300_000, 3), (7_000_000, 2)])
def test_the_warning_of_few_steps_names_a_batch_size_and_epochs_that_suffice(
    tmp_path: Path, samples: int, epochs: int
) -> None:
    def warning(size: int, epochs: int) -> str:
        given = load(tmp_path, f"[train]\nbatch_size = {size}\nepochs = {epochs}")
        return few_steps_warning(given, samples, math.ceil(samples / size) * epochs)

    text = warning(1 << 20, epochs)
    smaller, more = map(
        int, re.findall(r"set train.batch_size to (\d+), or train.epochs to (\d+) together with", text)[0]
    )
    cases = ((2 * smaller, epochs), (smaller, epochs), (1 << 20, more - 1), (1 << 20, more))
    assert [bool(warning(*case)) for case in cases] == [True, False, True, False]


def test_no_batch_size_is_named_where_none_leaves_200_steps(tmp_path: Path) -> None:
    text = few_steps_warning(load(tmp_path, "[train]\nbatch_size = 1"), 50, 100)
    assert re.search(r"too few for train.batch_size = 1 to reach what more steps would; set train.epochs to 4", text)


def schema(**fields: dict) -> Schema:
    return Schema("tabular", (), tuple(SparseField(name, 10, **given) for name, given in fields.items()), {})


def tables_of(fields: Schema, config: RunConfig) -> list[TableSpec]:
    specs = table_specs(fields, config)
    check_tables(config, fields, specs)
    return specs


def test_a_table_is_a_field_unless_fields_share_it() -> None:
    times = {"": 0, "90s": 90, "5m": 300, "2h": 7200, "30d": 2592000}
    assert {text: seconds(text, "key") for text in times} == times
    shared = {"people": {"fields": ["user", "author"], "capacity": 50}, "day": {"kind": "rows"}}
    ids = {"kind": "collisionless", "capacity": 100, "tables": shared}
    config = config_from({"model": {"embedding_dims": {"user": 4, "author": 4}}, "id_table": ids})
    specs = tables_of(schema(user={}, day={}, item={}, author={}), config)
    found = {spec.name: ([field.name for field in spec.fields], spec.ids.kind, spec.ids.capacity) for spec in specs}
    assert found == {
        "people": (["user", "author"], "collisionless", 50),
        "day": (["day"], "rows", 100),
        "item": (["item"], "collisionless", 100),
    }
    assert [spec.num_embeddings >= 2 + spec.ids.capacity for spec in specs] == [True, False, True]
    assert next(spec for spec in specs if spec.name == "day").num_embeddings == 10
    assert [spec.embedding_dim for spec in specs] == [4, 10, 10]


IDS = {"kind": "collisionless"}
WRONG_TIME = 'id_table.expire_after must be a whole number and a unit .* such as "30d"'
WRONG_TABLES: list[tuple[dict[str, Any], str]] = [
    *(({"expire_after": text} | IDS, WRONG_TIME) for text in ("30", "0d")),
    ({"capacity": 0}, "id_table.capacity must be at least 1, got 0"),
    ({"kind": "collisionless", "threshold": 5}, 'threshold = 5 has no meaning for id_table.admission = "none"'),
    (
        {"kind": "rows", "capacity": 10},
        'capacity = 10 has no meaning for id_table.kind = "rows"; set it to "hash" or "collisionless"',
    ),
    ({"kind": "rows", "tables": {"day": {"capacity": 10}}}, "tables.day.capacity = 10 has no meaning"),
    ({"kind": "rows", "tables": {"day": {"admission": "count"}}}, "tables.day.admission = 'count' has no meaning"),
    ({"tables": {"dya": {"capacity": 4}}}, "names 'dya', which is not a sparse field; did you mean"),
    ({"kind": "rows", "tables": {"both": {"fields": ["day", "user"]}}}, "row numbers mean different ids"),
    ({"tables": {"a": {"fields": ["day", "tags"]}}}, "one is pooled by sum, the other by mean"),
]


@pytest.mark.parametrize(("section", "message"), WRONG_TABLES)
def test_tables_that_are_invalid_or_do_not_fit_the_data_are_refused(section: dict[str, Any], message: str) -> None:
    fields = schema(day={}, user={}, item={}, tags={"kind": "multi", "pooling": "mean"})
    given = {"id_table": {"kind": "hash"} | section, "model": {"embedding_dims": {"item": 3}}}
    refused(message, lambda: tables_of(fields, config_from(given)))


def test_names_and_raw_ids_that_have_no_table_are_refused() -> None:
    unknown = config_from({"model": {"embedding_dims": {"usr": 3}}})
    refused(r"model.embedding_dims names 'usr', .* did you mean 'user'?", tables_of, schema(user={}), unknown)
    raw = Schema("tabular", (), (SparseField("user", 0, encoding="raw"),), {})
    refused("field 'user' has raw ids", tables_of, raw, config_from({}))


def test_every_shipped_configuration_can_be_had() -> None:
    files = [file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.toml")]
    shipped = {name for name in files if not name.endswith("_schema")}
    assert set(presets()) == shipped | {OWN_DATA}


@pytest.mark.parametrize("preset", presets())
def test_a_written_file_has_the_values_of_its_preset(preset: str, tmp_path: Path) -> None:
    expected = RunConfig() if preset == OWN_DATA else load_config(CONFIGS / f"{preset}.toml")
    assert load(tmp_path, run_file(preset)) == expected


def test_keys_can_be_uncommented(tmp_path: Path) -> None:
    keys = re.compile(r"^# (\w+ = .+)$", re.MULTILINE)
    assert load(tmp_path, keys.sub(r"\1", run_file())) == RunConfig()
    assert len(keys.findall(run_file())) > 80


def test_the_command_writes_new_files_only(cowrec: Cowrec, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert cowrec("config", "init", "--for", "avazu", "--output", file)[0] == 0
    assert file.read_text() == run_file("avazu")
    assert f"{file} exists; choose another --output" in cowrec("config", "init", "--output", file)[2]
    assert cowrec("config", "init") == (0, run_file(), "")
    assert "--for 'critoe' is not known; did you mean 'criteo'?" in cowrec("config", "init", "--for", "critoe")[2]


def test_values_made_in_python_are_checked(tmp_path: Path) -> None:
    config = RunConfig()
    changed = replace(config, train=replace(config.train, batch_size=8192))
    save_config(changed, tmp_path / "run.toml")
    assert load_config(tmp_path / "run.toml") == changed
    size = 'train.batch_size must be at least 0, or "auto", in Python -1, got .8K.'
    refused(size, replace, config.train, batch_size="8K")
    kind = r"RunConfig.train must be a TrainConfig, got {.*dataclasses.replace change values"
    refused(kind, RunConfig, train={"x": 1})
    wrong: Any = replace(config, train=replace(config.train, eval_batch_size=5.5))
    refused("train.eval_batch_size = 5.5: ", train, wrong, tmp_path, tmp_path / "run")
    refused("must be a RunConfig, got 'run.toml'; load_", train, "run.toml", tmp_path, tmp_path / "run")


def test_every_count_takes_a_unit(tmp_path: Path) -> None:
    """Whole numbers of all sections, in the file and by --set: as the number, which some refuse."""
    sections = [(section, get_type_hints(kind)) for section, kind in get_type_hints(RunConfig).items()]
    keys = [(section, key) for section, hints in sections for key in hints if hints[key] in (int, int | None)]
    assert len(keys) > 25

    def outcome(toml: str, *overrides: str) -> RunConfig | str:
        try:
            return load(tmp_path, toml, *overrides)
        except ValueError as error:
            return str(error).replace("100K", "102400")

    for section, key in keys:
        of_file, of_flag = (outcome(f"[{section}]\n{key} = 102400"), outcome("", f"{section}.{key}=102400"))
        assert outcome(f'[{section}]\n{key} = "100K"') == of_file
        assert outcome("", f"{section}.{key}=100K") == of_flag
