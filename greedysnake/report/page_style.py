"""The report page's style and script: both are inside of the page, which loads nothing."""

from greedysnake.report.bars import FAMILY_COLORS

RESOURCE_COLORS = {
    "compute": "#2f6db5",
    "cpu": "#2f8a52",
    "ssd_read": "#2b93a8",
    "ssd_write": "#c44d73",
    "h2d": "#a87b1f",
    "d2h": "#7d4fa8",
}
"""Colours of the resources where each is one line or row."""

MEMORY_COLORS = {
    "resident": "#8b95a1",
    "waiting-gradients": "#e0a93b",
    "boundaries": "#8a5fb5",
    "kept": "#e07fae",
    "weights": "#3b7cc4",
    "gradients": "#d96f2b",
    "state": "#2f8a52",
    "other": "#8c6d4f",
}
"""Colours of what memory is for."""

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #22272e; --soft: #616b77; --grid: #e6e9ed;
  --line: #d5dae0; --well: #f1f3f6; --good: #2f8a52; --warn: #a5610a; --warn-page: #fdf3e2; --limit: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2127; --ink: #e3e7ec; --soft: #98a2ae;
  --grid: #2b323a; --line: #39414b; --well: #242a31; --good: #5cc488; --warn: #f0b35a; --warn-page: #33291a;
  --limit: #fb8a4c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1220px; margin: 0 auto; padding: 26px 20px 40px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 8px; }
h3 { font-size: 13px; margin: 14px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 0 0 8px; max-width: 125ch; }
.sub { color: var(--soft); margin: 2px 0 14px; overflow-wrap: anywhere; }
.status { display: inline-block; font-weight: 600; color: var(--good); }
.status.warn { color: var(--warn); }
.missing { background: var(--warn-page); border-left: 3px solid var(--warn); border-radius: 6px; padding: 10px 14px;
  margin: 0 0 14px; }
