// The status of the connection: whether the page is live, and which mirror it uses. While the
// page's own mirror does not answer, links to this page at other mirrors are shown next to the status.

import { requireElement } from "../dom";
import type { Mirror } from "../failover";
import type { ConnectionStatus } from "../liveFeed";

const STATUS_LABELS: Record<ConnectionStatus, string> = {
  connecting: "Connecting",
  live: "Live",
  silent: "No answer",
  reconnecting: "Reconnecting",
  refused: "Not available",
};

/** Shows the status of the connection; screen readers announce its changes. */
export class ConnectionStatusView {
  private readonly status: HTMLElement;
  private readonly label: HTMLElement;
  private readonly mirrorName: HTMLElement;
  private readonly otherMirrors: HTMLElement;

  constructor(
    private readonly page: HTMLElement,
    private readonly mirrors: Mirror[],
  ) {
    this.status = requireElement(page, "[data-connection]");
    this.label = requireElement(this.status, "[data-connection-label]");
    this.mirrorName = requireElement(this.status, "[data-mirror-name]");
    this.otherMirrors = requireElement(page, "[data-other-mirrors]");
  }

  /** Show a status of the connection to a mirror; 0 is the page's own. */
  show(status: ConnectionStatus, mirror: number): void {
    const isLive = status === "live";
    const namesMirror = isLive && this.mirrors.length > 1;
    this.status.dataset.connection = status;
    this.label.textContent = STATUS_LABELS[status];
    this.mirrorName.textContent = namesMirror ? `by ${this.mirrors[mirror]!.name}` : "";
    this.mirrorName.hidden = !namesMirror;
    this.page.dataset.stale = String(!isLive);
    this.showLinks(this.selectLinkedMirrors(isLive, mirror), mirror !== 0);
  }

  /** Return the mirrors to link to: the one in use, or while none is in use, all others. */
  private selectLinkedMirrors(isLive: boolean, mirror: number): Mirror[] {
    if (!isLive) return this.mirrors.slice(1);
    return mirror === 0 ? [] : [this.mirrors[mirror]!];
  }

  /** Link to this page at other mirrors. `hasLeftHome`: whether the page uses another mirror. */
  private showLinks(mirrors: Mirror[], hasLeftHome: boolean): void {
    const reason = hasLeftHome ? `${this.mirrors[0]!.name} does not answer. ` : "";
    const parts: (string | Node)[] = [`${reason}This page at `];
    mirrors.forEach(({ name, page }, i) => {
      const link = document.createElement("a");
      link.href = page;
      link.textContent = name;
      if (i > 0) parts.push(", ");
      parts.push(link);
    });
    this.otherMirrors.replaceChildren(...parts);
    this.otherMirrors.hidden = mirrors.length === 0;
  }
}
