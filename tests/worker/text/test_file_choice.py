"""Only files of text are chosen, of one split and one language, and nothing private."""

import pytest

from barnraise.errors import TextError
from barnraise.text.file_choice import (
    check_languages,
    choose_split,
    file_reason,
    find_split,
    folder_reason,
    reasons_by_path,
)

TAKEN = [
    *("a.txt", "A.TXT", "book.text", "notes.md", "chapter.rst", "paper.tex", "plan.org"),
    *("a.txt.gz", "B.TXT.GZ", "c.txt.zst", "d.txt.bz2", "e.txt.xz", "a.gz", "archive.zip"),
    *("rows.jsonl", "ROWS.JSONL", "rows.ndjson", "rows.jsonl.gz", "rows.json", "list.JSON"),
    *("table.csv", "table.tsv", "data.parquet", "DATA.PARQUET", "data.arrow"),
    *("rows.jsonl?download=true", "a.txt.gz?X=1&Y=2", "train-00000-of-00002.parquet"),
    # Names that only resemble those of private files or of files about the data.
    *("my-license-story.txt", "the_key.txt", "tokens.txt", "the_secret_garden.txt"),
    *("shadow_of_the_wind.txt", "keyboard.json", "security.md", "constraint.txt"),
    *("history.txt", "news.txt", "no.txt", "Who are you?.txt"),
]
LEFT_OUT = {
    "hidden": ".hidden.txt .bashrc .gitignore .train.jsonl",
    "operating system": "Thumbs.db thumbs.DB .DS_Store desktop.ini ._a.txt ._train.jsonl",
    "passwords or keys": ".env .env.local prod.env id_rsa id_rsa.txt id_ed25519.pub key.pem a.key "
    "cert.p12 secrets.txt credentials.json Passwords.txt service-account.json api_key.txt "
    "authorized_keys vault.kdbx message.asc .netrc.pem my-passwords.csv github-recovery-codes.txt "
    "application_default_credentials.json client_secret_1.apps.example.json token.json auth.json "
    "appsettings.Development.json bitwarden_export.csv aws-secrets.txt secret-prod.txt "
    "id_rsa?x=a.txt",
    "about the data": "LICENSE LICENSE.txt license.md LICENCE.TXT LICENSE-MIT.txt COPYING "
    "README.md readme.txt README.rst requirements.txt requirements-dev.txt dev-requirements.txt "
    "constraints.txt CMakeLists.txt robots.txt CHANGELOG.md NEWS.txt AUTHORS.txt NOTICE "
    "SHA256SUMS.txt CITATION.md",
    "configuration": "package.json tsconfig.json dataset_info.json config.json tokenizer.json "
    "model.safetensors.index.json vocab.txt jest.config.json",
    "office document": "a.docx a.DOC b.odt c.pdf d.xlsx e.pptx f.rtf g.epub",
    "archive": "a.tar a.tar.gz b.tgz c.7z d.rar e.whl f.tar.zst",
    "temporary": "a.txt~ a.txt.bak a.swp ~$report.txt a.jsonl.part a.parquet.crdownload",
    "not a text format": "a.png a.py b.js data.bin weights.safetensors x.sqlite a.html b.xml "
    "app.log c.yaml a.pkl Makefile noextension a.png.gz",
}


@pytest.mark.parametrize("name", TAKEN)
def test_file_of_a_text_format_is_chosen(name):
    assert file_reason(name) == "" and file_reason(f"folder/{name}") == ""


@pytest.mark.parametrize(
    ("name", "reason"), [(name, key) for key, names in LEFT_OUT.items() for name in names.split()]
)
def test_file_that_is_private_or_no_text_is_left_out(name, reason):
    assert reason in file_reason(name), file_reason(name)


@pytest.mark.parametrize(
    ("name", "entries", "reason"),
    [
        (".git", (), "version control"),
        (".hg", (), "version control"),
        (".svn", (), "version control"),
        ("CVS", (), "version control"),
        ("bare.git", ("HEAD", "objects", "refs"), "version control"),
        ("node_modules", (), "packages"),
        ("site-packages", (), "packages"),
        ("x.egg-info", (), "packages"),
        ("__pycache__", (), "cache"),
        ("venv", (), "virtual environment"),
        ("my-env", ("pyvenv.cfg", "lib"), "virtual environment"),
        ("conda", ("conda-meta",), "virtual environment"),
        (".cache", (), "hidden"),
        ("Credentials", (), "passwords or keys"),
        ("..", (), "out of its archive"),
        ("__MACOSX", (), "operating system"),
        ("$RECYCLE.BIN", (), "operating system"),
        ("books", ("a.txt",), ""),
        ("environment", ("a.txt",), ""),
    ],
)
def test_folder_that_is_private_or_no_text_is_left_out(name, entries, reason):
    found = folder_reason(name, entries)
    assert reason in found if reason else found == ""


