# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The script of the report's page.

It builds everything from the data as text nodes, so that text of a model never becomes markup.
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { events, culprits, strips, totals } = data;
const number = (value) => (value === null || value === undefined ? null : Number(value));
events.forEach((event, i) => (event.index = i));
culprits.forEach((culprit, i) => (culprit.index = i));
for (const culprit of culprits) {
  culprit.times = number(culprit.grad_norm) / number(culprit.threshold);
  // A NaN is worse than any number.
  culprit.severity = Number.isNaN(culprit.times) ? Infinity : culprit.times;
  (events[culprit.event].culprits ??= []).push(culprit);
}
const steps = events.every((event) => event.global_step !== null);
const place = (event) => (steps ? event.global_step : event.index + 1);
const placeName = steps ? "Step" : "Event";

const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
function short(value) {
  const x = number(value);
  if (x === null) return "–";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size && (size < 1e-3 || size >= 1e7) ? x.toExponential(2).replace("e+", "e") : significant.format(x);
  return text.replaceAll("-", "−");
}
const times = (x) =>
  Number.isFinite(x) ? (x >= 9.95 ? Math.round(x).toLocaleString("en") : x.toFixed(x < 0.0995 ? 2 : 1)) + "×" : "–";
const whole = (n) => n.toLocaleString("en");
const percent = (share) => {
  const x = number(share);
  return !Number.isFinite(x) ? "–" : x > 0 && x < 0.01 ? "under 1 %" : `${Math.round(100 * x)} %`;
};
const count = (n, noun, plural = noun + "s") => `${whole(n)} ${n === 1 ? noun : plural}`;
const unseen = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const escaped = { "\n": "↵", "\t": "⇥", "\r": "␍" };
const visible = (text) =>
  text.replace(unseen, (c) => escaped[c] ?? "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const spaced = (text) => text.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
const named = (culprit) =>
  culprit.token === null
    ? `id ${culprit.token_id}`
    : culprit.token === ""
      ? "(empty)"
      : spaced(visible(culprit.token));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
const token = (culprit) => make("span", { class: "tok" }, named(culprit));
const badge = (source) => make("span", { class: "badge", style: { "--shade": `var(--${source})` } }, source);
const get = (id) => document.getElementById(id);
const color = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
const sorted = (list, key) => [...list].sort((a, b) => key(a) - key(b));
const plotted = { displayModeBar: false, responsive: true };

function layout(more) {
  const line = { color: color("soft"), size: 12.5 };
  const axis = {
    gridcolor: color("faint"),
    linecolor: color("rule"),
    zeroline: false,
    tickfont: line,
    ticks: "",
    automargin: true,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: color("sans"), ...line },
    hoverlabel: {
      bgcolor: color("ink"),
      bordercolor: color("ink"),
      align: "left",
      font: { color: color("paper"), family: color("sans"), size: 13 },
    },
    margin: { l: 8, r: 12, t: 8, b: 8 },
    dragmode: "zoom",
    hovermode: "closest",
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}
// Plotly reads a little markup in the texts that it shows.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const logTicks = (low, high) => {
  const values = [];
  const wide = Math.log10(high / low) > 1.3;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of wide ? [1] : [1, 2, 5]) values.push(digit * 10 ** power);
  return { tickvals: values, ticktext: values.map(short) };
};

// The page's state: which culprit is shown, and how the table is sorted and filtered.
let current = null;
let currentEvent = null;
let markCurrent = () => {};
// What the pieces of the strip stand for, and the one whose numbers are shown.
const pieces = new WeakMap();
let tipped = null;
const table = { key: "severity", down: true, words: "", source: "", token: null, rows: 100 };

function intro() {
  const [first, last] = [totals.first_step, totals.last_step];
  const where = !steps ? "" : first === last ? ` in step ${first}` : `, steps ${first} to ${last}`;
  get("title").textContent = events.length ? count(totals.events, "gradient spike") + where : "No gradient spike";
  document.title = get("title").textContent + " · GradLoc";
  const lead = get("lead");
  if (!events.length) lead.append("No event is in this evidence: no micro-batch was over its threshold.");
  else if (!culprits.length) lead.append("No single token was found to be over the threshold.");
  else {
    const worst = culprits[0];
    const them = totals.events === 1 ? "it" : "them";
    const many = `${count(totals.culprits, "token")} stand out in ${them}. The largest is `;
    const size = Number.isFinite(worst.times)
      ? `with a gradient ${times(worst.times)} the threshold`
      : "whose gradient is not finite";
    lead.append(
      totals.culprits === 1 ? "One token stands out: " : many,
      make("b", {}, token(worst)),
      ` in ${placeName.toLowerCase()} ${place(events[worst.event])}, ${size}.`,
    );
  }
  const figures = [
    ["Spikes", whole(totals.events), ""],
    ["Culprit tokens", whole(totals.culprits), ""],
    [
      "Largest token gradient",
      culprits.length ? short(culprits[0].grad_norm) : "–",
      events.length ? `threshold ${[...new Set(totals.thresholds.map(short))].join(" to ")}` : "",
    ],
    ["Searches complete", whole(totals.events - totals.incomplete_events), `of ${whole(totals.events)}`],
    ["Extra passes", whole(totals.passes), `${whole(Math.round(number(totals.seconds)))} s in all`],
  ];
  if (events.length)
    get("figures").append(
      ...figures.map(([name, value, more]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, value, more && make("small", {}, more))),
      ),
    );
  else document.querySelectorAll("section").forEach((section) => (section.hidden = true));
  const notes = data.notes.map((note) => `The file notes: ${note}.`);
  if (totals.incomplete_events)
    notes.push(`${count(totals.incomplete_events, "search", "searches")} ended early: there may be more culprits.`);
  if (data.skipped)
    notes.push(`${count(data.skipped, "line")} of the evidence skipped: malformed, or of another version.`);
  const cut = [];
  if (events.length < totals.events)
    cut.push(`the ${count(events.length, "spike")} with the largest norms of ${whole(totals.events)}`);
  if (culprits.length < totals.culprits)
    cut.push(`${count(culprits.length, "culprit")} of ${whole(totals.culprits)}, the largest of each spike first`);
  if (cut.length) notes.push(`The page shows ${cut.join(", and ")}. Its totals are of all.`);
  get("notes").hidden = !notes.length;
  get("notes").append(...notes.map((note) => make("li", {}, note)));
}

