// The form of a new run: fields of the model's shape show the preset's values as placeholders.

const BYTE_VOCABULARY = 256; // of a run that tokenizes text into bytes

/** Show the selected preset's shape in the fields that may override it. */
export function enablePresetHints(page: Document): void {
  const form = page.querySelector<HTMLFormElement>("[data-run-form]");
  if (!form) return;
  form.addEventListener("change", () => showPresetShape(form));
  showPresetShape(form);
}

function showPresetShape(form: HTMLFormElement): void {
  const preset = form.querySelector<HTMLInputElement>("input[name=preset]:checked");
  const shape = JSON.parse(preset?.dataset.shape ?? "{}") as Record<string, unknown>;
  const tokenizer = form.querySelector<HTMLInputElement>("input[name='text.tokenizer']:checked");
  if (tokenizer?.value === "bytes") shape.vocabulary = BYTE_VOCABULARY;
  for (const [name, value] of Object.entries(shape)) {
    const field = form.querySelector<HTMLInputElement>(`input[name='model.${name}']`);
    if (field && typeof value === "number") {
      field.placeholder = value.toLocaleString("en-US", { maximumSignificantDigits: 9 });
    }
  }
}
