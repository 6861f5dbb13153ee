// SPDX-FileCopyrightText: 2026 The GradLoc Authors
// SPDX-License-Identifier: Apache-2.0

// The script of the report's page: it draws the view, whose form is in view.py, and links its parts. It makes
// everything as text nodes, so that a model's text never becomes markup. A link is "c" with the number of a culprit,
// "s" with that of a spike, or "#" with the id of an element.

const view = await unpack(document.getElementById("data").textContent);
const { spikes, culprits, tables } = view;

// What is selected: a spike, and a culprit of it if it has one.
let current = { spike: null, culprit: null };

// How the table of culprits is sorted (`down`: the largest first) and filtered, and how many rows are shown at most.
const shown = { column: 2, down: true, words: "", source: "", token: "", rows: 100, clips: 100 };
const [tokenColumn, sourceColumn] = ["token", "badge"].map((kind) =>
  tables.culprits.columns.findIndex((column) => column.kind === kind)
);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text(), (_, part) => part?.cells ? withRows(part) : part);
}

// A table comes by columns.
function withRows(table) {
  const rows = (table.cells[0] ?? []).map((_, i) => table.cells.map((column) => column[i]));
  return { ...table, rows };
}

function start() {
  for (const section of document.querySelectorAll("[data-needs]")) {
    const name = section.dataset.needs;
    section.hidden = !(view.charts[name] || view.texts[name] || view[name]?.length);
  }
  document.title = `${view.title} · GradLoc`;
  showContent({ title: view.title, ...view.texts });
  fill("alarms", view.alarms.map((text) => make("li", { class: "banner" }, text)));
  fill("warnings", view.warnings.map(makeWarning));
  fill("drills", view.drills.map(makeDrill));
  fill("notes", view.notes.map((text) => make("li", {}, text)));
  get("lead").append(
    ...view.lead.map((part) => typeof part === "string" ? part : make("b", { class: part[0] }, part[1])),
  );
  get("figures").append(
    ...makeTerms(view.facts.map(([name, value, more]) => [name, [value, make("small", {}, more)]])),
  );
  fill("replay-list", view.replays.map(makeReplay));
  get("help").append(...Object.entries(view.rules).flatMap(([source, texts]) => makeTerm(makeBadge(source), texts)));
  get("help").append(...view.help.flatMap(([name, text]) => makeTerm(name, [text])));
  showClips();
  if (spikes.length) startSpikes();
  drawCharts();
  addPageListeners();
}

function startSpikes() {
  get("pick").hidden = spikes.length === 1;
  get("event").append(...spikes.map(({ name }, i) => make("option", { value: i }, name)));
  get("event").addEventListener("change", () => go(`s${get("event").value}`));
  get("previous").addEventListener("click", () => moveToSpike(-1, "previous", "next"));
  get("next").addEventListener("click", () => moveToSpike(1, "next", "previous"));
  addTableListeners();
  addStripListeners();
  showHeads();
  showBars();
  showRows();
  go(culprits.length ? "c0" : "s0");
}

function addPageListeners() {
  addMore("clips", showClips, () => get("clips-more").hidden ? get("clips-scroll") : null);
  addEventListener("beforeprint", () => setPrinted(true));
  addEventListener("afterprint", () => setPrinted(false));
  // Charts are as wide as there is room.
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawCharts, 200);
  });
  // The keyboard scrolls to what it moves to; the tip goes along.
  addEventListener("scroll", placeTip, { capture: true, passive: true });
  addEventListener("keydown", (press) => press.key === "Escape" && hideTip());
}

// On paper: light colours, and charts as wide as an A4 page.
function setPrinted(on) {
  document.documentElement.classList.toggle("print", on);
  drawCharts();
}

// Goes where a link leads.
function go(link) {
  const number = Number(link.slice(1));
  if (link[0] === "c") select(culprits[number].spike, number);
  else if (link[0] === "s") select(number, spikes[number].culprits[0] ?? null);
  else scrollAndFocus(link.slice(1), link.slice(1));
}

function goAndScroll(link) {
  go(link);
  scrollAndFocus("detail", "spike");
}

function scrollAndFocus(id, focused) {
  get(id).scrollIntoView({ block: "start" });
  get(focused).focus({ preventScroll: true });
}

// Elements.