def test_folders_count_for_the_files_of_an_archive_or_dataset():
    reasons = reasons_by_path(
        [
            *("a.txt", "b/c.txt", "b/.git/x.txt", "b/node_modules/m/y.json"),
            *("e/pyvenv.cfg", "e/share/z.txt", "r/HEAD", "r/objects/o.txt", "r/refs/r.txt"),
        ]
    )
    assert {path for path, reason in reasons.items() if not reason} == {"a.txt", "b/c.txt"}
    assert reasons["e/share/z.txt"] == "a virtual environment"


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("data/TRAIN-00000-of-00001.parquet", "train"),
        ("training/a.txt", "train"),
        ("test/part_train.jsonl", "train"),
        ("valid.csv", "validation"),
        ("x_dev.json", "validation"),
        ("eval.jsonl", "test"),
        ("constraints.txt", ""),
        ("trainer.txt", ""),
        ("latest.txt", ""),
        ("strain.jsonl", ""),
        ("contest/a.txt", ""),
    ],
)
def test_split_is_found_in_whole_words(path, split):
    assert find_split(path) == split


def test_training_part_is_chosen_and_others_are_left_out():
    paths = ["a.jsonl", "data/test.jsonl", "data/train-0.jsonl", "data/validation.jsonl"]
    chosen, others = choose_split(paths)
    assert chosen == ["a.jsonl", "data/train-0.jsonl"]
    assert [item.reason for item in others] == ["the split 'test'", "the split 'validation'"]
    assert choose_split(paths, "test")[0] == ["data/test.jsonl"]
    assert choose_split(["only_test.jsonl"]) == (["only_test.jsonl"], [])
    assert choose_split(["a.txt", "test.txt"])[0] == ["a.txt", "test.txt"]
    assert choose_split(["w.txt", "w.valid.txt", "w.test.txt"])[0] == ["w.txt"]


@pytest.mark.parametrize(
    ("paths", "wanted", "sentence"),
    [
        (["test.jsonl", "valid.jsonl"], "", "splits test, validation and none for training"),
        (["train.jsonl"], "test", "no split 'test'; there are train"),
        (["a.jsonl"], "test", "no split 'test'; there are none"),
    ],
)
def test_ambiguous_or_missing_split_is_refused_with_the_choices(paths, wanted, sentence):
    with pytest.raises(TextError, match=sentence):
        choose_split(paths, wanted)


@pytest.mark.parametrize(
    ("paths", "choices"),
    [
        (["en.jsonl", "de.jsonl"], "de.jsonl, en.jsonl"),
        (["data/en/a.txt", "data/de/b.txt", "data/de/c.txt"], "data/de, data/en"),
        (["en/train-0.parquet", "fr/train-0.parquet"], "en, fr"),
        (["wiki_en.txt.gz", "wiki_ja.txt.gz"], "wiki_en.txt.gz, wiki_ja.txt.gz"),
        (
            ["20231101.en/0.parquet", "20231101.simple/0.parquet", "20231101.de/0.parquet"],
            "20231101.de, 20231101.en",
        ),
        (["en-US.jsonl", "de-DE.jsonl"], "de-DE.jsonl, en-US.jsonl"),
        (["zh-CN/a.txt", "en/a.txt"], "en, zh-CN"),
        (["eng_Latn/a.txt", "rus_Cyrl/a.txt", "swh_Latn/a.txt"], "eng_Latn, rus_Cyrl, swh_Latn"),
        (["corpus.EN.txt", "corpus.DE.txt"], "corpus.DE.txt, corpus.EN.txt"),
        (["english.txt", "german.txt"], "english.txt, german.txt"),
    ],
)
def test_several_languages_are_refused_with_the_choices(paths, choices):
    with pytest.raises(TextError) as error:
        check_languages(paths)
    assert f"({choices})" in str(error.value)


@pytest.mark.parametrize(
    "paths",
    [
        ["a.txt", "b.txt"],
        ["en/a.txt", "en/b.txt"],
        ["is_this_it.txt", "so_what.txt", "no_country.txt"],
        ["en.jsonl", "other.jsonl"],
        ["en.jsonl"],
        [],
    ],
)
def test_one_language_or_ordinary_words_are_accepted(paths):
    assert check_languages(paths) == []


def test_a_few_files_in_several_languages_are_a_warning():
    paths = ["a.txt", "b.txt", "c.txt", "x/en.txt", "x/de.txt"]
    assert check_languages(paths) == ["it mixes the languages de, en (x/de.txt, x/en.txt)"]