const symbols = {
  token: "circle",
  sequence: "square",
  layer: "diamond",
  nonfinite: "x",
  misaligned: "triangle-up",
  other: "circle-open",
};
function timeline() {
  const finite = culprits
    .map((culprit) => number(culprit.grad_norm))
    .filter((norm) => Number.isFinite(norm) && norm > 0);
  const bare = events.filter((event) => !event.culprits);
  // What a single token would have to have to be all of it; the units are not always known.
  const wholeNorm = ({ threshold, trigger, units }) =>
    Math.max(
      (number(threshold) * number(trigger.norm)) / number(trigger.threshold),
      ...units.map((unit) => number(unit.token_equivalent)),
    );
  const thresholds = events.map((event) => number(event.threshold));
  const low = Math.min(...thresholds, ...finite) / 1.6;
  const largest = Math.max(...thresholds, ...finite, ...bare.map(wholeNorm).filter(Number.isFinite));
  // Room for the largest mark, however many decades there are.
  const room = Math.max(1.8, (largest / low) ** 0.08);
  const most = largest * room;
  // Norms that are not finite get a place of their own above the others.
  const endless =
    culprits.some((culprit) => !Number.isFinite(number(culprit.grad_norm))) ||
    bare.some((event) => !Number.isFinite(wholeNorm(event)));
  const ceiling = most * room;
  const height = (norm) => (Number.isFinite(norm) ? norm : ceiling);
  const places = events.map(place);
  const [first, last] = [Math.min(...places), Math.max(...places)];
  const margin = Math.max((last - first) * 0.03, 1);
  const size = events.length > 150 ? 8 : 11;
  const traces = Object.keys(data.source_rules)
    .map((source) => {
      const mine = culprits.filter((culprit) => culprit.source === source);
      return {
        type: "scatter",
        mode: "markers",
        name: source,
        x: mine.map((culprit) => place(events[culprit.event])),
        y: mine.map((culprit) => height(number(culprit.grad_norm))),
        customdata: mine.map((culprit) => culprit.index),
        text: mine.map(
          (culprit) =>
            `<b>${plain(named(culprit).slice(0, 40))}</b>   ${source}<br>gradient norm ${short(culprit.grad_norm)}` +
            (Number.isFinite(culprit.times) ? `, ${times(culprit.times)} the threshold` : "") +
            `<br>${placeName.toLowerCase()} ${place(events[culprit.event])}, rank ${culprit.rank}`,
        ),
        hovertemplate: "%{text}<extra></extra>",
        marker: {
          symbol: symbols[source],
          size,
          color: color(source),
          opacity: culprits.length > 150 ? 0.85 : 0.95,
          line: {
            width: symbols[source].endsWith("open") ? 2 : 1,
            color: symbols[source].endsWith("open") ? color(source) : color("paper"),
          },
        },
      };
    })
    .filter((trace) => trace.x.length);
  get("when").textContent =
    (culprits.length ? "Every culprit by the norm of its own gradient" : "") +
    (culprits.length && bare.length ? "; " : "") +
    (bare.length ? "bars are spikes without a culprit, by the norm that a single token would need" : "") +
    ". Select one to see it below.";
  if (bare.length)
    traces.push({
      type: "scatter",
      mode: "markers",
      name: "no culprit found",
      x: bare.map(place),
      y: bare.map((event) => height(wholeNorm(event))),
      customdata: bare.map((event) => ({ event: event.index })),
      text: bare.map(
        (event) => `<b>no culprit found</b><br>a single token would need norm ${short(wholeNorm(event))}`,
      ),
      hovertemplate: "%{text}<extra></extra>",
      marker: {
        symbol: "line-ns-open",
        size: size + 2,
        color: color("quiet"),
        line: { width: 2, color: color("quiet") },
      },
    });
  const line = sorted(events, place);
  traces.unshift({
    type: "scatter",
    mode: "lines",
    name: "threshold",
    hoverinfo: "skip",
    line: { color: color("ink"), width: 1.25, dash: "4px,4px", shape: "hv" },
    x: [first - margin, ...line.map(place), last + margin],
    y: [number(line[0].threshold), ...line.map((event) => number(event.threshold)), number(line.at(-1).threshold)],
  });
  const ticks = logTicks(low, most);
  if (endless) {
    ticks.tickvals.push(ceiling);
    ticks.ticktext.push("NaN, ∞");
  }
  markCurrent = () => {
    const at = current
      ? { x: [[place(currentEvent)]], y: [[height(number(current.grad_norm))]] }
      : { x: [[]], y: [[]] };
    Plotly.restyle("timeline", at, [traces.length - 1]);
  };
  traces.push({
    type: "scatter",
    mode: "markers",
    x: [],
    y: [],
    hoverinfo: "skip",
    showlegend: false,
    marker: { symbol: "circle-open", size: size + 11, color: color("ink"), line: { width: 1.75 } },
  });
  Plotly.react(
    "timeline",
    traces,
    layout({
      xaxis: {
        title: { text: placeName.toLowerCase(), standoff: 8 },
        range: [first - margin, last + margin],
        showgrid: false,
        tickformat: "d",
        ...(last - first < 6 ? { dtick: 1 } : {}),
      },
      yaxis: {
        type: "log",
        range: [Math.log10(low), Math.log10(endless ? ceiling * room : most)],
        title: { text: "gradient norm of a token", standoff: 8 },
        ...ticks,
      },
      legend: {
        orientation: "h",
        x: 0,
        xanchor: "left",
        y: 1.02,
        yanchor: "bottom",
        itemclick: false,
        itemdoubleclick: false,
        font: { size: 13, color: color("ink") },
      },
    }),
    plotted,
  ).then((chart) => {
    const norms = finite.length ? `, from ${short(Math.min(...finite))} to ${short(Math.max(...finite))}` : "";
    chart.setAttribute(
      "aria-label",
      `Chart: gradient norms of ${count(culprits.length, "culprit")} in ${count(events.length, "spike")}${norms}. ` +
        "The list of spikes and the table of all culprits lead to the same places.",
    );
    markCurrent();
    chart.removeAllListeners("plotly_click");
    chart.on(
      "plotly_click",
      ({ points: [{ customdata }] }) =>
        customdata !== undefined &&
        (customdata.event === undefined ? show(culprits[customdata]) : showEvent(events[customdata.event])),
    );
  });
}

