"use strict";
(() => {
  const help = document.getElementById("help");
  const writing = (node) => node.matches?.("input, select, textarea");

  // -- keys: an element says by data-key which one it wants ---------------------------------------------------------
  const entries = () => [...document.querySelectorAll(".rows a.entry")];
  const move = (by) => {
    const all = entries();
    if (!all.length) return false;
    const at = all.indexOf(document.activeElement);
    const to = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + by));
    all[to].focus();
    all[to].scrollIntoView({ block: "nearest" });
    return true;
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape" && writing(event.target)) { event.target.blur(); return; }
    if (writing(event.target) || help?.open) return;
    if (event.key === "j" || event.key === "k") {
      if (move(event.key === "j" ? 1 : -1)) event.preventDefault();
      return;
    }
    const wanted = [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === event.key);
    if (!wanted) return;
    event.preventDefault();
    if (writing(wanted)) { wanted.focus(); wanted.select?.(); } else wanted.click();
  });
  document.getElementById("help-button")?.addEventListener("click", () => help?.showModal());

  // -- live parts: fetched about once a second while somebody looks ---------------------------------------------------
  const box = document.getElementById("live");
  if (!box) return;
  const lost = document.getElementById("no-answer");
  const seen = new Map();
  let running = false;
  const replace = (fresh) => {
    const parts = [...fresh.children];  // before they are moved to the page
    const ids = new Set(parts.map((each) => each.id));
    for (const old of [...box.children]) if (!ids.has(old.id)) old.remove();
    for (const part of parts) {
      const html = part.outerHTML;
      const now = document.getElementById(part.id);
      if (now && (seen.get(part.id) === html || now.outerHTML === html)) continue;
      seen.set(part.id, html);
      if (!now) { box.append(part); continue; }
      if (now.contains(document.activeElement) && writing(document.activeElement)) continue;
      const opened = [...now.querySelectorAll("details[id][open]")].map((each) => each.id);
      const focused = now.contains(document.activeElement) ? document.activeElement.id : "";
      const scrolled = [...now.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
      now.replaceWith(part);
      for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
      part.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = scrolled[at] || 0; });
      if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    }
  };
  const look = async () => {
    if (running || document.hidden) return;
    running = true;
    const limit = new AbortController();
    const timer = setTimeout(() => limit.abort(), 10000);
    try {
      const answer = await fetch(box.dataset.live, { signal: limit.signal, cache: "no-store", redirect: "error" });
      const text = await answer.text();
      if (answer.headers.get("content-type")?.startsWith("text/html")) {
        replace(new DOMParser().parseFromString(text, "text/html").body);
        box.dataset.updates = Number(box.dataset.updates || 0) + 1;
      }
      if (lost) lost.hidden = true;
    } catch {
      if (lost) lost.hidden = false;
    } finally {
      clearTimeout(timer);
      running = false;
    }
  };
  setInterval(look, 1000);
  document.addEventListener("visibilitychange", look);
})();
