"""Compare runs: curves, figures, the settings in which they differ, and the tree of forks."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from barnraise.formats import format_duration
from barnraise.spec import RunSpec
from coordinator.runs.models import Run
from coordinator.runs.spec_form import FIELDS
from coordinator.telemetry.run_cards import RunCard, load_run_cards
from coordinator.telemetry.task_scores import last_share

MAX_COMPARED = 8
MAX_ANCESTORS = 20
MAX_FAMILY = 60  # runs in a tree of forks
MAX_TEXT = 80  # characters of a setting
# Parts of a spec that every run has of its own.
OWN_SETTINGS = ("manifest", "owner", "roots")


@dataclass(frozen=True)
class ComparedRun:
    """A run's column."""

    run: Run
    card: RunCard  # its figures now
    score: float | None  # the share of the run's own tasks that it answered
    duration: str  # since its start, or from its start to its end; "–" before


@dataclass
class FamilyMember:
    """A run in the tree of forks, with the runs that were copied from it."""

    run: Run
    is_compared: bool
    forks: "list[FamilyMember]" = field(default_factory=list)


@require_safe
def compare_runs(request: HttpRequest) -> HttpResponse:
    """Compare the runs that the address names with `run`, in that order."""
    names = list(dict.fromkeys(request.GET.getlist("run")))[:MAX_COMPARED]
    visible = Run.objects.visible_to(request.user).select_related("owner", "parent")
    found = [run for name in names if (run := visible.find(name)) is not None]
    runs = list({run.pk: run for run in found}.values())
    columns = _build_columns(runs)
    context = {
        "columns": columns,
        "has_scores": any(column.score is not None for column in columns),
        "are_live": not all(run.is_over for run in runs),
        "settings": differing_settings(runs),
        "family": [tree for tree in find_families(request.user, runs) if tree.forks],
        "chart_runs": json.dumps(
            [
                {
                    "id": str(run.pk),
                    "name": run.name,
                    "stepTokens": run.spec.step_tokens,
                    "isOver": run.is_over,
                }
                for run in runs
            ]
        ),
        "missing": len(names) - len(runs),
    }
    return render(request, "run_compare.html", context)


def _build_columns(runs: list[Run]) -> list[ComparedRun]:
    cards = load_run_cards(runs)
    return [ComparedRun(run, cards[run.pk], last_share(run), _format_duration(run)) for run in runs]


def _format_duration(run: Run) -> str:
    """Write the time from a run's start to its end, or until now; "–" before its start."""
    if run.started is None:
        return "–"
    end = run.finished or timezone.now()
    return format_duration(max(0.0, (end - run.started).total_seconds()))


def differing_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ: (name, the value of each run)."""
    specs = [_flatten(json.loads(RunSpec.to_json(run.spec))) for run in runs]
    names = sorted({name for spec in specs for name in spec})
    rows = []
    for name in names:
        values = [spec.get(name, "–") for spec in specs]
        if len(set(values)) > 1 and name.split(".")[0] not in OWN_SETTINGS:
            rows.append((setting_label(name), values))
    return rows


def setting_label(name: str) -> str:
    """Return what the form calls a setting; what has no field there, in words."""
    known = FIELDS.get(name)
    if known is not None and known.metadata.get("label"):
        return known.metadata["label"]
    group, _, rest = name.rpartition(".")
    words = rest.replace("_", " ").capitalize()
    return f"{words} ({group})" if group in ("start", "assumed") else words


def _flatten(value: Any, name: str = "") -> dict[str, str]:
    """Return the values of nested objects by their names, joined with points."""
    if isinstance(value, dict):
        flat: dict[str, str] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{name}.{key}" if name else str(key))
        return flat
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = " · ".join(value)  # prompts and places, as they were typed
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if type(value) is int and name != "seed":
        text = f"{value:,}"
    return {name: text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"}


def find_families(user: Any, runs: list[Run]) -> list[FamilyMember]:
    """Return the trees of forks that these runs belong to, as far as lists show them."""
    listed = Run.objects.listed_for(user).select_related("owner")
    roots = _find_roots(listed, runs)
    members: dict[UUID, FamilyMember] = {}
    compared = {run.pk for run in runs}
    children: dict[UUID, list[Run]] = defaultdict(list)
    level = list(roots.values())
    count = 0
    while level and count < MAX_FAMILY:
        count += len(level)
        for run in level:
            members[run.pk] = FamilyMember(run, run.pk in compared)
        forks = listed.filter(parent__in=level).exclude(pk__in=members).order_by("pk")
        level = list(forks[: MAX_FAMILY - count])
        for fork in level:
            children[fork.parent_id].append(fork)
    for parent, forks in children.items():
        members[parent].forks += [members[fork.pk] for fork in forks if fork.pk in members]
    return [members[pk] for pk in roots]


def _find_roots(listed: Any, runs: list[Run]) -> dict[UUID, Run]:
    """Return the oldest listed ancestors of runs, by their ids."""
    roots: dict[UUID, Run] = {}
    level = {run.pk: run for run in runs}
    for _ in range(MAX_ANCESTORS):
        parents = listed.in_bulk({run.parent_id for run in level.values() if run.parent_id})
        above: dict[UUID, Run] = {}
        for run in level.values():
            parent = parents.get(run.parent_id)
            if parent is None:
                roots[run.pk] = run
            else:
                above[parent.pk] = parent
        level = above
        if not level:
            break
    return roots | level
