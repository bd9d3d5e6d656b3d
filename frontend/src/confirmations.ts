// Questions before a form is sent whose action cannot be undone.

/** Ask the question in a form's `data-confirm` before the form is submitted. */
export function enableConfirmations(page: Document): void {
  const confirmed = new WeakSet<HTMLFormElement>();
  page.addEventListener("submit", (event) => {
    const form = event.target as HTMLFormElement;
    const question = form.dataset.confirm;
    if (!question || confirmed.has(form)) return;
    event.preventDefault();
    const { submitter } = event as SubmitEvent;
    const action = submitter?.textContent?.trim() || "Continue";
    askQuestion(page, question, action, () => {
      confirmed.add(form);
      form.requestSubmit(submitter);
      confirmed.delete(form); // the browser may come back to this page
    });
  });
}

/** Show a question whose answer is an action or "Go back"; the latter has the keyboard's focus. */
function askQuestion(page: Document, question: string, action: string, onYes: () => void): void {
  const dialog = page.createElement("dialog");
  dialog.className = "question";
  dialog.setAttribute("aria-labelledby", "question-text");
  const text = page.createElement("p");
  text.id = "question-text";
  text.textContent = question;
  const back = createButton(page, "Go back", "button");
  const go = createButton(page, action, "button is-danger");
  const buttons = page.createElement("div");
  buttons.className = "buttons";
  buttons.append(back, go);
  dialog.append(text, buttons);
  back.addEventListener("click", () => dialog.close());
  go.addEventListener("click", () => {
    dialog.close();
    onYes();
  });
  dialog.addEventListener("close", () => dialog.remove());
  page.body.append(dialog);
  dialog.showModal();
}

function createButton(page: Document, label: string, className: string): HTMLButtonElement {
  const button = page.createElement("button");
  button.type = "button";
  button.className = className;
  button.textContent = label;
  return button;
}
