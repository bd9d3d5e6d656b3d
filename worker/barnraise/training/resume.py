"""What this machine kept of a run, and where its state lies: checkpoints for a plan in memory, a store for one on disk.

Other limits may move the state: from memory to disk, back, or to a disk laid out in another way. The new one is whole
and committed before the old one goes, so that a crash at any instant leaves one of them.

checkpoint/       two slots (`checkpoint.py`), of a plan in memory
state/            records and their manifest (`swap/store.py`), of a plan on disk
state.new/ .old/  while a state moves
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from barnraise.errors import StateError
from barnraise.exchange.handlers.snapshot_client import load_base_snapshot
from barnraise.exchange.ledger.anchor import Anchor, compute_sketch
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.planning.plan import Plan
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.engine import WARMUP_STEPS, Engine
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import TRAINING_KINDS, FragmentSequence, StateStore, read_manifest
from barnraise.training.checkpoint import Checkpoint, StateHeader

log = logging.getLogger("barnraise")


class SavedState:
    """The state of one run in `folder`, for whoever holds the folder's lock. `mark`: what the newest belongs to."""

    def __init__(self, folder: Path, plan: Plan):
        self.plan, self.state = plan, folder / "state"
        self.checkpoint = Checkpoint(folder / "checkpoint")
        self._fresh, self._old = folder / "state.new", folder / "state.old"
        self._finish_move()
        saved, stored = self.checkpoint.header, read_state_header(self.state)
        on_disk = stored is not None and (
            saved is None
            or stored.step > saved.step
            or (plan.on_disk and stored.step == saved.step)
        )
        self.header = stored if on_disk else saved
        self._on_disk = on_disk

    def open_store(self, recipe: Recipe) -> StateStore:
        """The state under the plan, brought into its form first; empty where nothing was kept."""
        plan = self.plan
        if not plan.on_disk:
            return StateStore(plan)
        if self.header is not None and (
            not self._on_disk or read_manifest(self.state)["layout"] != StateStore.layout_of(plan)
        ):
            log.info("moving this machine's state to where the plan wants it")
            self._move(self.header, recipe)
        _remove(self.checkpoint.folder)
        return StateStore(plan, self.state)

    def read_progress(self, store: StateStore) -> EngineProgress | None:
        """Where a state on disk stands; None for a fresh one, and for one in memory, which `load` brings back."""
        if store.header is None:
            return None
        mark = StateHeader.model_validate_json(store.header)
        return EngineProgress(position=mark.step, **mark.progress)

    def load_into(self, engine: Engine) -> None:
        """Into an engine in memory. Raises StateError when it is of another model."""
        with_state = DiskState(self.plan.model, self.state) if self._on_disk else None
        if with_state is None:
            kept = self.checkpoint.load()
            assert kept is not None
            engine.load_state_dict(kept[0])
            return
        engine.load_state_dict(with_state)
        with_state.close()

    def save(self, engine: Engine, mark: StateHeader, closing: bool) -> None:
        """Makes durable what the engine holds. `closing`: the worker leaves."""
        if self.plan.on_disk:
            engine.commit(closing)  # it asks for the mark by itself
            return
        self.checkpoint.save(engine.state_dict(), mark)
        if self._on_disk:
            self._on_disk = False
            _remove(self.state)

    def align_with_ledger(self, ledger: Ledger, recipe: Recipe) -> bool:
        """Whether the ledger goes on from what is kept. One that began again at a snapshot since gives its anchor the
        place of the kept one; moments, momentum and feedback stay."""
        assert self.header is not None
        vector = {author: head.seq for author, head in self.header.heads.items()}
        if ledger.can_continue_from(vector, self.header.retracted):
            return True
        base = load_base_snapshot(ledger) if ledger.has_received(vector) else None
        if base is None:
            return False
        anchor = Anchor([], base.heads)
        anchor.restore(
            base.heads, base.retracted, [compute_sketch(units) for units in base.fragments]
        )
        log.info(
            "taking the peers' anchor at %s tokens in the place of an older one",
            f"{anchor.tokens:,}",
        )
        stands = {
            "heads": anchor.heads,
            "retracted": anchor.retracted,
            "sketches": anchor.expected_sketches,
            "tokens": anchor.tokens,
        }
        self._rebase(base.fragments, self.header.model_copy(update=stands), recipe)
        return True

    def _rebase(self, anchor: Sequence[Tensor], mark: StateHeader, recipe: Recipe) -> None:
        if self.plan.on_disk:
            self._move(mark, recipe, anchor)
        else:
            with ExitStack() as opened:
                self.checkpoint.save(dict(self._source(opened, anchor)), mark)
            self._on_disk = False
            _remove(self.state)
        self.header = mark

    def clear(self) -> None:
        """Forgets all of it: it belongs to another past than the ledger's."""
        _remove(self.state)
        self.checkpoint.clear()
        self.header, self._on_disk = None, False

    # ---- moving ----------------------------------------------------------------------------------------------

    def _source(
        self, opened: ExitStack, anchor: Sequence[Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """What was kept, while `opened` is; over another anchor where one is given."""
        if self._on_disk:
            state = DiskState(self.plan.model, self.state)
            opened.callback(state.close)
            source: Mapping[str, Tensor] = state
        else:
            kept = self.checkpoint.load()
            assert kept is not None
            source = kept[0]
        return source if anchor is None else AnchorOverlay(source, anchor)

    def _move(
        self, mark: StateHeader, recipe: Recipe, anchor: Sequence[Tensor] | None = None
    ) -> None:
        _remove(self._fresh)

        def describe(progress: EngineProgress) -> str:
            return mark.model_copy(update={"progress": progress_fields(progress)}).model_dump_json()

        with ExitStack() as opened:
            engine = Engine(
                self.plan, recipe, StateStore(self.plan, self._fresh), Anchor([]), describe
            )
            opened.callback(engine.close)
            engine.load_state_dict(self._source(opened, anchor))
            engine.progress = replace(engine.progress, position=mark.step)
            engine.commit(closing=True)
        if self.state.exists():
            self.state.rename(self._old)
        self._finish_move()
        self._on_disk = True

    def _finish_move(self) -> None:
        """After a crash, too: the new state takes its place if it is whole, else the old one comes back."""
        if not self.state.exists():
            for source in (self._fresh, self._old):
                if read_state_header(source) is not None:
                    source.rename(self.state)
                    break
        for leftover in (self._fresh, self._old):
            _remove(leftover)


class AnchorOverlay(Mapping[str, Tensor]):
    """A state with other anchor fragments, read a tensor at a time."""

    def __init__(self, source: Mapping[str, Tensor], anchor: Sequence[Tensor]):
        self._source, self._anchor = source, anchor

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __getitem__(self, name: str) -> Tensor:
        kind, _, index = name.partition(".")
        return self._anchor[int(index)] if kind == "anchor" else self._source[name]


class DiskState(Mapping[str, Tensor]):
    """A state on disk under the names of `Engine.state`, read a tensor at a time; memory holds none of it."""

    def __init__(self, model: ModelSpec, folder: Path):
        """Raises StateError where there is no whole one."""
        body = read_manifest(folder)
        if body is None:
            raise StateError(f"{folder} holds no state")
        layout, everywhere = body["layout"], ("disk",) * (model.layers + 2)
        plan = Plan(
            model=model, weights=everywhere, moments=everywhere, exchange="disk", clipping="layer",
            tile=layout["tile"], crash_safety=layout["crash_safety"], dtype=layout["dtype"],
            moments_bits=layout["moments_bits"],
        )  # fmt: skip
        self._store = StateStore(plan, folder)
        self.header = StateHeader.model_validate_json(self._store.header or "")
        self._names = ["progress"]
        for i in range(plan.last_fragment + 1):
            self._names += [f"{kind}.{i}" for kind in ("m", "v", "anchor", "momentum", "feedback")]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        kind, _, index = name.partition(".")
        if kind == "progress":
            notes, lost = self.header.progress, self._store.invalid_kinds & set(TRAINING_KINDS)
            return torch.tensor(
                [0, WARMUP_STEPS]
                if lost
                else [int(notes["optimizer_steps"]), int(notes["warmup_steps_left"])]
            )
        if kind not in ("m", "v"):
            return FragmentSequence(
                self._store, kind, torch.float32 if kind == "momentum" else torch.int32
            )[int(index)]
        return self._moment(int(index), first=kind == "m")

    def _moment(self, i: int, first: bool) -> Tensor:
        plan, whole = self._store.plan, torch.empty(self._store.plan.fragments[i].size)
        record = torch.empty(plan.record_bytes("moments", plan.tile) + 4096, dtype=torch.uint8)
        record = record[-record.data_ptr() % 4096 :]  # O_DIRECT wants whole pages
        for t in range(plan.tile_count(i)):
            begin, end = plan.tile_bounds(i, t)
            part = self._store.load_tile("moments", i, t, record)
            whole[begin:end] = AdamMoments.of(plan, part, end - begin).to_float32()[
                0 if first else 1
            ]
        return whole

    def close(self) -> None:
        self._store.close()


def progress_fields(progress: EngineProgress) -> dict[str, int | tuple[float, ...]]:
    """What a mark says of a state's progress besides its position, which is the mark's step."""
    return {name: count for name, count in asdict(progress).items() if name != "position"}


def read_state_header(folder: Path) -> StateHeader | None:
    """What a state on disk belongs to; None where there is none, or none to go on from (the log says why)."""
    try:
        body = read_manifest(folder)
        if body is None:
            return None
        if "anchor" in body["invalid"]:
            raise StateError("the anchor in it is damaged")
        return StateHeader.model_validate_json(body["header"])
    except (StateError, ValidationError) as error:
        log.warning("the state in %s is not used: %s", folder, error)
        return None


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
