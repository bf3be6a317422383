"use strict";
(() => {
  const root = document.documentElement;
  const remembered = (value) => {
    try {
      if (value) localStorage.setItem("penstock-theme", value);
      return localStorage.getItem("penstock-theme");
    } catch { return null; }
  };
  const before = remembered();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  document.getElementById("theme")?.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remembered(root.dataset.theme);
  });

  const choose = (box, at) => {
    const tokens = box.querySelectorAll("i");
    if (!tokens.length) return;
    at = Math.max(0, Math.min(tokens.length - 1, at));
    box.querySelector("i.chosen")?.classList.remove("chosen");
    const token = tokens[at];
    token.classList.add("chosen");
    token.scrollIntoView({ block: "nearest" });
    box.dataset.at = at;
    const run = token.parentElement;
    const id = (box.dataset.ids || "").split(" ")[at];
    const detail = box.parentElement.querySelector(".detail");
    if (detail) {
      detail.textContent = `Token ${at + 1} of ${tokens.length}: id ${id}, ${JSON.stringify(token.textContent)}, ` +
        (box.dataset.unmasked !== undefined ? "" : run.classList.contains("trained") ? "supervised, " : "not supervised, ") +
        run.dataset.part;
    }
  };
  document.addEventListener("click", (event) => {
    const token = event.target.closest?.(".tokens i");
    if (!token) return;
    const box = token.closest(".tokens");
    choose(box, Array.prototype.indexOf.call(box.querySelectorAll("i"), token));
  });
  document.addEventListener("keydown", (event) => {
    const box = event.target.closest?.(".tokens");
    if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = box.querySelectorAll("i").length - 1;
    const at = box.dataset.at === undefined ? -1 : Number(box.dataset.at);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: last,
      Enter: Math.max(at, 0), " ": Math.max(at, 0) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(box, to);
  });
})();
