"""An export never deletes or overwrites a file that no export wrote."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from barnraise.errors import StateError
from barnraise.training.model_files import output_folder
from barnraise.training.model_files.output_folder import ExportTarget


def contents(folder: Path) -> dict[str, str]:
    """Return path → text of every file below a folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Exporter:
    """Exports into one folder, with records of its own."""

    def __init__(self, root: Path):
        self.root = root / "place"
        self.folder = self.root / "model"
        self.records = root / "records"

    def write(self, **files: str) -> None:
        target = ExportTarget.choose(self.folder, self.records)
        with target.replace(100) as new:
            for name, text in files.items():
                (new / name).write_text(text)


@pytest.fixture
def exporter(tmp_path) -> Exporter:
    return Exporter(tmp_path)


def test_export_fills_a_new_an_empty_and_its_own_folder(exporter):
    exporter.write(a="1", b="2")
    assert contents(exporter.root) == {"model/a": "1", "model/b": "2"}
    exporter.write(b="3")
    assert contents(exporter.root) == {"model/b": "3"}, "its own files are replaced, none is left"
    (exporter.folder / "b").unlink()
    exporter.write(c="")
    assert contents(exporter.root) == {"model/c": ""}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "notes.txt", ".git/config", "model-00001-of-00002.safetensors"]
)
def test_folder_with_a_foreign_file_is_refused_untouched(name, exporter):
    exporter.write(a="1")
    foreign = exporter.folder / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    before = contents(exporter.root)
    with pytest.raises(StateError, match=name.split("/")[0]):
        exporter.write(a="2")
    assert contents(exporter.root) == before


def test_exported_file_that_was_edited_since_is_foreign(exporter):
    exporter.write(readme="as written")
    (exporter.folder / "readme").write_text("as edited!")
    with pytest.raises(StateError, match="readme"):
        exporter.write(readme="2")
    assert contents(exporter.root) == {"model/readme": "as edited!"}


def test_copy_of_an_export_at_another_place_is_foreign(exporter, tmp_path):
    exporter.write(a="1")
    exporter.folder.rename(exporter.root / "moved")
    exporter.folder = exporter.root / "moved"
    with pytest.raises(StateError, match="no export of this machine wrote"):
        exporter.write(a="2")


def test_link_to_a_folder_fills_the_folder_and_stays(exporter):
    exporter.root.mkdir()
    real = exporter.root / "elsewhere"
    real.mkdir()
    exporter.folder.symlink_to(real)
    exporter.write(a="1")
    assert exporter.folder.is_symlink() and (real / "a").read_text() == "1"


def test_linked_file_in_the_folder_is_foreign(exporter):
    exporter.write(a="1")
    (exporter.root / "precious").write_text("1")
    (exporter.folder / "a").unlink()
    (exporter.folder / "a").symlink_to(exporter.root / "precious")
    with pytest.raises(StateError, match="a"):
        exporter.write(a="2")
    assert (exporter.root / "precious").read_text() == "1"


def test_file_and_current_folder_are_refused(exporter, monkeypatch):
    exporter.root.mkdir()
    exporter.folder.write_text("a file")
    with pytest.raises(StateError, match="is a file"):
        exporter.write(a="1")
    exporter.folder.unlink()
    exporter.folder.mkdir()
    monkeypatch.chdir(exporter.folder)
    with pytest.raises(StateError, match="current folder"):
        exporter.write(a="1")


def test_failure_leaves_the_target_as_it_was_and_nothing_else(exporter):
    exporter.write(a="1")
    target = ExportTarget.choose(exporter.folder, exporter.records)
    with pytest.raises(RuntimeError), target.replace(100) as new:
        (new / "a").write_text("half")
        raise RuntimeError
    assert contents(exporter.root) == {"model/a": "1"}
    exporter.write(a="2")


def test_file_added_while_the_export_was_written_survives(exporter):
    exporter.write(a="1")
    target = ExportTarget.choose(exporter.folder, exporter.records)
    with pytest.raises(StateError, match="late"), target.replace(100) as new:
        (new / "a").write_text("2")
        (exporter.folder / "late").write_text("mine")
    assert contents(exporter.root) == {"model/a": "1", "model/late": "mine"}


