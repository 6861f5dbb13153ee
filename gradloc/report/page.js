// SPDX-FileCopyrightText: 2026 The GradLoc Authors
// SPDX-License-Identifier: Apache-2.0

// The script of the report's page: it draws the view, whose form is in view.py, and links its parts. It makes
// everything as text nodes, so that a model's text never becomes markup. A link is "c" with the number of a culprit,
// "s" with that of a spike, "?" with words that filter the table of all culprits, or "#" with the id of an element.

const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const view = await new Response(stream).json();
const { spikes, culprits, tables } = view;

// The selected spike, and the culprit of it if it has one.
let current = { spike: null, culprit: null };

// The column by which the table of culprits is sorted; `down`: the largest first.
const order = { column: null, down: true };

function start() {
  for (const section of document.querySelectorAll("[data-needs]")) {
    const name = section.dataset.needs;
    section.hidden = !(view.charts[name] || view.texts[name] || view[name]?.length);
  }
  document.title = `${view.title} · GradLoc`;
  const { identities, worst, beside, sources, tokens } = tables;
  showContent({ title: view.title, ...view.texts, identities, worst, beside, sources, tokens });
  for (const list of ["alarms", "warnings", "drills", "notes"]) fill(list, view[list].map(makeRemark));
  fill("figures", makeTerms(view.facts.map(([name, value, more]) => [name, [value, make("small", {}, more)]])));
  fill("replay-list", view.replays.map(makeReplay));
  get("terms").append(...makeTerms([...Object.keys(view.rules).map(ruleOf), ...view.help]));
  for (const [id, chart] of Object.entries(view.charts)) drawChart(id, chart, tables[chart.table]);
  if (tables.clips?.rows.length) {
    fill("clips-table", [makeTable(tables.clips, "h-clips", "clips-rows")]);
    showRows("clips-rows", tables.clips.rows, (row) => makeRow(tables.clips, row, { tabindex: -1 }));
  }
  if (spikes.length) startSpikes();
  // The keyboard scrolls to what it moves to; the tip goes along.
  addEventListener("scroll", placeTip, { capture: true, passive: true });
  addEventListener("keydown", (press) => press.key === "Escape" && hideTip());
}

function startSpikes() {
  get("pick").hidden = spikes.length === 1;
  get("event").append(...spikes.map(({ name }, i) => make("option", { value: i }, name)));
  get("event").addEventListener("change", () => go(`s${get("event").value}`));
  const move = (by) => () => go(`s${(current.spike + by + spikes.length) % spikes.length}`);
  get("previous").addEventListener("click", move(-1));
  get("next").addEventListener("click", move(1));
  get("words").addEventListener("input", showCulprits);
  fill("culprits-table", [makeTable(tables.culprits, "h-table", "rows", sortBy)]);
  // Who marks text in a row does not select it.
  addKeys("rows", (row) => getSelection().isCollapsed && go(`c${row.dataset.culprit}`, true));
  startStrip();
  sortBy(2);
  go(culprits.length ? "c0" : "s0");
}

// Selects what a link leads to; `scroll`: and goes there.
function go(link, scroll = link[0] === "#") {
  const [kind, to] = [link[0], link.slice(1)];
  if (kind === "c") select(culprits[to].spike, Number(to));
  if (kind === "s") select(Number(to), spikes[to].culprits[0] ?? null);
  if (kind === "?") {
    get("words").value = to;
    showCulprits();
  }
  if (!scroll) return;
  const head = get({ "#": to, "?": "h-table" }[kind] ?? "spike");
  head.scrollIntoView({ block: "start" });
  head.focus({ preventScroll: true });
}

