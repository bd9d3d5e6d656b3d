// Small helpers for elements of the page.

/** Return the element that the selector names; throw if the template lacks it. */
export function requireElement<E extends Element = HTMLElement>(
  root: ParentNode,
  selector: string,
): E {
  const element = root.querySelector<E>(selector);
  if (!element) throw new Error(`the page has no element ${selector}`);
  return element;
}

// What `setText` has set. Reading an element's text costs more than formatting a number.
const shownTexts = new WeakMap<HTMLElement, string>();

/** Set an element's text, unless it is the same: an unchanged element causes no work. */
export function setText(element: HTMLElement | undefined, text: string): void {
  if (!element || shownTexts.get(element) === text) return;
  shownTexts.set(element, text);
  const node = element.firstChild;
  if (node?.nodeType !== Node.TEXT_NODE || node.nextSibling) element.textContent = text;
  // A text that changes keeps its node: a new one would be styled and placed from the beginning.
  else if (node.nodeValue !== text) node.nodeValue = text;
}

// One observer for all: the browser looks at each of them in every frame.
const visibilityListeners = new WeakMap<Element, (isVisible: boolean) => void>();
let visibilityObserver: IntersectionObserver | null = null;

/**
 * Call `onChange` when an element comes into view or leaves it.
 *
 * What nobody sees is drawn less often. An element has one listener.
 */
export function watchVisibility(element: Element, onChange: (isVisible: boolean) => void): void {
  visibilityListeners.set(element, onChange);
  visibilityObserver ??= new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        visibilityListeners.get(target)?.(isIntersecting);
      }
    },
    { rootMargin: "150px" },
  );
  visibilityObserver.observe(element);
}

const SLICE_MS = 8; // of work in a browser that is not idle

/**
 * Call `work` when the browser has nothing else to do; `hasTime` returns false once that ends.
 *
 * @param timeout - milliseconds after which it is called even if the browser is busy
 */
export function whenIdle(work: (hasTime: () => boolean) => void, timeout: number): void {
  if ("requestIdleCallback" in window) {
    requestIdleCallback((deadline) => {
      if (deadline.didTimeout) runSlice(work);
      else work(() => deadline.timeRemaining() > 1);
    }, { timeout });
  } else {
    setTimeout(() => runSlice(work));
  }
}

function runSlice(work: (hasTime: () => boolean) => void): void {
  const end = performance.now() + SLICE_MS;
  work(() => performance.now() < end);
}

/** Create a copy of the single element in a template. */
export function cloneTemplate(template: HTMLTemplateElement): HTMLElement {
  const fragment = template.content.cloneNode(true) as DocumentFragment;
  return requireElement(fragment, "*");
}

/**
 * Replace an element's children by `rows`.
 *
 * A row that is already in its place is not moved, because moving it would take the keyboard's
 * focus from it.
 */
export function replaceRows(list: HTMLElement, rows: HTMLElement[]): void {
  const shown = new Set<Element>(rows);
  for (const row of [...list.children]) {
    if (!shown.has(row)) row.remove();
  }
  rows.forEach((row, i) => {
    const present = list.children[i] ?? null;
    if (row !== present) list.insertBefore(row, present);
  });
}