function get(id) {
  return document.getElementById(id);
}

// An element with attributes ("onclick" adds a listener, "style" takes properties by name) and children, texts among
// them. What is null or empty is left out.
function make(tag, attributes = {}, ...children) {
  return equip(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return equip(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function equip(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, of]) => element.style.setProperty(key, of));
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
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

// A button that shows more rows of a table, and what gets the focus then: a button that is hidden loses it.
function addMore(table, show, focused) {
  get(`${table}-more`).addEventListener("click", () => {
    const first = shown[table];
    shown[table] += 200;
    show();
    focused(first)?.focus();
  });
}

function sayHowManyMore(table, rows) {
  const more = rows - shown[table];
  fill(`${table}-more`, more > 0 ? [`Show ${Math.min(200, more)} more of ${whole(more)}`] : []);
}

// Texts and tables, each in the element of its name.
function showContent(content) {
  for (const [id, part] of Object.entries(content)) {
    if (typeof part === "string") fill(id, part ? makeCheck(part) : []);
    else fill(id, part ? makeTitled(part, "h3") : []);
  }
}

function makeToken(text) {
  return make("span", { class: "tok" }, text);
}

function makeBadge(source) {
  return make("span", { class: "badge", style: { "--shade": `var(--${source})` } }, source);
}

function makeTerms(terms) {
  return terms.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

function makeTerm(name, texts) {
  return [make("dt", {}, name), make("dd", {}, texts.join(" "))];
}

function makeWarning([said, check]) {
  return make("li", {}, make("b", {}, said), make("p", { class: "check" }, makeCheck(check)));
}

function makeDrill([text, found, advice]) {
  const steps = advice.map((sentence) => make("li", {}, sentence));
  return make("li", { class: found ? "found" : "failed" }, text, steps.length ? make("ul", {}, steps) : null);
}

function makeReplay({ title, where, sentences, tables, notes }) {
  return make(
    "div",
    { class: "card" },
    make("h3", {}, title),
    make("p", { class: "hint" }, where),
    sentences.map((text) => make("p", { class: "story" }, text)),
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
const ownCommands = [
  /^bash run_experiment\.sh --embedded --fault [a-z_]+$/,
  /^gradloc replay (?!'?-)(?:[\w@%+=:,./-]+|'[^']*'(?:"'"'[^']*')*)(?: --remedies| --switches| --search| --threshold [\d.e+-]+)*$/,
];

function makeCommand(command) {
  const code = make("code", {}, command);
  if (!ownCommands.some((form) => form.test(command))) return [code];
  const button = make("button", { type: "button", class: "copy", "aria-label": "Copy the command" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      // Where the browser does not let a page copy, the user does.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
  });
  return [code, " ", button];
}

// Tables.

function makeTitled(table, head) {
  const { title, more } = table;
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  scroll.append(make("table", {}, makeTable(table)));
  return [make(head, {}, title), scroll, make("p", { class: "hint" }, more)];
}

function makeTable({ columns, rows, links }, most = rows.length) {
  const heads = columns.map(({ name, kind }) => make("th", { scope: "col", class: kind || null }, name));
  const body = rows.slice(0, most).map((row, i) => make("tr", {}, makeCells(columns, row, links[i])));
  return [make("thead", {}, make("tr", {}, heads)), make("tbody", {}, body)];
}

function makeCells(columns, row, link) {
  return row.map((cell, i) => {
    const { kind } = columns[i];
    return make(
      kind === "row" ? "th" : "td",
      kind === "row" ? { scope: "row" } : { class: kind || null },
      makeCell(kind, cell, link),
    );
  });
}

function makeCell(kind, cell, link) {
  if (kind === "badge") return makeBadge(cell);
  if (kind === "token") return [makeToken(cell[0]), make("span", { class: "tok around" }, cell[1])];
  if (kind === "spark") return makeLine(cell);
  if (kind === "link" && link) {
    const label = `Spike: ${spikes[link.slice(1)].name}`;
    return make("button", { type: "button", "aria-label": label, onclick: () => goAndScroll(link) }, "see above");
  }
  if (typeof cell !== "string") return [cell[0], make("small", {}, cell[1])];
  return cell.includes("\n") ? cell.split("\n").map((line) => make("div", {}, line)) : cell;
}

// A figure over some steps, with a dot in the last one if that is the spike's.
function makeLine([points, last]) {
  const [cx, cy] = last.split(",");
  return makeSvg(
    "svg",
    { class: "spark", viewBox: "0 0 220 40", width: 220, height: 40, "aria-hidden": "true" },
    makeSvg("polyline", { points }),
    last ? makeSvg("circle", { cx, cy, r: 3.5 }) : null,
  );
}

function showClips() {
  if (!tables.clips) return;
  get("clips-scroll").hidden = !tables.clips.rows.length;
  get("clips-table").replaceChildren(...makeTable(tables.clips, shown.clips));
  sayHowManyMore("clips", tables.clips.rows.length);
}

// Charts: marks, lines and bars at places from 0 to 1000. Their colours come from the style.

// By the id of a drawn chart, where its points are.
const drawn = new Map();

function drawCharts() {
  hideTip();
  for (const [id, chart] of Object.entries(view.charts)) drawChart(id, chart, tables[chart.table]);
  const culprit = culprits[current.culprit];
  if (culprit?.layers) drawChart("layers", culprit.layers, culprit.layer_table);
  else drawn.delete("layers");
  markSelection();
}

function drawChart(id, { label, axes, series }, table) {
  const box = get(id);
  box.hidden = false;
  box.setAttribute("aria-label", label);
  const legend = make("div", { class: "key" }, series.filter(({ name }) => name).map(makeKey));
  box.replaceChildren(legend);
  const width = document.documentElement.classList.contains("print") ? Math.min(640, box.clientWidth) : box.clientWidth;
  const height = box.clientHeight - legend.offsetHeight;
  const [xAxis, yAxis] = axes;
  const left = 30 + 7 * Math.max(...yAxis.ticks.map(([, text]) => text.length), 2);
  const frame = { left, right: width - 12, top: 8, bottom: height - 42 };
  const x = (at) => frame.left + (at * (frame.right - frame.left)) / 1000;
  const y = (at) => frame.bottom - (at * (frame.bottom - frame.top)) / 1000;
  const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, makeAxes(xAxis, yAxis, frame, x, y));
  const points = [];
  for (const part of series) {
    const { base, tips, links } = part;
    const placed = part.x.map((at, i) => ({
      x: x(at),
      y: y(part.y[i]),
      base: y(base[i] ?? NaN),
      tip: tips[i] ?? "",
      link: links[i] ?? "",
    }));
    svg.append(makeSeries(part, placed));
    points.push(...placed.filter(({ tip }) => tip !== ""));
  }
  const tipAt = (move) => {
    const point = nearest(svg, points, move);
    svg.classList.toggle("over", Boolean(point?.link));
    if (point) showTip(rectOf(svg, point), ...pointFacts(point.tip, table));
    else hideTip();
  };
  svg.addEventListener("mousemove", tipAt);
  svg.addEventListener("mouseleave", hideTip);
  svg.addEventListener("click", (press) => {
    const link = nearest(svg, points, press)?.link;
    if (link) go(link);
  });
  box.append(svg);
  drawn.set(id, { svg, points });
}

function makeKey({ name, kind, shape, open, color }) {
  const isMark = kind === "marks" || kind === "bars";
  const mark = isMark ? makeMark(shape, open, 4.5, 8, 8) : makeSvg("path", { class: kind, d: "M0,8H18" });
  const svg = makeSvg(
    "svg",
    { width: isMark ? 16 : 18, height: 16, style: { "--c": `var(--${color})` } },
    mark,
  );
  return make("span", {}, svg, name);
}

function makeMark(shape, open, size, x, y) {
  return makeSvg("path", {
    class: open ? "open" : "mark",
    d: shape,
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`,
  });
}

function makeAxes(xAxis, yAxis, { left, right, top, bottom }, x, y) {
  const text = (attributes, said) => makeSvg("text", attributes, said);
  const wide = 7.5 * Math.max(...xAxis.ticks.map(([, said]) => said.length), 1) + 10;
  // As many labels as there is room for.
  const every = Math.ceil((xAxis.ticks.length * wide) / (right - left)) || 1;
  return makeSvg(
    "g",
    { class: "axes" },
    yAxis.ticks.map(([at]) => makeSvg("path", { class: "ygrid", d: `M${left},${y(at)}H${right}` })),
    yAxis.ticks.map(([at, said]) => text({ x: left - 6, y: y(at) + 4, "text-anchor": "end" }, said)),
    xAxis.ticks.filter((_, i) => i % every === 0).map(([at, said]) =>
      text({ class: "xtick", x: x(at), y: bottom + 18, "text-anchor": "middle" }, said)
    ),
    text({ x: (left + right) / 2, y: bottom + 37, "text-anchor": "middle" }, xAxis.title),
    text({ transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yAxis.title),
  );
}

function makeSeries({ kind, color, shape, open, size }, points) {
  const group = makeSvg("g", { class: `series ${kind}`, style: { "--c": `var(--${color})` } });
  if (kind === "marks") group.append(...points.map((point) => makeMark(shape, open, size, point.x, point.y)));
  else if (kind === "bars") {
    for (const { x, y, base } of points) {
      if (!Number.isNaN(base)) {
        group.append(makeSvg("path", { class: "bar", d: `M${x},${base}V${y}`, "stroke-width": size }));
        group.append(makeMark("M-1,0H1", true, size, x, base));
      }
      group.append(makeMark(shape, open, size, x, y));
    }
  } else {
    const d = points.map((point, i) => `${i ? "L" : "M"}${point.x.toFixed(1)},${point.y.toFixed(1)}`).join("");
    group.append(makeSvg("path", { class: kind, d: d || "M0,0" }));
    const dots = kind === "line" && size ? points : [];
    group.append(...dots.map((point) => makeSvg("circle", { cx: point.x, cy: point.y, r: size })));
  }
  return group;
}

// The nearest point under the mouse; of those at one place the one that is drawn last.
function nearest(svg, points, { clientX, clientY }) {
  const { left, top } = svg.getBoundingClientRect();
  let [found, best] = [null, 15 ** 2];
  for (const point of points) {
    const distance = (left + point.x - clientX) ** 2 + (top + point.y - clientY) ** 2;
    if (distance <= best) [found, best] = [point, distance];
  }
  return found;
}

function rectOf(svg, { x, y }) {
  return () => {
    const { left, top } = svg.getBoundingClientRect();
    return new DOMRect(left + x, top + y - 6, 0, 12);
  };
}

// What the tip of a point says: that of a row of its table, or lines of text.
function pointFacts(tip, table) {
  if (typeof tip === "number") return rowFacts(table, tip);
  const [title, ...lines] = tip.split("\n");
  return [title, lines.map((line) => [line, ""])];
}

function rowFacts({ columns, rows }, i) {
  const texts = rows[i].map((cell) => typeof cell === "string" ? cell : cell[0]);
  const head = columns.findIndex(({ kind }) => kind === "token" || kind === "row");
  return [texts[head], columns.map(({ name }, at) => [name, texts[at]]).filter((_, at) => at !== head)];
}

// A ring around the selected culprit.
function markSelection() {
  for (const { svg, points } of drawn.values()) {
    svg.querySelector(".ring")?.remove();
    const point = points.find(({ link }) => link === `c${current.culprit}`);
    if (point) svg.append(makeSvg("circle", { class: "ring", cx: point.x, cy: point.y, r: 10 }));
  }
}

// The shares of sources and tokens.

function showBars() {
  for (const [id, bars] of Object.entries(view.bars)) {
    const most = Math.max(...bars.map(([, n]) => n));
    get(id).replaceChildren(...bars.map((bar) => make("li", {}, makeBar(bar, most))));
  }
}

function makeBar([label, n, share, isToken], most) {
  const kind = isToken ? "token" : "source";
  const pressed = shown[kind] === label;
  const style = { width: `${(100 * n) / most}%`, ...(isToken ? {} : { "--shade": `var(--${label})` }) };
  return make(
    "button",
    {
      type: "button",
      "aria-pressed": String(pressed),
      title: isToken ? null : view.rules[label]?.[0],
      onclick: () => filter({ [kind]: pressed ? "" : label }),
    },
    make("span", { class: "label" }, isToken ? makeToken(label) : label),
    make("span", { class: "track" }, make("span", { class: "fill", style })),
    make("span", { class: "value" }, whole(n)),
    share && make("span", { class: "value" }, share),
  );
}

// One spike, and one of its culprits.

function moveToSpike(by, pressed, other) {
  go(`s${current.spike + by}`);
  // A button that is disabled loses the focus.
  if (get(pressed).disabled) get(other).focus();
}

function select(spike, culprit) {
  current = { spike, culprit };
  get("event").value = spike;
  get("previous").disabled = spike === 0;
  get("next").disabled = spike === spikes.length - 1;
  showContent(spikes[spike].content);
  showChips();
  get("culprit").hidden = get("details").hidden = culprit === null;
  if (culprit === null) fill("why", []);
  else showCulprit(culprits[culprit]);
  get("todo").hidden = ["check", "look", "why", "then"].every((part) => get(part).hidden);
  markSelection();
  for (const row of get("rows").children) {
    row.setAttribute("aria-current", String(Number(row.dataset.culprit) === culprit));
  }
}

function tokenOf(culprit) {
  return tables.culprits.rows[culprit][tokenColumn][0];
}

// A button for each culprit of the spike.
function showChips() {
  const mine = spikes[current.spike].culprits;
  const press = (culprit, i) => () => {
    go(`c${culprit}`);
    get("chips").children[i].focus();
  };
  const chips = mine.map((culprit, i) =>
    make(
      "button",
      { type: "button", "aria-pressed": String(culprit === current.culprit), onclick: press(culprit, i) },
      makeToken(tokenOf(culprit)),
      make("span", { class: "times" }, culprits[culprit].factor),
    )
  );
  fill("chips", mine.length > 1 ? chips : []);
}

function showCulprit(culprit) {
  get("head").replaceChildren(makeToken(tokenOf(current.culprit)), make("span", { class: "norm" }, culprit.head));
  fill("why", culprit.reasons.map(makeReason));
  showStrip(culprit);
  get("ladder").replaceChildren(...[...view.ladders[culprit.ladder], culprit.rung].flatMap(makeRung));
  get("layers").hidden = get("layers-figures").hidden = !culprit.layers;
  fill("layers-hint", culprit.layer_hint ? [culprit.layer_hint] : []);
  drawn.delete("layers");
  if (culprit.layers) {
    get("layers-table").replaceChildren(...makeTable(culprit.layer_table));
    drawChart("layers", culprit.layers, culprit.layer_table);
  }
  const facts = [tables.culprits, tables.terms].flatMap((table) => rowFacts(table, current.culprit)[1]);
  get("numbers").replaceChildren(...makeTerms(facts));
  document.querySelectorAll("#details details").forEach((details, i) => {
    const text = culprit.texts[i] ?? null;
    details.hidden = text === null;
    details.querySelector("pre").textContent = text;
  });
}

// A source with its rule and what to do.
function makeReason(source) {
  const [rule, advice] = view.rules[source];
  return make("li", {}, makeBadge(source), make("span", {}, rule, " ", make("b", {}, advice)));
}

// A rung's bar goes from the threshold to the norm; one that is not finite goes to the end.
function makeRung({ name, more, factor, norms, over, start, end, mark }) {
  const style = { left: `${start}%`, width: `${end - start}%`, background: over ? "var(--accent)" : "var(--quiet)" };
  return [
    make("div", { class: "rung" }, name, make("small", {}, more)),
    make("div", { class: "rail" }, make("i", { style }), make("b", { style: { left: `${mark}%` } })),
    make("div", { class: "factor" }, factor, make("small", {}, norms)),
  ];
}

// The response, token by token.

// What each piece of the strip stands for: the number of its culprit, if any, and what its tip says.
const pieces = new WeakMap();

function showStrip(culprit) {
  hideTip();
  const strip = view.strips[culprit.strip];
  get("legend").hidden = !strip;
  get("strip").replaceChildren(...(strip ? makeStrip(strip, culprit.place) : [makeEdge(culprit.no_strip)]));
  const target = get("strip").querySelector(".current");
  get("strip").scrollTop = target ? middleOfStrip(target) : 0;
}

function middleOfStrip(piece) {
  const box = get("strip");
  return Math.max(piece.offsetTop - box.offsetTop - box.clientHeight / 2, 0);
}

function makeEdge(text) {
  return make("span", { class: "edge" }, text);
}

function makeStrip({ start, tokens, shades, figures }, [rank, row]) {
  const mine = spikes[current.spike].culprits.filter((i) =>
    culprits[i].place[0] === rank && culprits[i].place[1] === row
  );
  const found = new Map(mine.map((i) => [culprits[i].place[2], i]));
  const made = tokens.map((text, i) => {
    const culprit = found.get(start + i);
    const piece = makePiece(start + i, text, shades[i] ?? 0, culprit);
    const [title, facts] = culprit === undefined ? [text.replace(/\n$/, ""), []] : rowFacts(tables.culprits, culprit);
    const own = [["position", String(start + i)], ["suspicion", figures[i] ?? "–"]];
    pieces.set(piece, { culprit, title: text === "▪" ? `token ${start + i}` : title, facts: [...own, ...facts] });
    return piece;
  });
  return start > 0 ? [makeEdge(`${start} tokens before `), ...made] : made;
}

function makePiece(position, text, shade, culprit) {
  const selected = culprit !== undefined && culprit === current.culprit;
  return make(
    "span",
    {
      class: "piece" + (culprit === undefined ? "" : " culprit") + (selected ? " current" : ""),
      style: { "--h": (0.0075 * shade).toFixed(3) },
      "data-position": position,
      tabindex: selected ? 0 : -1,
      role: culprit === undefined ? null : "button",
    },
    text,
  );
}

function addStripListeners() {
  const box = get("strip");
  const explain = ({ target }) => {
    const piece = pieces.get(target);
    if (!piece || (target === tipOwner && get("tip"))) return;
    showTip(() => target.getClientRects()[0] ?? target.getBoundingClientRect(), piece.title, piece.facts);
    tipOwner = target;
  };
  const end = ({ target }) => target === tipOwner && hideTip();
  // A move, and no mouseover: that also comes when the keyboard scrolls tokens past a mouse at rest.
  box.addEventListener("mousemove", explain);
  box.addEventListener("focusin", explain);
  box.addEventListener("mouseout", end);
  box.addEventListener("focusout", end);
  box.addEventListener("click", ({ target }) => selectPiece(target));
  box.addEventListener("keydown", onStripKey);
}

function selectPiece(piece) {
  const culprit = pieces.get(piece)?.culprit;
  if (culprit === undefined) return;
  go(`c${culprit}`);
  get("strip").querySelector(".current").focus({ preventScroll: true });
}

function onStripKey(press) {
  const all = [...get("strip").querySelectorAll(".piece")];
  const at = all.indexOf(document.activeElement);
  if (isPress(press)) {
    press.preventDefault();
    selectPiece(all[at]);
    return;
  }
  const isCulprit = (piece) => piece.classList.contains("culprit");
  moveFocus(press, all[at], {
    ArrowRight: all[at + 1],
    ArrowLeft: all[at - 1],
    ArrowDown: all.slice(at + 1).find(isCulprit),
    ArrowUp: all.slice(0, Math.max(at, 0)).findLast(isCulprit),
    Home: all[0],
    End: all.at(-1),
  });
}

function isPress({ key }) {
  return key === "Enter" || key === " ";
}

// Moves the focus within a group of which only one element is reached by Tab. `targets` has an entry for each key.
function moveFocus(press, from, targets) {
  if (!(press.key in targets)) return;
  press.preventDefault();
  const to = targets[press.key];
  if (!to) return;
  if (from) from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

// The tip with the numbers of a token or point. It keeps what gives the place of its anchor.

let tipAnchor = null;
// The piece of the strip that it is about.
let tipOwner = null;

function showTip(anchor, title, facts) {
  hideTip();
  const entries = facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  const head = make("div", { class: "tok" }, title);
  document.body.append(make("div", { id: "tip", role: "tooltip" }, head, make("dl", {}, entries)));
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

// The table of all culprits.

function showHeads() {
  const order = shown.down ? "descending" : "ascending";
  const heads = tables.culprits.columns.map(({ name, kind }, i) =>
    make(
      "th",
      { scope: "col", class: kind || null, "aria-sort": i === shown.column ? order : null },
      make("button", { type: "button", onclick: () => sortBy(i, kind === "num") }, name),
    )
  );
  get("columns").replaceChildren(...heads);
}

// Numbers come the largest first; the same column again turns the order.
function sortBy(column, isNumber) {
  shown.down = shown.column === column ? !shown.down : isNumber;
  shown.column = column;
  showHeads();
  get("columns").children[column].firstChild.focus();
  showRows();
}

function filter(change) {
  Object.assign(shown, { rows: 100 }, change);
  get("source").value = shown.source;
  get("words").value = shown.words;
  get("clear").hidden = !shown.words && !shown.source && !shown.token;
  showBars();
  showRows();
}

// The numbers of the culprits that pass the filters, in the table's order. "step 12" finds a column's value.
function matching() {
  const { columns, rows } = tables.culprits;
  const words = shown.words.toLowerCase().trim();
  const [, name, wanted] = words.match(/^(.+) (\d+)$/) ?? [];
  const column = columns.findIndex((column) => column.kind === "num" && column.name.toLowerCase() === name);
  const hasWords = (i) => column < 0 ? searchText(i).includes(words) : rows[i][column] === wanted;
  return rows.map((_, i) => i)
    .filter((i) => !shown.source || rows[i][sourceColumn] === shown.source)
    .filter((i) => !shown.token || tokenOf(i) === shown.token)
    .filter((i) => !words || hasWords(i))
    .sort(compareRows);
}

function searchText(i) {
  culprits[i].search ??= searchedTexts(i).join("\n").toLowerCase();
  return culprits[i].search;
}

function searchedTexts(i) {
  const row = tables.culprits.rows[i];
  return [
    ...row[tokenColumn],
    row[sourceColumn],
    ...tables.terms.rows[i].filter((_, at) => tables.terms.columns[at].kind !== "num"),
  ];
}

// Whatever the direction, what is not known comes last; what is not finite is more than any number.
function compareRows(a, b) {
  const { columns, rows } = tables.culprits;
  const isNumber = columns[shown.column].kind === "num";
  const [x, y] = [a, b].map((i) => {
    const cell = rows[i][shown.column];
    if (cell === "–") return null;
    return isNumber ? sizeOf(cell) : typeof cell === "string" ? cell : cell[0];
  });
  if (x === null || y === null) return (x === null) - (y === null);
  return (x < y ? -1 : x > y ? 1 : 0) * (shown.down ? -1 : 1);
}

function sizeOf(text) {
  if (text.startsWith("-∞")) return -Infinity;
  const size = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(size) ? Infinity : size;
}

function showRows() {
  const found = matching();
  const { columns, rows, more } = tables.culprits;
  get("rows").replaceChildren(
    ...found.slice(0, shown.rows).map((culprit, i) =>
      make(
        "tr",
        { tabindex: i ? -1 : 0, "data-culprit": culprit, "aria-current": String(culprit === current.culprit) },
        makeCells(columns, rows[culprit]),
      )
    ),
  );
  const some = found.length < rows.length ? `${whole(found.length)} of ` : "";
  get("count").textContent = `${some}${whole(rows.length)} ${rows.length === 1 ? "culprit" : "culprits"}${
    more && `, ${more}`
  }`;
  fill("none", found.length ? [] : [more ? `No culprit on this page matches; ${more}.` : "No culprit matches."]);
  sayHowManyMore("rows", found.length);
}

function addTableListeners() {
  get("source").append(...view.bars.sources.map(([source]) => make("option", { value: source }, source)));
  get("words").addEventListener("input", () => filter({ words: get("words").value }));
  get("source").addEventListener("change", () => filter({ source: get("source").value }));
  get("clear").addEventListener("click", () => {
    filter({ words: "", source: "", token: "" });
    get("words").focus();
  });
  addMore("rows", showRows, (first) => get("rows").children[first]);
  get("rows").addEventListener("click", ({ target }) => {
    const row = target.closest("tr");
    // Who marks text in a row does not select it.
    if (row && getSelection().isCollapsed) goAndScroll(`c${row.dataset.culprit}`);
  });
  get("rows").addEventListener("keydown", onRowKey);
}

function onRowKey(press) {
  const row = press.target.closest("tr");
  if (isPress(press)) {
    press.preventDefault();
    goAndScroll(`c${row.dataset.culprit}`);
    return;
  }
  moveFocus(press, row, {
    ArrowDown: row.nextElementSibling,
    ArrowUp: row.previousElementSibling,
    Home: row.parentElement.firstElementChild,
    End: row.parentElement.lastElementChild,
  });
}

start();
