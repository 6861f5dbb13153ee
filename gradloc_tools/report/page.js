// SPDX-FileCopyrightText: 2026 The GradLoc Authors
// SPDX-License-Identifier: Apache-2.0

// The script of the report's page. It makes everything from the data as text nodes, so that a model's text never
// becomes markup. Plotly is in the page before it.

const data = JSON.parse(document.getElementById("data").textContent);
const { events, culprits, strips, totals, clips } = data;
linkCulpritsToEvents();

const haveSteps = events.every((event) => event.global_step !== null);
const placeName = haveSteps ? "Step" : "Event";

// What is selected: a culprit and its event, or an event without culprits.
let current = null;
let currentEvent = null;

// How the table is sorted (`down`: the largest first) and filtered, and how many rows it shows at most.
const table = { key: "severity", down: true, words: "", source: "", token: null, rows: 100 };

function linkCulpritsToEvents() {
  events.forEach((event, i) => (event.index = i));
  culprits.forEach((culprit, i) => {
    culprit.index = i;
    culprit.times = number(culprit.grad_norm) / number(culprit.threshold);
    // A NaN is worse than any number.
    culprit.severity = Number.isNaN(culprit.times) ? Infinity : culprit.times;
    (events[culprit.event].culprits ??= []).push(culprit);
  });
}

function start() {
  fill("warnings", data.warnings.map(makeWarning));
  showTotals();
  showDrills();
  get("replays").hidden = !data.replays.length;
  fill("replay-list", data.replays.map(makeReplay));
  showClips();
  drawLevel();
  if (!events.length) {
    hide(document.querySelectorAll("section:not(#run, #clips, #replays)"));
    addChartListeners();
    return;
  }
  fillEventList();
  fill("columns", columns.map(makeColumnHead));
  addTableListeners();
  addStripListeners();
  showBars();
  fillHelp();
  if (culprits.length) select(culprits[0]);
  else selectEvent(events[0]);
  drawTimeline();
  showRows();
  if (!culprits.length) hide(document.querySelectorAll(".of-culprits"));
  addPageListeners();
}

function addChartListeners() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  addEventListener("beforeprint", () => setPrinted(true));
  addEventListener("afterprint", () => setPrinted(false));
}

function addPageListeners() {
  addChartListeners();
  // The labels of the layers depend on the width.
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => current && showLayers(), 200);
  });
  // The keyboard scrolls to what it moves to; the tip goes along.
  addEventListener("scroll", placeTip, { capture: true, passive: true });
  addEventListener("keydown", (press) => press.key === "Escape" && hideTip());
}

function drawCharts() {
  drawLevel();
  drawClips();
  drawTimeline();
  if (current) showLayers();
}

// On paper: light colours, and charts as wide as an A4 page.
function setPrinted(on) {
  document.documentElement.classList.toggle("print", on);
  drawCharts();
  const size = on ? { width: 640 } : { width: null, autosize: true };
  const charts = [
    data.charts && data.level && "level",
    data.charts && clipsWithStep.length && "clips-chart",
    data.charts && events.length && "timeline",
    current && !get("layers").hidden && "layers",
  ];
  for (const chart of charts.filter(Boolean)) Plotly.relayout(chart, size);
}

// Numbers and texts in words.

// A number of the evidence, where NaN and infinities are strings.
function number(value) {
  return value === null || value === undefined ? null : Number(value);
}

// Four digits at most.
const fourDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

function short(value) {
  const x = number(value);
  if (x === null) return "–";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size && (size < 1e-3 || size >= 1e7) ? x.toExponential(2).replace("e+", "e") : fourDigits.format(x);
  return text.replaceAll("-", "−");
}

// "14×"; more digits for what is small.
function times(x) {
  if (!Number.isFinite(x)) return "–";
  return (x >= 9.95 ? whole(Math.round(x)) : x.toFixed(x < 0.0995 ? 2 : 1)) + "×";
}

function timesOrNotFinite(x) {
  return Number.isFinite(x) ? times(x) : "not finite";
}

function whole(n) {
  return n.toLocaleString("en");
}

function percent(share) {
  const x = number(share);
  if (!Number.isFinite(x)) return "–";
  return x > 0 && x < 0.01 ? "under 1 %" : `${Math.round(100 * x)} %`;
}

function count(n, noun, plural = noun + "s") {
  return `${whole(n)} ${n === 1 ? noun : plural}`;
}

// The text with what cannot be seen, or would turn its direction, escaped.
function visible(text) {
  const signs = { "\n": "↵", "\t": "⇥", "\r": "␍" };
  return text.replace(
    /[\p{Cc}\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu,
    (unseen) => signs[unseen] ?? "\\u" + unseen.charCodeAt(0).toString(16).padStart(4, "0"),
  );
}

// A token's text, with spaces at its ends that can be seen; or its id, or what it has instead.
function tokenName({ token, token_id, name }) {
  if (token === null) return name ?? `id ${token_id}`;
  if (token === "") return "(empty)";
  return visible(token).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

// Where an event is over the run: its step, or its number where steps are not known.
function place(event) {
  return haveSteps ? event.global_step : event.index + 1;
}

function placeInWords(event) {
  const where = `${placeName} ${place(event)}`;
  if (!event.mini_batch && !event.epoch) return where;
  return `${where}, mini-batch ${event.mini_batch}` + (event.epoch ? ` of epoch ${event.epoch}` : "");
}

// Elements.

function get(id) {
  return document.getElementById(id);
}

// An element with attributes ("onclick" adds a listener, "style" takes properties by name) and children, texts among
// them. What is null is left out.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") setStyle(element, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function setStyle(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, value);
}

function hide(elements) {
  for (const element of elements) element.hidden = true;
}

// Shows children in an element, or a text; without any, the element is hidden.
function fill(id, children) {
  get(id).hidden = !children.length;
  get(id).replaceChildren(...children);
}

function say(id, text) {
  fill(id, text ? [text] : []);
}

function sayHowManyMore(id, more) {
  say(id, more > 0 && `Show ${Math.min(200, more)} more of ${whole(more)}`);
}

function makeToken(culprit) {
  return make("span", { class: "tok" }, tokenName(culprit));
}

function makeBadge(source) {
  return make("span", { class: "badge", style: { "--shade": sourceColor(source) } }, source);
}

function makeTerms(terms) {
  return terms.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

// Tables. A column is its head, what its cell has for a row, and the class of both; "row" is that of a row's own head.

function fillTable(id, columns, rows) {
  get(id).replaceChildren(...makeTableParts(columns, rows));
}

function makeTableParts(columns, rows) {
  const heads = columns.map(([head, , kind]) => make("th", { scope: "col", class: kind }, head));
  return [
    make("thead", {}, make("tr", {}, heads)),
    make("tbody", {}, rows.map((row) => make("tr", {}, makeCells(columns, row)))),
  ];
}

function makeCells(columns, row) {
  return columns.map(([, cell, kind]) =>
    kind === "row" ? make("th", { scope: "row" }, cell(row)) : make("td", { class: kind }, cell(row))
  );
}

// Columns of numbers: of any, and of whole ones.
function figure(head, name) {
  return [head, (row) => short(row[name]), "num"];
}

function index(head, name) {
  return [head, (row) => String(row[name] ?? "–"), "num"];
}

function makeReplayTable(title, heads, rows) {
  if (!rows.length) return null;
  const isText = (head) => ["Layer", "By", "Switch", "Override", "Meaning"].includes(head);
  const columns = heads.map((head, i) => [visible(head), (row) => visible(row[i]), isText(head) ? null : "num"]);
  return make(
    "details",
    { open: title === "Tokens" ? "" : null },
    make("summary", {}, title),
    make(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      make("table", {}, makeTableParts(columns, rows)),
    ),
  );
}

function sourceColor(source) {
  return `var(--${source})`;
}

// Charts.

const chartOptions = { displayModeBar: false, responsive: true };

// A colour or font of the page's style, which changes between light and dark.
function styleOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function chartLayout({ xaxis, yaxis, legend }) {
  const line = { color: styleOf("soft"), size: 12.5 };
  const axis = {
    gridcolor: styleOf("faint"),
    linecolor: styleOf("rule"),
    zeroline: false,
    tickfont: line,
    ticks: "",
    automargin: true,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: styleOf("sans"), ...line },
    hoverlabel: {
      bgcolor: styleOf("ink"),
      bordercolor: styleOf("ink"),
      align: "left",
      font: { color: styleOf("paper"), family: styleOf("sans"), size: 13 },
    },
    margin: { l: 8, r: 12, t: 8, b: 8 },
    dragmode: "zoom",
    hovermode: "closest",
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, type: "log", ...yaxis },
    legend: {
      orientation: "h",
      x: 0,
      xanchor: "left",
      y: 1.02,
      yanchor: "bottom",
      itemclick: false,
      itemdoubleclick: false,
      ...legend,
    },
  };
}

