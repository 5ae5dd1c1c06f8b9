"""Data sets are written atomically: full disks, killed processes, folders in use."""

import os
import resource

import pytest

from cowrec.data_pipeline import Schema, SynthesizeConfig, synthesize
from refusal import refused

SMALL = SynthesizeConfig(rows=3000, test_rows=500, vocabulary_scale=1e-4)


def test_a_file_above_the_size_limit_is_reported_and_nothing_remains(tmp_path):
    """Needs no right to mount: limits file sizes meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="a file is too large for"):
            synthesize(tmp_path / "out", SynthesizeConfig(rows=20_000, vocabulary_scale=1e-4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_only_a_data_set_is_overwritten_and_only_when_asked(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    synthesize(out, SMALL)
    refused("exists and is not empty; choose another folder", synthesize, out, SMALL)
    synthesize(out, SynthesizeConfig(rows=100, test_rows=100, vocabulary_scale=1e-4), overwrite=True)
    assert Schema.load(out).splits["train"].rows == 100
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    refused("is not a prepared data set, so it is not overwritten", synthesize, mine, SMALL, overwrite=True)
    (out / "train" / "notes.txt").touch()
    (out / "raw.csv").touch()
    refused("2 files in it are not a data set's: raw.csv, train/notes.txt", synthesize, out, SMALL, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]
    assert sorted(os.listdir(out)) == ["raw.csv", "schema.json", "test", "train"]


def test_a_link_is_written_through_and_a_mount_point_is_refused(tmp_path):
    link, large = tmp_path / "out", tmp_path / "large disk" / "out"
    link.symlink_to(large)
    for rows in (100, 200):
        synthesize(link, SynthesizeConfig(rows=rows, test_rows=100, vocabulary_scale=1e-4), overwrite=True)
        assert link.readlink() == large
        assert Schema.load(large).splits["train"].rows == rows
    assert os.listdir(large.parent) == ["out"]
    refused("/proc is a mount point, which cannot be replaced; name a folder in it: /proc/data", synthesize, "/proc")
