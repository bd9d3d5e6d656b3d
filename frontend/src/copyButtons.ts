// A command beside a button that copies it. The button keeps its width when its label changes.

export function copyButtons(page: Document): void {
  page.addEventListener("click", (event) => {
    const button = (event.target as Element).closest<HTMLButtonElement>("[data-copy]");
    if (button) void copy(button);
  });
}

async function copy(button: HTMLButtonElement): Promise<void> {
  const text = button.dataset.copy ?? "";
  const done = await put(text);
  const label = button.querySelector("[data-label]") ?? button;
  label.textContent = done ? "Copied" : "Select it";
  button.classList.toggle("is-done", done);
  setTimeout(() => {
    label.textContent = "Copy";
    button.classList.remove("is-done");
  }, 1600);
}

/** navigator.clipboard is there on https and localhost only; elsewhere the old way still works. */
async function put(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
