// What is wrong with a page as it is drawn: a list of sentences. Run in the page by the tests.
() => {
  const faults = [];
  const told = (e) => {
    const text = (e.textContent || e.value || "").trim().replace(/\s+/g, " ").slice(0, 40);
    return `<${e.tagName.toLowerCase()}${e.id ? " #" + e.id : ""}${e.className && e.className.baseVal === undefined ? " ." + e.className : ""}> "${text}"`;
  };
  const style = (e) => getComputedStyle(e);
  const shown = (e) => e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !e.closest(".unseen, .skip");
  const width = document.documentElement.clientWidth;
  const all = [...document.body.querySelectorAll("*")].filter(shown);

  // -- nothing sticks out, nothing is cut off ---------------------------------------------------------------------------
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) faults.push(`the page is ${root.scrollWidth} wide in a window of ${root.clientWidth}`);
  const scrolls = (e) => ["auto", "scroll"].includes(style(e).overflowX);
  const scroller = (e) => { for (let p = e; p && p !== root; p = p.parentElement) if (scrolls(p)) return p; return null; };
  for (const e of all) {
    const s = style(e);
    if (["hidden", "clip"].includes(s.overflowX) && e.scrollWidth > e.clientWidth + 1 && !e.matches("input, textarea, select, svg, svg *"))
      faults.push(`cut off: ${told(e)} is ${e.scrollWidth} wide in ${e.clientWidth}`);
    if (s.textOverflow === "ellipsis" && e.scrollWidth > e.clientWidth) faults.push(`cut off by dots: ${told(e)}`);
  }
  const pen = document.createElement("canvas").getContext("2d");
  // Not the shorthand: where figures are tabular it is empty, and what is drawn in its stead is smaller.
  const wide = (text, s) => { pen.font = `${s.fontStyle} ${s.fontWeight} ${s.fontSize} ${s.fontFamily}`; return pen.measureText(text).width; };
  const room = (e, s) => e.clientWidth - parseFloat(s.paddingLeft) - parseFloat(s.paddingRight);
  for (const e of all.filter((e) => e.matches("input:not([type=checkbox])"))) {
    const s = style(e);
    if (e.placeholder && !e.value && wide(e.placeholder, getComputedStyle(e, "::placeholder")) > room(e, s) + 1) faults.push(`the hint does not fit: "${e.placeholder}" of ${told(e)}`);
  }
  for (const e of all.filter((e) => e.matches("select"))) {
    const text = e.selectedOptions[0]?.text ?? "";
    // The arrow takes its place.
    if (wide(text, style(e)) > room(e, style(e)) - 12 && !e.matches("[data-long]")) faults.push(`the choice does not fit: "${text}"`);
  }

  for (const e of all.filter((e) => e.matches("input[type=checkbox]")))
    if (e.clientWidth > e.clientHeight + 1) faults.push(`a box that is stretched, ${e.clientWidth} by ${e.clientHeight}: ${told(e)}`);

  for (const e of all.filter((e) => e.matches("td > label > input[type=checkbox], td > input[type=checkbox]"))) {
    const beside = e.closest("td").nextElementSibling, words = document.createRange();
    if (!beside?.lastElementChild) continue;
    words.selectNodeContents(beside.lastElementChild);
    const own = e.getBoundingClientRect(), line = words.getClientRects()[0];
    if (line && Math.abs((own.top + own.bottom - line.top - line.bottom) / 2) > 4) faults.push(`a box that is not on the line of what it is for: ${told(beside)}`);
  }

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || !shown(e) || e.closest("script, option, title, textarea")) continue;
    texts.push([node, e]);
  }
  for (const [node, e] of texts) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = scroller(e) ?? e.closest("td, th, li, dd, dt, p, h1, h2, h3, label, button, figcaption, pre, main, header, footer") ?? root;
    const edge = box.getBoundingClientRect();
    for (const r of range.getClientRects()) {
      if (!r.width) continue;
      const end = scrolls(box) ? edge.left + box.scrollWidth - box.scrollLeft : edge.right;
      if (!e.closest("svg") && (r.right > end + 1.5 || r.left < edge.left - box.scrollLeft - 1.5)) { faults.push(`sticks out of its box: ${told(e)}`); break; }
      if (!scroller(e) && (r.right > width + 1 || r.left < -1)) { faults.push(`sticks out of the window: ${told(e)}`); break; }
    }
  }
  for (const e of all.filter((e) => e.matches("svg text"))) {
    const svg = e.ownerSVGElement.getBoundingClientRect(), r = e.getBoundingClientRect();
    if (r.left < svg.left - 1 || r.right > svg.right + 1 || r.top < svg.top - 1 || r.bottom > svg.bottom + 1) faults.push(`outside its drawing: ${told(e)}`);
    if (r.height < 8) faults.push(`too small to read, ${r.height.toFixed(1)} px: ${told(e)}`);
  }
  for (const svg of all.filter((e) => e.matches("svg"))) {
    const boxes = [...svg.querySelectorAll("text")].filter(shown).map((t) => [t, t.getBoundingClientRect()]);
    boxes.forEach(([a, p], n) => boxes.slice(n + 1).forEach(([b, q]) => {
      if (p.left < q.right && q.left < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom) faults.push(`${told(a)} and ${told(b)} run into each other`);
    }));
  }
  for (const [, e] of texts) if (parseFloat(style(e).fontSize) < 12 && !e.closest("svg")) faults.push(`too small: ${told(e)}`);

  // -- it can be read: WCAG AA ------------------------------------------------------------------------------------------
  const colour = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return { r, g, b, a }; };
  const over = (top, under, o = 1) => {
    const a = top.a * o;
    return { r: top.r * a + under.r * (1 - a), g: top.g * a + under.g * (1 - a), b: top.b * a + under.b * (1 - a), a: 1 };
  };
  const ground = (e) => {
    const line = [];
    for (let p = e; p; p = p.parentElement) line.unshift(p);
    let found = colour(matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(0,0,0)" : "rgb(255,255,255)");
    for (const p of line) found = over(colour(style(p).backgroundColor), found);
    return found;
  };
  const opacity = (e) => { let o = 1; for (let p = e; p; p = p.parentElement) o *= parseFloat(style(p).opacity); return o; };
  const light = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const judge = (e, text, least) => {
    const under = ground(e);
    const found = contrast(over(colour(text), under, opacity(e)), under);
    if (found < least) faults.push(`hard to read, ${found.toFixed(2)} to 1: ${told(e)}`);
  };
  for (const [, e] of texts) {
    if (e.closest(":disabled")) continue;
    const s = style(e), size = parseFloat(s.fontSize);
    judge(e, e.closest("svg") ? s.fill : s.color, size >= 24 || (size >= 18.66 && s.fontWeight >= 700) ? 3 : 4.5);
  }
  for (const e of all.filter((e) => e.matches("input:not([type=checkbox]), select, textarea"))) {
    judge(e, style(e).color, 4.5);
    if (e.placeholder && !e.value) judge(e, getComputedStyle(e, "::placeholder").color, 4.5);
    const s = style(e), outside = ground(e.parentElement);
    if (contrast(over(colour(s.borderTopColor), outside), outside) < 3) faults.push(`its edge cannot be seen: ${told(e)}`);
  }
  for (const e of all.filter((e) => e.matches("svg path, svg rect") && style(e).stroke !== "none" && !e.closest(".told") && !e.matches(".axis")))
    if (contrast(over(colour(style(e).stroke), ground(e), opacity(e)), ground(e)) < 3) faults.push(`a line that cannot be seen: .${e.className.baseVal}`);

  // -- everything has a name --------------------------------------------------------------------------------------------
  const named = (e) => {
    const by = (e.getAttribute("aria-labelledby") ?? "").split(/\s+/).filter(Boolean).map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    return (e.getAttribute("aria-label") || by || [...(e.labels ?? [])].map((l) => l.textContent).join(" ") || (e.matches("input, select, textarea") ? "" : e.textContent) || "").trim();
  };
  for (const e of all.filter((e) => e.matches("a, button, input, select, textarea, summary, svg[role=img], dialog, nav, [role=group]")))
    if (!named(e)) faults.push(`has no name: ${told(e)}`);
  for (const label of all.filter((e) => e.matches("label"))) if (!label.control) faults.push(`names nothing: ${told(label)}`);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) faults.push(`the id ${id} is there twice`);
  let level = 0;
  for (const h of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!h.checkVisibility()) continue;
    const here = Number(h.tagName[1]);
    if (here > level + 1) faults.push(`a heading of level ${here} after one of ${level}: ${told(h)}`);
    level = here;
  }
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one first heading");
  for (const th of all.filter((e) => e.matches("thead th"))) if (!th.textContent.trim()) faults.push("a column without a heading");
  if (!document.documentElement.lang) faults.push("no language");

  // -- a thumb meets it, and a phone does not enlarge the page when one types --------------------------------------------
  if (width < 600) for (const e of all.filter((e) => e.matches("button, input:not([type=hidden]), select, textarea, .button, .chip, summary, nav a, .pages a"))) {
    const r = (e.closest("label") ?? e).getBoundingClientRect(), own = e.getBoundingClientRect();
    if (Math.max(r.height, own.height) < 40 || Math.max(r.width, own.width) < 40) faults.push(`too small for a thumb, ${own.width.toFixed(0)}×${own.height.toFixed(0)}: ${told(e)}`);
  }
  if (width < 600) for (const e of all.filter((e) => e.matches("input:not([type=checkbox]), select, textarea")))
    if (parseFloat(style(e).fontSize) < 16) faults.push(`too small to type into: ${told(e)}`);
  return [...new Set(faults)];
}
