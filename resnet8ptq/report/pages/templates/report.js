"use strict";
// Without this script the page shows the same, unsorted and without the buttons.
const STEPS = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Enter: 0, " ": 0};
for (const family of document.querySelectorAll("section.family")) {
  const table = family.querySelector("table.runs");
  if (!table) continue;
  const body = table.tBodies[0], rows = [...body.rows];
  const points = [...family.querySelectorAll(".point[data-row]")];
  const filter = family.querySelector("input.filter"), more = family.querySelector("button.more");
  const count = family.querySelector(".count"), tip = family.querySelector(".tip");
  const runs = new Map(rows.map(row => [row.dataset.row, row]));
  const marks = new Map(rows.map(row => [row.dataset.row, []])); // a run's points, one a drawing
  for (const point of points) marks.get(point.dataset.row)?.push(point);
  let all = false, framework = "";

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, hidden = 0;
    for (const row of [...body.rows]) {
      const text = row.textContent.toLowerCase();
      const fits = words.every(word => text.includes(word)) && (!framework || row.dataset.framework === framework);
      const cut = fits && !all && !words.length && !framework && row.hasAttribute("data-more");
      row.hidden = !fits || cut;
      shown += fits && !cut;
      hidden += cut;
      for (const point of marks.get(row.dataset.row)) point.classList.toggle("off", !fits);
    }
    more.hidden = !hidden;
    more.textContent = `Show all ${shown + hidden} rows`;
    count.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
  }

  function value(row, column) {
    const text = row.cells[column].textContent.trim().replace(/,/g, "").replace(/^</, "");
    const number = parseFloat(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  }

  function sort(column, down) {
    const order = rows.map((row, index) => [value(row, column), index, row]);
    order.sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j;
      const both = typeof a === "number" && typeof b === "number";
      const sign = both ? a - b : String(a).localeCompare(String(b));
      return (down ? -sign : sign) || i - j;
    });
    body.append(...order.map(([, , row]) => row));
  }

  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(column, down);
    });
  }

  function select(number, scroll) {
    for (const row of rows) row.classList.toggle("on", row.dataset.row === number);
    for (const point of points) point.classList.toggle("on", point.dataset.row === number);
    const row = runs.get(number);
    if (!row) return;
    if (row.hidden) { filter.value = ""; framework = ""; all = true; press(); show(); }
    if (scroll) row.scrollIntoView({block: "center", behavior: "auto"});
  }

  const titles = new Map(); // of every point; the tip replaces the browser's own, which comes late
  const place = point => point.querySelector(".mark").getBoundingClientRect();

  function showTip(point) { // beside the point, inside the figure; also names points below it
    const box = tip.parentElement.getBoundingClientRect(), mark = place(point);
    const near = [...titles.keys()].filter(other => Math.hypot(place(other).x - mark.x, place(other).y - mark.y) < 4 && place(other).width);
    tip.replaceChildren(...[point, ...near.filter(other => other !== point)].slice(0, 4).flatMap(other => {
      const [name, ...values] = titles.get(other).split(": "), bold = document.createElement("b");
      bold.textContent = name;
      return [bold, values.join(": ")];
    }));
    tip.hidden = false;
    const left = mark.right - box.left + 8, top = mark.bottom - box.top + 8;
    const fits = left + tip.offsetWidth <= box.width;
    tip.style.left = `${Math.max(0, fits ? left : mark.left - box.left - tip.offsetWidth - 8)}px`;
    tip.style.top = `${top + tip.offsetHeight <= box.height ? top : mark.top - box.top - tip.offsetHeight - 8}px`;
  }

  function move(point, step) { // to the next point from left to right: only one is a tab stop
    const all = [...point.parentElement.querySelectorAll(".point[role]")].sort((a, b) => place(a).x - place(b).x);
    const next = all[all.indexOf(point) + step];
    if (!next) return;
    point.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  for (const point of family.querySelectorAll(".point")) {
    const name = point.querySelector("title"), title = name.textContent;
    name.remove();
    titles.set(point, title);
    const hide = () => { tip.hidden = true; };
    for (const [begin, end] of [["mouseenter", "mouseleave"], ["focus", "blur"]]) {
      point.addEventListener(begin, () => showTip(point));
      point.addEventListener(end, hide);
    }
    if (!point.hasAttribute("role")) continue;
    point.setAttribute("aria-label", title);
    point.addEventListener("click", () => select(point.dataset.row, true));
    point.addEventListener("keydown", event => {
      const step = STEPS[event.key];
      if (step === undefined) return;
      event.preventDefault();
      if (step) move(point, step); else select(point.dataset.row, true);
    });
  }
  for (const row of rows) row.addEventListener("click", () => select(row.dataset.row, false));

  const keys = [...family.querySelectorAll("button.key")];
  function press() { for (const key of keys) key.setAttribute("aria-pressed", String(key.value === framework)); }
  for (const key of keys) key.addEventListener("click", () => {
    framework = framework === key.value ? "" : key.value;
    press(); show();
  });
  const panels = [...family.querySelectorAll(".panel-of")];
  const axes = [...family.querySelectorAll("button.axis-of")];
  function turn(name) {
    for (const panel of panels) panel.classList.toggle("away", panel.dataset.name !== name);
    for (const axis of axes) axis.setAttribute("aria-pressed", String(axis.value === name));
  }
  for (const axis of axes) axis.addEventListener("click", () => turn(axis.value));
  if (axes.length) turn(axes[0].value);
  const columns = family.querySelector("button.columns");
  columns.addEventListener("click", () => columns.setAttribute("aria-pressed", String(family.classList.toggle("all"))));
  filter.addEventListener("input", show);
  more.addEventListener("click", () => { all = true; show(); });
  press();
  show();
}
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  } catch { // file:// pages cannot write to the clipboard: select the command
    getSelection().selectAllChildren(code);
    button.textContent = "selected";
  }
});
addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("details.method")) fold.open = true; });
document.documentElement.classList.add("scripted");