// A group of which Tab reaches one element and arrow keys the others, those up and down only where it `stops`. A click,
// Enter or Space presses one.
function addKeys(id, press, stops = () => true) {
  const childOf = (target) => [...get(id).children].find((child) => child.contains(target));
  get(id).addEventListener("click", ({ target }) => target.id !== id && press(childOf(target)));
  get(id).addEventListener("keydown", (event) => {
    const [all, from] = [[...get(id).children], childOf(event.target)];
    const [before, after] = [all.slice(0, all.indexOf(from)), all.slice(all.indexOf(from) + 1)];
    const moves = { ArrowLeft: before.at(-1), ArrowRight: after[0], Home: all[0], End: all.at(-1) };
    Object.assign(moves, { ArrowUp: before.findLast(stops), ArrowDown: after.find(stops) });
    const isPress = event.key === "Enter" || event.key === " ";
    if (!isPress && !(event.key in moves)) return;
    event.preventDefault();
    const to = moves[event.key];
    if (isPress) press(from);
    else if (to) {
      from.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    }
  });
}

// Elements.

const svgTags = new Set(["svg", "g", "path", "line", "polyline", "circle", "text"]);

function get(id) {
  return document.getElementById(id);
}

// An element with attributes ("onclick" adds a listener) and children, texts among them. What is null or empty is
// left out.
function make(tag, attributes = {}, ...children) {
  const space = svgTags.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(Boolean));
  return element;
}

// Shows children in an element; without any, it is hidden.
function fill(id, children) {
  get(id).hidden = !children.length;
  get(id).replaceChildren(...children);
}

function whole(n) {
  return n.toLocaleString("en");
}

// Texts, tables, and titled texts that are shown as they are, each in the element of its name.
function showContent(content) {
  for (const [id, part] of Object.entries(content)) {
    const head = get(id).tagName === "DETAILS" ? "summary" : "h3";
    if (!part || part.rows?.length === 0) fill(id, []);
    else if (typeof part === "string") fill(id, makeCheck(part));
    else fill(id, Array.isArray(part) ? [make(head, {}, part[0]), make("pre", {}, part[1])] : makeTitled(part, head));
  }
}

function makeToken(text) {
  return make("span", { class: "tok" }, text);
}

function makeBadge(source) {
  return make("span", { class: "badge", style: `--shade: var(--${source})` }, source);
}