function bars(id, entries, pressed, press) {
  const most = Math.max(...entries.map((entry) => entry.count));
  get(id).replaceChildren(
    ...entries.map((entry) =>
      make(
        "li",
        {},
        make(
          "button",
          { type: "button", "aria-pressed": String(pressed(entry)), title: entry.title, onclick: () => press(entry) },
          make("span", { class: "label" }, entry.label),
          make(
            "span",
            { class: "track" },
            make("span", {
              class: "fill",
              style: {
                display: "block",
                width: `${(100 * entry.count) / most}%`,
                ...(entry.shade && { "--shade": entry.shade }),
              },
            }),
          ),
          entry.values.map((value) => make("span", { class: "value" }, value)),
        ),
      ),
    ),
  );
}
function shares() {
  bars(
    "sources",
    Object.entries(totals.sources).map(([source, n]) => ({
      source,
      count: n,
      label: source,
      title: data.source_rules[source],
      shade: `var(--${source})`,
      values: [whole(n), `${Math.round((100 * n) / totals.culprits)} %`],
    })),
    (entry) => entry.source === table.source,
    (entry) => filter({ source: table.source === entry.source ? "" : entry.source }),
  );
  bars(
    "tokens",
    data.tokens.map((entry) => ({
      name: named(entry),
      count: entry.count,
      label: make("span", { class: "tok" }, named(entry)),
      values: [whole(entry.count)],
    })),
    (entry) => entry.name === table.token,
    (entry) => filter({ token: table.token === entry.name ? null : entry.name }),
  );
}

