# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The page of the report: its elements, its style, and how they become one file with the script and the data.

The page's security policy forbids it any request.
"""

from .script import SCRIPT

_STYLE = r"""
:root {
  color-scheme: light dark; --paper: #faf9f6; --card: #ffffff; --ink: #1c1e22; --soft: #5e636d; --faint: #e7e4dd;
  --rule: #d9d5cb; --accent: #c4321f; --heat: 205, 92, 12; --quiet: #848a94; --focus: #2563c9; --token: #c4321f;
  --sequence: #8f5b00; --layer: #2b6cb8; --nonfinite: #7d3ca8; --misaligned: #0c8077; --other: #757a83;
  --sans: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root:not(.print) {
    --paper: #131519; --card: #1a1d22; --ink: #e9e7e2; --soft: #a1a6b0; --faint: #272b32; --rule: #353a43;
    --accent: #ff7462; --heat: 190, 80, 20; --quiet: #7d838e; --focus: #79aef5; --token: #ff7462;
    --sequence: #eab04a; --layer: #6fb0f5; --nonfinite: #c79af2; --misaligned: #4cc9bc; --other: #969ca7;
  }
}
:root.print { color-scheme: light; }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) {
  html { scroll-behavior: auto; }
}
body {
  margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 var(--sans);
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1180px; margin: 0 auto; padding: 56px 32px 72px; }
.name { color: var(--accent); font-weight: 650; font-size: 13px; letter-spacing: 0.06em; margin: 0 0 10px; }
h1 {
  font-size: clamp(28px, 4.2vw, 42px); line-height: 1.12; letter-spacing: -0.022em; font-weight: 680;
  margin: 0 0 12px;
}
h2 { font-size: 20px; letter-spacing: -0.012em; font-weight: 650; margin: 0 0 4px; }
h3 { font-size: 13px; font-weight: 620; margin: 0 0 10px; }
p { margin: 0; }
.lead { font-size: 18px; color: var(--soft); max-width: 70ch; text-wrap: pretty; }
.lead b { color: var(--ink); font-weight: 620; }
.hint { color: var(--soft); font-size: 13.5px; max-width: 78ch; text-wrap: pretty; }
section { margin-top: 56px; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 20px 32px; margin: 36px 0 0;
  padding: 20px 0 0; border-top: 1px solid var(--rule);
}
.figures dt { color: var(--soft); font-size: 13px; }
.figures dd { margin: 0; font-size: 25px; font-weight: 620; letter-spacing: -0.015em; }
.figures dd small { display: block; font-size: 13px; font-weight: 450; letter-spacing: 0; color: var(--soft); }
.notes {
  margin: 28px 0 0; padding: 12px 16px; border-left: 3px solid var(--sequence); background: var(--card);
  font-size: 14px; list-style: none;
}
.card { background: var(--card); border: 1px solid var(--faint); border-radius: 12px; padding: 28px; }
.two { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); gap: 48px; }
.chart { width: 100%; }
#timeline { height: 300px; margin: 14px 0 0; }
#layers { height: 262px; }
button, input, select { font: inherit; color: inherit; }
button { cursor: pointer; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; border-radius: 4px; }

.bars { display: grid; gap: 2px; margin: 14px -10px 0; padding: 0; list-style: none; }
.bars button {
  width: 100%; display: grid; grid-template-columns: 92px 1fr 30px 44px; gap: 14px; align-items: center;
  padding: 6px 10px; border: 0; border-radius: 8px; background: none; text-align: left;
}
.bars.wide button { grid-template-columns: minmax(64px, 110px) 1fr 30px; }
.bars button:hover, .bars button[aria-pressed="true"] { background: var(--faint); }
.bars button[aria-pressed="true"] { box-shadow: inset 0 0 0 2px var(--focus); }
.bars .label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 560; }
.bars .track { height: 10px; border-radius: 3px; }
.bars .fill { height: 10px; border-radius: 3px; min-width: 3px; background: var(--shade, var(--quiet)); }
.bars .value { text-align: right; color: var(--soft); font-size: 13.5px; }
.tok { font-family: var(--mono); font-size: 0.93em; unicode-bidi: isolate; white-space: pre; }