function makeTerms(terms) {
  return terms.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

// A source, and its rule with what to do.
function ruleOf(source) {
  const [rule, advice] = view.rules[source];
  return [makeBadge(source), [rule, " ", make("b", {}, advice)]];
}

function makeRemark(remark) {
  const [text, more = [], kind = null] = typeof remark === "string" ? [remark] : remark;
  const checks = more.map((said) => make("p", { class: "check" }, makeCheck(said)));
  return make("li", { class: kind }, make("b", {}, text), checks);
}

function makeReplay({ title, where, sentences, tables, notes }) {
  return make(
    "div",
    { class: "card" },
    make("h3", {}, title),
    make("p", { class: "hint" }, where),
    sentences.map((text) => make("p", { class: "story" }, makeCheck(text))),
    tables.map((table, i) => make("details", { open: i ? null : "" }, makeTitled(table, "summary"))),
    notes.map((text) => make("p", { class: "hint" }, text)),
  );
}

// A sentence in which commands are between backticks; those that GradLoc writes can be copied.
function makeCheck(sentence) {
  const parts = sentence.split("`");
  return parts.flatMap((part, i) => i % 2 && i < parts.length - 1 ? makeCommand(part) : part ? [part] : []);
}

// The commands that GradLoc writes. The evidence may come from a stranger, and what is copied goes into a shell: so no
// other options, and of a path only what a shell takes for one word, as Python's shlex.quote gives it.
const ownCommand =
  /^gradloc replay (?!'?-)(?:[\w@%+=:,./-]+|'[^']*'(?:"'"'[^']*')*)(?: --remedies| --switches| --search| --threshold [\d.e+-]+)*$/;

function makeCommand(command) {
  const code = make("code", {}, command);
  if (!ownCommand.test(command)) return [code];
  const copy = async ({ target }) => {
    try {
      await navigator.clipboard.writeText(command);
      target.textContent = "Copied";
    } catch {
      // Where the browser does not let a page copy, the user does.
      getSelection().selectAllChildren(code);
      target.textContent = "Selected";
    }
  };
  const label = "Copy the command";
  return [code, " ", make("button", { type: "button", class: "copy", "aria-label": label, onclick: copy }, "Copy")];
}

// Tables.

function makeTitled(table, head) {
  const body = table.rows.map((row) => makeRow(table, row));
  return [
    make(head, {}, table.title),
    makeTable(table, null, null, null, body),
    make("p", { class: "hint" }, table.more),
  ];
}

// A table that scrolls, labelled by an element or by its title; `press` is what pressing the head of a column does.
function makeTable({ title, columns }, labelledBy, id, press, body = []) {
  const heads = columns.map(({ name, kind }, i) => {
    const button = press && make("button", { type: "button", onclick: () => press(i) }, name);
    return make("th", { scope: "col", class: kind || null }, button ?? name);
  });
  const table = make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", { id }, body));
  const label = labelledBy ? { "aria-labelledby": labelledBy } : { "aria-label": title };
  return make("div", { class: "scroll", tabindex: "0", role: "region", ...label }, table);
}

function makeRow({ columns }, row, attributes = {}) {
  const cells = row.map((cell, i) => {
    const { kind } = columns[i];
    const [tag, scope] = kind === "row" ? ["th", "row"] : ["td", null];
    return make(tag, { scope, class: kind || null }, makeCell(kind, cell));
  });
  return make("tr", attributes, cells);
}

function makeCell(kind, cell) {
  if (kind === "badge") return makeBadge(cell);
  if (kind === "token") return [makeToken(cell[0]), make("span", { class: "tok around" }, cell[1])];
  if (kind === "spark") return makeLine(cell);
  if (typeof cell === "string") return cell;
  if (kind === "link") return make("button", { type: "button", onclick: () => go(cell[1], true) }, cell[0]);
  return [cell[0], make("small", {}, cell[1])];
}

// A figure over some steps, with a dot in the last one if that is the spike's.
function makeLine([points, last]) {
  const [cx, cy] = last.split(",");
  const dot = last ? make("circle", { cx, cy, r: 6 }) : null;
  return make("svg", { viewBox: "0 0 220 40", "aria-hidden": "true" }, make("polyline", { points }), dot);
}

// The first rows of a long table, and a button for more of them, which hands the focus to the first of these.
function showRows(id, rows, makeRow, most = 100) {
  get(id).replaceChildren(...rows.slice(0, most).map(makeRow));
  const more = rows.length - most;
  const showMore = () => {
    showRows(id, rows, makeRow, most + 200);
    get(id).children[most].focus();
  };
  const text = `Show ${Math.min(200, more)} more of ${whole(more)}`;
  fill(`${id}-more`, more > 0 ? [make("button", { type: "button", class: "more", onclick: showMore }, text)] : []);
}

function textOf(cell) {
  return typeof cell === "string" ? cell : cell[0];
}

// What the tip of a row says: its head, and its other cells.
function rowFacts({ columns, rows }, i) {
  const texts = rows[i].map(textOf);
  const head = columns.findIndex(({ kind }) => kind === "token" || kind === "row");
  return [texts[head], columns.map(({ name }, at) => [name, texts[at]]).filter((_, at) => at !== head)];
}

// Charts: marks, lines and bars at places from 0 to 1000, from the top and from the left. All places are shares of the
// chart's size, so that it fits whatever that is. Colours come from the style.

// By the id of a chart, its svg and its points with a tip.
const drawn = new Map();

function drawChart(id, { label, axes, series }, table) {
  const all = series.flatMap(({ points }) => points).map(([x, y, tip, link]) => ({ x, y, tip, link }));
  const points = all.filter(({ tip }) => tip !== null);
  const [xAxis, yAxis] = axes;
  const left = 30 + 7 * Math.max(...yAxis.ticks.map(([, text]) => text.length), 2);
  const svg = make(
    "svg",
    {
      class: "plot",
      style: `--left: ${left}px`,
      onmousemove: (move) => {
        const point = nearest(svg, points, move);
        svg.classList.toggle("over", Boolean(point?.link));
        if (!point) hideTip();
        else showTip(() => placeOf(svg, point), typeof point.tip === "number" ? rowFacts(table, point.tip) : point.tip);
      },
      onmouseleave: hideTip,
      onclick: (press) => {
        const link = nearest(svg, points, press)?.link;
        if (link) go(link);
      },
    },
    makeAxes(xAxis, yAxis),
    series.map(makeSeries),
  );
  get(id).setAttribute("aria-label", label);
  fill(id, [make("div", { class: "key" }, series.filter(({ name }) => name).map(makeKey)), svg]);
  drawn.set(id, { svg, points });
}

function percent(place) {
  return `${place / 10}%`;
}

function makeKey({ name, kind, shape, open, color }) {
  const isMark = kind === "marks" || kind === "bars";
  const mark = isMark ? makeMark(shape, open, 4.5, "8px", "8px") : make("path", { class: kind, d: "M0,8H18" });
  return make("span", {}, make("svg", { style: `--c: var(--${color})` }, mark), name);
}

function makeMark(d, open, size, x, y) {
  const style = `transform: translate(${x}, ${y}) scale(${size})`;
  return make("path", { class: open ? "open" : "mark", d, style });
}

function makeAxes(xAxis, yAxis) {
  return make(
    "g",
    { class: "axes" },
    yAxis.ticks.map(([at]) => make("line", { class: "ygrid", x2: "100%", y1: percent(at), y2: percent(at) })),
    yAxis.ticks.map(([at, said]) => make("text", { class: "ytick", x: -6, y: percent(at), dy: 4 }, said)),
    make("g", {}, xAxis.ticks.map(([at, said]) => make("text", { x: percent(at), y: "100%", dy: 18 }, said))),
    make("text", { x: "50%", y: "100%", dy: 37 }, xAxis.title),
    make("text", { class: "ytitle" }, yAxis.title),
  );
}

function makeSeries({ kind, color, shape, open, size, points }) {
  const group = make("g", { class: `series ${kind}`, style: `--c: var(--${color})` });
  const isLine = kind === "line" || kind === "dashes";
  if (isLine) {
    const path = make("path", { class: kind, d: `M${points.map(([x, y]) => `${x},${y}`).join("L")}` });
    group.append(make("svg", { viewBox: "0 0 1000 1000", preserveAspectRatio: "none" }, path));
  }
  for (const [x, y, , , base] of points) {
    const [at, top, bottom] = [x, y, base].map(percent);
    if (base !== null) {
      const bar = make("line", { class: "bar", x1: at, x2: at, y1: bottom, y2: top, "stroke-width": size });
      group.append(bar, makeMark("M-1,0H1", true, size, at, bottom));
    }
    if (size) {
      group.append(isLine ? make("circle", { cx: at, cy: top, r: size }) : makeMark(shape, open, size, at, top));
    }
  }
  return group;
}

// Where a point is in the window.
function placeOf(svg, { x, y }) {
  const { left, top, width, height } = svg.getBoundingClientRect();
  return new DOMRect(left + x * width / 1000, top + y * height / 1000 - 6, 0, 12);
}

// The nearest point under the mouse; of those at one place the one that is drawn last.
function nearest(svg, points, { clientX, clientY }) {
  let [found, best] = [null, 15];
  for (const point of points) {
    const { left, top } = placeOf(svg, point);
    const distance = Math.hypot(left - clientX, top + 6 - clientY);
    if (distance <= best) [found, best] = [point, distance];
  }
  return found;
}

// A ring around the selected culprit.
function markSelection() {
  for (const { svg, points } of drawn.values()) {
    svg.querySelector(".ring")?.remove();
    const point = points.find(({ link }) => link === `c${current.culprit}`);
    if (point) svg.append(make("circle", { class: "ring", cx: percent(point.x), cy: percent(point.y), r: 10 }));
  }
}

// One spike, and one of its culprits.

function select(spike, culprit) {
  current = { spike, culprit };
  get("event").value = spike;
  showContent(spikes[spike].content);
  showChips();
  get("culprit").hidden = get("figured").hidden = culprit === null;
  if (culprit !== null) showCulprit(culprits[culprit]);
  get("todo").hidden = [...get("todo").querySelectorAll("[id]")].every((part) => part.hidden);
  markSelection();
  for (const row of get("rows").children) {
    row.setAttribute("aria-current", String(Number(row.dataset.culprit) === culprit));
  }
}

function tokenOf(culprit) {
  return rowFacts(tables.culprits, culprit)[0];
}

// A button for each culprit of the spike.
function showChips() {
  const mine = spikes[current.spike].culprits;
  const chips = mine.map((culprit, i) => {
    const onclick = () => {
      go(`c${culprit}`);
      get("chips").children[i].focus();
    };
    const pressed = String(culprit === current.culprit);
    const factor = make("span", { class: "times" }, tables.culprits.rows[culprit][3]);
    return make("button", { type: "button", "aria-pressed": pressed, onclick }, makeToken(tokenOf(culprit)), factor);
  });
  fill("chips", mine.length > 1 ? chips : []);
}

function showCulprit(culprit) {
  fill("token", [tokenOf(current.culprit)]);
  showContent(culprit.content);
  showStrip(culprit);
  fill("why", makeTerms(culprit.reasons.map(ruleOf)));
  if (culprit.layers) drawChart("layers", culprit.layers, culprit.content["layers-figures"]);
  else fill("layers", []);
  fill("numbers", makeTerms([tables.culprits, tables.terms].flatMap((table) => rowFacts(table, current.culprit)[1])));
}

// The response, token by token.

// What each piece of the strip stands for: the number of its culprit, if any, and what its tip says.
const pieces = new WeakMap();

function showStrip(culprit) {
  hideTip();
  const [box, strip] = [get("strip"), view.strips[culprit.strip]];
  get("legend").hidden = !strip;
  get("pieces").replaceChildren(...(strip ? makePieces(strip) : []));
  const target = box.querySelector(".current");
  box.scrollTop = target ? target.offsetTop - box.offsetTop - box.clientHeight / 2 : 0;
}

function makePieces({ start, tokens, shades, figures, culprits }) {
  return tokens.map((text, i) => {
    const [position, culprit] = [start + i, culprits[start + i]];
    const [title, facts] = culprit === undefined ? [text.replace(/\n$/, ""), []] : rowFacts(tables.culprits, culprit);
    const selected = culprit !== undefined && culprit === current.culprit;
    const kind = (culprit === undefined ? "" : " culprit") + (selected ? " current" : "");
    const shade = `--h: ${0.75 * (shades[i] ?? 0)}%`;
    const tabindex = selected ? 0 : -1;
    const piece = make("span", { class: `piece${kind}`, style: shade, tabindex, "data-position": position }, text);
    if (culprit !== undefined) piece.role = "button";
    const own = [["position", String(position)], ["suspicion", figures[i] ?? "–"]];
    pieces.set(piece, { culprit, tip: [text === "▪" ? `token ${position}` : title, [...own, ...facts]] });
    return piece;
  });
}

function startStrip() {
  const box = get("pieces");
  const explain = ({ target }) => {
    const piece = pieces.get(target);
    if (!piece || (target === tipOwner && get("tip"))) return;
    showTip(() => target.getClientRects()[0] ?? target.getBoundingClientRect(), piece.tip);
    tipOwner = target;
  };
  const end = ({ target }) => target === tipOwner && hideTip();
  // A move, and no mouseover: that also comes when the keyboard scrolls tokens past a mouse at rest.
  for (const event of ["mousemove", "focusin"]) box.addEventListener(event, explain);
  for (const event of ["mouseout", "focusout"]) box.addEventListener(event, end);
  addKeys("pieces", selectPiece, (piece) => piece.role === "button");
}

function selectPiece(piece) {
  const culprit = pieces.get(piece).culprit;
  if (culprit === undefined) return;
  go(`c${culprit}`);
  get("strip").querySelector(".current").focus({ preventScroll: true });
}

// The tip with the numbers of a token or point. It keeps what gives the place of its anchor.

let tipAnchor = null;
// The piece of the strip that it is about.
let tipOwner = null;

function showTip(anchor, [title, facts]) {
  hideTip();
  const head = make("div", { class: "tok" }, title);
  document.body.append(make("div", { id: "tip", role: "tooltip" }, head, make("dl", {}, makeTerms(facts))));
  [tipAnchor, tipOwner] = [anchor, null];
  placeTip();
}

function placeTip() {
  const tip = get("tip");
  if (!tip) return;
  const spot = tipAnchor();
  const size = tip.getBoundingClientRect();
  const below = spot.bottom + 10 + size.height < innerHeight || spot.top < size.height + 10;
  const right = document.documentElement.clientWidth - size.width - 8;
  tip.style.top = `${below ? spot.bottom + 10 : spot.top - size.height - 10}px`;
  tip.style.left = `${Math.max(8, Math.min(spot.left - 12, right))}px`;
}

function hideTip() {
  get("tip")?.remove();
}

// The table of all culprits, and the bars that filter it.

// Numbers come the largest first; the same column again turns the order.
function sortBy(column) {
  order.down = column === order.column ? !order.down : tables.culprits.columns[column].kind === "num";
  order.column = column;
  const heads = [...document.querySelectorAll("#culprits-table th")];
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].ariaSort = order.down ? "descending" : "ascending";
  showCulprits();
}

function showCulprits() {
  const { rows, more } = tables.culprits;
  const found = inOrder(matching(get("words").value.trim()));
  showRows("rows", found, (culprit, i) => {
    const isCurrent = String(culprit === current.culprit);
    const attributes = { tabindex: i ? -1 : 0, "data-culprit": culprit, "aria-current": isCurrent };
    return makeRow(tables.culprits, rows[culprit], attributes);
  });
  const some = found.length < rows.length ? `${whole(found.length)} of ` : "";
  const all = `${whole(rows.length)} ${rows.length === 1 ? "culprit" : "culprits"}`;
  get("count").textContent = `${some}${all}${more && `, ${more}`}`;
}

// The numbers of the culprits that have a value in a column, as in "step 12", or else these words in a text.
function matching(words) {
  const { columns, rows } = tables.culprits;
  const [, head, value] = words.match(/^(\S+) (.+)$/) ?? [];
  const column = columns.findIndex(({ name }) => name.toLowerCase().split(" ")[0] === head?.toLowerCase());
  const all = [...rows.keys()];
  const found = column < 0 ? [] : all.filter((i) => textOf(rows[i][column]) === value);
  return found.length ? found : all.filter((i) => searchText(i).includes(words.toLowerCase()));
}

function searchText(i) {
  const texts = ({ columns, rows }) => rows[i].filter((_, at) => columns[at].kind !== "num");
  return [tables.culprits, tables.terms].flatMap(texts).flat().join("\n").toLowerCase();
}

// Whatever the direction, what is not known comes last; what is not finite is more than any number.
function inOrder(found) {
  const { columns, rows } = tables.culprits;
  const toKey = columns[order.column].kind === "num" ? sizeOf : (text) => text;
  const keys = new Map(found.map((i) => [i, toKey(textOf(rows[i][order.column]))]));
  const sign = order.down ? -1 : 1;
  return found.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    return (x === "–") - (y === "–") || sign * ((x > y) - (x < y));
  });
}

function sizeOf(text) {
  const size = parseFloat(text.replaceAll(",", "").replace("∞", "Infinity"));
  return text === "–" ? text : Number.isNaN(size) ? Infinity : size;
}

start();
