// Buttons that copy a command to the clipboard.

const CONFIRMATION_MS = 1600; // for which the button shows whether it has copied

/** Make every button with `data-copy` copy that text. */
export function enableCopyButtons(page: Document): void {
  page.addEventListener("click", (event) => {
    const button = (event.target as Element).closest<HTMLButtonElement>("[data-copy]");
    if (button) void copyCommand(button);
  });
}

async function copyCommand(button: HTMLButtonElement): Promise<void> {
  const hasCopied = await writeToClipboard(button.dataset.copy ?? "");
  const label = button.querySelector("[data-copy-label]") ?? button;
  label.textContent = hasCopied ? "Copied" : "Select it";
  button.classList.toggle("is-done", hasCopied);
  setTimeout(() => {
    label.textContent = "Copy";
    button.classList.remove("is-done");
  }, CONFIRMATION_MS);
}

/**
 * Write a text to the clipboard, and return whether that succeeded.
 *
 * Browsers offer `navigator.clipboard` only on https and localhost. Elsewhere the deprecated
 * `execCommand` still works.
 */
export async function writeToClipboard(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    const hasCopied = document.execCommand("copy");
    area.remove();
    return hasCopied;
  }
}
