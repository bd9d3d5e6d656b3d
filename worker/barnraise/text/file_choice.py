"""Choose the files of a folder or a dataset that hold its text. Pure.

A folder is read by an allow-list of text formats: what is private, about the data, or no text is
left out with a reason. Of several splits the training part is chosen. Several languages, or several
splits without a training part, are an ambiguous choice, which is refused.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from barnraise.errors import TextError
from barnraise.text.file_format import FORMATS_BY_SUFFIX, ZIP, plain_name, split_suffixes


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
NO_SUFFIX = "not a text format by its name"

_SYSTEM_NAMES = {"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r", "ntuser.dat"}
_PRIVATE_STEMS = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)([-_. ].*)?|(authorized_keys|known_hosts)([-_. ].*)?"
    r"|htpasswd|passwd|shadow|env|kubeconfig|wallet([-_. ].*)?|(.*[-_. ])?secrets"
    r"|secret([-_. ]?(\d+|prod\w*|dev\w*|staging|local|test|backup|old|new|key|token|file))*"
    r"|(appsettings|local\.settings|google-services|connectionstrings)([-_. ].*)?"
    r"|(bitwarden|lastpass|1password|dashlane|keepass\w*|nordpass|enpass)([-_. ].*)?",
    re.ASCII,
)
# Anywhere in a name.
_PRIVATE_WORDS = re.compile(
    r"(^|[-_. ])(credential|password|passwd|passphrase|service[-_. ]?account|firebase-adminsdk"
    r"|(api|private|secret|access|ssh|signing)[-_. ]?key|(access|auth|bearer|refresh)[-_. ]?token"
    r"|(client|app|oauth)[-_. ]?secret|(recovery|backup|2fa|mfa)[-_. ]?code"
    r"|(seed|recovery)[-_. ]?phrase)s?($|[-_. ])",
    re.ASCII,
)
_PRIVATE_NAMES = {
    *("token.json", "tokens.json", "auth.json", "key.json", "keys.json", "keyfile.json"),
    *("adc.json", "logins.json", "cookies.json", "cookies.txt", "seed.txt", "mnemonic.txt"),
}
_PRIVATE_FOLDERS = re.compile(r"(secret|credential|password|private[-_. ]?key)s", re.ASCII)
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
    *("vocab.txt", "preprocessor_config.json", "bower.json", "trainer_state.json"),
    *("adapter_config.json", "processor_config.json", "angular.json", "renovate.json"),
}
_CONFIGURATION_ENDINGS = (".index.json", ".config.json", ".schema.json", "-lock.json")
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
    """Return why a folder inside a chosen one is not read, by its name and entries, or ""."""
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
    if _PRIVATE_FOLDERS.fullmatch(folded):
        return PRIVATE
    if name == "..":
        return "a path out of its archive"
    return HIDDEN if name.startswith(".") else ""


def file_reason(path: str) -> str:
    """Return why a file of a folder, an archive or a dataset is not read, by its name, or ""."""
    name = path.rpartition("/")[2]
    folded = plain_name(name)
    stem, suffix, compression = split_suffixes(name)
    for reason, applies in (
        (SYSTEM, folded in _SYSTEM_NAMES or name.startswith("._")),
        (PRIVATE, suffix in _PRIVATE_SUFFIXES or folded.startswith(".env")),
        (HIDDEN, name.startswith(".")),
        (PRIVATE, _PRIVATE_STEMS.fullmatch(stem) or _PRIVATE_WORDS.search(stem)),
        (PRIVATE, folded in _PRIVATE_NAMES),
        (TEMPORARY, suffix in _TEMPORARY_SUFFIXES or name.endswith("~") or name.startswith("~$")),
        (CONFIGURATION, folded in _CONFIGURATION_NAMES or folded.endswith(_CONFIGURATION_ENDINGS)),
        (OFFICE, suffix in _OFFICE_SUFFIXES),
        (ARCHIVE, suffix in _ARCHIVE_SUFFIXES),
        (ABOUT_DATA, is_about_data(path)),
    ):
        if applies:
            return reason
    # An archive, and a compressed file that names no format, are looked at.
    if suffix in FORMATS_BY_SUFFIX or compression == ZIP or (compression and not suffix):
        return ""
    return f"{suffix} is not a text format" if suffix else NO_SUFFIX


def reasons_by_path(paths: Collection[str]) -> dict[str, str]:
    """Return why each path of an archive or a dataset is not read, or ""; folders count too."""
    inside: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        parts = path.split("/")
        for depth, part in enumerate(parts):
            inside["/".join(parts[:depth])].add(part)
    folders = {
        folder: folder_reason(folder.rpartition("/")[2], inside[folder]) for folder in inside
    }
    folders[""] = ""  # what holds them all was chosen itself
    reasons: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        above = (folders["/".join(parts[:depth])] for depth in range(len(parts)))
        reasons[path] = next(filter(None, above), "") or file_reason(path)
    return reasons


def is_about_data(path: str) -> bool:
    """Return whether a file's name is that of a licence, a readme or a list of packages."""
    name = path.rpartition("/")[2]
    stem, suffix, _ = split_suffixes(name)
    if suffix not in ("", ".txt", ".text", ".md", ".markdown", ".rst", ".org"):
        stem += suffix  # such as LICENSE.apache
        if suffix in FORMATS_BY_SUFFIX:
            return False
    return bool(
        _ABOUT_DATA.fullmatch(stem) or _ABOUT_DATA_IN_CAPITALS.fullmatch(PurePosixPath(name).stem)
    )


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
# A word that may name a language, with the script and region that may follow: "zh-Hant-TW".
_LANGUAGE_TAG = re.compile(
    r"(?P<language>[^\W_0-9]{2,})"
    r"(?:[-_](?P<script>latn|cyrl|arab|hans|hant|deva|beng|grek|hebr|thai|jpan|kore|hang|armn|geor"
    r"|ethi|khmr|laoo|mymr|sinh|taml|telu|knda|mlym|gujr|guru|orya|tibt|olck|tfng))?"
    r"(?:[-_](?P<region>[a-z]{2}|\d{3}))?(?![^\W_0-9])"
)


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
    if not target and len(present) <= 1:
        return list(paths), []
    # Where several other splits are named, files that name none are the training part.
    accepted = (target,) if wanted else ("", target)
    chosen = [path for path in paths if splits[path] in accepted]
    others = [
        LeftOut(path, f"the split '{splits[path]}'" if splits[path] else f"not the split {target}")
        for path in paths
        if splits[path] not in accepted
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


def check_languages(paths: Sequence[str]) -> list[str]:
    """Refuse files that are the same kind of text in several languages.

    Such paths differ in nothing but the name or code of a language, in a folder or a file's name.

    Returns:
        A warning, if only a smaller part of the files is of this kind.

    Raises:
        TextError: most of the files are of this kind; with the choices.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for pattern, language in _language_patterns(path):
            found[pattern][language].append(path)
    mixed = [choices for choices in found.values() if len(choices) > 1]
    covered = {path for choices in mixed for files in choices.values() for path in files}
    if not covered:
        return []
    choices = max(mixed, key=lambda choices: sum(map(len, choices.values())))
    listed = sorted(choices)[:12]
    places = ", ".join(_describe_choice(language, choices[language]) for language in listed)
    problem = f"it mixes the languages {', '.join(listed)}"
    if 2 * len(covered) < len(paths):
        return [f"{problem} ({places})"]
    raise TextError(f"{problem}: name the one to train on, or each that you want ({places})")


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
        for word in _WORD.finditer(name):
            match = _LANGUAGE_TAG.match(name, word.start())
            if match is None or not _is_language(match):
                continue
            # "en", "en_us" and "eng_latn" take the same place.
            ends = {match.end(part) for part in ("language", "script", "region") if match[part]}
            for end in ends:
                around = f"{name[: match.start()]}*{name[end:]}{suffix}"
                pattern = "/".join([*parts[:depth], around])
                patterns.add((re.sub(r"\d+", "", pattern), match["language"]))
    return patterns


def _is_language(tag: re.Match[str]) -> bool:
    """Return whether a word is a language: one of the list, or a code before a script."""
    return tag["language"] in LANGUAGES or bool(tag["script"] and len(tag["language"]) == 3)


def _describe_choice(language: str, paths: Sequence[str]) -> str:
    """Return the folder that all files of a language share, or the first of the files."""
    folders = {path.rpartition("/")[0] for path in paths}
    folder = min(folders)
    if len(folders) == 1 and language in _WORD.findall(folder.casefold()):
        return folder
    return paths[0] if len(paths) == 1 else f"{paths[0]} …"
