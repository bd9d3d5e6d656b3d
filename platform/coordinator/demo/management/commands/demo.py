"""Run a demo: three people's machines train one GPT peer to peer, and a browser can watch."""

import json
import shutil
import signal
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from barnraise.formats import format_share
from coordinator.accounts.models import User
from coordinator.demo.demo_people import OWNER, STAFF, VOLUNTEERS, DemoPeople
from coordinator.demo.multi_mirror import MirrorCluster
from coordinator.demo.stack import DemoStack, StackError
from coordinator.runs.models import Run, Status

WORKERS = (1, 2, 3)
DEFAULT_TOKENS = 3_000_000  # about five minutes on two cores
NAME = "Demo"
MAX_MIRRORS = 9  # on one machine
FINISH_SECONDS = 90.0  # between the last worker's end and the run's status "finished"


class Command(BaseCommand):
    """Run the demo."""

    help = (
        "Start a platform on this machine, with a run and three workers. Ctrl-C stops everything."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "--tokens", type=int, help="stop at this many tokens and print one line of JSON"
        )
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--new", action="store_true", help="begin another run instead of continuing the last"
        )
        parser.add_argument(
            "--mirrors", type=int, default=1, help="sites with databases of their own"
        )

    def handle(self, *, tokens: int | None, port: int, mirrors: int = 1, **options: Any) -> None:
        """Start everything, show it, and stop it."""
        self.is_new = bool(options.get("new"))
        if tokens is not None and tokens < 1_000:
            raise CommandError(f"TOKENS must be 1,000 or more, not {tokens}")
        if not 1 <= mirrors <= MAX_MIRRORS:
            raise CommandError(f"MIRRORS must be between 1 and {MAX_MIRRORS}, not {mirrors}")
        for name in ("SIGTERM", "SIGHUP"):  # a closed terminal stops everything too
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), _interrupt)
        started = time.monotonic()
        console = Console(highlight=False)
        stack = DemoStack(settings.STATE_DIR / "demo", port, mirrors)
        try:
            with stack:
                self.show(stack, console, tokens, started, moved=port != stack.port and port)
        except StackError as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            console.print("\nStopped: every process of the demo has ended.")

    def show(
        self,
        stack: DemoStack,
        console: Console,
        tokens: int | None,
        started: float,
        moved: int | bool,
    ) -> None:
        """Start the stack, print the addresses, and watch the run."""
        if moved:
            console.print(f"Port {moved} is taken: using {stack.port}.")

        def show_progress(text: str) -> None:
            console.print(f"  {time.monotonic() - started:5.1f} s  {text}", soft_wrap=True)

        show_progress("starting Postgres, Valkey and the site")
        stack.start_measurement()
        stack.start_site()
        stack.wait_for_site()
        show_progress(f"the site answers at [bold]{stack.url}/[/]; now its people and machines")
        people = DemoPeople(settings.STATE_DIR)
        owner = people.create(OWNER)
        people.create(STAFF)
        owners: dict[int, User] = dict(
            zip(WORKERS, [owner, *map(people.create, VOLUNTEERS)], strict=True)
        )
        run = None if tokens or self.is_new else find_unfinished(owner)
        if run is None:
            run = launch_demo_run(stack, owner, tokens or DEFAULT_TOKENS)
        else:
            share = format_share(run.ledger_tokens / run.token_budget)
            console.print(f"  Continuing the run of last time ({share}). NEW=1 begins another.")
        url = f"{stack.url}{run.get_absolute_url()}"
        show_progress(f"watch the run at [bold]{url}[/]")
        show_progress("enrolling three machines of three people")
        stack.enrol(owners)
        if stack.is_measuring:
            show_progress("measuring this machine, once")
        stack.wait_for_measurement()
        show_progress("starting the machines")
        stack.start_workers(list(WORKERS), run)
        print_accounts(people, url, stack.url, console)
        if stack.cluster:
            print_mirrors(stack.cluster, run.get_absolute_url(), console)
        console.print(f"  up in {time.monotonic() - started:.1f} s · Ctrl-C stops everything\n")
        self.watch(stack, console, run, people)
        if tokens is None:
            console.print("The run is finished. The site stays up until Ctrl-C.")
            with Live(console=console, auto_refresh=False, transient=True) as live:
                while True:
                    stack.check_processes()
                    print_news(stack, console)
                    if console.is_terminal:
                        live.update(_staff_line(people), refresh=True)
                    time.sleep(0.5)
        self.conclude(stack, run, url, started)

    def watch(self, stack: DemoStack, console: Console, run: Run, people: DemoPeople) -> None:
        """Print live lines until every worker has ended by itself."""
        printed_at = 0.0
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while any(stack.processes.children[f"worker-{n}"].poll() is None for n in WORKERS):
                stack.check_processes()
                print_news(stack, console)
                statuses = {n: stack.read_status(n, run) for n in WORKERS}
                if console.is_terminal:
                    live.update(Group(_build_table(statuses), _staff_line(people)), refresh=True)
                elif time.monotonic() - printed_at > 5:
                    printed_at = time.monotonic()
                    for number, status in statuses.items():
                        name = stack.machine_name(number)
                        print(f"{name}: {_format_line(status)}", flush=True)
                time.sleep(0.25)
        stack.check_processes()

    def conclude(self, stack: DemoStack, run: Run, url: str, started: float) -> None:
        """Print one line of JSON; fail if the workers disagree or the loss did not fall."""
        stack.wait(
            lambda: _reload_run(run).state is Status.FINISHED, "the run's finish", FINISH_SECONDS
        )
        statuses = [stack.read_status(number, run) or {} for number in WORKERS]
        firsts = [s["validation_first"] for s in statuses if s.get("validation_first")]
        lasts = [s["validation_last"] for s in statuses if s.get("validation_last")]
        agree = len({(s.get("vector"), s.get("anchor")) for s in statuses}) == 1 and bool(
            statuses[0].get("anchor")
        )
        first, last = min(firsts)[1], max(lasts)[1]
        cluster_summary = stack.cluster.summary() if stack.cluster else {}
        print(
            json.dumps(
                {
                    "workers": len(statuses),
                    "tokens": statuses[0]["ledger_tokens"],
                    "updates": statuses[0]["updates_sent"] + statuses[0]["updates_received"],
                    "loss_first": round(first, 4),
                    "loss_last": round(last, 4),
                    "agree": agree,
                    "peer_bytes": sum(s["peer_bytes_sent"] for s in statuses),
                    "coordinator_bytes": sum(s["coordinator_bytes"] for s in statuses),
                    "seconds": round(time.monotonic() - started, 1),
                    "url": url,
                    **cluster_summary,
                }
            ),
            flush=True,
        )
        if not agree:
            raise CommandError("the workers' anchors differ")
        if not cluster_summary.get("one_state_hash", True):
            raise CommandError("the mirrors' states differ")
        if not last < first:
            raise CommandError(f"the validation loss did not fall: {first:.4f} → {last:.4f}")