.pick { display: flex; flex-wrap: wrap; gap: 10px; align-items: center; margin: 14px 0 18px; }
.pick select, .pick button, .tools input, .tools select, .more {
  border: 1px solid var(--quiet); background: var(--card); border-radius: 8px; padding: 7px 12px; min-height: 38px;
  max-width: 100%;
}
.pick button:hover:enabled, .more:hover { border-color: var(--soft); }
.pick button:disabled { opacity: 0.4; cursor: default; }
.story { color: var(--soft); max-width: 84ch; text-wrap: pretty; }
.chips {
  display: flex; flex-wrap: wrap; gap: 8px; margin: 18px 0 0; padding: 2px; max-height: 124px; overflow-y: auto;
}
.chips button {
  border: 1px solid var(--quiet); background: none; border-radius: 999px; padding: 3px 13px; font-size: 13.5px;
}
.chips button[aria-pressed="true"] { background: var(--ink); color: var(--card); border-color: var(--ink); }
.chips .tok {
  display: inline-block; max-width: 22ch; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom;
}
.chips .times { opacity: 0.75; margin-left: 7px; }
.head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 18px; margin: 26px 0 4px; }
.head .tok {
  font-size: 26px; font-weight: 700; color: var(--accent); max-width: 100%; overflow: hidden;
  text-overflow: ellipsis;
}
.head .norm { font-size: 17px; }
.badge {
  display: inline-flex; align-items: center; gap: 7px; white-space: nowrap; font-weight: 560; font-size: 13.5px;
}
.badge::before { content: ""; width: 9px; height: 9px; border-radius: 50%; background: var(--shade); }
.strip {
  margin: 20px 0 0; padding: 16px 18px; border-radius: 8px; background: var(--paper);
  border: 1px solid var(--faint); font: 14px/1.95 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 340px; overflow-y: auto;
}
.strip .piece {
  unicode-bidi: isolate; border-radius: 3px; padding: 2px 0; cursor: default;
  background: rgba(var(--heat), var(--h, 0)); box-shadow: inset 0 -1px 0 rgba(var(--heat), calc(var(--h, 0) * 0.8));
}
.strip .piece:hover, .strip .piece:focus-visible { outline: 2px solid var(--focus); outline-offset: 0; }
.strip .culprit {
  font-weight: 750; outline: 2px solid var(--accent); outline-offset: 1px; padding: 2px 1px; margin: 0 2px;
}
.strip .current { background: var(--accent); color: var(--card); }
.strip .edge { color: var(--soft); font-family: var(--sans); font-size: 13px; }
.legend {
  display: flex; flex-wrap: wrap; gap: 6px 22px; margin-top: 10px; color: var(--soft); font-size: 13px;
  align-items: center;
}
.legend .ramp {
  display: inline-block; width: 84px; height: 9px; border-radius: 3px; margin: 0 7px; vertical-align: 0;
  background: linear-gradient(90deg, rgba(var(--heat), 0.03), rgba(var(--heat), 0.75));
}
.legend .mark {
  outline: 2px solid var(--accent); padding: 0 5px; border-radius: 3px; font-weight: 700; margin-right: 7px;
}
#tip {
  position: fixed; z-index: 9; pointer-events: none; max-width: min(340px, 92vw); padding: 11px 14px;
  border-radius: 9px; background: var(--ink); color: var(--paper); font-size: 13px; line-height: 1.5;
  box-shadow: 0 6px 24px rgba(0, 0, 0, 0.22);
}
#tip .tok { font-weight: 700; font-size: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
#tip dl { display: grid; grid-template-columns: auto auto; gap: 0 18px; margin: 5px 0 0; justify-content: start; }
#tip dt { opacity: 0.72; }
#tip dd { margin: 0; text-align: right; }

.panes { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 36px 48px; margin-top: 34px; }
.ladder {
  display: grid; grid-template-columns: minmax(96px, max-content) minmax(60px, 1fr) max-content; gap: 17px 16px;
  align-items: center; font-size: 13.5px; margin: 18px 0 0;
}
.ladder .rung { font-weight: 560; }
.ladder .rung small { display: block; color: var(--soft); font-weight: 400; font-size: 12.5px; line-height: 1.3; }
.ladder .rail { position: relative; height: 26px; }
.ladder .rail i { position: absolute; top: 8px; height: 10px; border-radius: 3px; min-width: 2px; }
.ladder .rail b { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1.5px solid var(--ink); }
.ladder .factor { text-align: right; font-weight: 620; }
.ladder .factor small { display: block; color: var(--soft); font-weight: 400; font-size: 12.5px; line-height: 1.3; }
.numbers {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 14px 24px; margin: 34px 0 0;
  padding-top: 24px; border-top: 1px solid var(--faint);
}
.numbers dt { color: var(--soft); font-size: 12.5px; }
.numbers dd { margin: 0; font-weight: 560; overflow-wrap: anywhere; }
details { margin-top: 22px; }
summary { cursor: pointer; font-weight: 560; font-size: 14px; }
details pre {
  font: 13px/1.6 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; margin: 10px 0 0; padding: 14px 18px;
  background: var(--paper); border-radius: 8px; max-height: 300px; overflow-y: auto;
}