function placed(event) {
  const part = `, mini-batch ${event.mini_batch}` + (event.epoch ? ` of epoch ${event.epoch}` : "");
  return `${placeName} ${place(event)}` + (event.mini_batch || event.epoch ? part : "");
}
function picker() {
  get("event").replaceChildren(
    ...events.map((event, i) => {
      const worst = event.culprits?.[0];
      return make(
        "option",
        { value: i },
        placed(event) +
          (worst
            ? `: ${named(worst).slice(0, 20)}  ${Number.isFinite(worst.times) ? times(worst.times) : "not finite"}`
            : ": no culprit found"),
      );
    }),
  );
  get("event").addEventListener("change", () => showEvent(events[get("event").value]));
  // A button that is disabled loses the focus.
  for (const [id, step, other] of [["previous", -1, "next"], ["next", 1, "previous"]])
    get(id).addEventListener("click", () => {
      showEvent(events[currentEvent.index + step]);
      if (get(id).disabled) get(other).focus();
    });
}
function showEvent(event) {
  event.culprits ? show(event.culprits[0]) : show(null, event);
}
function show(culprit, event = events[culprit.event], scroll = false) {
  [current, currentEvent] = [culprit, event];
  const index = event.index;
  get("event").value = index;
  get("previous").disabled = index === 0;
  get("next").disabled = index === events.length - 1;
  detail();
  markCurrent();
  for (const row of get("rows").children)
    row.setAttribute("aria-current", String(culprits[row.dataset.culprit] === current));
  if (scroll) {
    get("detail").scrollIntoView({ block: "start" });
    get("spike").focus({ preventScroll: true });
  }
}

function story(event) {
  const { kind, norm, threshold } = event.trigger;
  const cause = kind === "global" ? "The gradient of all ranks" : "A micro-batch's gradient";
  const parts = [
    `${cause} had norm ${short(norm)}, over its threshold of ${short(threshold)}.`,
    `${count(event.passes, "extra pass", "extra passes")} (${short(number(event.seconds).toFixed(2))} s) found ` +
      count(event.culprits_in_all, "culprit") +
      (event.ended_early ? "; the search ended early" : "") +
      (event.ended_early && event.open_tokens ? `, with ${count(event.open_tokens, "token")} not looked at.` : "."),
  ];
  if (event.error) parts.push(`It met an error: ${event.error.replace(/\.+$/, "")}.`);
  parts.push((event.applied ? data.applied : data.not_applied)[event.action]);
  return parts.join(" ");
}
function parts(event) {
  get("parts").hidden = !event.diffuse.length;
  get("parts-rows").replaceChildren(
    ...event.diffuse.map((part) => {
      const largest = part.largest_tokens.map(
        ({ row, position, grad_norm, share }) =>
          `token ${position} of row ${row}: ${short(grad_norm)}` +
          (Number.isFinite(number(share)) ? `, ${percent(share)} of the norm` : ""),
      );
      const cells = [
        [part.rank === null ? "several" : String(part.rank), "num"],
        [String(part.micro_batch), "num"],
        [part.rows, "rows"],
        [whole(part.tokens), "num"],
        [short(part.norm), "num"],
        [short(part.threshold), "num"],
        [times(number(part.norm) / number(part.threshold)), "num"],
        [largest.map((text) => make("div", {}, text)), null],
      ];
      return make("tr", {}, ...cells.map(([content, kind]) => make("td", { class: kind }, ...[content].flat())));
    }),
  );
  const left = event.diffuse_in_all - event.diffuse.length;
  get("parts-left").hidden = !left;
  get("parts-left").textContent = `${count(left, "smaller part")} left out here.`;
}