def find_unfinished(owner: User) -> Run | None:
    """Find the run of an earlier demo that can go on."""
    runs = Run.objects.filter(owner=owner, name__startswith=NAME)
    return runs.exclude(status__in=(Status.FINISHED, Status.CANCELLED)).order_by("-pk").first()


def launch_demo_run(stack: DemoStack, owner: User, budget: int) -> Run:
    """Launch a run, in place of an earlier demo's; the machines' keys stay."""
    earlier = Run.objects.filter(owner=owner, name__startswith=NAME)
    for stale in earlier.exclude(status__in=(Status.FINISHED, Status.CANCELLED)):
        stale.cancel()
    for number in WORKERS:
        shutil.rmtree(stack.worker_dir(number) / "runs", ignore_errors=True)
    count = earlier.count()
    name = f"{NAME} {count + 1}" if count else NAME
    fields = {
        "text__tokenizer": "bytes",
        "recipe__token_budget": budget,
        "recipe__learning_rate": 3e-3,
        "recipe__evaluate_every": 30_000,
        "prompts": "The function \nTo open a file, ",
    }
    return stack.launch_run(owner, name, **fields)


def print_accounts(people: DemoPeople, run_url: str, site_url: str, console: Console) -> None:
    """Print where to look and how to sign in."""
    volunteers = ", ".join(person.email for person in VOLUNTEERS)
    console.print(
        f"\n  Watch it at     [bold]{run_url}[/]"
        f"\n  the owner       {OWNER.email}"
        f"\n  two volunteers  {volunteers}"
        f"\n  the staff       {STAFF.email}, for {site_url}/admin/"
        f"\n  password        {people.password}, for all of them"
        "\n  Or sign up: the code of the email appears here.\n",
        soft_wrap=True,
    )


