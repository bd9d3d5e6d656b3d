// Errors of a submitted form, which disappear once the person changes the field they concern. What
// was typed instead is checked when the form is sent again.

const ERROR_SUFFIX = "_error"; // of the id of a field's error, after the field's own id

/** Remove a field's error, its red border and its line in the summary when the field changes. */
export function enableErrorClearing(page: Document): void {
  page.addEventListener("input", (event) => {
    const field = (event.target as Element).closest<HTMLElement>(".field");
    const error = field?.querySelector<HTMLElement>(":scope > .error");
    if (!field || !error) return;
    for (const input of field.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
    }
    removeFromSummary(page, error.id.slice(0, -ERROR_SUFFIX.length));
    error.remove();
  });
}

/** Remove the link to a field from the summary above the form, and an empty summary. */
function removeFromSummary(page: Document, fieldId: string): void {
  const link = page.querySelector(`.notice.is-error a[href="#${CSS.escape(fieldId)}"]`);
  const summary = link?.closest(".notice");
  link?.closest("li")?.remove();
  if (summary && !summary.querySelector("li")) summary.remove();
  const count = summary?.querySelectorAll("li").length ?? 0;
  const sentence = summary?.querySelector("[data-error-count]");
  if (sentence) {
    sentence.textContent = count === 1 ? "One field needs fixing:" : `${count} fields need fixing:`;
  }
}