function detail() {
  const event = currentEvent;
  get("spike").textContent = placed(event);
  get("story").textContent = story(event);
  const diagnosis = make("b", {}, `Diagnosis: ${event.diagnosis}.`);
  get("diagnosis").replaceChildren(diagnosis, " " + data.diagnoses[event.diagnosis]);
  get("explanation").hidden = !event.explanation;
  get("explanation").textContent = event.explanation;
  parts(event);
  const all = event.culprits ?? [];
  const left = event.culprits_in_all - all.length;
  get("chips").hidden = all.length < 2;
  get("chips").replaceChildren(
    ...all.map((culprit) =>
      make(
        "button",
        {
          type: "button",
          "aria-pressed": String(culprit === current),
          onclick: () => {
            show(culprit);
            get("chips").children[all.indexOf(culprit)].focus();
          },
        },
        token(culprit),
        make("span", { class: "times" }, Number.isFinite(culprit.times) ? times(culprit.times) : "not finite"),
      ),
    ),
  );
  get("left").hidden = !left;
  get("left").textContent = `The page leaves out ${count(left, "smaller culprit")} of this spike.`;
  get("culprit").hidden = current === null;
  if (!current) return;
  get("head").replaceChildren(
    token(current),
    make(
      "span",
      { class: "norm" },
      `gradient norm ${short(current.grad_norm)}` +
        (Number.isFinite(current.times) ? `, ${times(current.times)} the threshold` : ""),
    ),
    badge(current.source),
  );
  get("why").textContent = data.source_rules[current.source];
  strip();
  ladder();
  layers();
  const facts = [
    ["importance ratio", short(current.ratio)],
    ["ratio to the rollout", short(current.rollout_ratio)],
    ["sequence ratio", short(current.sequence_ratio)],
    ["advantage", short(current.advantage)],
    ["log p", short(current.log_prob)],
    ["old log p", short(current.old_log_prob)],
    ["rollout log p", short(current.rollout_log_prob)],
    ["reference log p", short(current.ref_log_prob)],
    ["entropy", short(current.entropy)],
    ["∂L/∂log p", short(current.coefficient)],
    ["suspicion", short(current.suspicion)],
    ["weight in the loss", short(current.weight)],
    ["share of the unit", percent(current.share)],
    ["misaligned tokens", percent(current.misaligned_share)],
    ["rank, batch, row", `${current.rank}, ${current.micro_batch}, ${current.row}`],
    ["position", String(current.position)],
    ["token id", String(current.token_id)],
    ["reward", short(current.reward)],
    ["data source", visible(current.data_source ?? "–")],
    ["uid", visible(current.uid ?? "–")],
  ];
  get("numbers").replaceChildren(
    ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
  const texts = [
    ["prompt", current.prompt],
    ["truth", current.ground_truth],
    ["response", current.response],
  ];
  for (const [id, text] of texts) {
    get(id).closest("details").hidden = text === null || text === undefined;
    get(id).textContent = text ?? "";
  }
}

function strip() {
  const box = get("strip");
  untip();
  box.replaceChildren();
  const mine = strips[current.strip];
  get("legend").hidden = !mine;
  if (!mine) {
    box.append(
      make(
        "span",
        { class: "edge" },
        current.layer_norms
          ? "The response is not in the evidence."
          : `The page has the responses of ${count(data.top, "culprit")}, the largest first; --top sets how many.`,
      ),
    );
    return;
  }
  const found = new Map(
    currentEvent.culprits
      .filter((other) => other.rank === current.rank && other.row === current.row)
      .map((other) => [other.position, other]),
  );
  const heat = mine.heat.map(number);
  const most = Math.max(...heat.filter(Number.isFinite), 0);
  const length = Math.max(heat.length, mine.tokens?.length ?? 0);
  if (mine.start > 0) box.append(make("span", { class: "edge" }, `${mine.start} tokens before `));
  for (let i = 0; i < length; i++) {
    const position = mine.start + i;
    const culprit = found.get(position);
    const text = mine.tokens?.[i] ?? "▪";
    const shown = text === "" ? "∅" : visible(text) + (text.endsWith("\n") ? "\n" : "");
    // The square root keeps the smaller ones apart; the culprit would outshine all else.
    const strength = Number.isFinite(heat[i]) && most > 0 ? Math.sqrt(heat[i] / most) : heat[i] === undefined ? 0 : 1;
    const piece = make(
      "span",
      {
        class: "piece" + (culprit ? " culprit" : "") + (culprit === current ? " current" : ""),
        style: { "--h": (0.75 * strength).toFixed(3) },
        "data-position": position,
        tabindex: culprit === current ? 0 : -1,
        role: culprit && "button",
      },
      shown,
    );
    const title = culprit ? named(culprit) : mine.tokens ? visible(mine.tokens[i] ?? "") : `token ${position}`;
    const facts = [
      ["position", String(position)],
      ["suspicion", short(mine.heat[i])],
    ];
    if (culprit)
      facts.push(
        ["gradient norm", short(culprit.grad_norm)],
        ["× threshold", times(culprit.times)],
        ["importance ratio", short(culprit.ratio)],
        ["ratio to the rollout", short(culprit.rollout_ratio)],
        ["advantage", short(culprit.advantage)],
        ["log p", short(culprit.log_prob)],
        ["source", culprit.source],
      );
    pieces.set(piece, { culprit, title, facts });
    box.append(piece);
  }
  const target = box.querySelector(".current");
  box.scrollTop = target ? Math.max(target.offsetTop - box.offsetTop - box.clientHeight / 2, 0) : 0;
}
function stripEvents() {
  const box = get("strip");
  const explain = ({ target }) => {
    if (pieces.has(target) && (target !== tipped || !get("tip"))) tip(target, pieces.get(target));
  };
  const end = ({ target }) => {
    if (target === tipped) untip();
  };
  // A move, and no mouseover: that also comes when the keyboard scrolls tokens past a mouse at rest.
  box.addEventListener("mousemove", explain);
  box.addEventListener("focusin", explain);
  box.addEventListener("mouseout", end);
  box.addEventListener("focusout", end);
  box.addEventListener("click", ({ target }) => {
    const culprit = pieces.get(target)?.culprit;
    if (!culprit) return;
    show(culprit);
    box.querySelector(".current").focus({ preventScroll: true });
  });
  box.addEventListener("keydown", (press) => {
    const all = [...box.querySelectorAll(".piece")];
    const at = all.indexOf(document.activeElement);
    const culprit = (piece) => piece.classList.contains("culprit");
    const to = {
      ArrowRight: all[at + 1],
      ArrowLeft: all[at - 1],
      ArrowDown: all.slice(at + 1).find(culprit),
      ArrowUp: all.slice(0, Math.max(at, 0)).findLast(culprit),
      Home: all[0],
      End: all.at(-1),
    };
    if (press.key === "Enter" || press.key === " ") {
      press.preventDefault();
      all[at]?.click();
    }
    if (!(press.key in to)) return;
    press.preventDefault();
    if (!to[press.key]) return;
    all[at]?.setAttribute("tabindex", -1);
    to[press.key].setAttribute("tabindex", 0);
    to[press.key].focus();
  });
}
function tip(anchor, { title, facts }) {
  untip();
  const entries = facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  document.body.append(
    make("div", { id: "tip", role: "tooltip" }, make("div", { class: "tok" }, title), make("dl", {}, entries)),
  );
  tipped = anchor;
  placeTip();
}
function placeTip() {
  const box = get("tip");
  if (!box) return;
  const [spot, size] = [tipped.getClientRects()[0] ?? tipped.getBoundingClientRect(), box.getBoundingClientRect()];
  const below = spot.bottom + 10 + size.height < innerHeight || spot.top < size.height + 10;
  box.style.top = `${below ? spot.bottom + 10 : spot.top - size.height - 10}px`;
  box.style.left = `${Math.max(8, Math.min(spot.left - 12, document.documentElement.clientWidth - size.width - 8))}px`;
}
function untip() {
  get("tip")?.remove();
}

function ladder() {
  const unit = currentEvent.units.find(
    (other) => other.rank === current.rank && other.micro_batch === current.micro_batch,
  );
  const peers = currentEvent.units.filter((other) => other.micro_batch === current.micro_batch);
  const factor = (other) => number(other.norm) / number(other.threshold);
  const worst = peers.find((other) => !Number.isFinite(factor(other))) ?? sorted(peers, (other) => -factor(other))[0];
  const rungs = [["All ranks", "the reduced gradient", currentEvent.global_norm, currentEvent.global_threshold]];
  if (worst)
    rungs.push([
      `Micro-batch ${current.micro_batch}`,
      `over on ${peers.length} of ${count(currentEvent.world_size, "rank")}`,
      worst.norm,
      worst.threshold,
    ]);
  if (unit)
    rungs.push([
      `Rank ${current.rank}`,
      `${count(unit.tokens, "token")} in ${count(unit.rows, "response")}`,
      unit.norm,
      unit.threshold,
    ]);
  rungs.push([`Token ${current.position}`, `of row ${current.row}`, current.grad_norm, current.threshold]);
  const factors = rungs.map(([, , norm, threshold]) => number(norm) / number(threshold));
  const finite = factors.filter((x) => Number.isFinite(x) && x > 0).map(Math.log10);
  const [low, high] = [Math.min(-0.3, ...finite), Math.max(0.3, ...finite)];
  const at = (x) => (100 * (x - low)) / (high - low);
  get("ladder").replaceChildren(
    ...rungs.flatMap(([name, more, norm, threshold], i) => {
      const over = !(factors[i] <= 1);
      const end =
        Number.isFinite(factors[i]) && factors[i] > 0 ? Math.log10(factors[i]) : factors[i] === 0 ? low : high;
      const [from, to] = [at(Math.min(0, end)), at(Math.max(0, end))];
      return [
        make("div", { class: "rung" }, name, make("small", {}, more)),
        make(
          "div",
          { class: "rail" },
          make("i", {
            style: { left: `${from}%`, width: `${to - from}%`, background: over ? "var(--accent)" : "var(--quiet)" },
          }),
          make("b", { style: { left: `${at(0)}%` } }),
        ),
        make(
          "div",
          { class: "factor" },
          Number.isFinite(factors[i]) ? times(factors[i]) : "not finite",
          make("small", {}, `${short(norm)} / ${short(threshold)}`),
        ),
      ];
    }),
  );
}

function layers() {
  const norms = current.layer_norms ?? {};
  const ordinary = currentEvent.ordinary_layer_norms;
  const names = Object.keys(norms);
  const mine = names.map((name) => number(norms[name]));
  const theirs = names.map((name) => number(ordinary?.[name]));
  const good = (x) => x !== null && Number.isFinite(x) && x > 0;
  get("layers").hidden = get("layers-figures").hidden = !mine.some(good);
  get("layers-hint").textContent = !mine.some(good)
    ? "There are no finite norms by layer to show for this culprit."
    : ordinary
      ? "Each bar spans from an ordinary token, the median of the micro-batches under their thresholds, to the culprit."
      : "No micro-batch of this mini-batch is under its threshold, to compare the culprit with.";
  if (!mine.some(good)) return;
  const known = [...mine, ...theirs].filter(good);
  const [low, high] = [Math.min(...known) / 2, Math.max(...known) * 2];
  const over = (i) => (good(mine[i]) && good(theirs[i]) ? times(mine[i] / theirs[i]) : "–");
  const top = mine.reduce((best, x, i) => (good(x) && !(mine[best] >= x) ? i : best), 0);
  get("layers").setAttribute(
    "aria-label",
    `Chart: the culprit's gradient norm in each of ${count(names.length, "layer")}. The largest is ` +
      `${short(mine[top])} in ${visible(names[top])}` +
      (good(theirs[top]) ? `, ${over(top)} an ordinary token's.` : ".") +
      " All figures are in the table below it.",
  );
  get("layers-rows").replaceChildren(
    ...names.map((name, i) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, visible(name)),
        ...[short(mine[i]), short(theirs[i]), over(i)].map((text) => make("td", { class: "num" }, text)),
      ),
    ),
  );
  const label = names.map((name) =>
    name
      .replace(/^embed_tokens$/, "embed")
      .replace(/^lm_head$/, "head")
      .replace(/^.*?(\d+)(\.router)?$/, (_, layer, router) => layer + (router ? "r" : ""))
      .slice(-8),
  );
  const text = names.map(
    (name, i) =>
      `<b>${plain(name)}</b><br>culprit ${short(mine[i])}<br>ordinary token ${short(theirs[i])}` +
      (good(mine[i]) && good(theirs[i]) ? `<br>${times(mine[i] / theirs[i])} an ordinary token` : ""),
  );
  const at = names.map((_, i) => i);
  const both = at.filter((i) => good(mine[i]) && good(theirs[i]));
  const hover = { text, hovertemplate: "%{text}<extra></extra>" };
  const every = Math.ceil(names.length / Math.max(4, Math.floor(get("layers").clientWidth / 46)));
  const ticks = at.filter((i) => i % every === 0);
  const routers = names.some((name) => name.endsWith(".router"));
  const width = Math.max(4, Math.min(14, (get("layers").clientWidth - 60) / names.length / 2.2));
  Plotly.react(
    "layers",
    [
      {
        type: "bar",
        x: both,
        base: both.map((i) => Math.min(mine[i], theirs[i])),
        y: both.map((i) => Math.abs(mine[i] - theirs[i])),
        width: Math.min(0.5, 0.12 * Math.max(names.length / 10, 1)),
        marker: {
          color: both.map((i) => (mine[i] > theirs[i] ? color("accent") : color("quiet"))),
          opacity: 0.32,
          line: { width: 0 },
        },
        hoverinfo: "skip",
        showlegend: false,
      },
      {
        type: "scatter",
        mode: "markers",
        name: "an ordinary token",
        x: at,
        y: theirs.map((y) => (good(y) ? y : null)),
        ...hover,
        marker: {
          symbol: "line-ew-open",
          size: width,
          color: color("soft"),
          line: { width: 2, color: color("soft") },
        },
      },
      {
        type: "scatter",
        mode: "markers",
        name: "the culprit",
        x: at,
        y: mine.map((y) => (good(y) ? y : null)),
        ...hover,
        marker: { size: Math.min(9, width), color: color("accent") },
      },
    ],
    layout({
      xaxis: {
        tickvals: ticks,
        ticktext: ticks.map((i) => label[i]),
        range: [-0.7, names.length - 0.3],
        showgrid: false,
        tickangle: 0,
        title: { text: routers ? "layer (r: its router)" : "layer", standoff: 6 },
      },
      yaxis: {
        type: "log",
        range: [Math.log10(low), Math.log10(high)],
        title: { text: "gradient norm", standoff: 6 },
        ...logTicks(low, high),
      },
      legend: {
        itemsizing: "constant",
        orientation: "h",
        x: 0,
        y: 1.02,
        yanchor: "bottom",
        itemclick: false,
        itemdoubleclick: false,
        font: { size: 12.5, color: color("ink") },
      },
    }),
    plotted,
  );
}

