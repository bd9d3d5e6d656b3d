// The new-run form: what a preset stands for shows as the placeholder of each field that may override it.

export function presetHints(page: Document): void {
  const form = page.querySelector<HTMLFormElement>("[data-run-form]");
  if (!form) return;
  const show = () => {
    const chosen = form.querySelector<HTMLInputElement>("input[name=preset]:checked");
    const shape = JSON.parse(chosen?.dataset.shape ?? "{}") as Record<string, number>;
    const bytes = form.querySelector<HTMLInputElement>("input[name='text.tokenizer']:checked")?.value === "bytes";
    for (const [name, value] of Object.entries(bytes ? { ...shape, vocabulary: 256 } : shape)) {
      const field = form.querySelector<HTMLInputElement>(`input[name='model.${name}']`);
      if (field) field.placeholder = value.toLocaleString("en-US");
    }
  };
  form.addEventListener("change", show);
  show();
}
