// What pages can do beyond reading: keys, copying, and parts that refresh themselves. Everything works without it, too.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const FIELDS = "input, textarea, select, [contenteditable]";
  // Not in a box that was just ticked: nothing is typed there.
  const typing = (e) => e.target instanceof Element && e.target.closest(FIELDS) && !e.target.matches("input[type=checkbox]");

  // -- keys ----------------------------------------------------------------------------------------------------------
  const rows = () => all("tr[data-row]");
  const here = () => document.querySelector("tr.here");

  function go(step) {
    const list = rows();
    if (!list.length) return;
    const at = list.indexOf(here());
    const next = list[Math.max(0, Math.min(list.length - 1, at < 0 ? (step > 0 ? 0 : list.length - 1) : at + step))];
    here()?.classList.remove("here");
    next.classList.add("here");
    next.querySelector("[data-open]")?.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  }

  function choose() {
    const box = here()?.querySelector("input[type=checkbox]");
    if (box) box.click();
  }

  const keys = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => go(1),
    k: () => go(-1),
    x: choose,
    "?": () => document.getElementById("keys")?.showModal(),
  };

  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
    if (typing(e)) {
      if (e.key === "Escape") e.target.blur();
      return;
    }
    if (e.key === "Enter" && here() && !e.target.closest("a, button, summary")) {
      e.preventDefault();
      here().querySelector("[data-open]")?.click();
      return;
    }
    if (keys[e.key]) {
      e.preventDefault();
      keys[e.key]();
    }
  });

  // -- ticking -------------------------------------------------------------------------------------------------------
  const boxes = () => all("#pick tr[data-row] input[type=checkbox]");

  function count() {
    const told = document.querySelector("[data-ticked]");
    if (!told) return;
    const ticked = boxes().filter((box) => box.checked).length;
    told.textContent = `${ticked} ticked`;
    boxes().forEach((box) => box.closest("tr").classList.toggle("chosen", box.checked));
    document.querySelector("#tick-all input").checked = ticked > 0 && ticked === boxes().length;
    all("#pick button[name=action]").forEach((button) => { button.disabled = !ticked; });
  }

  document.addEventListener("change", (e) => {
    if (e.target.matches("#tick-all input")) boxes().forEach((box) => { box.checked = e.target.checked; });
    if (e.target.matches("#pick input[type=checkbox]")) count();
  });

  // A page that one comes back to has its boxes ticked as they were.
  addEventListener("pageshow", count);

  // -- copying -------------------------------------------------------------------------------------------------------
  function addCopying(within) {
    for (const el of all("[data-copy], [data-copy-from]", within)) {
      if (el.querySelector("button.copy") || !navigator.clipboard) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "copy";
      button.setAttribute("aria-label", `copy ${el.dataset.copy || "the text"}`);
      el.append(" ", button);
    }
  }

  document.addEventListener("click", async (e) => {
    const button = e.target.closest?.("button.copy");
    if (!button) return;
    const holder = button.parentElement;
    const text = holder.dataset.copy || document.getElementById(holder.dataset.copyFrom)?.textContent || "";
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });

  // -- narrow windows --------------------------------------------------------------------------------------------------
  // Where there is no room for a table its rows stand one below the other, and each cell says the heading of its column.
  function addLabels(within) {
    const tables = within.matches?.("tr") ? [within.closest("table")] : all(".wide table", within);
    if (within.matches?.(".wide table, .wide tbody")) tables.push(within.closest("table"));
    for (const table of tables) {
      const names = all("thead th", table).map((th) => (th.querySelector(".unseen") ? "" : th.textContent.trim()));
      for (const row of all("tbody tr", table)) {
        [...row.cells].forEach((cell, n) => { if (n && names[n]) cell.dataset.label = names[n]; });
      }
      table.closest(".wide").classList.toggle("stacks", !table.closest(".figures"));
    }
  }

  // -- refreshing ----------------------------------------------------------------------------------------------------
  // A marked part is replaced by the one of the same id in a page that was fetched anew, unless somebody is at it: has the
  // focus in it, or text of it selected.
  const busy = (el) => {
    const chosen = getSelection();
    return (el.contains(document.activeElement) && document.activeElement !== document.body && document.activeElement.closest(FIELDS))
      || (chosen && !chosen.isCollapsed && el.contains(chosen.anchorNode));
  };
  const plain = (el) => {
    const copy = el.cloneNode(true);
    all("button.copy", copy).forEach((b) => { b.previousSibling?.nodeType === 3 && b.previousSibling.remove(); b.remove(); });
    all("details[open]", copy).forEach((d) => d.removeAttribute("open"));
    all("[data-label]", copy).forEach((cell) => cell.removeAttribute("data-label"));
    for (const row of [copy, ...all(".here, .chosen, .stacks", copy)]) {
      row.classList.remove("here", "chosen", "stacks");
      if (!row.classList.length) row.removeAttribute("class");
    }
    return copy.outerHTML;
  };

  function replace(old, fresh) {
    if (busy(old) || plain(old) === plain(fresh)) return;
    const open = new Set(all("details[open][id]", old).map((d) => d.id));
    const rowsOf = (part) => (part.matches("tr[data-row]") ? [part] : all("tr[data-row]", part));
    const at = rowsOf(old).findIndex((row) => row.classList.contains("here"));
    const row = at >= 0 ? rowsOf(old)[at].id : "";
    const chosen = new Set(all("input[type=checkbox]:checked", old).map((c) => c.value));
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const node = document.importNode(fresh, true);
    all("details[id]", node).forEach((d) => { d.open = open.has(d.id); });
    for (const box of all("input[type=checkbox]", node)) {
      box.checked = chosen.has(box.value);
      box.closest("tr")?.classList.toggle("chosen", box.checked);
    }
    old.replaceWith(node);
    addCopying(node);
    addLabels(node);
    const again = row ? document.getElementById(row) : rowsOf(node)[at];
    again?.classList.add("here");
    if (focused) all("a", node).find((a) => a.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }

  // What stands highest in the window, and where: it must stand there afterwards too, whatever came above it. At the top of the
  // page nobody reads on: what is new is to be seen.
  function reading() {
    if (!scrollY) return null;
    const found = all("main [id]").find((el) => el.getClientRects().length && el.getBoundingClientRect().top >= 0);
    return found && { id: found.id, top: found.getBoundingClientRect().top };
  }

  async function refresh() {
    const parts = all("[data-live]");
    if (!parts.length || document.hidden) return;
    const answer = await fetch(location.href, { headers: { "X-Madeira-Refresh": "1" }, redirect: "error", credentials: "same-origin" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const read = reading();
    for (const old of parts) {
      const fresh = old.id && page.getElementById(old.id);
      if (fresh) replace(old, fresh);
    }
    const still = read && document.getElementById(read.id);
    if (still) scrollBy(0, still.getBoundingClientRect().top - read.top);
  }

  let failures = 0;

  async function always() {
    try {
      await refresh();
      failures = 0;
    } catch {
      // One that is lost is made up for by the next; more of them must not go unnoticed.
      failures += 1;
    }
    document.getElementById("stale").hidden = failures < 2;
    setTimeout(always, EVERY_MS);
  }

  document.addEventListener("DOMContentLoaded", () => {
    addCopying(document);
    addLabels(document);
    document.getElementById("tick-all")?.removeAttribute("hidden");
    count();
    if (document.querySelector("[data-live]")) setTimeout(always, EVERY_MS);
  });
})();