def print_news(stack: DemoStack, console: Console) -> None:
    """Print the emails that the site has sent, and the mirrors that died, since the last call."""
    for line in stack.emails.new_lines():
        console.print(line, markup=False, soft_wrap=True)
    print_dead_mirrors(stack.cluster, console)


def print_mirrors(several: MirrorCluster, path: str, console: Console) -> None:
    """Print each mirror's address of the run, and the command that kills it."""
    for mirror in several.all:
        kill = " ".join(f"-{pid}" for pid in mirror.pids)  # with what they started
        console.print(
            f"  {mirror.name:<12}  {mirror.url}{path}   kill -9 -- {kill}", soft_wrap=True
        )
    console.print(
        f"  {len(several.all)} mirrors joined in {several.setup_seconds:.1f} s; kill any: the "
        "others go on, and it is started again\n"
    )


def print_dead_mirrors(several: MirrorCluster | None, console: Console) -> None:
    """Print which mirrors died since the last call."""
    if several is None:
        return
    for mirror in several.newly_dead():
        running = ", ".join(other.url for other in several.running)
        console.print(
            f"{mirror.name} at {mirror.url} is gone and is started again. Still running: "
            f"{running or 'none, but training continues'}",
            soft_wrap=True,
        )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _reload_run(run: Run) -> Run:
    run.refresh_from_db()
    return run


def _format_line(status: dict[str, Any] | None) -> str:
    if status is None:
        return "starting"
    loss = f"{status['loss']:.3f}" if status["loss"] is not None else "–"
    return (
        f"{status['activity']}, step {status['step']:,}, loss {loss}, "
        f"{status['rate']:,.0f} tokens/s, "
        f"sent {status['updates_sent']}, received {status['updates_received']}, "
        f"ledger {status['ledger_tokens']:,}"
    )


def _staff_line(people: DemoPeople) -> Text:
    return Text(f"\nThe staff's second factor now: {people.staff_code()}", style="dim")


def _build_table(statuses: dict[int, dict[str, Any] | None]) -> Table:
    table = Table(box=None, pad_edge=True)
    table.add_column("machine")
    for name in ("step", "loss", "validation", "tokens/s", "sent", "received", "ledger tokens"):
        table.add_column(name, justify="right", min_width=len(name) + 2)
    table.add_column("")
    for number, status in statuses.items():
        if status is None:
            table.add_row(DemoStack.machine_name(number), *[""] * 7, "starting")
            continue
        loss = f"{status['loss']:.3f}" if status["loss"] is not None else "–"
        valid = f"{status['validation_last'][1]:.3f}" if status["validation_last"] else "–"
        sent, received, ledger = (
            status["updates_sent"],
            status["updates_received"],
            status["ledger_tokens"],
        )
        figures = (
            f"{status['step']:,}",
            loss,
            valid,
            f"{status['rate']:,.0f}",
            f"{sent:,}",
            f"{received:,}",
            f"{ledger:,}",
        )
        table.add_row(DemoStack.machine_name(number), *figures, status["activity"])
    return table
