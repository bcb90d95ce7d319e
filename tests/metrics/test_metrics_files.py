"""Files for Prometheus and node_exporter: complete at any moment, readable, and removed at the right time."""

from __future__ import annotations

import json
import os
import re
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics.errors import MetricsError
from engine.metrics.export import files
from engine.metrics.export.files import Textfile
from engine.metrics.run_names import clean_name, default_name

from ..waiting import until, until_files


@pytest.mark.slow
@given(st.text(max_size=300))
def test_a_runs_name_is_fit_for_a_label_and_a_file(name):
    clean = clean_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}", clean)
    assert clean_name(clean) == clean


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "examples/digits.py", "--x"], "digits-7"),
        (["python", "-m", "pkg.train", "--x"], "pkg.train-7"),
        (["python", "/x/pkg/__main__.py"], "pkg-7"),
        (["./run.sh", "a b"], "run-7"),
        (["python", "-P", "-m", "engine.runner.rank", "/tmp/x"], "engine.run-7"),
        (["./ü ber"], "_ber-7"),
    ],
)
def test_a_run_is_named_for_its_script(command, name):
    assert default_name(command, 7) == name


def test_a_target_brings_no_label_that_a_series_has():
    [group] = json.loads(files.describe_endpoint("h:1", "r", 5))
    assert group["targets"] == ["h:1"]
    assert all(label.startswith("__meta_") for label in group["labels"])


def test_a_file_is_whole_at_any_moment_and_others_may_read_it(tmp_path):
    path, over, parts = tmp_path / "a.json", threading.Event(), set()
    old = os.umask(0o077)
    try:
        files.replace(path, b"a" * 100_000)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def read() -> None:
        while not over.is_set():
            content = path.read_bytes()
            parts.add((len(content), content[:1], content[-1:]))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        files.replace(path, (b"a", b"b")[turn % 2] * 100_000)
    over.set()
    reader.join(60)
    assert parts <= {(100_000, b"a", b"a"), (100_000, b"b", b"b")}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        files.replace(tmp_path / "taken", b"x")
    assert os.listdir(tmp_path) == ["taken"]


def test_only_the_runs_own_file_is_removed(tmp_path):
    path = tmp_path / "a.json"
    ours, theirs = (files.describe_endpoint("h:1", "train", pid) for pid in (1, 2))
    path.write_bytes(theirs)
    files.remove(path, ours)
    assert path.exists()
    files.remove(path, theirs)
    assert not path.exists()
    files.remove(path, theirs)


def test_a_directory_gets_a_file_for_each_run_and_is_made(tmp_path):
    assert files.choose_file(tmp_path / "sd" / "engine", "run-1") == tmp_path / "sd" / "engine" / "run-1.json"
    assert files.choose_file(tmp_path / "all.json", "run-1") == tmp_path / "all.json"
    (tmp_path / "d.json").mkdir()
    assert files.choose_file(tmp_path / "d.json", "run-1") == tmp_path / "d.json" / "run-1.json"


def test_places_that_cannot_be_say_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MetricsError, match=r"file_sd in .*: .*; name a directory or a"):
        files.choose_file(tmp_path / "file", "r")
    with pytest.raises(MetricsError, match=r"there is no directory .*: make it"):
        files.choose_file(tmp_path / "no" / "a.json", "r")
    with pytest.raises(MetricsError, match=r"there is no directory .*: make it"):
        Textfile(tmp_path / "no" / "a.prom", lambda: b"", print)
    with pytest.raises(MetricsError, match=r"which reads \*.prom: name it so"):
        Textfile(tmp_path / "a.txt", lambda: b"", print)


def test_a_textfile_is_written_again_and_again_and_once_more_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PERIOD", 0.01)
    texts = iter(range(1_000_000))
    it = Textfile(tmp_path / "a.prom", lambda: b"%d\n" % next(texts), print)
    it.start()
    until(lambda: it.path.exists() and int(it.path.read_text()) >= 3, "it is written again and again")
    before = int(it.path.read_text())
    it.stop()
    assert int(it.path.read_text()) > before
    assert os.listdir(tmp_path) == ["a.prom"]


def test_a_textfile_that_cannot_be_written_is_said_once_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PERIOD", 0.01)
    place = tmp_path / "d"
    place.mkdir()
    said, turns = [], []
    it = Textfile(place / "a.prom", lambda: turns.append(1) or b"x", said.append)
    place.rmdir()
    it.start()
    until(lambda: len(turns) >= 5, "it is tried again")
    assert said == [f"metrics: cannot write '{place}/a.prom': No such file or directory; goes on trying"]
    place.mkdir()
    until_files(place / "a.prom")
    it.stop()