// Plotly reads a little markup in the texts that it shows.
function withoutMarkup(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function logTicks(low, high) {
  const digits = Math.log10(high / low) > 1.3 ? [1] : [1, 2, 5];
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    values.push(...digits.map((digit) => digit * 10 ** power));
  }
  return { tickvals: values, ticktext: values.map(short) };
}

// An axis of steps. Over fewer than six steps, Plotly would set ticks at their halves, and round the labels.
function stepAxis(first, last) {
  return { tickformat: "d", dtick: 1, tickmode: last - first < 6 ? "linear" : "auto" };
}

// The same for the steps that are left after zooming.
function keepStepsWhole(chart) {
  chart.removeAllListeners("plotly_relayout");
  chart.on("plotly_relayout", () => {
    const { range, tickmode } = chart.layout.xaxis;
    const axis = stepAxis(...range);
    if (axis.tickmode !== tickmode) {
      Plotly.relayout(chart, { "xaxis.dtick": axis.dtick, "xaxis.tickmode": axis.tickmode });
    }
  });
}

// Charts over the run: marks on a logarithmic scale.

// A scale for values. Those that are not finite get a place of their own above the others, and zero has none.
function makeScale(values) {
  const known = values.map(number).filter((x) => x !== null);
  const finite = known.filter(isNorm);
  const [least, most] = finite.length ? [Math.min(...finite), Math.max(...finite)] : [1, 1];
  const low = least / 1.6;
  // Room for the largest mark, however many decades there are.
  const room = Math.max(1.8, (most / low) ** 0.08);
  const top = most * room;
  const endless = known.some((x) => !Number.isFinite(x));
  const { tickvals, ticktext } = logTicks(low, top);
  if (endless) {
    tickvals.push(top * room);
    ticktext.push("NaN, ∞");
  }
  return {
    low,
    end: endless ? top * room * room : top,
    tickvals,
    ticktext,
    height: (value) => {
      const x = number(value);
      return x === null || x <= 0 ? null : Number.isFinite(x) ? x : top * room;
    },
  };
}

function isNorm(x) {
  return x !== null && Number.isFinite(x) && x > 0;
}

function markSize() {
  return events.length > 150 ? 8 : 11;
}

// Marks: of each row its place, its text for the mouse, and what a click leads to.
function marks(name, rows, { x, y, text, target, symbol, color, size = markSize(), rim, ...marker }) {
  return {
    type: "scatter",
    mode: "markers",
    name,
    x: rows.map(x),
    y: rows.map(y),
    text: rows.map(text),
    customdata: rows.map(target ?? (() => null)),
    hovertemplate: "%{text}<extra></extra>",
    marker: {
      symbol,
      size,
      color: styleOf(color),
      line: { width: symbol.endsWith("open") ? 2 : 1, color: rim },
      ...marker,
    },
  };
}

function thresholdLine(steps, thresholds) {
  return {
    type: "scatter",
    mode: steps.length > 1 ? "lines" : "lines+markers",
    name: "threshold",
    hoverinfo: "skip",
    x: steps,
    y: thresholds.map(number),
    line: { color: styleOf("ink"), width: 1.25, dash: "4px,4px", shape: "hv" },
  };
}

// The places of marks, from the first to the last, with room for them.
function widened(places) {
  const [first, last] = [Math.min(...places), Math.max(...places)];
  const margin = Math.max((last - first) * 0.03, 1);
  return [first - margin, last + margin];
}

function drawOverRun(id, { label, traces, scale, range, xTitle = "step", yTitle }) {
  const { low, end, tickvals, ticktext } = scale;
  const layout = chartLayout({
    xaxis: { title: { text: xTitle, standoff: 8 }, range, showgrid: false, ...stepAxis(...range) },
    yaxis: {
      range: [Math.log10(low), Math.log10(end)],
      title: { text: yTitle, standoff: 8 },
      tickvals,
      ticktext,
    },
    legend: { font: { size: 13, color: styleOf("ink") } },
  });
  get(id).setAttribute("aria-label", label);
  return Plotly.react(id, traces, layout, chartOptions).then((chart) => {
    chart.removeAllListeners("plotly_click");
    chart.on("plotly_click", ({ points }) => selectPoint(points[0]));
    keepStepsWhole(chart);
  });
}

// The totals.

function showTotals() {
  get("title").textContent = title();
  document.title = get("title").textContent + " · GradLoc";
  get("lead").append(...lead());
  if (events.length) get("figures").append(...makeTerms(figures()));
  fill("notes", notes().map((message) => make("li", {}, message)));
}

function title() {
  if (!events.length) return data.lost_spikes ? "No gradient spike could be read" : "No gradient spike";
  const { first_step: first, last_step: last } = totals;
  const where = !haveSteps ? "" : first === last ? ` in step ${first}` : `, steps ${first} to ${last}`;
  return totals.named + where;
}

function lead() {
  if (!events.length) {
    if (data.lost_spikes) return [data.lost_spikes];
    const where = data.level ? `in ${count(data.level.steps_in_all, "step")}` : "in this evidence";
    const noSpike = `No spike is ${where}: no micro-batch was over its threshold.`;
    return [clips ? `${noSpike} ${clips.sentences[0]}` : noSpike];
  }
  const verdict = data.verdict === null ? "" : visible(data.verdict) + ". ";
  if (!culprits.length) {
    const searched = events.some((event) => event.diagnosis !== "unsearched");
    const found = searched ? "No single token was found to be over the threshold." : "No token was measured.";
    return [make("b", {}, verdict), found];
  }
  const worst = culprits[0];
  const many = `${count(totals.culprits, "token")} stand out in ${
    totals.events === 1 ? "it" : "them"
  }. The largest is `;
  const size = Number.isFinite(worst.times)
    ? `with a gradient ${times(worst.times)} the threshold`
    : "whose gradient is not finite";
  return [
    make("b", {}, verdict),
    totals.culprits === 1 ? "One token stands out: " : many,
    make("b", {}, makeToken(worst)),
    ` in ${placeName.toLowerCase()} ${place(events[worst.event])}, ${size}.`,
  ];
}

function figures() {
  const small = (text) => make("small", {}, text);
  const thresholds = [...new Set(totals.thresholds.map(short))].join(" to ");
  const largest = culprits.length ? short(culprits[0].grad_norm) : "–";
  return [
    ["Spikes", whole(totals.events)],
    ["Culprit tokens", whole(totals.culprits)],
    ["Largest token gradient", [largest, small(`threshold ${thresholds}`)]],
    ["Searches complete", [whole(totals.events - totals.incomplete_events), small(`of ${whole(totals.events)}`)]],
    ...(clips ? [clipsFigure()] : []),
    ["Extra passes", [whole(totals.passes), small(`${whole(Math.round(number(totals.seconds)))} s in all`)]],
  ];
}

function clipsFigure() {
  const more = make("small", {}, `of ${count(clips.mini_batches, "mini-batch", "mini-batches")} with outlying tokens`);
  return ["Stopped by TokenClip", [whole(clips.stopped), more]];
}

function notes() {
  const messages = data.notes.map((note) => `The file notes: ${note}.`);
  if (!data.texts) {
    messages.push(
      "This page has no prompts, responses or ground truths: the evidence has them. spike_log=texts adds them.",
    );
  }
  if (totals.incomplete_events) {
    messages.push(`${count(totals.incomplete_events, "search", "searches")} ended early: there may be more culprits.`);
  }
  messages.push(...data.other_versions, ...data.merged);
  if (data.lost_spikes && events.length) messages.push(data.lost_spikes);
  if (data.skipped) messages.push(`${count(data.skipped, "line")} of the evidence skipped: malformed or unfinished.`);
  const cut = [];
  if (events.length < totals.events) {
    cut.push(`the ${count(events.length, "spike")} with the largest norms of ${whole(totals.events)}`);
  }
  if (culprits.length < totals.culprits) {
    cut.push(`${count(culprits.length, "culprit")} of ${whole(totals.culprits)}, the largest of each spike first`);
  }
  if (cut.length) messages.push(`The page shows ${cut.join(", and ")}. Its totals count all of them.`);
  return messages;
}

