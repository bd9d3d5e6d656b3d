// The runs that a reader selects in the list to compare them. The list is fetched again every few
// seconds, and the choice stays.

const MIN_RUNS = 2;
const MAX_RUNS = 8;

/** Keep the selected checkboxes of the list of runs, and allow comparing from two runs on. */
export function enableRunSelection(page: Document): void {
  const form = page.querySelector<HTMLFormElement>("[data-run-selection]");
  if (!form) return;
  const button = form.querySelector<HTMLButtonElement>("[data-compare]")!;
  const text = form.querySelector<HTMLElement>("[data-selection-text]")!;
  const hint = text.textContent ?? "";
  const selected = new Set<string>();
  const boxes = () => page.querySelectorAll<HTMLInputElement>("#runs input[name=run]");

  const update = () => {
    for (const box of boxes()) {
      box.checked = selected.has(box.value);
      box.disabled = !box.checked && selected.size >= MAX_RUNS;
    }
    button.disabled = selected.size < MIN_RUNS;
    text.textContent = selected.size ? `${selected.size} of at most ${MAX_RUNS} selected.` : hint;
  };
  page.addEventListener("change", (event) => {
    const box = event.target as HTMLInputElement;
    if (box.name !== "run") return;
    if (box.checked) selected.add(box.value);
    else selected.delete(box.value);
    update();
  });
  // A selected run may be on another page of the list.
  form.addEventListener("submit", () => {
    const shown = new Set([...boxes()].map((box) => box.value));
    for (const run of selected) {
      if (shown.has(run)) continue;
      const field = page.createElement("input");
      Object.assign(field, { type: "hidden", name: "run", value: run });
      form.append(field);
    }
  });
  new MutationObserver(update).observe(form.parentElement!, { childList: true });
  for (const box of boxes()) if (box.checked) selected.add(box.value);
  update();
}
