// Puts what the replica says now in the place of what it said two seconds ago, while somebody looks at the page.
// All figures and plots are made by the replica; without this script the page is the same, and loads itself anew.
(() => {
  const note = document.getElementById("live");
  let timer;
  let busy = false;

  const tell = (text, stale) => {
    note.textContent = text;
    document.documentElement.classList.toggle("stale", stale);
  };

  const refresh = async () => {
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch("", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!page.querySelector("main")) throw new Error("another page");
      if (getSelection().isCollapsed) {
        document.querySelector("main").replaceWith(document.adoptNode(page.querySelector("main")));
        tell("live", false);
      } else {
        tell("stands still while text is selected", false);
      }
    } catch {
      tell("no answer: this is how it was", true);
    }
    busy = false;
    rest();
  };

  const rest = () => {
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(refresh, 2000);
  };

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) refresh();
  });
  rest();
})();