// The warnings of the steps, which need no spike.

function makeWarning({ when, sentence, check }) {
  return make(
    "li",
    {},
    make("b", {}, `${when}: ${visible(sentence)}`),
    make("p", { class: "check" }, makeCheck(check)),
  );
}

// A sentence in which commands are between backticks; those that GradLoc writes can be copied.
function makeCheck(sentence) {
  const parts = visible(sentence).split("`");
  return parts.flatMap((part, i) => i % 2 && i < parts.length - 1 ? makeCommand(part) : [part]);
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

// What was done on purpose: faults and drills.

function showDrills() {
  const { faults, drills } = data;
  say("fault", faults.length && `A fault was planted in this run on purpose: ${visible(faults.join(", "))}`);
  fill("drills", drills.map(makeDrill));
}

function makeDrill({ found, text, advice }) {
  const steps = advice.map((sentence) => make("li", {}, visible(sentence)));
  return make("li", { class: found ? "found" : "failed" }, text, steps.length ? make("ul", {}, steps) : null);
}

// Replays: what became of a spike that was computed again.

function makeReplay(replay) {
  const { bundle, sentences, notes, variant, device, recorded, model, variants } = replay;
  const title = (replay.global_step === null ? "" : `Step ${replay.global_step}: `) + visible(bundle);
  const where = `${visible(model)}, ${visible(variant)} on ${visible(device)}; in training ${visible(recorded)}`;
  const before = ["In training", "Replayed", ...variants];
  return make(
    "div",
    { class: "card" },
    make("h3", {}, title),
    make("p", { class: "hint" }, where),
    [...sentences, ...notes].map((text) => make("p", { class: "story" }, visible(text))),
    makeReplayTable(
      "Tokens",
      ["Rank", "Row", "Position", "Token id", ...before, "Log p", "Replayed"],
      replay.tokens.map((token) => [
        ...[token.rank, token.row, token.position, token.token_id].map(String),
        ...[token.grad_norm, token.replayed, ...token.others, token.log_prob, token.replayed_log_prob].map(short),
      ]),
    ),
    makeReplayTable(
      "Micro-batches",
      ["Rank", "Micro-batch", "Threshold", ...before, "Without culprits"],
      replay.units.map((unit) => [
        ...[unit.rank, unit.micro_batch].map(String),
        ...[unit.threshold, unit.norm, unit.replayed, ...unit.others, unit.rest].map(short),
      ]),
    ),
    makeReplayTable(
      "The first micro-batch by layer",
      ["Layer", ...before],
      replay.layers.map((layer) => [layer.layer, ...[layer.norm, layer.replayed, ...layer.others].map(short)]),
    ),
    makeSwitches(replay),
    replay.remedy_notes ? makeRemedies(replay) : makeEstimates(replay),
  );
}

// What each switch changes, if they were asked for.
function makeSwitches({ switches }) {
  return makeReplayTable(
    "What each switch changes in the first micro-batch",
    ["Switch", "Norm", "Log-probs differ by up to", "Culprit"],
    (switches ?? []).map((row) => [row.name, ...[row.norm, row.log_probs, row.culprit].map(short)]),
  );
}

// What needs no further pass.
function makeEstimates({ remedies }) {
  return makeReplayTable(
    "What would be left of the first micro-batch's gradient",
    ["By", "Norm", "Meaning"],
    remedies.map(({ name, norm, meaning }) => [name, short(norm), meaning]),
  );
}

// The remedies that a replay measured, best first, with the overrides to copy.
function makeRemedies({ remedies, remedy_notes }) {
  const rows = remedies.map((row) => [
    ...[row.name, short(row.norm), row.left === null ? "–" : percent(row.left), row.under ? "yes" : "no"],
    row.ordinary_moved === null ? "–" : percent(row.ordinary_moved),
    ...[row.masked.tokens, row.masked.culprits].map(String),
    ...[row.override ?? "", [row.meaning, row.note].filter((text) => text).join(". ")],
  ]);
  const heads = ["By", "Norm", "Left", "Under its threshold", "Ordinary moved", "Masked", "Of them culprits"];
  return [
    makeReplayTable("Which remedy fits", [...heads, "Override", "Meaning"], rows),
    ...remedy_notes.map((text) => make("p", { class: "hint" }, visible(text))),
  ];
}

// What TokenClip found: tokens whose backward signals were over its bounds.

const clipsWithStep = (clips?.rows ?? []).filter(hasStep);
let clipRows = 100;

function showClips() {
  get("clips").hidden = !clips;
  if (!clips) return;
  get("h-clips").textContent = clips.title;
  get("clips-hint").textContent = visible(clips.sentences.join(" "));
  get("clips-how").textContent = clips.explanation;
  get("clips-scroll").hidden = get("clips-how").hidden = !clips.rows.length;
  get("clips-more").addEventListener("click", showMoreClips);
  showClipRows();
  drawClips();
}

function showClipRows() {
  fillTable("clips-table", clipColumns, clips.rows.slice(0, clipRows));
  sayHowManyMore("clips-more", clips.rows.length - clipRows);
}

function showMoreClips() {
  clipRows += 200;
  showClipRows();
  // A button that is hidden loses the focus.
  if (get("clips-more").hidden) get("clips-scroll").focus();
}

const clipColumns = [
  index("Step", "global_step"),
  ["Token in its context", tokenInContext, "words"],
  ["First over at", ({ boundary }) => visible(boundary)],
  figure("× usual", "multiple"),
  ["Signal", ({ done }) => done],
  index("Rank", "rank"),
  index("Row", "row"),
  ["Position", ({ position }) => position < 0 ? "prompt" : String(position), "num"],
  figure("log p", "log_prob"),
  figure("Reward", "reward"),
  ["Data source", ({ data_source }) => visible(data_source ?? "–")],
  ["Spike", clipSpike],
];

// What leads to the spike of the same mini-batch.
function clipSpike({ spike, event }) {
  if (event === null) return spike ? "yes" : "–";
  const label = `Spike of ${placeInWords(events[event])}`;
  return make(
    "button",
    { type: "button", "aria-label": label, onclick: () => scrollToEvent(events[event]) },
    "see above",
  );
}

function scrollToEvent(event) {
  selectEvent(event);
  get("detail").scrollIntoView({ block: "start" });
  get("spike").focus({ preventScroll: true });
}

// Every token by how far it was over what is usual.
function drawClips() {
  const shown = data.charts && clipsWithStep.length > 0;
  get("clips-chart").hidden = !shown;
  if (!shown) return;
  const scale = makeScale(clipsWithStep.map(({ multiple }) => multiple));
  const traces = Object.entries(clipMarks).map(([done, mark]) =>
    marks(done, clipsWithStep.filter((row) => row.done === done), {
      x: stepOf,
      y: ({ multiple }) => scale.height(multiple),
      text: clipHover,
      ...mark,
    })
  );
  drawOverRun("clips-chart", {
    label: clipsLabel(),
    traces: traces.filter(({ x }) => x.length),
    scale,
    range: widened(clipsWithStep.map(stepOf)),
    yTitle: "times the usual signal",
  });
}

const clipMarks = {
  dropped: { symbol: "triangle-up", color: "advantage" },
  reduced: { symbol: "triangle-down", color: "misaligned" },
  left: { symbol: "triangle-up-open", color: "sequence" },
};

function clipHover(row) {
  return `<b>${withoutMarkup(tokenName(row).slice(0, 40))}</b>   ${row.done}` +
    `<br>${short(row.multiple)} times the usual at ${withoutMarkup(visible(row.boundary).slice(0, 40))}` +
    `<br>step ${row.global_step}, rank ${row.rank}`;
}

function clipsLabel() {
  return `Chart: ${count(clipsWithStep.length, "token")} over TokenClip's bounds, by step and by how many times the ` +
    "usual signal. The table has the same tokens.";
}

// The level: the token norm of every step against its threshold.

function drawLevel() {
  if (!data.level || !data.charts) return;
  get("run").hidden = false;
  get("level-hint").textContent = levelHint();
  const { steps, norms, thresholds } = data.level;
  const levels = [...events, ...data.drills].filter(hasStep).map(({ level }) => level);
  const scale = makeScale([...norms, ...thresholds, ...levels]);
  const traces = [levelTrace(scale), thresholdLine(steps, thresholds), ...levelMarks(scale)];
  const places = traces.flatMap(({ x }) => x);
  drawOverRun("level", { label: levelLabel(), traces, scale, range: widened(places), yTitle: "token-equivalent norm" });
}

function levelHint() {
  const { steps, steps_in_all } = data.level;
  const thinned = steps.length < steps_in_all
    ? ` Of ${whole(steps_in_all)} steps, the lowest and the highest of every few are drawn.`
    : "";
  return "The largest token-equivalent norm of each step: the norm that a single token would need for it." + thinned +
    (events.length ? " Select a spike to see it above." : "") + levelClipsHint();
}

function levelLabel() {
  const { steps, steps_in_all } = data.level;
  return `Chart: the token norm of ${count(steps_in_all, "step")}, ${steps[0]} to ${steps.at(-1)}, ` +
    `with ${count(events.length, "spike")} and ${count(data.drills.length, "drill")}` +
    (clips ? `, and marks at ${count(clips.marks.length, "step")} in which TokenClip found tokens.` : ".");
}

function hasStep({ global_step }) {
  return global_step !== null;
}

function stepOf({ global_step }) {
  return global_step;
}

// The line lies under the marks. So that it does not take the mouse from them, it says and selects the same there.
function levelTrace({ height }) {
  const { steps, norms } = data.level;
  const marks = marksByStep();
  return {
    type: "scatter",
    mode: steps.length < 60 ? "lines+markers" : "lines",
    name: "token norm",
    x: steps,
    y: norms.map(height),
    customdata: steps.map((step) => marks.get(step)?.point ?? null),
    text: steps.map((step, i) => marks.get(step)?.text ?? `step ${step}<br>token norm ${short(norms[i])}`),
    hovertemplate: "%{text}<extra></extra>",
    line: { color: styleOf("soft"), width: 1.25 },
    marker: { size: 4, color: styleOf("soft") },
  };
}

// The marks of spikes and drills, and along the chart's lower edge those of the steps in which TokenClip found tokens.
function levelMarks({ height, low, end }) {
  const [found, failed] = [true, false].map((wanted) => data.drills.filter((drill) => drill.found === wanted));
  const [stopped, left] = [true, false].map((wanted) => (clips?.marks ?? []).filter((step) => step.stopped === wanted));
  const spike = { text: spikeHover, y: ({ level }) => height(level), target: ({ index }) => ({ event: index }) };
  const drill = { text: drillHover, y: spike.y };
  const clip = { text: levelClipHover, y: () => low * (end / low) ** 0.03, target: () => ({ clips: true }) };
  const kinds = [
    ["spike", events, { ...spike, symbol: "circle", color: "accent" }],
    ["drill, found", found, { ...drill, symbol: "diamond-open", color: "focus" }],
    ["drill, FAILED", failed, { ...drill, symbol: "x", color: "token" }],
    ["stopped by TokenClip", stopped, { ...clip, symbol: "triangle-up", color: "advantage" }],
    ["found by TokenClip", left, { ...clip, symbol: "triangle-up-open", color: "sequence" }],
  ];
  return kinds
    .map(([name, rows, mark]) => marks(name, rows.filter(hasStep), { x: stepOf, size: 10, ...mark }))
    .filter(({ x }) => x.length);
}

function levelClipHover({ global_step, over, cut, stopped }) {
  return `<b>${stopped ? "stopped" : "found"} by TokenClip</b> in step ${global_step}` +
    `<br>${count(over, "backward signal")} over the bounds, ${whole(cut)} cut`;
}

function levelClipsHint() {
  if (!clips?.marks.length) return "";
  const { marks, steps_in_all } = clips;
  const which = marks.length < steps_in_all ? `, the ${whole(marks.length)} with most of them` : "";
  return ` Triangles are steps in which TokenClip found tokens${which}; filled where it cut all and no spike was recorded.`;
}

// The texts and places of the marks by step; of several spikes in a step, those of the largest.
function marksByStep() {
  const byStep = new Map(data.drills.filter(hasStep).map((drill) => [drill.global_step, { text: drillHover(drill) }]));
  const level = (event) => Number.isNaN(number(event.level)) ? Infinity : number(event.level);
  for (const event of [...events].filter(hasStep).sort((a, b) => level(a) - level(b))) {
    byStep.set(event.global_step, { text: spikeHover(event), point: { event: event.index } });
  }
  return byStep;
}

function spikeHover(event) {
  return `<b>spike</b> in step ${event.global_step}<br>token norm ${short(event.level)}, ` +
    `${timesOrNotFinite(number(event.level) / number(event.threshold))} the threshold`;
}

function drillHover(drill) {
  return withoutMarkup(drill.text);
}

// The timeline: every culprit by the norm of its own gradient.

const symbols = {
  token: "circle",
  sequence: "square",
  layer: "diamond",
  nonfinite: "x",
  retokenized: "triangle-left",
  misaligned: "triangle-up",
  unsampled: "star",
  advantage: "hexagon",
  weight: "pentagon",
  kl: "cross",
  entropy: "hourglass",
  unlikely: "triangle-down",
  punished: "triangle-right",
  other: "circle-open",
};

const bareEvents = events.filter((event) => !event.culprits);
const timelineScale = makeScale([
  ...events.map(({ threshold }) => threshold),
  ...culprits.map(({ grad_norm }) => grad_norm),
  ...bareEvents.map(({ size }) => size),
]);

function drawTimeline() {
  get("times").hidden = !data.charts || !events.length;
  if (get("times").hidden) return;
  get("when").textContent = timelineHint();
  const line = [...events].sort((a, b) => place(a) - place(b));
  const range = widened(events.map(place));
  const thresholds = [line[0], ...line, line.at(-1)].map(({ threshold }) => threshold);
  const traces = [thresholdLine([range[0], ...line.map(place), range[1]], thresholds), ...culpritTraces()];
  if (bareEvents.length) traces.push(bareTrace());
  traces.push(selectionTrace());
  drawOverRun("timeline", {
    label: timelineLabel(),
    traces,
    scale: timelineScale,
    range,
    xTitle: placeName.toLowerCase(),
    yTitle: "gradient norm of a token",
  }).then(markSelection);
}

function timelineHint() {
  const shown = [];
  if (culprits.length) shown.push("Every culprit by the norm of its own gradient");
  if (bareEvents.length) shown.push("bars are spikes without a culprit, at the norm that a single token would need");
  const sentence = shown.join("; ") + ". Select one to see it above.";
  return sentence[0].toUpperCase() + sentence.slice(1);
}

function culpritTraces() {
  return Object.keys(data.source_rules)
    .map((source) => culpritTrace(source, culprits.filter((culprit) => culprit.source === source)))
    .filter((trace) => trace.x.length);
}

function culpritTrace(source, mine) {
  return marks(source, mine, {
    x: (culprit) => place(events[culprit.event]),
    y: ({ grad_norm }) => timelineScale.height(grad_norm),
    text: culpritHover,
    target: ({ index }) => ({ culprit: index }),
    symbol: symbols[source],
    color: source,
    rim: styleOf("paper"),
    opacity: culprits.length > 150 ? 0.85 : 0.95,
  });
}

function culpritHover(culprit) {
  return `<b>${withoutMarkup(tokenName(culprit).slice(0, 40))}</b>   ${culprit.source}` +
    `<br>gradient norm ${short(culprit.grad_norm)}` +
    (Number.isFinite(culprit.times) ? `, ${times(culprit.times)} the threshold` : "") +
    `<br>${placeName.toLowerCase()} ${place(events[culprit.event])}, rank ${culprit.rank}`;
}

function bareTrace() {
  return marks("no culprit found", bareEvents, {
    x: place,
    y: ({ size }) => timelineScale.height(size),
    text: (event) => `<b>${withoutCulprit(event)}</b><br>a single token would need norm ${short(event.size)}`,
    target: ({ index }) => ({ event: index }),
    symbol: "line-ns-open",
    color: "quiet",
    size: markSize() + 2,
  });
}

// A ring around the selected culprit; the last trace.
function selectionTrace() {
  return {
    type: "scatter",
    mode: "markers",
    x: [],
    y: [],
    hoverinfo: "skip",
    showlegend: false,
    marker: { symbol: "circle-open", size: markSize() + 11, color: styleOf("ink"), line: { width: 1.75 } },
  };
}

function markSelection() {
  const chart = get("timeline");
  if (!chart.data) return; // it is not drawn yet
  const x = current ? [place(currentEvent)] : [];
  const y = current ? [timelineScale.height(current.grad_norm)] : [];
  Plotly.restyle(chart, { x: [x], y: [y] }, [chart.data.length - 1]);
}

function selectPoint({ customdata }) {
  if (customdata?.clips) scrollToClips();
  else if (customdata?.culprit !== undefined) select(culprits[customdata.culprit]);
  else if (customdata) selectEvent(events[customdata.event]);
}

function scrollToClips() {
  get("clips").scrollIntoView({ block: "start" });
  get("h-clips").focus({ preventScroll: true });
}

function timelineLabel() {
  const norms = culprits.map((culprit) => number(culprit.grad_norm)).filter(isNorm);
  const range = norms.length ? `, from ${short(Math.min(...norms))} to ${short(Math.max(...norms))}` : "";
  return `Chart: gradient norms of ${count(culprits.length, "culprit")} in ${count(events.length, "spike")}${range}. ` +
    "The list of spikes and the table of all culprits lead to the same places.";
}

// The shares of sources and tokens.

function showBars() {
  fillBars(
    "sources",
    Object.entries(totals.sources).map(([source, n]) => ({
      label: source,
      count: n,
      more: `${Math.round((100 * n) / totals.culprits)} %`,
      title: data.source_rules[source],
      shade: sourceColor(source),
      pressed: source === table.source,
      press: () => filter({ source: source === table.source ? "" : source }),
    })),
  );
  fillBars(
    "tokens",
    data.tokens.map((token) => ({
      label: makeToken(token),
      count: token.count,
      pressed: tokenName(token) === table.token,
      press: () => filter({ token: tokenName(token) === table.token ? null : tokenName(token) }),
    })),
  );
}

function fillBars(id, bars) {
  const most = Math.max(...bars.map((bar) => bar.count));
  get(id).replaceChildren(...bars.map((bar) => make("li", {}, makeBar(bar, most))));
}

function makeBar({ label, count, more, title, shade, pressed, press }, most) {
  const style = { display: "block", width: `${(100 * count) / most}%`, ...(shade && { "--shade": shade }) };
  return make(
    "button",
    { type: "button", "aria-pressed": String(pressed), title, onclick: press },
    make("span", { class: "label" }, label),
    make("span", { class: "track" }, make("span", { class: "fill", style })),
    make("span", { class: "value" }, whole(count)),
    more && make("span", { class: "value" }, more),
  );
}

// One spike.

function fillEventList() {
  get("pick").hidden = events.length === 1;
  get("event").replaceChildren(...events.map((event) => make("option", { value: event.index }, eventName(event))));
  get("event").addEventListener("change", () => selectEvent(events[get("event").value]));
  get("previous").addEventListener("click", () => moveToEvent(-1, "previous", "next"));
  get("next").addEventListener("click", () => moveToEvent(1, "next", "previous"));
}

function eventName(event) {
  const worst = event.culprits?.[0];
  const found = worst ? `${tokenName(worst).slice(0, 20)}  ${timesOrNotFinite(worst.times)}` : withoutCulprit(event);
  return `${placeInWords(event)}: ${found}`;
}

function withoutCulprit(event) {
  return { unsearched: "not searched", under: "nothing over its threshold" }[event.diagnosis] ?? "no culprit found";
}

function moveToEvent(by, pressed, other) {
  selectEvent(events[currentEvent.index + by]);
  // A button that is disabled loses the focus.
  if (get(pressed).disabled) get(other).focus();
}

function selectEvent(event) {
  if (event.culprits) select(event.culprits[0]);
  else show(event, null);
}

function select(culprit) {
  show(events[culprit.event], culprit);
}

function selectAndScroll(culprit) {
  select(culprit);
  get("detail").scrollIntoView({ block: "start" });
  get("spike").focus({ preventScroll: true });
}

function show(event, culprit) {
  [currentEvent, current] = [event, culprit];
  get("event").value = event.index;
  get("previous").disabled = event.index === 0;
  get("next").disabled = event.index === events.length - 1;
  showSpike();
  markSelection();
  for (const row of get("rows").children) {
    row.setAttribute("aria-current", String(culprits[row.dataset.culprit] === current));
  }
}

function showSpike() {
  const event = currentEvent;
  get("spike").textContent = placeInWords(event);
  // An event of an older release has no verdict.
  const { verdict } = event;
  say("verdict", visible(verdict?.sentence ?? event.summary ?? ""));
  say("summary", verdict && visible(event.summary ?? ""));
  say("story", story(event));
  say("clipped", event.token_clip);
  const diagnosis = make("b", {}, `Diagnosis: ${event.diagnosis}.`);
  get("diagnosis").replaceChildren(diagnosis, event.explanation ? " " + event.explanation : "");
  showWhatToDo(event);
  showBefore(event);
  showParts(event);
  showSuspected(event);
  showChips(event);
  get("culprit").hidden = get("details").hidden = current === null;
  if (current) showCulprit();
}

// How to check the verdict, what the diagnosis leads to, and what to do about each source of the culprit.
function showWhatToDo({ verdict, diagnosis, next_command: next }) {
  fill("check", verdict ? makeCheck(verdict.check) : []);
  say("look", diagnosis !== "tokens" && data.diagnoses[diagnosis]);
  fill("why", (current?.sources ?? []).map(makeReason));
  const said = next === null || verdict?.check.includes(next);
  fill("then", said ? [] : makeCheck(`Next: \`${next}\``));
  get("todo").hidden = ["check", "look", "why", "then"].every((part) => get(part).hidden);
}

function story(event) {
  const { kind, norm, threshold } = event.trigger;
  const cause = kind === "global" ? "The gradient of all ranks" : "A micro-batch's gradient";
  const passes = count(event.passes, "extra pass", "extra passes");
  const found = count(event.culprits_in_all, "culprit");
  const early = event.ended_early ? "; the search ended early" : "";
  const left = event.ended_early && event.open_tokens
    ? `, with ${count(event.open_tokens, "token")} not looked at`
    : "";
  const over = event.is_spike ? ", over its threshold of" : "; its threshold is";
  const sentences = [
    `${cause} had norm ${short(norm)}${over} ${short(threshold)}.`,
    event.diagnosis === "unsearched"
      ? "It was recorded, and not searched."
      : event.diagnosis === "under"
      ? "Its bundle was searched: no micro-batch is over its threshold."
      : `${passes} (${short(number(event.seconds).toFixed(2))} s) found ${found}${early}${left}.`,
  ];
  if (event.error) sentences.push(`The search failed with an error: ${event.error.replace(/\.+$/, "")}.`);
  sentences.push((event.applied ? data.applied : data.not_applied)[event.action]);
  return sentences.join(" ");
}

// The figures of the steps before the spike.
function showBefore({ before }) {
  get("before").hidden = !before || !data.charts;
  if (get("before").hidden) return;
  const earlier = before.steps.filter((step) => step < currentEvent.global_step);
  get("before-title").textContent = `The ${count(earlier.length, "step")} before`;
  const own = before.steps.length > earlier.length;
  const columns = [
    ["Figure", ({ name }) => makeFigureName(name, ...data.figure_names[name]), "row"],
    ["Up to the spike", ({ name, values }) => makeSparkline(name, values.map(number), own)],
    ["Usual", ({ name, values }) => figureText(name, median(values.slice(0, earlier.length).map(number))), "num"],
    ["In its step", ({ name, values }) => figureText(name, own ? values.at(-1) : null), "num"],
  ];
  fillTable("before-table", columns, before.figures);
}

function makeFigureName(name, label, help) {
  return make("span", { title: help }, label, make("small", {}, name));
}

function figureText(name, value) {
  const x = number(value);
  return name === "unlikely_share" && x !== null ? `${short((100 * x).toPrecision(3))} %` : short(x);
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return !sorted.length ? null : sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// A figure's values as a line, with a dot in the spike's own step. On a log scale; of a ratio, its logarithm is what is
// shown.
function makeSparkline(name, values, own) {
  const [width, height, margin] = [220, 40, 5];
  const size = (value) => value === null ? null : name.includes("ratio") ? Math.log(Math.max(value, 1)) : value;
  const logs = values.map(size).filter(isNorm).map(Math.log10);
  const low = Math.min(...logs, Infinity);
  // At least a factor of 2, so that small changes look small.
  const high = Math.max(...logs, low + Math.log10(2));
  const x = (i) => margin + (i * (width - 2 * margin)) / Math.max(values.length - 1, 1);
  const y = (value) => {
    const log = Number.isFinite(value) ? Math.min(Math.max(Math.log10(Math.max(value, 0)), low), high) : high;
    return margin + (height - 2 * margin) * (logs.length ? (high - log) / (high - low) : 0.5);
  };
  const points = values.map((value, i) => value === null ? "" : `${x(i).toFixed(1)},${y(size(value)).toFixed(1)}`);
  const [at, last] = [values.length - 1, own ? values.at(-1) : null];
  const dot = last === null ? [] : [makeSvg("circle", { cx: x(at), cy: y(size(last)).toFixed(1), r: 3.5 })];
  return makeSvg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    makeSvg("polyline", { points: points.filter(Boolean).join(" ") }),
    ...dot,
  );
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The parts of a diffuse event.
function showParts(event) {
  get("parts").hidden = !event.diffuse.length;
  fillTable("parts-table", partColumns, event.diffuse);
  const left = event.diffuse_in_all - event.diffuse.length;
  say("parts-left", left && `${count(left, "smaller part")} left out here.`);
}

const partColumns = [
  ["Rank", ({ rank }) => rank === null ? "several" : String(rank), "num"],
  index("Micro-batch", "micro_batch"),
  ["Rows", ({ rows }) => rows, "rows"],
  ["Tokens", ({ tokens }) => whole(tokens), "num"],
  figure("Norm", "norm"),
  figure("Threshold", "threshold"),
  ["× threshold", ({ norm, threshold }) => times(number(norm) / number(threshold)), "num"],
  ["Largest tokens measured", (part) => part.largest_tokens.map((token) => make("div", {}, measuredToken(token)))],
];

function measuredToken({ row, position, grad_norm, share }) {
  const carried = Number.isFinite(number(share)) ? `, ${percent(share)} of the norm` : "";
  return `token ${position} of row ${row}: ${short(grad_norm)}${carried}`;
}

// The tokens of a spike that was only recorded.
function showSuspected({ suspected, suspected_title }) {
  get("suspected").hidden = !suspected.length;
  get("suspected").querySelector("h3").textContent = suspected_title;
  fillTable("suspected-table", suspectedColumns, suspected);
}

const suspectedColumns = [
  [
    "Token in its context",
    (token) => [makeToken(token), make("small", {}, token.context === null ? "" : ` ${visible(token.context)}`)],
  ],
  figure("Suspicion", "suspicion"),
  figure("Ratio", "ratio"),
  figure("Advantage", "advantage"),
  figure("Reward", "reward"),
  index("Rank", "rank"),
  index("Row", "row"),
  index("Position", "position"),
  ["Source", ({ source }) => makeBadge(source)],
];

// A button for each culprit of the event.
function showChips(event) {
  const mine = event.culprits ?? [];
  get("chips").hidden = mine.length < 2;
  get("chips").replaceChildren(...mine.map(makeChip));
  const left = event.culprits_in_all - mine.length;
  say("left", left && `The page leaves out ${count(left, "smaller culprit")} of this spike.`);
}

function makeChip(culprit, i) {
  const press = () => {
    select(culprit);
    get("chips").children[i].focus();
  };
  return make(
    "button",
    { type: "button", "aria-pressed": String(culprit === current), onclick: press },
    makeToken(culprit),
    make("span", { class: "times" }, timesOrNotFinite(culprit.times)),
  );
}

function showCulprit() {
  const size = Number.isFinite(current.times) ? `, ${times(current.times)} the threshold` : "";
  get("head").replaceChildren(
    makeToken(current),
    make("span", { class: "norm" }, `gradient norm ${short(current.grad_norm)}${size}`),
  );
  showStrip();
  showLadder();
  showLayers();
  get("numbers").replaceChildren(...makeTerms(culpritFigures(current)));
  showText("prompt", current.prompt);
  showText("response", current.response);
  showText("truth", current.ground_truth);
}

// A source with its rule and what to do.
function makeReason(source) {
  const advice = make("b", {}, data.source_advice[source]);
  return make("li", {}, makeBadge(source), make("span", {}, data.source_rules[source], " ", advice));
}

function culpritFigures(culprit) {
  return [
    ["importance ratio", short(culprit.ratio)],
    ["ratio to the rollout", short(culprit.rollout_ratio)],
    ["sequence ratio", short(culprit.sequence_ratio)],
    ["advantage", short(culprit.advantage)],
    ["log p", short(culprit.log_prob)],
    ["old log p", short(culprit.old_log_prob)],
    ["rollout log p", short(culprit.rollout_log_prob)],
    ["reference log p", short(culprit.ref_log_prob)],
    ["entropy", short(culprit.entropy)],
    ["∂L/∂log p", short(culprit.coefficient)],
    ["suspicion", short(culprit.suspicion)],
    ["weight in the loss", short(culprit.weight)],
    ["share of the unit", percent(culprit.share)],
    ["misaligned tokens", percent(culprit.misaligned_share)],
    ["turn", short(culprit.turn)],
    ["mismatch begins with turn", short(culprit.mismatch_turn)],
    ["rank, batch, row", `${culprit.rank}, ${culprit.micro_batch}, ${culprit.row}`],
    ["position", String(culprit.position)],
    ["token id", String(culprit.token_id)],
    ["reward", short(culprit.reward)],
    ["data source", visible(culprit.data_source ?? "–")],
    ["uid", visible(culprit.uid ?? "–")],
  ];
}

function showText(id, text) {
  get(id).closest("details").hidden = text === null || text === undefined;
  get(id).textContent = text ?? "";
}

// The response, token by token.

// What each piece of the strip stands for: {culprit, title, facts}.
const pieces = new WeakMap();

function showStrip() {
  hideTip();
  const strip = strips[current.strip];
  get("legend").hidden = !strip;
  get("strip").replaceChildren(...(strip ? makeStrip(strip) : [makeEdge(withoutStrip())]));
  const target = get("strip").querySelector(".current");
  get("strip").scrollTop = target ? middleOfStrip(target) : 0;
}

function withoutStrip() {
  if (!data.texts) return "The response is not on this page.";
  if (current.layer_norms) return "The response is not in the evidence.";
  return `The page has the responses of ${count(data.top, "culprit")}, the largest first; --top sets how many.`;
}

function middleOfStrip(piece) {
  const box = get("strip");
  return Math.max(piece.offsetTop - box.offsetTop - box.clientHeight / 2, 0);
}

function makeEdge(text) {
  return make("span", { class: "edge" }, text);
}

function makeStrip({ start, tokens, heat }) {
  const figures = heat.map(number);
  const hottest = Math.max(...figures.filter(Number.isFinite), 0);
  const found = culpritsOfResponse();
  const length = Math.max(heat.length, tokens?.length ?? 0);
  const made = Array.from({ length }, (_, i) => {
    const culprit = found.get(start + i);
    const piece = makePiece(start + i, tokens?.[i] ?? "▪", shadeOf(figures[i], hottest), culprit);
    pieces.set(piece, pieceFacts(start + i, tokens && (tokens[i] ?? ""), heat[i], culprit));
    return piece;
  });
  return start > 0 ? [makeEdge(`${start} tokens before `), ...made] : made;
}

// The culprits of the selected one's response, by their position.
function culpritsOfResponse() {
  const mine = currentEvent.culprits.filter((other) => other.rank === current.rank && other.row === current.row);
  return new Map(mine.map((other) => [other.position, other]));
}

// From 0 to 1. The square root keeps the smaller ones apart; the culprit would outshine all else.
function shadeOf(suspicion, hottest) {
  if (suspicion === undefined) return 0;
  return Number.isFinite(suspicion) && hottest > 0 ? Math.sqrt(suspicion / hottest) : 1;
}

function makePiece(position, text, shade, culprit) {
  const shown = text === "" ? "∅" : visible(text) + (text.endsWith("\n") ? "\n" : "");
  const selected = culprit !== undefined && culprit === current;
  return make(
    "span",
    {
      class: "piece" + (culprit ? " culprit" : "") + (selected ? " current" : ""),
      style: { "--h": (0.75 * shade).toFixed(3) },
      "data-position": position,
      tabindex: selected ? 0 : -1,
      role: culprit && "button",
    },
    shown,
  );
}

function pieceFacts(position, text, suspicion, culprit) {
  const facts = [["position", String(position)], ["suspicion", short(suspicion)]];
  if (!culprit) return { culprit, facts, title: text === null ? `token ${position}` : visible(text) };
  facts.push(
    ["gradient norm", short(culprit.grad_norm)],
    ["× threshold", times(culprit.times)],
    ["importance ratio", short(culprit.ratio)],
    ["ratio to the rollout", short(culprit.rollout_ratio)],
    ["advantage", short(culprit.advantage)],
    ["log p", short(culprit.log_prob)],
    ["source", culprit.source],
  );
  return { culprit, facts, title: tokenName(culprit) };
}

function addStripListeners() {
  const box = get("strip");
  const explain = ({ target }) => {
    if (pieces.has(target) && (target !== tipAnchor || !get("tip"))) showTip(target);
  };
  const end = ({ target }) => {
    if (target === tipAnchor) hideTip();
  };
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
  if (!culprit) return;
  select(culprit);
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

// The tip with the numbers of a token.

// The piece whose numbers are shown.
let tipAnchor = null;

function showTip(piece) {
  hideTip();
  const { title, facts } = pieces.get(piece);
  const entries = facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  document.body.append(
    make("div", { id: "tip", role: "tooltip" }, make("div", { class: "tok" }, title), make("dl", {}, entries)),
  );
  tipAnchor = piece;
  placeTip();
}

function placeTip() {
  const tip = get("tip");
  if (!tip) return;
  const spot = tipAnchor.getClientRects()[0] ?? tipAnchor.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const below = spot.bottom + 10 + size.height < innerHeight || spot.top < size.height + 10;
  const right = document.documentElement.clientWidth - size.width - 8;
  tip.style.top = `${below ? spot.bottom + 10 : spot.top - size.height - 10}px`;
  tip.style.left = `${Math.max(8, Math.min(spot.left - 12, right))}px`;
}

function hideTip() {
  get("tip")?.remove();
}

// How far over the threshold, from the whole gradient down to the token.

function showLadder() {
  const rungs = ladderRungs().map((rung) => ({ ...rung, factor: number(rung.norm) / number(rung.threshold) }));
  const logs = rungs.map((rung) => rung.factor).filter((x) => Number.isFinite(x) && x > 0).map(Math.log10);
  const [low, high] = [Math.min(-0.3, ...logs), Math.max(0.3, ...logs)];
  const at = (log) => (100 * (log - low)) / (high - low);
  get("ladder").replaceChildren(...rungs.flatMap((rung) => makeRung(rung, low, high, at)));
}

function ladderRungs() {
  const { global_norm, global_threshold, units, world_size } = currentEvent;
  const peers = units.filter((unit) => unit.micro_batch === current.micro_batch);
  const worst = worstUnit(peers);
  const own = peers.find((unit) => unit.rank === current.rank);
  const rungs = [
    { name: "All ranks", more: "the reduced gradient", norm: global_norm, threshold: global_threshold },
  ];
  if (worst) {
    const more = `over on ${worst.of_ranks} of ${count(world_size, "rank")}`;
    rungs.push({ name: `Micro-batch ${current.micro_batch}`, more, norm: worst.norm, threshold: worst.threshold });
  }
  if (own) {
    const more = `${count(own.tokens, "token")} in ${count(own.rows, "response")}`;
    rungs.push({ name: `Rank ${current.rank}`, more, norm: own.norm, threshold: own.threshold });
  }
  rungs.push({
    name: `Token ${current.position}`,
    more: `of row ${current.row}`,
    norm: current.grad_norm,
    threshold: current.threshold,
  });
  return rungs;
}

function worstUnit(units) {
  const factor = (unit) => number(unit.norm) / number(unit.threshold);
  return units.find((unit) => !Number.isFinite(factor(unit))) ?? [...units].sort((a, b) => factor(b) - factor(a))[0];
}

// A rung's bar goes from the threshold to the norm; one that is not finite goes to the end.
function makeRung({ name, more, norm, threshold, factor }, low, high, at) {
  const end = Number.isFinite(factor) ? (factor > 0 ? Math.log10(factor) : low) : high;
  const [from, to] = [at(Math.min(0, end)), at(Math.max(0, end))];
  const background = factor <= 1 ? "var(--quiet)" : "var(--accent)";
  return [
    make("div", { class: "rung" }, name, make("small", {}, more)),
    make(
      "div",
      { class: "rail" },
      make("i", { style: { left: `${from}%`, width: `${to - from}%`, background } }),
      make("b", { style: { left: `${at(0)}%` } }),
    ),
    make(
      "div",
      { class: "factor" },
      timesOrNotFinite(factor),
      make("small", {}, `${short(norm)} / ${short(threshold)}`),
    ),
  ];
}

// The gradient norm by layer.

function showLayers() {
  const layers = layersOfCulprit();
  const shown = layers.some((layer) => isNorm(layer.norm));
  get("layers").hidden = get("layers-figures").hidden = !shown;
  get("layers-hint").textContent = layersHint(shown);
  if (!shown) return;
  get("layers").setAttribute("aria-label", layersLabel(layers));
  fillTable("layers-table", layerColumns, layers);
  Plotly.react("layers", layerTraces(layers), layersLayout(layers), chartOptions);
}

// By layer: the culprit's norm, an ordinary token's, and how many times that the culprit's is ("–" if not known).
function layersOfCulprit() {
  const ordinary = currentEvent.ordinary_layer_norms;
  return Object.entries(current.layer_norms ?? {}).map(([name, value]) => {
    const layer = { name, norm: number(value), ordinary: number(ordinary?.[name]) };
    layer.both = isNorm(layer.norm) && isNorm(layer.ordinary);
    layer.ratio = layer.both ? times(layer.norm / layer.ordinary) : "–";
    return layer;
  });
}

function layersHint(shown) {
  if (!shown) return "There are no finite norms by layer to show for this culprit.";
  if (!currentEvent.ordinary_layer_norms) {
    return "No mini-batch so far had a micro-batch under its threshold: there is no ordinary token to compare with.";
  }
  return "Each bar goes from an ordinary token (of the micro-batches under their thresholds) to the culprit.";
}

function layersLabel(layers) {
  const top = layers.filter((layer) => isNorm(layer.norm)).reduce((a, b) => b.norm > a.norm ? b : a);
  return `Chart: the culprit's gradient norm in each of ${count(layers.length, "layer")}. The largest is ` +
    `${short(top.norm)} in ${visible(top.name)}` +
    (isNorm(top.ordinary) ? `, ${top.ratio} an ordinary token's.` : ".") +
    " All figures are in the table below it.";
}

const layerColumns = [
  ["Layer", ({ name }) => visible(name), "row"],
  figure("Culprit", "norm"),
  figure("Ordinary token", "ordinary"),
  ["Ratio", ({ ratio }) => ratio, "num"],
];

function layerTraces(layers) {
  const size = Math.max(4, Math.min(14, (get("layers").clientWidth - 60) / layers.length / 2.2));
  const at = { x: (_, i) => i, text: layerHover };
  const norm = (name) => (layer) => isNorm(layer[name]) ? layer[name] : null;
  return [
    layerBars(layers),
    marks("an ordinary token", layers, { ...at, y: norm("ordinary"), symbol: "line-ew-open", color: "soft", size }),
    marks("the culprit", layers, {
      ...at,
      y: norm("norm"),
      symbol: "circle",
      color: "accent",
      size: Math.min(9, size),
      line: {},
    }),
  ];
}

// From an ordinary token's norm to the culprit's.
function layerBars(layers) {
  const both = layers.map((layer, i) => ({ ...layer, i })).filter((layer) => layer.both);
  return {
    type: "bar",
    x: both.map(({ i }) => i),
    base: both.map(({ norm, ordinary }) => Math.min(norm, ordinary)),
    y: both.map(({ norm, ordinary }) => Math.abs(norm - ordinary)),
    width: Math.min(0.5, 0.12 * Math.max(layers.length / 10, 1)),
    marker: {
      color: both.map(({ norm, ordinary }) => styleOf(norm > ordinary ? "accent" : "quiet")),
      opacity: 0.32,
      line: { width: 0 },
    },
    hoverinfo: "skip",
    showlegend: false,
  };
}

function layerHover({ name, norm, ordinary, both, ratio }) {
  return `<b>${withoutMarkup(name)}</b><br>culprit ${short(norm)}<br>ordinary token ${short(ordinary)}` +
    (both ? `<br>${ratio} an ordinary token` : "");
}

function layersLayout(layers) {
  const norms = layers.flatMap(({ norm, ordinary }) => [norm, ordinary]).filter(isNorm);
  const [low, high] = [Math.min(...norms) / 2, Math.max(...norms) * 2];
  // As many labels as there is room for.
  const every = Math.ceil(layers.length / Math.max(4, Math.floor(get("layers").clientWidth / 46)));
  const labelled = layers.map((_, i) => i).filter((i) => i % every === 0);
  const routers = layers.some(({ name }) => name.endsWith(".router"));
  return chartLayout({
    xaxis: {
      tickvals: labelled,
      ticktext: labelled.map((i) => layerLabel(layers[i].name)),
      range: [-0.7, layers.length - 0.3],
      showgrid: false,
      tickangle: 0,
      title: { text: routers ? "layer (r: its router)" : "layer", standoff: 6 },
    },
    yaxis: {
      range: [Math.log10(low), Math.log10(high)],
      title: { text: "gradient norm", standoff: 6 },
      ...logTicks(low, high),
    },
    legend: { itemsizing: "constant", font: { size: 12.5, color: styleOf("ink") } },
  });
}

function layerLabel(name) {
  return name
    .replace(/^embed_tokens$/, "embed")
    .replace(/^lm_head$/, "head")
    .replace(/^.*?(\d+)(\.router)?$/, (_, layer, router) => layer + (router ? "r" : ""))
    .slice(-8);
}

// The table of all culprits. The fourth entry of a column is what it is sorted by.

const columns = [
  [...index("Step", "global_step"), "global_step"],
  ["Token in its context", tokenInContext, "words", "token"],
  [...figure("Gradient norm", "grad_norm"), "severity"],
  ["× threshold", (culprit) => times(culprit.times), "num", "times"],
  ["Source", ({ source }) => makeBadge(source), null, "source"],
  [...figure("Ratio", "ratio"), "ratio"],
  [...figure("Rollout ratio", "rollout_ratio"), "rollout_ratio"],
  [...figure("Advantage", "advantage"), "advantage"],
  [...figure("log p", "log_prob"), "log_prob"],
  [...figure("Reward", "reward"), "reward"],
];

function tokenInContext(row) {
  return [makeToken(row), make("span", { class: "tok around" }, contextAround(row))];
}

// The context from shortly before the culprit on: the cell is narrow.
function contextAround({ context, token }) {
  if (!context) return "";
  const start = Math.max(context.indexOf(`«${token}»`) - 12, 0);
  return (start ? "…" : "") + visible(context.slice(start));
}

function makeColumnHead([name, , kind, key]) {
  const order = table.down ? "descending" : "ascending";
  return make(
    "th",
    { scope: "col", class: kind, "aria-sort": key === table.key ? order : null },
    make("button", { type: "button", "data-key": key, onclick: () => sortBy(key, kind === "num") }, name),
  );
}

// Numbers come the largest first; the same column again turns the order.
function sortBy(key, num) {
  table.down = table.key === key ? !table.down : num;
  table.key = key;
  fill("columns", columns.map(makeColumnHead));
  document.querySelector(`#columns [data-key="${key}"]`).focus();
  showRows();
}

function filter(change) {
  Object.assign(table, { rows: 100 }, change);
  get("source").value = table.source;
  get("words").value = table.words;
  get("clear").hidden = !table.words && !table.source && table.token === null;
  showBars();
  showRows();
}

// The culprits that pass the filters, in the table's order.
function matchingCulprits() {
  const words = table.words.toLowerCase().trim();
  const [, field, wanted] = words.match(/^(step|rank) (\d+)$/) ?? [];
  const hasWords = (culprit) =>
    field
      ? String(field === "step" ? culprit.global_step : culprit.rank) === wanted
      : searchText(culprit).includes(words);
  return culprits
    .filter((culprit) => !table.source || culprit.source === table.source)
    .filter((culprit) => table.token === null || tokenName(culprit) === table.token)
    .filter(hasWords)
    .sort(compareRows);
}

function searchText(culprit) {
  const { token, context, source, uid, data_source } = culprit;
  culprit.search ??= [tokenName(culprit), token, context, source, uid, data_source].join("\n").toLowerCase();
  return culprit.search;
}

// Whatever the direction, what is not known comes last.
function compareRows(a, b) {
  const [, , kind] = columns.find(([, , , key]) => key === table.key);
  const [x, y] = [a, b].map((culprit) => kind === "num" ? number(culprit[table.key]) : culprit[table.key]);
  const unknown = (value) => value === null || value === undefined || Number.isNaN(value);
  if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);
  return (x < y ? -1 : x > y ? 1 : 0) * (table.down ? -1 : 1);
}

function showRows() {
  const found = matchingCulprits();
  get("rows").replaceChildren(...found.slice(0, table.rows).map(makeRow));
  const absent = totals.culprits - culprits.length;
  get("count").textContent = (found.length < culprits.length ? `${whole(found.length)} of ` : "") +
    count(culprits.length, "culprit") +
    (absent ? `, ${whole(absent)} left out` : "");
  const none = absent
    ? `No culprit on this page matches; ${whole(absent)} smaller ones are not on it.`
    : "No culprit matches.";
  say("none", !found.length && none);
  sayHowManyMore("more", found.length - table.rows);
}

function makeRow(culprit, i) {
  return make(
    "tr",
    { tabindex: i ? -1 : 0, "data-culprit": culprit.index, "aria-current": String(culprit === current) },
    makeCells(columns, culprit),
  );
}

function addTableListeners() {
  get("source").append(...Object.keys(totals.sources).map((source) => make("option", { value: source }, source)));
  get("words").addEventListener("input", () => filter({ words: get("words").value }));
  get("source").addEventListener("change", () => filter({ source: get("source").value }));
  get("clear").addEventListener("click", () => {
    filter({ words: "", source: "", token: null });
    get("words").focus();
  });
  get("more").addEventListener("click", showMoreRows);
  get("rows").addEventListener("click", ({ target }) => {
    const row = target.closest("tr");
    // Who marks text in a row does not select it.
    if (row && getSelection().isCollapsed) selectAndScroll(culprits[row.dataset.culprit]);
  });
  get("rows").addEventListener("keydown", onRowKey);
}

function showMoreRows() {
  const first = table.rows;
  table.rows += 200;
  showRows();
  get("rows").children[first]?.focus();
}

function onRowKey(press) {
  const row = press.target.closest("tr");
  if (isPress(press)) {
    press.preventDefault();
    selectAndScroll(culprits[row.dataset.culprit]);
    return;
  }
  moveFocus(press, row, {
    ArrowDown: row.nextElementSibling,
    ArrowUp: row.previousElementSibling,
    Home: row.parentElement.firstElementChild,
    End: row.parentElement.lastElementChild,
  });
}

// The help.

function fillHelp() {
  const rules = Object.entries(data.source_rules);
  const entries = rules.map(([source, rule]) => [makeBadge(source), `${rule} ${data.source_advice[source]}`]);
  if (data.level) entries.push(...Object.values(data.figure_names));
  get("help").append(...entries.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
}

start();
