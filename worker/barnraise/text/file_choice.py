"""Choose the files of a folder or a dataset that hold its text. Pure.

A folder is read by an allow-list of text formats: what is private, about the data, or no text is
left out with a reason. Of several splits the training part is chosen. Several languages, or several
splits without a training part, are an ambiguous choice, which is refused.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from barnraise.errors import TextError
from barnraise.text.file_format import FORMATS_BY_SUFFIX, plain_name, split_suffixes


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not read, and why."""

    path: str
    reason: str


HIDDEN = "hidden"
PRIVATE = "may hold passwords or keys"
ABOUT_DATA = "about the data, not part of it"
CONFIGURATION = "configuration, not text"
OFFICE = "an office document: save its text as .txt"
ARCHIVE = "an archive of unknown content"
TEMPORARY = "a temporary file"
SYSTEM = "a file of the operating system"

_SYSTEM_NAMES = {"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r", "ntuser.dat"}
_PRIVATE_STEMS = re.compile(
    r"(id_(rsa|dsa|ecdsa|ed25519)|authorized_keys|known_hosts|htpasswd|passwd|shadow|wallet"
    r"|(service[-_. ]?account|credential|secret|password|passphrase|api[-_. ]?key|recovery[-_. ]?"
    r"code|private[-_. ]?key|access[-_. ]?token|auth[-_. ]?token)s?)([-_. ].*)?",
    re.ASCII,
)
_PRIVATE_SUFFIXES = {
    *(".env", ".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".kdb", ".ppk"),
    *(".gpg", ".pgp", ".asc", ".crt", ".cer", ".der", ".csr", ".ovpn", ".netrc", ".pgpass"),
}
_ABOUT_DATA = re.compile(
    r"(licen[cs]es?|unlicense|copying|copyright|notice|read[-_ ]?me|changelog|contributing"
    r"|code[-_ ]of[-_ ]conduct|citation|cmakelists|robots|third[-_ ]?party[-_ ]?notices?"
    r"|(.*[-_. ])?(requirements|constraints)|(sha\d*|md5)sums?|checksums?"
    r"|dependency_links|entry_points|top_level)([-_. ].*)?",
    re.ASCII,
)
# These words are also names of texts; in capitals they are files about a program.
_ABOUT_DATA_IN_CAPITALS = re.compile(
    r"(NEWS|HISTORY|CHANGES|AUTHORS|INSTALL|TODO|SECURITY|MAINTAINERS|CONTRIBUTORS|SUPPORT"
    r"|PATENTS|CREDITS|MANIFEST)([-_. ].*)?"
)
_CONFIGURATION_NAMES = {
    *("package.json", "package-lock.json", "tsconfig.json", "composer.json", "manifest.json"),
    *("settings.json", "config.json", "dataset_info.json", "dataset_infos.json", "state.json"),
    *("dataset_dict.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "generation_config.json", "added_tokens.json", "merges.txt"),
    *("vocab.txt", "preprocessor_config.json", "bower.json", "appsettings.json"),
}
_OFFICE_SUFFIXES = {
    *(".doc", ".docx", ".docm", ".dot", ".dotx", ".odt", ".ott", ".rtf", ".pdf", ".xls", ".xlsx"),
    *(".ods", ".ppt", ".pptx", ".odp", ".epub", ".mobi", ".azw3", ".djvu", ".pages", ".numbers"),
    *(".key", ".eml", ".msg", ".one", ".pub", ".vsd"),
}
_ARCHIVE_SUFFIXES = {
    *(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".7z", ".rar", ".jar", ".war", ".whl"),
    *(".deb", ".rpm", ".iso", ".dmg", ".cab", ".lz4", ".lzma", ".br", ".z", ".warc", ".egg"),
}
_TEMPORARY_SUFFIXES = {
    *(".bak", ".tmp", ".temp", ".swp", ".swo", ".orig", ".rej", ".part", ".crdownload", ".lock"),
    *(".incomplete", ".download", ".old", ".pyc"),
}
_FOLDERS = {
    "node_modules": "packages of a program",
    "bower_components": "packages of a program",
    "site-packages": "packages of a program",
    "dist-packages": "packages of a program",
    "__pycache__": "a cache",
    "__macosx": SYSTEM,
    "$recycle.bin": SYSTEM,
    "system volume information": SYSTEM,
    "lost+found": SYSTEM,
    "cvs": "a folder of a version control system",
    "_darcs": "a folder of a version control system",
}
_VCS_FOLDERS = {".git", ".hg", ".svn", ".bzr", ".jj", ".fossil"}


def folder_reason(name: str, entries: Iterable[str] = ()) -> str:
    """Return why a folder inside a chosen one is not read, or "".

    Args:
        name: the folder's name.
        entries: the names in it.
    """
    folded = name.casefold()
    inside = {entry.casefold() for entry in entries}
    if folded in _VCS_FOLDERS or {"head", "objects", "refs"} <= inside:
        return "a folder of a version control system"
    if folded in _FOLDERS:
        return _FOLDERS[folded]
    if {"pyvenv.cfg", "conda-meta"} & inside or folded in (".venv", "venv", "virtualenv"):
        return "a virtual environment"
    if folded.endswith((".egg-info", ".dist-info")):
        return "packages of a program"
    return HIDDEN if name.startswith(".") else ""


def file_reason(path: str) -> str:
    """Return why a file of a folder, an archive or a dataset is not read, by its name, or ""."""
    name = path.rpartition("/")[2]
    folded = plain_name(name)
    stem, suffix, _ = split_suffixes(name)
    for reason, applies in (
        (SYSTEM, folded in _SYSTEM_NAMES or name.startswith("._")),
        (PRIVATE, suffix in _PRIVATE_SUFFIXES or folded.startswith(".env")),
        (HIDDEN, name.startswith(".")),
        (PRIVATE, bool(_PRIVATE_STEMS.fullmatch(stem)) or folded == "env"),
        (TEMPORARY, suffix in _TEMPORARY_SUFFIXES or name.endswith("~") or name.startswith("~$")),
        (CONFIGURATION, folded in _CONFIGURATION_NAMES or folded.endswith(".index.json")),
        (OFFICE, suffix in _OFFICE_SUFFIXES),
        (ARCHIVE, suffix in _ARCHIVE_SUFFIXES),
        (ABOUT_DATA, is_about_data(path)),
    ):
        if applies:
            return reason
    return _format_reason(name, suffix)


def _format_reason(name: str, suffix: str) -> str:
    """Return why a file's format is not on the allow-list, or ""."""
    if suffix in FORMATS_BY_SUFFIX:
        return ""
    compression = split_suffixes(name)[2]
    if compression == "zip" or (compression and not suffix):
        return ""  # its content is looked at
    if compression:
        return f"{suffix} is not a text format"
    return f"{suffix} is not a text format" if suffix else "not a text format by its name"


def is_about_data(path: str) -> bool:
    """Return whether a file's name is that of a licence, a readme or a list of packages."""
    name = path.rpartition("/")[2]
    stem, suffix, _ = split_suffixes(name)
    if suffix not in ("", ".txt", ".text", ".md", ".markdown", ".rst", ".org"):
        stem += suffix  # such as LICENSE.apache
        if suffix in FORMATS_BY_SUFFIX:
            return False
    return bool(_ABOUT_DATA.fullmatch(stem) or _ABOUT_DATA_IN_CAPITALS.fullmatch(_bare(name)))


def _bare(name: str) -> str:
    """Return a name without its last suffix, in its own letter case."""
    return PurePosixPath(name).stem


# ---- splits and languages ----------------------------------------------------------------------

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("heldout", "holdout"), "held out"),
}
_WORD = re.compile(r"[^\W_0-9]+")
_LANGUAGE_WORDS = (
    "aa ab af ak am ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de "
    "dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz "
    "ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li "
    "ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os "
    "pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te "
    "tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
    "ara ben ces dan deu eng fin fra ger heb hin hun ita jpn kor nld nor pol por ron rus slk spa "
    "swe tha tur ukr vie zho chi "
    "arabic bengali bulgarian chinese czech danish dutch english estonian finnish french german "
    "greek hebrew hindi hungarian indonesian italian japanese korean latin latvian lithuanian "
    "norwegian persian polish portuguese romanian russian serbian slovak slovenian spanish swedish "
    "tamil thai turkish ukrainian urdu vietnamese deutsch francais español espanol italiano "
    "portugues"
)
LANGUAGES = frozenset(_LANGUAGE_WORDS.split())


