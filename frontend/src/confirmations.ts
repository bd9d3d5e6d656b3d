// Questions before a form is sent whose action cannot be undone.

/** Ask the question in a form's `data-confirm` before the form is submitted. */
export function enableConfirmations(page: Document): void {
  page.addEventListener("submit", (event) => {
    const question = (event.target as HTMLElement).dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
}
