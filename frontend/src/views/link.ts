// Whether what one sees is live: a dot and a word, said aloud when it changes.

import type { Link } from "../socket";

const WORDS: Record<Link, string> = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  refused: "Not available",
};

export class LinkSign {
  private readonly sign: HTMLElement;
  private readonly word: HTMLElement;

  constructor(private readonly page: HTMLElement) {
    this.sign = page.querySelector("[data-link]")!;
    this.word = this.sign.querySelector("[data-word]")!;
  }

  show(link: Link): void {
    this.sign.dataset.link = link;
    this.word.textContent = WORDS[link];
    this.page.dataset.stale = String(link !== "live");
  }
}