def choose_split(paths: Sequence[str], wanted: str = "") -> tuple[list[str], list[LeftOut]]:
    """Choose the training part of files whose names state splits.

    Args:
        paths: the files' paths inside the folder or dataset.
        wanted: a split that was named.

    Returns:
        The chosen files, in the given order, and the others.

    Raises:
        TextError: the named split is not there, or there are several and none is for training.
    """
    splits = {path: find_split(path) for path in paths}
    present = sorted(set(splits.values()) - {""})
    target = SPLITS.get(wanted.casefold(), wanted)
    if wanted and target not in present:
        raise TextError(f"there is no split '{wanted}'; there are {', '.join(present) or 'none'}")
    if not target and "train" in present:
        target = "train"
    if not target and len(present) > 1 and "" not in splits.values():
        raise TextError(
            f"there are the splits {', '.join(present)} and none for training: name one of them"
        )
    if not target:
        return list(paths), []
    chosen = [path for path in paths if splits[path] in ("", target)]
    if wanted:
        chosen = [path for path in paths if splits[path] == target]
    others = [
        LeftOut(path, f"the split '{splits[path]}'" if splits[path] else f"not the split {target}")
        for path in paths
        if path not in set(chosen)
    ]
    return chosen, others


def find_split(path: str) -> str:
    """Return the split that a path names, or ""; the file's name counts before its folders.

    Whole words count: "constraints" does not name "train".
    """
    for part in reversed(plain_name(path).split("/")):
        for word in _WORD.findall(part):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def check_languages(paths: Sequence[str]) -> None:
    """Refuse files that are the same kind of text in several languages.

    Such paths differ in nothing but the name or code of a language, in a folder or a file's name.

    Raises:
        TextError: all files are of this kind; with the choices.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for pattern, language in _language_patterns(path):
            found[pattern][language].append(path)
    mixed = [choices for choices in found.values() if len(choices) > 1]
    covered = {path for choices in mixed for files in choices.values() for path in files}
    if not covered or covered != set(paths):
        return
    choices = max(mixed, key=lambda choices: sum(map(len, choices.values())))
    listed = sorted(choices)[:12]
    places = ", ".join(_describe_choice(language, choices[language]) for language in listed)
    raise TextError(
        f"it mixes the languages {', '.join(listed)}: "
        f"name the one to train on, or each that you want ({places})"
    )


def _language_patterns(path: str) -> set[tuple[str, str]]:
    """Return the languages that a path names, each with the path up to it, digits left out."""
    patterns: set[tuple[str, str]] = set()
    parts = plain_name(path).split("/")
    for depth, part in enumerate(parts):
        name, suffix = part, ""
        if depth == len(parts) - 1:
            name, suffix, _ = split_suffixes(part)
            if suffix not in FORMATS_BY_SUFFIX:
                name, suffix = name + suffix, ""
        for match in _WORD.finditer(name):
            if match[0] in LANGUAGES:
                around = f"{name[: match.start()]}*{name[match.end() :]}{suffix}"
                pattern = "/".join([*parts[:depth], around])
                patterns.add((re.sub(r"\d+", "", pattern), match[0]))
    return patterns


def _describe_choice(language: str, paths: Sequence[str]) -> str:
    """Return the folder that all files of a language share, or the first of the files."""
    folders = {path.rpartition("/")[0] for path in paths}
    folder = min(folders)
    if len(folders) == 1 and language in _WORD.findall(folder.casefold()):
        return folder
    return paths[0] if len(paths) == 1 else f"{paths[0]} …"
