// Whether what one sees is live, and by which mirror: a dot and a word, said aloud when it changes. Links on the page
// lead to its own site all the same; while that is gone, the way to this page at another one stands beside it.

import type { Mirror } from "../failover";
import type { ConnectionStatus } from "../socket";

const WORDS: Record<ConnectionStatus, string> = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  refused: "Not available",
};

export class ConnectionStatusView {
  private readonly sign: HTMLElement;
  private readonly word: HTMLElement;
  private readonly by: HTMLElement;
  private readonly elsewhere: HTMLElement;

  constructor(
    private readonly page: HTMLElement,
    private readonly mirrors: Mirror[],
  ) {
    this.sign = page.querySelector("[data-link]")!;
    this.word = this.sign.querySelector("[data-word]")!;
    this.by = this.sign.querySelector("[data-by]")!;
    this.elsewhere = page.querySelector("[data-elsewhere]")!;
  }

  /** `at`: the mirror that is asked. */
  show(link: ConnectionStatus, at: number): void {
    this.sign.dataset.link = link;
    this.word.textContent = WORDS[link];
    this.by.textContent = link === "live" && this.mirrors.length > 1 ? `by ${this.mirrors[at]!.name}` : "";
    this.by.hidden = !this.by.textContent;
    this.page.dataset.stale = String(link !== "live");
    this.offer(link === "live" ? (at ? [this.mirrors[at]!] : []) : this.mirrors.slice(1), at);
  }

  private offer(mirrors: Mirror[], at: number): void {
    const links = mirrors.map(({ name, page }) => {
      const link = document.createElement("a");
      [link.href, link.textContent] = [page, name];
      return link;
    });
    const words = at ? `${this.mirrors[0]!.name} does not answer. This page at ` : "This page at ";
    this.elsewhere.replaceChildren(words, ...links.flatMap((link, i) => (i ? [", ", link] : [link])));
    this.elsewhere.hidden = links.length === 0;
  }
}