def test_full_disk_is_refused_before_anything_is_written(exporter):
    target = ExportTarget.choose(exporter.folder, exporter.records)
    with pytest.raises(StateError, match="takes 1,000,000 TB"), target.replace(10**18):
        pass
    assert not exporter.folder.exists()


def test_interrupted_swap_restores_the_earlier_export(exporter, monkeypatch):
    exporter.write(a="1")
    rename = Path.rename

    def fail_for_new(path, target):
        if ".new-" in path.name:
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(output_folder.Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="no"):
        exporter.write(a="2")
    monkeypatch.undo()
    assert contents(exporter.root) == {"model/a": "1"}
    exporter.write(a="3")
    assert contents(exporter.root) == {"model/a": "3"}


@pytest.mark.integration
def test_folder_that_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    target = ExportTarget.choose(tmp_path / "model", tmp_path / "records")
    foreign = tmp_path / ".model.new-0badc0de"  # nothing of ours, though it looks so
    foreign.mkdir()

    def fill_and_die() -> None:
        with target.replace(0) as new:
            (new / "config.json").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed = multiprocessing.get_context("fork").Process(target=fill_and_die)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".model.new-*"))) == 2
    with target.replace(0) as new:
        (new / "config.json").write_text("whole")
    assert list(tmp_path.glob(".model.new-*")) == [foreign]
    assert (tmp_path / "model" / "config.json").read_text() == "whole"


@pytest.mark.integration
@pytest.mark.parametrize("is_exchanged", [False, True], ids=["before", "after"])
def test_exchange_that_was_killed_is_undone_or_finished(is_exchanged, exporter, monkeypatch):
    """Die with the earlier export aside, before or after the new one has taken its place."""
    exporter.write(a="1", b="2")
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if ".new-" in path.name and not is_exchanged:
            os._exit(9)
        renamed = rename(path, target)
        if ".new-" in path.name:
            os._exit(9)
        return renamed

    monkeypatch.setattr(output_folder.Path, "rename", die)
    killed = multiprocessing.get_context("fork").Process(target=lambda: exporter.write(a="3"))
    killed.start()
    killed.join(60)
    monkeypatch.undo()
    assert killed.exitcode == 9 and len(list(exporter.root.glob(".model.old-*"))) == 1
    if is_exchanged:
        (next(exporter.root.glob(".model.old-*")) / "mine").write_text("not of an export")
    exporter.write(a="4")
    left = contents(exporter.root)
    assert left.pop("model/a") == "4"
    assert list(left.values()) == (["not of an export"] if is_exchanged else []), left


def test_failed_export_after_a_killed_one_leaves_the_earlier_model(exporter, monkeypatch):
    exporter.write(a="1")
    target = ExportTarget.choose(exporter.folder, exporter.records)
    old = exporter.root / ".model.old-0badc0de"
    target.record.with_suffix(".old-folder").write_text(str(old))
    exporter.folder.rename(old)
    with pytest.raises(RuntimeError), target.replace(100):
        raise RuntimeError
    assert contents(exporter.root) == {"model/a": "1"}


def test_folder_that_no_record_names_is_never_removed(exporter):
    exporter.write(a="1")
    foreign = exporter.root / ".model.old-0badc0de"
    foreign.mkdir()
    (foreign / "a").write_text("1")
    exporter.write(a="2")
    assert contents(exporter.root) == {"model/a": "2", ".model.old-0badc0de/a": "1"}


def test_place_that_cannot_be_used_is_a_sentence(exporter):
    exporter.root.mkdir()
    for one, other in (("x", "y"), ("y", "x")):
        (exporter.root / one).symlink_to(exporter.root / other)
    (exporter.root / "file").write_text("a file")
    for name in ("x/model", "file/model"):
        exporter.folder = exporter.root / name
        with pytest.raises(StateError, match=r"cannot be used|nothing can be written"):
            exporter.write(a="1")


def test_two_exports_into_one_folder_do_not_remove_each_others_files(tmp_path):
    target = ExportTarget.choose(tmp_path / "model", tmp_path / "records")
    with target.replace(0) as new:
        with pytest.raises(StateError, match="another export fills"), target.replace(0):
            pass
        (new / "config.json").write_text("first")
    assert (tmp_path / "model" / "config.json").read_text() == "first"
