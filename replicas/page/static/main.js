// The page: draws the document after changes, at a limited rate, and once a second for the ages.

import { draw } from "./elements.js";
import { Model } from "./model.js";
import { placeOf } from "./places.js";
import { setDay } from "./texts.js";
import { Lanes } from "./lanes.js";
import { drawnChannels } from "./syncs.js";
import { drawnEvents, drawnFigures, drawnHead, drawnNodes, drawnVerdict } from "./tables.js";
import { Orders } from "./orders.js";
import { Panel } from "./panel.js";
import { Link } from "./link.js";

const THEMES = ["auto", "light", "dark"];
const GENTLE_MS = 700; // between two drawings for changes; a person's actions are drawn immediately
const part = (name) => document.getElementById(name);
const model = new Model();
const events = { all: false, text: "", most: 60 };
let due = false;
let drawnAt = 0;
let drawnKnown = false; // true if the last drawing had a document
let later = 0;
let theme = "auto";
let shownPlace = location.hash;

function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    drawAll();
  });
}

const orders = new Orders(model, part("ask"), redraw);
const lanes = new Lanes(model, part("time"), redraw);
const panel = new Panel(model, part("panel"), orders, redraw);
const inside = part("document"); // of a report
const link = inside ? { state: "report", since: 0 } : new Link(model, changed);

function changed() {
  if (model.known !== drawnKnown) redraw();
  else later ||= setTimeout(redraw, Math.max(0, drawnAt + GENTLE_MS - performance.now()));
}

function drawAll() {
  drawnAt = performance.now();
  drawnKnown = model.known;
  clearTimeout(later);
  later = 0;
  const { verdict, run } = model.doc;
  if (model.known) setDay(model.now);
  draw(part("head"), drawnHead(model, link, {
    locked: orders.locked, theme, onToken: () => (orders.locked ? orders.askToken() : orders.forget()), onTheme: changeTheme,
  }));
  draw(part("verdict"), drawnVerdict(model, link));
  draw(part("figures"), drawnFigures(model));
  if (model.known) lanes.draw();
  draw(part("channels"), drawnChannels(model, redraw));
  draw(part("nodes"), drawnNodes(model));
  draw(part("events"), drawnEvents(model, events, redraw));
  panel.draw(placeOf(location.hash));
  const mark = link.state === "lost" || verdict.level === "bad" ? "✕ " : verdict.level === "warn" ? "! " : "";
  document.title = `${mark}${run.run ?? "replicas"}`;
}

function changeTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  document.documentElement.dataset.theme = theme;
  redraw();
}

addEventListener("hashchange", () => {
  const from = document.activeElement;
  panel.draw(placeOf(location.hash));
  if (placeOf(location.hash)) part("paneltitle")?.focus({ preventScroll: matchMedia("(min-width: 1000px)").matches });
  else document.querySelector(`a[href="${CSS.escape(shownPlace)}"]`)?.focus();
  if (from === document.body) shownPlace = location.hash;
  shownPlace = location.hash || shownPlace;
  redraw();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && placeOf(location.hash) && !part("ask").open) location.hash = "";
});

if (inside) {
  model.replace(JSON.parse(inside.textContent), true);
  model.known = true;
  lanes.window = Infinity;
  redraw();
} else {
  link.open();
  setInterval(() => document.hidden || performance.now() - drawnAt < 900 || redraw(), 1000);
}