.missing ul { margin: 2px 0 0; padding-left: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 0 0 14px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 10px 13px; }
.tile span { display: block; color: var(--soft); font-size: 12px; }
.tile b { display: block; font-size: 21px; line-height: 1.3; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile b.none { font-size: 14px; line-height: 27px; font-weight: 500; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.card { padding: 14px 16px; break-inside: avoid; min-width: 0; }
.wide { grid-column: 1 / -1; }
@media screen and (max-width: 760px) { .cards { grid-template-columns: minmax(0, 1fr); } .card { overflow-x: auto; }
  .wide svg.chart { min-width: 720px; } }
.lead { font-size: 16px; max-width: none; }
.none, .soft { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 12px; margin: 0 0 4px;
  max-width: none; }
.legend i { display: inline-block; width: 16px; height: 0; border-top: 2px solid var(--c); margin-right: 6px;
  vertical-align: middle; }
.legend i.faint { opacity: .4; }
.legend i.points { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c); }
.legend i.box { width: 10px; height: 10px; border: 0; border-radius: 2px; background: var(--c); }
.legend b { color: var(--limit); margin-right: 5px; font-size: 10px; }
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.row-name, svg text.row-value { font-size: 12px; fill: var(--ink); }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.line { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; }
.faint { fill: none; stroke: var(--c); stroke-width: 1; opacity: .35; stroke-linejoin: round; }
.band { fill: var(--c); opacity: .2; } .area { fill: var(--c); opacity: .2; }
.dotted path { fill: none; stroke: var(--c); stroke-width: 1.3; }
.dotted circle { fill: var(--c); stroke: var(--card); stroke-width: 1.2; }
.limit { stroke: var(--limit); stroke-width: 1.3; stroke-dasharray: 5 4; }
svg text.limit-label { fill: var(--limit); }
.stacked { fill: var(--c); } .stacked:hover { filter: brightness(1.1); }
.reserved { stroke: var(--soft); stroke-width: 1.3; stroke-dasharray: 5 4; }
.legend i.reserved { border-top-style: dashed; --c: var(--soft); }
.legend i.limit { border-top-style: dashed; --c: var(--limit); }
.mark { fill: var(--limit); }
.well { fill: var(--well); }
.cursor { stroke: var(--soft); stroke-dasharray: 2 3; visibility: hidden; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12px; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
tr + tr th { padding-top: 14px; }
th.n, td.n { text-align: right; white-space: nowrap; }
td.bar-cell { width: 22%; vertical-align: middle; }
td.bar-cell div { height: 9px; border-radius: 2px; background: var(--c); min-width: 1px; }
td.share { background: linear-gradient(var(--well) 0 0) content-box no-repeat center / 100% 9px; }
.scroll { overflow-x: auto; }
.scroll + p, svg + p { margin-top: 8px; }
.card > :last-child { margin-bottom: 0; }
ul { margin: 0 0 8px; padding-left: 20px; }
.timeline { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 12px; }
.timeline-names div { display: flex; flex-direction: column; justify-content: center; text-align: right;
  line-height: 1.25; font-size: 12px; }
.timeline-names span { color: var(--soft); font-size: 11px; }
.timeline-scroll { overflow-x: auto; overflow-y: hidden; padding-bottom: 24px; }
.timeline-canvas { position: relative; width: 100%; }
.timeline-canvas svg { display: block; width: 100%; }
.bar { fill: var(--c); } .bar.odd { fill-opacity: .76; } .bar:hover { stroke: var(--ink); stroke-width: 1.5;
  vector-effect: non-scaling-stroke; }
.unit { position: absolute; container-type: inline-size; pointer-events: none; text-align: center; color: #ffffff;
  font-size: 11px; font-weight: 700; overflow: hidden; white-space: nowrap; }
.unit > span { display: block; }
@container (max-width: 17px) { .unit > span { visibility: hidden; } }
.timeline-axis { position: absolute; left: 0; right: 0; height: 20px; border-top: 1px solid var(--line); }
.timeline-axis span { position: absolute; font-size: 11px; color: var(--soft); padding-left: 4px;
  border-left: 1px solid var(--line); line-height: 15px; }
.timeline-axis .fine { display: none; } .timeline-canvas.zoomed .fine { display: block; }
.zoom { float: right; display: none; }
.scripted .zoom { display: block; }
.zoom button { font: inherit; font-size: 12px; color: var(--ink); background: var(--well);
  border: 1px solid var(--line); border-radius: 5px; padding: 1px 9px; cursor: pointer; }
.zoom button[aria-pressed="true"] { border-color: var(--ink); }
#tip { position: fixed; z-index: 9; display: none; pointer-events: none; background: var(--ink); color: var(--page);
  border-radius: 6px; padding: 6px 10px; font-size: 12px; line-height: 1.4; white-space: pre-line; max-width: 340px;
  font-variant-numeric: tabular-nums; }
details summary { cursor: pointer; font-weight: 600; }
pre { background: var(--well); border-radius: 6px; padding: 10px 12px; overflow: auto; max-height: 480px;
  margin: 10px 0 0; font: 12px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 12px; margin-top: 18px; }
@media (prefers-color-scheme: dark) { .line, .faint, .dotted path { stroke: color-mix(in srgb, var(--c), #ffffff 28%); }
  .legend i { border-color: color-mix(in srgb, var(--c), #ffffff 28%); } }
@media print { :root { --page: #ffffff; } body { font-size: 11px; } main { max-width: none; padding: 0; }
  .zoom, #tip { display: none !important; } .card, .tile { border-color: #cccccc; }
  .timeline-canvas { width: 100% !important; } .timeline-scroll { overflow: hidden; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

SCRIPT = """
(function () {
  "use strict";
  document.documentElement.classList.add("scripted");
  var tip = document.getElementById("tip");
  function show(event, text) {
    tip.textContent = text;
    tip.style.display = "block";
    var box = tip.getBoundingClientRect();
    var left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    var above = event.clientY - box.height - 12;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  }
  function hide() { tip.style.display = "none"; }
  document.querySelectorAll("svg[data-hover]").forEach(function (chart) {
    var points = JSON.parse(chart.getAttribute("data-hover"));
    var cursor = chart.querySelector(".cursor");
    chart.addEventListener("pointermove", function (event) {
      var box = chart.getBoundingClientRect();
      var x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
      var nearest = points.reduce(function (best, point) {
        return Math.abs(best[0] - x) > Math.abs(point[0] - x) ? point : best;
      });
      cursor.setAttribute("x1", nearest[0]);
      cursor.setAttribute("x2", nearest[0]);
      cursor.style.visibility = "visible";
      show(event, nearest[1]);
    });
    chart.addEventListener("pointerleave", function () { cursor.style.visibility = "hidden"; hide(); });
  });
  document.querySelectorAll(".timeline").forEach(function (timeline) {
    var told = new Map();
    timeline.querySelectorAll("rect.bar").forEach(function (bar) {
      var title = bar.querySelector("title");
      told.set(bar, title.textContent);
      title.remove();
    });
    timeline.addEventListener("pointermove", function (event) {
      if (told.has(event.target)) { show(event, told.get(event.target)); } else { hide(); }
    });
    timeline.addEventListener("pointerleave", hide);
  });
  document.querySelectorAll(".zoom button").forEach(function (button) {
    button.addEventListener("click", function () {
      var scroll = document.querySelector(".timeline-scroll");
      var canvas = document.querySelector(".timeline-canvas");
      var middle = (scroll.scrollLeft + scroll.clientWidth / 2) / canvas.clientWidth;
      canvas.style.width = button.value + "00%";
      canvas.classList.toggle("zoomed", button.value >= 4);
      scroll.scrollLeft = middle * canvas.clientWidth - scroll.clientWidth / 2;
      document.querySelectorAll(".zoom button").forEach(function (other) {
        other.setAttribute("aria-pressed", other === button ? "true" : "false");
      });
    });
  });
})();
"""
"""Tooltips and the zoom of the timeline; without it, the page only lacks those. No character needs escaping in it."""


def style() -> str:
    """The style sheet, with the colours that the pictures have, too."""
    colors = {**FAMILY_COLORS, **{f"r-{name}": color for name, color in RESOURCE_COLORS.items()}}
    colors |= {f"m-{name}": color for name, color in MEMORY_COLORS.items()}
    colors |= {"training": "#2f6fbb", "heldout": "#d9722e", "rate": "#2f8a52", "norm": "#7d4fa8", "memory": "#3a7fa8"}
    variables = " ".join(f"--{name}: {color};" for name, color in colors.items())
    return f":root {{ {variables} }}\n{_STYLE}"
