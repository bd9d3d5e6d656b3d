"""Plans of machines on the run's page, reported by machines that do not train."""

import os
import time

import pytest
from helpers import paths
from helpers.browser.navigation import click_and_load
from helpers.browser.screenshots import check_page
from helpers.site.live_site import EMAIL, log_in
from playwright.sync_api import Page, expect

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.protocol import coordinator_messages
from barnraise.protocol.signing import Identity

GOLDEN = paths.GOLDEN / "reports.json"
REPORT = coordinator_messages.Reports.model_validate_json(GOLDEN.read_text()).reports[0]
PLAN_ON_A_GPU = {
    "device": "NVIDIA GeForce RTX 4090 Laptop GPU",
    "device_bytes": 12 << 30,
    "host_bytes": 48 << 30,
    "disk_bytes": 120 << 30,
    "predicted_seconds": 41.0,
    "binding": "optimizer",
    "clipping": "layer",
    "crash_safety": "restart",
    "sentence": "50 layers in 12 groups; updating them on the CPU is what limits.",
}


class ReportingMachine:
    """An enrolled machine that reports and does not train."""

    def __init__(self, site, page: Page, run: str, name: str):
        self.coordinator = CoordinatorClient(site.url, Identity(os.urandom(32)))
        self.coordinator.pin_mirror()
        description = coordinator_messages.MachineDescription(hostname=name)
        code = self.coordinator.request_enrolment(description).code
        page.goto(f"{site.url}/machines/enrol/{code}/")
        click_and_load(page.get_by_role("button", name="Approve and confirm"))
        expect(page.get_by_role("heading", name=f"{name} is yours.")).to_be_visible()
        request = coordinator_messages.JoinRequest(version="1", addresses=[])
        joined = self.coordinator.join_run(run, request)
        self.run, self.slug, self.seq = joined.run.id, joined.run.slug, joined.acknowledged

    def report(self, **changed) -> None:
        self.seq += 1
        fields = {"seq": self.seq, "at": time.time(), "points": [], **changed}
        self.coordinator.send_reports(self.run, [REPORT.model_copy(update=fields)])


@pytest.fixture
def run(site, page) -> str:
    log_in(page)
    return site.manage("create_run", "--owner", EMAIL, "--name", "Planned", "--report-every", "5")


def test_run_page_shows_plans_and_predicted_and_measured_steps(site, page: Page, run):
    """A plan opens by keyboard, stays open while its values change, and fits a phone."""
    laptop, tower, workshop = (
        ReportingMachine(site, page, run, name) for name in ("laptop", "tower", "workshop")
    )
    laptop.report(plan=None, step_seconds=None, exchange=None)
    tower.report(
        plan=REPORT.plan.model_copy(update=PLAN_ON_A_GPU), step_seconds=50.0, anchor="c" * 64
    )
    workshop.report()
    page.goto(f"/runs/{workshop.slug}/")
    rows = {
        name: page.locator("[data-machine-table] tbody tr", has_text=name)
        for name in ("laptop", "tower", "workshop")
    }
    expect(rows["workshop"].locator(".step")).to_have_text("5.4 s / 5.1 sas planned")
    expect(rows["tower"].locator(".step")).to_have_text("41.0 s / 50.0 s22 % longer")
    expect(rows["tower"].locator("[data-large]")).to_have_count(0)
    expect(rows["workshop"].locator("[data-large]")).to_have_count(0)
    expect(rows["workshop"].locator(".upload")).to_have_text("105 kB/s · 8.4 %")
    expect(rows["workshop"].locator("[data-cell=lag]")).to_have_text("1")
    expect(rows["workshop"].locator(".weights")).to_have_text("Identical")
    expect(rows["tower"].locator(".weights")).to_have_text("Differ")
    expect(rows["laptop"].locator(".step")).to_have_text("–")
    expect(rows["laptop"].get_by_role("button")).to_have_count(0)

    plan_button, plan = (
        page.get_by_role(role, name="How workshop trains") for role in ("button", "region")
    )
    plan_button.focus()
    page.keyboard.press("Enter")
    expect(plan).to_contain_text(REPORT.plan.sentence)
    expect(plan).to_contain_text("4 × 1,024 tokens")
    expect(plan.locator("[data-fact=round_steps]")).to_have_text("20 steps")
    expect(plan).to_contain_text("1.6 % of the values, 0.23 bits a parameter")
    expect(plan.get_by_text("GPU memory")).to_be_hidden()
    workshop.report(step_seconds=6.6)
    expect(plan.locator("[data-fact=step_seconds]")).to_have_text("6.6 s")
    expect(plan_button).to_be_focused()
    expect(plan_button).to_have_attribute("aria-expanded", "true")

    page.get_by_role("button", name="How tower trains").click()
    check_page(page, "run-plan")
    plan_button.press("Space")
    expect(plan).to_have_count(0)