const columns = [
  { key: "global_step", name: "Step", num: true, cell: (culprit) => String(culprit.global_step ?? "–") },
  {
    key: "token",
    name: "Token in its context",
    cell: (culprit) => [token(culprit), make("span", { class: "tok around" }, around(culprit))],
    words: true,
  },
  { key: "severity", name: "Gradient norm", num: true, cell: (culprit) => short(culprit.grad_norm) },
  { key: "times", name: "× threshold", num: true, cell: (culprit) => times(culprit.times) },
  { key: "source", name: "Source", cell: (culprit) => badge(culprit.source) },
  { key: "ratio", name: "Ratio", num: true },
  { key: "rollout_ratio", name: "Rollout ratio", num: true },
  { key: "advantage", name: "Advantage", num: true },
  { key: "log_prob", name: "log p", num: true },
  { key: "reward", name: "Reward", num: true },
];
// The context from shortly before the culprit on: the cell is narrow.
function around({ context, token }) {
  if (!context) return "";
  const start = Math.max(context.indexOf(`«${token}»`) - 12, 0);
  return (start ? "…" : "") + visible(context.slice(start));
}
function tableHead() {
  get("columns").replaceChildren(
    ...columns.map((column) =>
      make(
        "th",
        {
          scope: "col",
          class: column.num ? "num" : null,
          "aria-sort": column.key === table.key ? (table.down ? "descending" : "ascending") : null,
        },
        make("button", { type: "button", "data-key": column.key, onclick: () => sortBy(column) }, column.name),
      ),
    ),
  );
}
function sortBy(column) {
  table.down = table.key === column.key ? !table.down : !!column.num;
  table.key = column.key;
  tableHead();
  document.querySelector(`#columns [data-key="${column.key}"]`).focus();
  rows();
}
function filter(change) {
  Object.assign(table, { rows: 100 }, change);
  get("source").value = table.source;
  get("words").value = table.words;
  get("clear").hidden = !table.words && !table.source && table.token === null;
  shares();
  rows();
}
function matching() {
  const words = table.words.toLowerCase().trim();
  const [, field, wanted] = words.match(/^(step|rank) (\d+)$/) ?? [];
  const text = (culprit) =>
    (culprit.search ??= [
      named(culprit),
      culprit.token,
      culprit.context,
      culprit.source,
      culprit.uid,
      culprit.data_source,
    ]
      .join("\n")
      .toLowerCase());
  const kept = culprits.filter(
    (culprit) =>
      (!table.source || culprit.source === table.source) &&
      (table.token === null || named(culprit) === table.token) &&
      (field
        ? String(field === "step" ? culprit.global_step : culprit.rank) === wanted
        : text(culprit).includes(words)),
  );
  const column = columns.find((other) => other.key === table.key);
  const value = (culprit) => (column.num ? number(culprit[table.key]) : culprit[table.key]);
  const unknown = (x) => x === null || x === undefined || Number.isNaN(x);
  // Whatever the direction, what is not known comes last.
  return kept.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);
    return (x < y ? -1 : x > y ? 1 : 0) * (table.down ? -1 : 1);
  });
}
function rows() {
  const found = matching();
  const shown = found.slice(0, table.rows);
  get("rows").replaceChildren(
    ...shown.map((culprit, i) =>
      make(
        "tr",
        { tabindex: i ? -1 : 0, "data-culprit": culprit.index, "aria-current": String(culprit === current) },
        columns.map((column) =>
          make(
            "td",
            { class: [column.num && "num", column.words && "words"].filter(Boolean).join(" ") || null },
            ...[column.cell ? column.cell(culprit) : short(culprit[column.key])].flat(),
          ),
        ),
      ),
    ),
  );
  const left = totals.culprits - culprits.length;
  get("count").textContent =
    (found.length < culprits.length ? `${whole(found.length)} of ` : "") +
    count(culprits.length, "culprit") +
    (left ? `, ${whole(left)} left out` : "");
  get("none").hidden = found.length > 0;
  get("none").textContent = left
    ? `No culprit on this page matches; ${whole(left)} smaller ones are not on it.`
    : "No culprit matches.";
  get("more").hidden = found.length <= shown.length;
  get("more").textContent =
    `Show ${Math.min(200, found.length - shown.length)} more of ${whole(found.length - shown.length)}`;
}
function tableEvents() {
  get("words").addEventListener("input", () => filter({ words: get("words").value }));
  get("source").append(
    ...Object.keys(totals.sources).map((source) => make("option", { value: source }, source)),
  );
  get("source").addEventListener("change", () => filter({ source: get("source").value }));
  get("clear").addEventListener("click", () => {
    filter({ words: "", source: "", token: null });
    get("words").focus();
  });
  get("more").addEventListener("click", () => {
    const at = table.rows;
    table.rows += 200;
    rows();
    get("rows").children[at]?.focus();
  });
  get("rows").addEventListener("click", ({ target }) => {
    const row = target.closest("tr");
    if (row && getSelection().isCollapsed) show(culprits[row.dataset.culprit], undefined, true);
  });
  get("rows").addEventListener("keydown", (press) => {
    const row = press.target.closest("tr");
    if (press.key === "Enter" || press.key === " ") {
      press.preventDefault();
      show(culprits[row.dataset.culprit], undefined, true);
      return;
    }
    const to = {
      ArrowDown: row.nextElementSibling,
      ArrowUp: row.previousElementSibling,
      Home: row.parentElement.firstElementChild,
      End: row.parentElement.lastElementChild,
    }[press.key];
    if (to === undefined) return;
    press.preventDefault();
    if (!to) return;
    row.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}
function help() {
  get("help").append(
    ...Object.entries(data.source_rules).flatMap(([source, rule]) => [
      make("dt", {}, badge(source)),
      make("dd", {}, rule),
    ]),
  );
}

intro();
if (events.length) {
  picker();
  tableHead();
  tableEvents();
  stripEvents();
  shares();
  help();
  culprits.length ? show(culprits[0]) : showEvent(events[0]);
  timeline();
  rows();
  if (!culprits.length) document.querySelectorAll(".of-culprits").forEach((section) => (section.hidden = true));
  const draw = () => {
    timeline();
    if (current) layers();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // The labels of the layers depend on the width.
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => current && layers(), 200);
  });
  // On paper: light colours, and charts as wide as an A4 page.
  const printed = (on) => {
    document.documentElement.classList.toggle("print", on);
    draw();
    const size = on ? { width: 640 } : { width: null, autosize: true };
    for (const chart of ["timeline", ...(current && !get("layers").hidden ? ["layers"] : [])])
      Plotly.relayout(chart, size);
  };
  addEventListener("beforeprint", () => printed(true));
  addEventListener("afterprint", () => printed(false));
}
// The keyboard scrolls to what it moves to; the tip goes along.
addEventListener("scroll", placeTip, { capture: true, passive: true });
addEventListener("keydown", (press) => press.key === "Escape" && untip());
"""