.tools { display: flex; flex-wrap: wrap; gap: 10px 14px; align-items: center; margin: 14px 0 12px; }
.tools input { flex: 1 1 240px; max-width: 380px; }
.tools output { color: var(--soft); font-size: 13.5px; margin-left: auto; }
.scroll { overflow-x: auto; border: 1px solid var(--faint); border-radius: 12px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 9px 8px; text-align: left; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 20px; }
th:last-child, td:last-child { padding-right: 20px; }
thead th { border-bottom: 1px solid var(--rule); padding-top: 6px; padding-bottom: 6px; font-weight: 560; }
th button { border: 0; background: none; padding: 4px 0; font-weight: 560; color: var(--soft); white-space: nowrap; }
th button:hover, th[aria-sort] button { color: var(--ink); }
th button::after { content: "\2002"; display: inline-block; width: 1em; text-align: right; }
th[aria-sort="descending"] button::after { content: "↓"; }
th[aria-sort="ascending"] button::after { content: "↑"; }
.num { text-align: right; }
td.words { max-width: 170px; min-width: 130px; overflow: hidden; text-overflow: ellipsis; }
td.words .tok:first-child { color: var(--accent); font-weight: 700; margin-right: 12px; }
td.words .around { color: var(--soft); font-size: 12.5px; }
tbody tr + tr > * { border-top: 1px solid var(--faint); }
#rows tr { cursor: pointer; }
#rows tr:hover, #rows tr[aria-current="true"] { background: color-mix(in srgb, var(--faint) 55%, transparent); }
#rows tr:focus-visible { outline-offset: -2px; }
th { color: var(--soft); font-weight: 560; }
#diagnosis, #explanation { margin-top: 8px; }
#diagnosis b { color: var(--ink); font-weight: 620; }
#parts { margin-top: 24px; }
#parts td { vertical-align: top; }
#parts td.rows { white-space: normal; min-width: 90px; }
#parts-left, #left { margin-top: 10px; }
#layers-figures .scroll { max-height: 300px; overflow-y: auto; margin-top: 10px; }
#layers-figures :is(th, td) { padding-top: 5px; padding-bottom: 5px; }
.none { padding: 28px 20px; color: var(--soft); }
.more { margin-top: 14px; }
.help { border-top: 1px solid var(--rule); padding-top: 24px; }
.help dl { display: grid; grid-template-columns: 130px 1fr; gap: 8px 24px; margin: 16px 0 0; font-size: 14px; }
.help dt { font-weight: 560; }
.help dd { margin: 0; color: var(--soft); max-width: 76ch; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (max-width: 860px) {
  main { padding: 32px 16px 56px; }
  section { margin-top: 44px; }
  .two, .panes { grid-template-columns: minmax(0, 1fr); }
  .card { padding: 18px 16px; }
  .help dl { grid-template-columns: 1fr; gap: 2px; }
  .help dd { margin-bottom: 10px; }
  #timeline { height: 350px; }
  .pick select { order: -1; flex: 1 0 100%; }
  .pick button { flex: 1; }
  .figures { grid-template-columns: repeat(2, 1fr); }
  .lead { font-size: 16px; }
}
@media print {
  * { print-color-adjust: exact; }
  main { padding: 0; }
  .strip, .chips, .scroll, details pre { max-height: none !important; overflow: visible; }
  .scroll table { font-size: 9px; }
  th, td { padding: 4px; }
}
"""

_BODY = r"""
<main>
<header>
  <p class="name">GradLoc</p>
  <h1 id="title"></h1>
  <p class="lead" id="lead"></p>
  <dl class="figures" id="figures"></dl>
  <ul class="notes" id="notes" hidden></ul>
</header>
<section aria-labelledby="h-time">
  <h2 id="h-time">When</h2>
  <p class="hint" id="when">Every culprit by the norm of its own gradient. Select one to see it below.</p>
  <div class="chart" id="timeline" role="img"></div>
</section>
<section class="two of-culprits">
  <div>
    <h2>What looks wrong</h2>
    <p class="hint">Select a source to see only its culprits in the table.</p>
    <ul class="bars" id="sources"></ul>
  </div>
  <div>
    <h2>Which tokens</h2>
    <p class="hint">The most frequent culprits; select one likewise.</p>
    <ul class="bars wide" id="tokens"></ul>
  </div>
</section>
<section id="detail" aria-labelledby="spike">
  <h2 id="spike" tabindex="-1"></h2>
  <div class="pick">
    <button type="button" id="previous">← Previous</button>
    <select id="event" aria-label="Spike"></select>
    <button type="button" id="next">Next →</button>
  </div>
  <div class="card">
    <p class="story" id="story"></p>
    <p class="story" id="diagnosis"></p>
    <p class="story" id="explanation"></p>
    <div id="parts">
      <h3>Parts over their threshold that no few tokens explain</h3>
      <div class="scroll" tabindex="0" role="region" aria-label="Parts over their threshold that no few tokens explain">
        <table>
          <thead><tr><th scope="col" class="num">Rank</th><th scope="col" class="num">Micro-batch</th>
            <th scope="col">Rows</th><th scope="col" class="num">Tokens</th><th scope="col" class="num">Norm</th>
            <th scope="col" class="num">Threshold</th><th scope="col" class="num">× threshold</th>
            <th scope="col">Largest tokens measured</th></tr></thead>
          <tbody id="parts-rows"></tbody>
        </table>
      </div>
      <p class="hint" id="parts-left"></p>
    </div>
    <div class="chips" id="chips" role="group" aria-label="Culprits of this spike"></div>
    <p class="hint" id="left"></p>
    <div id="culprit">
      <div class="head" id="head"></div>
      <p class="hint" id="why"></p>
      <div class="strip" id="strip" role="group" aria-label="The response's tokens; arrow keys move between them"></div>
      <div class="legend" id="legend">
        <span><span class="mark">a</span>culprit</span>
        <span>suspicion: low<span class="ramp"></span>high</span>
        <span>Point at a token, or go there with the arrow keys, for its numbers.</span>
      </div>
      <div class="panes">
        <div>
          <h3>How far over the threshold, from the whole gradient down to the token</h3>
          <div class="ladder" id="ladder"></div>
        </div>
        <div>
          <h3>Gradient norm by layer</h3>
          <div class="chart" id="layers" role="img"></div>
          <p class="hint" id="layers-hint"></p>
          <details id="layers-figures">
            <summary>The figures by layer</summary>
            <div class="scroll" tabindex="0" role="region" aria-label="The figures by layer">
              <table>
                <thead><tr><th scope="col">Layer</th><th scope="col" class="num">Culprit</th>
                  <th scope="col" class="num">Ordinary token</th><th scope="col" class="num">Ratio</th></tr></thead>
                <tbody id="layers-rows"></tbody>
              </table>
            </div>
          </details>
        </div>
      </div>
      <dl class="numbers" id="numbers"></dl>
      <details><summary>Prompt</summary><pre id="prompt"></pre></details>
      <details><summary>Response</summary><pre id="response"></pre></details>
      <details><summary>Ground truth</summary><pre id="truth"></pre></details>
    </div>
  </div>
</section>
<section class="of-culprits" aria-labelledby="h-table">
  <h2 id="h-table">All culprits</h2>
  <div class="tools">
    <input type="search" id="words" placeholder="Filter by token, text, uid, step 12 …" aria-label="Filter">
    <select id="source" aria-label="Source"><option value="">All sources</option></select>
    <button type="button" class="more" id="clear" style="margin: 0" hidden>Clear</button>
    <output id="count" aria-live="polite"></output>
  </div>
  <div class="scroll" tabindex="0" role="region" aria-labelledby="h-table">
    <table>
      <thead><tr id="columns"></tr></thead>
      <tbody id="rows"></tbody>
    </table>
    <p class="none" id="none" hidden>No culprit matches.</p>
  </div>
  <button type="button" class="more" id="more" hidden></button>
</section>
<section class="help">
  <h2>How to read this</h2>
  <dl id="help">
    <dt>Gradient norm</dt><dd>Of a token: the norm of its own share of the loss's gradient, divided by its weight in the
      loss. The same for long and short responses, and for every batch size.</dd>
    <dt>Threshold</dt><dd>τ for one token. A set of tokens with weights w may have τ·√Σw², as independent noise
      would.</dd>
    <dt>Explained</dt><dd>Without the culprits, every micro-batch that was over its threshold was measured under it.
      More tokens may be over τ.</dd>
    <dt>Suspicion</dt><dd>|∂L/∂log p|·(1 − p), the cheap guess that orders the search. High suspicion alone makes
      no culprit: each was measured.</dd>
    <dt>Ratio</dt><dd>Training's probability of the token over the old policy's, or over the rollout engine's.</dd>
  </dl>
</section>
</main>
"""

_HEAD = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,">
<title>GradLoc</title>
"""


def page(data: str, plotly: str) -> str:
    """The whole page as HTML.

    Args:
        data (str): JSON.
        plotly (str): The source of plotly.js.
    """
    # Nothing in the data may end the element that it is in, or begin a comment.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return "".join(
        [
            _HEAD,
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<noscript>This report needs JavaScript.</noscript>",
            _BODY,
            f'<script type="application/json" id="data">{data}</script>\n',
            f"<script>{plotly}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )
