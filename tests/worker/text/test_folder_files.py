"""Test which files of a folder or an archive are read: they are what a machine shares."""

import contextlib
import gzip
import os
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.worker.text_files import JSONL, LINES, TEXTS, archive, inspect, table
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import TextError
from barnraise.text.folder_files import FoundFiles, find_in_path

# What may be read, and what may not, whatever lies around it.
READ_FOLDERS = ("a", "b c", "ä")
UNREAD_FOLDERS = (".git", ".hidden", "node_modules", "secrets", "venv", "Passwords")
READ_NAMES = ("one.txt", "TWO.TXT", "rows.jsonl", "notes.md", "three.txt")
UNREAD_NAMES = (".env", "id_rsa", "passwords.txt", "x.pem", "LICENSE", "a.png", ".b.txt", "c.txt~")
HAS_PIPES = sys.platform != "win32"  # among files
KINDS = ("file", "empty", "link", "linked folder", *(["pipe"] if HAS_PIPES else []))
trees = st.dictionaries(
    st.tuples(
        st.lists(st.sampled_from(READ_FOLDERS + UNREAD_FOLDERS), max_size=3).map(tuple),
        st.sampled_from(READ_NAMES + UNREAD_NAMES),
    ),
    st.sampled_from(KINDS[:1] * 4 + KINDS),
    max_size=12,
)


def is_read(folders: tuple[str, ...], name: str, kind: str) -> bool:
    """Return whether a file is one that a machine may share."""
    return set(folders) <= set(READ_FOLDERS) and name in READ_NAMES and kind == "file"


def create_tree(root: Path, tree: dict[tuple[tuple[str, ...], str], str]) -> None:
    """Create files, links out of the folder and pipes; each file holds its own path."""
    outside = root.parent / "outside"
    outside.mkdir(parents=True)
    (outside / "one.txt").write_text("outside")
    root.mkdir()
    for (folders, name), kind in tree.items():
        path = root.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            path.symlink_to(outside / "one.txt")
        elif kind == "linked folder":
            path.symlink_to(outside)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_text("" if kind == "empty" else "/".join((*folders, name)))


def read_all(found: FoundFiles) -> list[str]:
    """Return the contents of the found files, sorted."""
    contents = []
    for file in found.files:
        with contextlib.closing(file.open()) as stream:
            contents.append(stream.read(1 << 20).decode())
    return sorted(contents)


@given(trees)
def test_folder_shares_what_may_be_read_and_lists_the_rest(tree):
    """No link, pipe, hidden or private file is opened, at any depth; nothing is left out unsaid."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "corpus"
        create_tree(root, tree)
        found = find_in_path(root)
        expected = sorted("/".join((*key[0], key[1])) for key in tree if is_read(*key, tree[key]))
        assert read_all(found) == expected
        left_out = [os.path.relpath(item.path, root) for item in found.left_out]
        for (folders, name), kind in tree.items():
            parts = (*folders, name)
            parents = {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
            assert is_read(folders, name, kind) or parents & set(left_out)


@given(trees)
def test_archive_shares_the_same_files_as_its_folder(tree):
    files = {key: kind for key, kind in tree.items() if kind in ("file", "empty")}
    names = {"/".join((*key[0], key[1])): key for key in files}
    contents = {n: n.encode() if files[key] == "file" else b"" for n, key in names.items()}
    expected = sorted(name for name, key in names.items() if is_read(*key, files[key]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.zip"
        path.write_bytes(archive(**contents))
        if expected:
            found = find_in_path(path)
            assert read_all(found) == expected
            assert len(found.left_out) == len(files) - len(expected)
        else:
            with pytest.raises(TextError, match=r"corpus\.zip"):
                find_in_path(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.ipynb", ".ipynb is not a text format; it is read as"),
        ("a.xml", ".xml is not a text format"),
        (".a.txt", "hidden"),
        ("config.json", "configuration"),
        ("a.txt.bak", "a temporary file"),
        ("noextension", ""),
    ],
)
def test_named_file_that_a_folder_would_leave_out_is_warned_of(look, name, reason):
    found = look(name, LINES if name != "config.json" else JSONL)
    assert not found.refusal and len(found.warnings) == (1 if reason else 0)
    assert not reason or reason in found.warnings[0]


def test_archive_is_read_as_a_folder_is(look):
    names = [
        "train.txt",
        "test.txt",
        "a\\.env",
        "m/node_modules/x.txt",
        "../../b.txt",
        "a/train.txt",
    ]
    found = look("a.zip", archive(**{name: (LINES + name).encode() for name in names}))
    assert [file.path.partition(".zip/")[2] for file in found.files] == ["a/train.txt", "train.txt"]
    reasons = {item.path.partition(".zip/")[2]: item.reason for item in found.left_out}
    assert reasons == {
        "test.txt": "the split 'test'",
        "a/.env": "may hold passwords or keys",
        "m/node_modules/x.txt": "packages of a program",
        "../../b.txt": "a path out of its archive",
    }


def test_archive_inside_of_an_archive_is_left_out(look):
    inner = archive(**{"in.txt": LINES.encode()})
    found = look("a.zip", archive(**{"b.zip": inner, "c.txt": LINES.encode(), "d.zip": inner[:4]}))
    assert found.documents == 1 and len(found.files) == 1
    assert [item.reason for item in found.left_out] == [
        "an archive inside of another archive or compressed file"
    ] * 2


@pytest.fixture
def folder(tmp_path):
    """Fill a folder with files to read and files to leave out."""
    root = tmp_path / "corpus"
    for name, content in {
        "a.txt": LINES,
        "b/rows.jsonl": JSONL,
        "LICENSE.txt": LINES + "licence",
        ".env": "SECRET=1",
        ".git/config.txt": "x",
        "node_modules/m/readme.txt": "x",
        "env/pyvenv.cfg": "",
        "env/notes.txt": "x",
        "report.docx": "PK",
        "damaged.txt.gz": gzip.compress(LINES.encode() * 9)[:150],
        "page.txt": "<html>",
        "empty.txt": "",
        "script.py": "print()",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_folder_is_read_by_the_allow_list_and_the_rest_is_listed(folder):
    found = inspect(folder)
    assert [file.path for file in found.files] == [f"{folder}/a.txt", f"{folder}/b/rows.jsonl"]
    left_out = {item.path.removeprefix(f"{folder}/"): item.reason for item in found.left_out}
    assert set(left_out) == {
        *("LICENSE.txt", ".env", ".git/", "node_modules/", "env/", "report.docx"),
        *("damaged.txt.gz", "page.txt", "empty.txt", "script.py"),
    }
    assert all(left_out.values()) and "damaged" in left_out["damaged.txt.gz"]
    assert not found.refusal and "2 files of text formats cannot be used" in found.warnings[0]
    report = found.to_json()
    assert list(report) == ["files", "skipped", "documents", "bytes", "duplicates", "warnings"]
    assert report["documents"] == 31 and report["bytes"] == len(LINES) + sum(map(len, TEXTS))


@pytest.mark.parametrize("name", ["node_modules", "env", ".git", "secrets"])
def test_named_folder_that_is_private_or_no_text_is_refused(folder, name):
    """A pattern of the shell names each folder itself."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "a.txt").write_text(LINES)
    with pytest.raises(TextError, match=f"{name} is not read"):
        inspect(folder / "a.txt", folder / name)
    hidden = folder / ".corpus"
    hidden.mkdir()
    (hidden / "a.txt").write_text(LINES)
    assert inspect(hidden).documents == 1


@pytest.mark.skipif(not HAS_PIPES, reason="Windows has no pipes among files")
def test_links_and_special_files_are_left_out(folder):
    (folder.parent / "outside.txt").write_text(LINES + "outside")
    (folder / "link.txt").symlink_to(folder.parent / "outside.txt")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    reasons = {item.path.rpartition("/")[2]: item.reason for item in inspect(folder).left_out}
    assert reasons["link.txt"] == "a link" and "pipe" in reasons["pipe.txt"]
    assert "a link to another folder" in {item.reason for item in inspect(folder).left_out}
    with pytest.raises(TextError, match="not a file"):
        inspect(folder / "pipe.txt")


def test_folder_without_text_says_what_it_left_out(tmp_path):
    (tmp_path / "README.md").write_text(LINES)
    assert "README.md (about the data" in inspect(tmp_path).refusal
    assert "the folder has no files" in inspect_empty(tmp_path / "nothing")


def inspect_empty(path) -> str:
    path.mkdir()
    return inspect(path).refusal


def test_licence_beside_a_table_is_not_the_text(tmp_path):
    (tmp_path / "LICENSE.txt").write_text(LINES * 9)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "a.parquet").write_bytes(table(text=TEXTS))
    assert [file.format for file in inspect(tmp_path).files] == ["parquet"]
    named = inspect(tmp_path / "LICENSE.txt")
    assert not named.refusal and "not like a text" in named.warnings[0]


def test_dataset_folder_with_configurations_needs_a_choice(tmp_path):
    card = "---\nconfigs:\n- config_name: small\n  data_files: small/*.jsonl\n"
    second = "- config_name: large\n  data_files: large/*.jsonl\n"
    for name in ("small", "large", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(JSONL.replace("Row", name))
    (tmp_path / "README.md").write_text(f"{card}---\n")
    assert [file.path for file in inspect(tmp_path).files] == [f"{tmp_path}/small/rows.jsonl"]
    (tmp_path / "README.md").write_text(f"{card}{second}---\n")
    with pytest.raises(TextError, match=r"several configurations.*small, large"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ("---\nconfigs: [\n---\n", "cannot be used"),
        ("---\nconfigs:\n- config_name: a\n  data_files: no/*.jsonl\n---\n", "cannot be used"),
        ("# Notes\nconfigs: none\n---\n", ""),
    ],
    ids=["damaged", "nothing there", "no card"],
)
def test_card_that_cannot_be_used_is_a_sentence(tmp_path, card, reason):
    (tmp_path / "a.jsonl").write_text(JSONL)
    (tmp_path / "README.md").write_text(card)
    if not reason:
        assert inspect(tmp_path).documents == 30
        return
    with pytest.raises(TextError, match=reason):
        inspect(tmp_path)


def test_several_languages_in_a_folder_are_refused_with_the_choices(tmp_path):
    for name in ("en", "de"):
        (tmp_path / f"{name}.txt").write_text(LINES + name)
    with pytest.raises(TextError, match=r"mixes the languages de, en.*de\.txt, en\.txt"):
        inspect(tmp_path)
    assert inspect(tmp_path / "en.txt", tmp_path / "de.txt").documents == 2, "named one by one"
