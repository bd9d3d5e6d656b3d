"""The documentation that comes with this version, and what a stranger wants to know at home."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs import markdown
from coordinator.runs.join_policy import Visibility
from coordinator.runs.models import Run, Status
from coordinator.telemetry import samples

FOLDER = Path(settings.ROOT) / "docs"
FIRST = "README.md"
HEADING = re.compile(r"(?m)^#(#+ )")  # the page has a heading above those of the document
PROOF_SECONDS = 60.0
PROOF_RUNS = 5  # finished runs that are searched for one with a sample


@dataclass(frozen=True)
class FinishedModel:
    """A model that people have trained here, with what it wrote last."""

    run: Run
    prompt: str
    text: str


_proof: TtlCache[None, FinishedModel | None] = TtlCache(PROOF_SECONDS)


def find_finished_model() -> FinishedModel | None:
    """Return the newest public model that is finished and wrote something."""
    return _proof.get(None, _search_finished_model)


def _search_finished_model() -> FinishedModel | None:
    finished = Run.objects.filter(
        status=Status.FINISHED, visibility=Visibility.PUBLIC, archived=None
    )
    for run in finished.order_by("-finished")[:PROOF_RUNS]:
        for group in samples.list_sample_groups(run, 1):
            prompt, text = group.texts[0]
            return FinishedModel(run, prompt, text)
    return None


@require_safe
def show_document(request: HttpRequest, name: str = FIRST) -> HttpResponse:
    """Show one document of this version."""
    document = _load_documents().get(name)
    if document is None:
        raise Http404
    title, html = document
    return render(request, "document.html", {"title": title, "html": html})


@lru_cache(maxsize=1)
def _load_documents() -> dict[str, tuple[str, SafeString]]:
    """Read and render all documents: their paths in the folder → title and HTML."""
    documents = {}
    for path in FOLDER.rglob("*.md"):
        title, _, text = path.read_text("utf-8").partition("\n")
        html = markdown.render_document(HEADING.sub(r"\1", text))
        documents[path.relative_to(FOLDER).as_posix()] = (title.lstrip("# "), html)
    return documents
